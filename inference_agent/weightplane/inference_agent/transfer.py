"""One update's bytes into one replica: a data thread per worker, its channel, its sink and its ledger.

The agent's loop never blocks here: it only calls ``cancel``, which aborts every channel from outside the data threads.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from functools import partial

from weightplane.controlplane import failpoints
from weightplane.controlplane.core.desired import DesiredUpdate
from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.model import Channel
from weightplane.controlplane.core.plan import Bucket
from weightplane.controlplane.core.states import Mode
from weightplane.transports.base import ArmToken, ChannelSpec, ReceiveChannel, Transport, TransportError
from weightplane.transports.watchdog import abort_all
from weightplane.v1 import update_pb2
from weightplane.v1.transport_pb2 import Rendezvous

from .engines.base import Engine
from .receipts import Ledger, Sink, WorkerPlan
from .threads import WorkThread

__all__ = ["Channels", "LocalWorker", "Transfer", "Worker", "channel_spec", "wanted_buckets"]


#: How the id of a channel begins that is one catch-up's alone.
CATCH_UP_CHANNEL = "c-k-"


def channel_spec(c: Channel, group: str) -> ChannelSpec:
    """A channel as its transport wants it described."""
    return ChannelSpec(
        channel_id=c.channel_id,
        group=group,
        transport=c.transport,
        key=c.key,
        senders=c.senders,
        receivers=c.receivers,
        bucket_bytes=c.bucket_bytes,
        offers={m: Rendezvous.FromString(o.data) for m, o in c.offers.items()},
        ordinal=c.ordinal,
    )


def wanted_buckets(share: WorkerPlan, ranges: Sequence[tuple[int, int]]) -> list[Bucket]:
    """The worker's buckets in these ranges (first, count), in plan order; (0, 0) means all."""
    return [b for b in share.buckets if any(n == 0 or first <= b.index < first + n for first, n in ranges)]


@dataclass
class Worker(ABC):
    """One worker's side of an update, wherever the worker is. ``thread`` drives it; ``channel.abort`` is anybody's."""

    member: str
    thread: WorkThread
    channel: ReceiveChannel
    share: WorkerPlan
    base: int
    channel_id: str = field(kw_only=True)
    armed_buckets: list[Bucket] = field(default_factory=list, kw_only=True)

    @property
    def landed(self) -> int:
        """Payload bytes of this update that the transport put in place. Any thread."""
        return self.channel.bytes_landed - self.base

    @abstractmethod
    def take(self, bucket: Bucket) -> None:
        """Receive one armed bucket, put it in its place, count it and hash it."""

    def ahead(self, bucket: Bucket) -> None:
        """``take`` of this bucket comes after the next one: bytes may come for both. Nothing is done by default."""
        return None

    @abstractmethod
    def missing(self) -> list[str]:
        """Names of the tensors of which bytes are missing."""

    @abstractmethod
    def elements(self) -> int:
        """Elements of the regions that are whole."""

    @abstractmethod
    def packed(self) -> Sequence[int]:
        """The digests in receipt order; 0 where nothing was asked. Empty when nothing is hashed."""


@dataclass
class LocalWorker(Worker):
    """A worker whose memory is in this process."""

    sink: Sink
    ledger: Ledger

    def take(self, bucket: Bucket) -> None:
        """See ``Worker``."""
        spans, memory = self.sink.spans(bucket)
        self.channel.receive(bucket, spans)
        self.sink.complete(bucket)
        self.ledger.feed(bucket, spans, memory)

    def ahead(self, bucket: Bucket) -> None:
        """See ``Worker``."""
        spans = self.sink.lasting(bucket)
        if spans is not None:
            self.channel.ahead(bucket, spans)

    def missing(self) -> list[str]:
        """See ``Worker``."""
        return self.ledger.missing()

    def elements(self) -> int:
        """See ``Worker``."""
        return self.ledger.elements

    def packed(self) -> Sequence[int]:
        """See ``Worker``."""
        return self.ledger.packed()


class Channels:
    """Open receive channels by id. A channel is used by its worker's data thread; others may abort it."""

    def __init__(self, group: str, transports: Mapping[str, Transport]) -> None:
        self._group = group
        self._transports = transports
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], ReceiveChannel] = {}

    def get(self, c: Channel, member: str) -> ReceiveChannel:
        """The member's side of ``c``, opened if need be; its sides of other channels are closed, but for a channel that
        serves one catch-up and is closed after it. Data thread only."""
        with self._lock:
            found = self._open.get((c.channel_id, member))
            passing = c.channel_id.startswith(CATCH_UP_CHANNEL)
            old = [k for k in self._open if k[1] == member and k[0] != c.channel_id and not passing]
            stale = [self._open.pop(k) for k in old]
        for channel in stale:
            channel.close()
        if found is not None:
            return found
        transport = self._transports.get(c.transport)
        if transport is None:
            have = ", ".join(sorted(self._transports)) or "none"
            raise TransportError(f"transport {c.transport!r} is not enabled here; enabled: {have}")
        channel = transport.open_receiver(channel_spec(c, self._group), member)
        with self._lock:
            self._open[c.channel_id, member] = channel
        return channel

    def device_kinds(self, transport: str) -> frozenset[str]:
        """The devices whose memory a transport can write; all of them if it moves no bytes, or is not enabled here."""
        found = self._transports.get(transport)
        if found is None or not found.capabilities.moves_bytes:
            return frozenset({"cpu", "cuda"})
        return found.capabilities.device_kinds

    def forget(self, channels: Sequence[ReceiveChannel]) -> None:
        """Use these no more, without closing them: somebody may still be inside."""
        with self._lock:
            self._open = {k: c for k, c in self._open.items() if c not in channels}

    def discard(self, channels: Sequence[ReceiveChannel]) -> None:
        """Close channels that were aborted, once their data threads have left."""
        self.forget(channels)
        for channel in channels:
            channel.close()

    def close(self) -> None:
        """Abort and close everything."""
        with self._lock:
            channels = list(self._open.values())
            self._open.clear()
        abort_all(channels, "the agent stops")
        for channel in channels:
            channel.close()


