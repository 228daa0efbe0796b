"""The sending end of a collective channel: packs, queues and runs ahead of the wire by a few buckets."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from weightplane.controlplane import failpoints
from weightplane.controlplane.core.plan import Bucket

from .base import ChannelSpec, SendChannel
from .collective import CollectiveChannel, Flight
from .collective_connect import Connect
from .collective_lanes import Lanes, Mark
from .collective_layout import Tuning

if TYPE_CHECKING:
    import torch

    from .collective_abc import Communicator
    from .collective_program import Work

__all__ = ["CollectiveSendChannel"]

_IN_FLIGHT: Final = 4  # buckets queued and not complete; two, where they are together
_IN_FLIGHT_BYTES: Final = 1 << 30  # more than this: their spans are held all the while


class CollectiveSendChannel(CollectiveChannel, SendChannel):
    """See ``collective``. Spans are held until their bucket is complete on the device."""

    sends = True

    def __init__(self, spec: ChannelSpec, member: str, lanes: Lanes, connect: Connect, tuning: Tuning) -> None:
        super().__init__(spec, member, lanes, connect, tuning)
        self._flights: deque[Flight] = deque()
        self._acked: tuple[Mark, int, tuple[str, ...]] | None = None
        self._broad = False
        self._some: list[str] = []  # receivers of buckets that not all receive
        self._all: tuple[str, ...] = ()

    def send(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        """See ``SendChannel``. Returns when the bucket is queued; the spans must not change before ``flush``."""
        name = self.spec.transport
        failpoints.hit(f"{name}.send.before")
        self._enter(bucket)
        program = self._program(bucket, spans)
        communicator = self._communicator(self.member)
        while self._full(bucket):
            self._complete(self._flights[0])
        flight = Flight(program)
        self._flights.append(flight)
        with self._asking(bucket):
            if bucket.index in self._fences:
                self._send_fence(communicator, bucket)
            works = [program.work(n, self._next_slot(s)) for n, s in enumerate(self._steps_of(bucket))]
            self._lanes.behind()
            for work in works:
                flight.marks.append((self._queue_work(communicator, bucket, work), work.payload))
        self._inside(bucket.nbytes)
        self._check(bucket.index)
        self._queue.popleft()
        if not self._queue:
            with self._asking(bucket):
                self._acknowledged(bucket)
        failpoints.hit(f"{name}.send.after")

    def _full(self, bucket: Bucket) -> bool:
        """Whether the bucket must wait until another is complete."""
        held = sum(f.program.bucket.nbytes for f in self._flights) + bucket.nbytes
        return len(self._flights) >= (2 if held > _IN_FLIGHT_BYTES else _IN_FLIGHT)

    def _queue_work(self, communicator: Communicator, bucket: Bucket, work: Work) -> Mark:
        lanes, slot = self._lanes, work.slot
        if slot is not None and slot.free is not None:
            lanes.wait(lanes.copy, slot.free)
        for table in work.tables:
            lanes.run(table)
        if work.tables:
            lanes.wait(lanes.wire, lanes.mark(lanes.copy))
        self._to_all(communicator, bucket, work.tensors)
        mark = lanes.mark(lanes.wire)
        if slot is not None:
            slot.free = mark
        return mark

    def _to_all(self, communicator: Communicator, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> None:
        if self._for_all(bucket):
            communicator.broadcast(tensors)
        else:
            communicator.exchange([(t, self._rank_of(r)) for r in bucket.receivers for t in tensors], ())

    def _send_fence(self, communicator: Communicator, bucket: Bucket) -> None:
        host, device = self._fence_place(bucket)
        self._lanes.move(host, device, self._lanes.wire)
        self._to_all(communicator, bucket, (device,))

    def flush(self) -> None:
        """See ``SendChannel`` and the text on completion in ``collective``."""
        self._check(-1)
        self._settle()
        self._forget()

    def _settle(self) -> None:
        while self._flights:
            self._complete(self._flights[0])
        if self._acked is not None:
            self._passed(*self._acked)
            self._acked = None

    def _complete(self, flight: Flight) -> None:
        bucket = flight.program.bucket
        for mark, _ in flight.marks:
            self._passed(mark, bucket.index, self._peers(bucket))
        self._flights.popleft()

    def _plan_acks(self, buckets: Sequence[Bucket]) -> None:
        self._broad = any(self._for_all(b) for b in buckets)
        self._some = [r for r in self.spec.receivers if any(r in b.receivers and not self._for_all(b) for b in buckets)]
        self._all = tuple(r for r in self.spec.receivers if any(r in b.receivers for b in buckets))
        self._ack_bytes(1 + len(self._some))

    def _acknowledged(self, last: Bucket) -> None:
        communicator, byte = self._communicator(self.member), self._ack_bytes(1 + len(self._some))
        if self._broad:
            communicator.reduce(byte[:1])
        if self._some:
            communicator.exchange((), [(byte[n : n + 1], self._rank_of(r)) for n, r in enumerate(self._some, 1)])
        self._acked = (self._lanes.mark(self._lanes.wire), last.index, self._all)
