"""The receiving end of a collective channel: checks the fence, queues, unpacks, and says when everything is there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from weightplane.controlplane import failpoints
from weightplane.controlplane.core.plan import Bucket

from .base import ChannelSpec, ReceiveChannel, TransportError
from .collective import CollectiveChannel, Flight
from .collective_connect import Connect
from .collective_lanes import Lanes, Mark
from .collective_layout import Tuning, fence_problem

if TYPE_CHECKING:
    import torch

    from .collective_abc import Communicator
    from .collective_program import Work

__all__ = ["CollectiveReceiveChannel"]

_LEAVE_S: Final = 1.0


class CollectiveReceiveChannel(CollectiveChannel, ReceiveChannel):
    """See ``collective``. Nothing is written to a span before the fence of its call was found right."""

    sends = False

    def __init__(self, spec: ChannelSpec, member: str, lanes: Lanes, connect: Connect, tuning: Tuning) -> None:
        super().__init__(spec, member, lanes, connect, tuning)
        self._next: tuple[Bucket, Sequence[torch.Tensor]] | None = None
        self._flight: Flight | None = None
        self._landed = 0
        self._begun = 0  # bytes queued to be written, and not landed
        self._owed: list[tuple[str, bool, bool]] = []
        self._said: Mark | None = None  # the last acknowledgement

    def receive(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        """See ``ReceiveChannel``."""
        try:
            self._receive(bucket, spans)
        except BaseException:
            self._landed, self._begun = self._landed + self._begun, 0  # it may have been written, in part or whole
            raise

    def _receive(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        name = self.spec.transport
        failpoints.hit(f"{name}.receive.before")
        self._enter(bucket)
        flight, self._flight = self._flight, None
        if flight is None:
            flight = self._queue_bucket(bucket, spans)
        elif flight.program.spans is not spans:
            text = f"bucket {bucket.index} was announced by ahead() with another list of spans"
            self._fail(text)
            raise TransportError(text, bucket=bucket.index)
        self._queue_next()
        self._land(flight)
        self._queue.popleft()
        if not self._queue:
            with self._asking(bucket):
                self._acknowledge()
            self._forget()
        failpoints.hit(f"{name}.receive.after")

    def ahead(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        """See ``ReceiveChannel``: the bucket is queued right after the one that is received next."""
        self._next = (bucket, spans)

    @property
    def bytes_landed(self) -> int:
        """See ``ReceiveChannel``."""
        return self._landed

    def _queue_next(self) -> None:
        """Queue what was announced, if it is next and no fence stands before it."""
        announced, self._next = self._next, None
        if announced is None or len(self._queue) < 2:
            return
        bucket, spans = announced
        if bucket.index == self._queue[1].index and bucket.index not in self._fences:
            self._flight = self._queue_bucket(bucket, spans)

    def _queue_bucket(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> Flight:
        program = self._program(bucket, spans)
        communicator = self._communicator(bucket.sender)
        flight = Flight(program)
        with self._asking(bucket):
            self._read_fence(bucket)
            works = [program.work(n, self._next_slot(s)) for n, s in enumerate(self._steps_of(bucket))]
            self._lanes.behind()
            for work in works:
                self._begun += work.payload
                flight.marks.append((self._queue_work(communicator, bucket, work), work.payload))
        return flight

    def _queue_work(self, communicator: Communicator, bucket: Bucket, work: Work) -> Mark:
        lanes, slot = self._lanes, work.slot
        if slot is not None and slot.free is not None:
            lanes.wait(lanes.wire, slot.free)
        self._from(communicator, bucket, work.tensors)
        mark = lanes.mark(lanes.wire)
        if work.tables:
            lanes.wait(lanes.copy, mark)
            for table in work.tables:
                lanes.run(table)
            mark = lanes.mark(lanes.copy)
        if slot is not None:
            slot.free = mark
        return mark

    def _from(self, communicator: Communicator, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> None:
        if self._for_all(bucket):
            communicator.broadcast(tensors)
        else:
            communicator.exchange((), [(t, 0) for t in tensors])

    def _read_fence(self, bucket: Bucket) -> None:
        expected = self._fences.get(bucket.index)
        if expected is None:
            return
        host, device = self._fence_place(bucket)
        self._from(self._communicator(bucket.sender), bucket, (device,))
        self._lanes.move(device, host, self._lanes.wire)
        self._passed(self._lanes.mark(self._lanes.wire), bucket.index, self._peers(bucket))
        problem = fence_problem(host.numpy().tobytes(), expected)
        if problem:
            text = f"{bucket.sender!r} and {self.member!r} are not at the same: {problem} (bucket {bucket.index})"
            raise TransportError(text, peers=(bucket.sender,), bucket=bucket.index)

    def _land(self, flight: Flight) -> None:
        bucket = flight.program.bucket
        peers = self._peers(bucket)
        for mark, nbytes in flight.marks:
            self._passed(mark, bucket.index, peers)
            self._landed, self._begun = self._landed + nbytes, self._begun - nbytes
            self._inside(nbytes)
        self._check(bucket.index)

    def _plan_acks(self, buckets: Sequence[Bucket]) -> None:
        self._next = self._flight = None
        self._owed = [
            (
                sender,
                any(b.sender == sender and self._for_all(b) for b in buckets),
                any(b.sender == sender and not self._for_all(b) for b in buckets),
            )
            for sender in self.spec.senders
        ]
        self._ack_bytes(1)

    def _acknowledge(self) -> None:
        byte = self._ack_bytes(1)
        for sender, broad, some in self._owed:
            communicator = self._communicator(sender) if broad or some else None
            if communicator is not None and broad:
                communicator.reduce(byte)
            if communicator is not None and some:
                communicator.exchange([(byte, 0)], ())
        self._said = self._lanes.mark(self._lanes.wire)

    def _leave(self) -> None:
        """The sender may still wait to hear that this member has everything."""
        said, end = self._said, time.monotonic() + _LEAVE_S
        while said is not None and not self._lanes.passed(said) and time.monotonic() < end:
            self._wake.wait(0.001)