class Transfer:
    """One update as this replica takes it, from check to its end. ``cancelled`` is final."""

    def __init__(self, want: DesiredUpdate, epoch: int, deadline: float, group: str) -> None:
        self.want, self.epoch, self.deadline = want, epoch, deadline
        self.extra = {"group": group, "update_id": want.update_id, "version": want.version}  # of log records
        self.update_id = want.update_id
        self.cancelled = threading.Event()
        self.manifest: Manifest | None = None
        self.workers: list[Worker] = []
        self.layout = 0
        self.receipts: tuple[update_pb2.Receipt, ...] = ()  # that go with the vote
        self.armed_at = 0.0
        self.received_at = 0.0
        self.verify_s = 0.0
        self.drop_by = 0.0  # when a drop should have ended; 0: none is under way
        self.abandoned = False
        self._lock = threading.Lock()
        self._reason = ""
        self._wrote = False

    @property
    def in_place(self) -> bool:
        """Whether bytes go straight to live memory."""
        return self.want.mode is Mode.IN_PLACE

    @property
    def wire_s(self) -> float:
        """From armed to the last byte in place."""
        return max(0.0, self.received_at - self.armed_at)

    @property
    def wrote(self) -> bool:
        """Whether bytes reached live memory (in place)."""
        return self._wrote or (self.in_place and any(w.landed for w in self.workers))

    @property
    def landed(self) -> int:
        """Payload bytes in place, all workers. Any thread."""
        return sum(w.landed for w in self.workers)

    def cancel(self, reason: str) -> None:
        """Stop everything, from any thread, at once: blocked data threads leave within a second."""
        with self._lock:
            self._reason = self._reason or reason
            self.cancelled.set()
            workers = list(self.workers)
        abort_all((w.channel for w in workers), reason)

    def add(self, worker: Worker) -> None:
        """A worker opened its channel; aborted at once if the update was dropped meanwhile."""
        with self._lock:
            self.workers.append(worker)
            dropped = self.cancelled.is_set()
        if dropped:
            worker.channel.abort(self._reason)

    def token(self) -> ArmToken:
        """Fences the bytes of this update."""
        return ArmToken(self.update_id, self.epoch, self.want.generation)

    def arm(self, seq: int) -> None:
        """Arm every worker for one call. Raises what a transport raises; then nothing is received.

        A channel that the call does not name is left alone: its senders are not armed yet, and may be waited for.
        """
        call = next(c for c in self.want.calls if c.seq == seq)

        def one(w: Worker) -> None:
            ranges = [(first, n) for channel_id, first, n in call.ranges if channel_id == w.channel_id]
            w.armed_buckets = wanted_buckets(w.share, ranges)
            if ranges:
                w.channel.arm(self.token(), w.armed_buckets, self.deadline)

        failpoints.hit("replica.arm.before")
        self._everywhere(one)
        failpoints.hit("replica.arm.after")
        self.armed_at = self.armed_at or time.monotonic()

    def receive(self, engine: Engine, progress: Callable[[], None]) -> None:
        """Receive what was armed, on every worker at once. Raises the first failure, after all have left."""
        if self.in_place and any(w.armed_buckets for w in self.workers):
            engine.writing(self.update_id)

        nearly = threading.Event()

        def one(w: Worker) -> None:
            try:
                for n, bucket in enumerate(w.armed_buckets, 1):
                    failpoints.hit("replica.receive.before")
                    if n < len(w.armed_buckets):
                        w.ahead(w.armed_buckets[n])
                    else:
                        nearly.set()
                    try:
                        w.take(bucket)
                    except TransportError as e:
                        e.tensors = tuple(dict.fromkeys(w.share.name(s.region) for s in bucket.segments))
                        raise
                    if self.in_place:
                        self._wrote = True
                    progress()
                    failpoints.hit("replica.receive.inside")
            finally:
                nearly.set()

        def meanwhile() -> None:
            nearly.wait()
            engine.settle(self.update_id)

        self._everywhere(one, meanwhile)
        self.received_at = time.monotonic()
        failpoints.hit("replica.receive.after")

    def _everywhere(self, work: Callable[[Worker], None], meanwhile: Callable[[], None] | None = None) -> None:
        """Run on every worker's data thread, and ``meanwhile`` on this one. The first failure aborts the others; raised
        once all have left."""
        futures = [w.thread.submit(partial(work, w)) for w in self.workers]
        failed: BaseException | None = None
        if meanwhile is not None:
            try:
                meanwhile()
            except BaseException as error:
                failed = error
        done: Collection[Future[None]] = ()
        rest: Collection[Future[None]] = futures
        if failed is None:
            done, rest = wait(futures, return_when=FIRST_EXCEPTION)
            failed = next(filter(None, (f.exception() for f in futures if f in done)), None)
        if failed is None:
            return
        if rest:
            for w in self.workers:
                w.channel.abort(f"another worker failed: {failed}")
            wait(rest)
        try:
            raise failed
        finally:
            del failed, futures, done, rest  # the error holds this frame, so itself and all frames that it passed
