"""What a transport is. Small enough to implement one in an evening; ``docs/transports.md`` walks through it.

A transport moves the bytes of planned buckets between the members of a *channel* and reports completion. It knows no
phases, versions or votes: it is handed byte spans and fills byte spans. It never allocates what it fills.

**Thread contract.** ``arm``, ``send``, ``receive``, ``flush`` are called from one thread at a time per channel (the
data thread). ``abort`` may be called from any thread, at any time, any number of times, also while the data thread is
blocked inside the channel: it returns at once and makes the blocked call, and every later one, raise
``ChannelAborted`` within a second. ``close`` comes last, after the data thread has left; it is bounded (5 s) and never
raises for a dead peer. Calls that block release the GIL.

**Completion.** When ``receive`` returns, every byte of the bucket is in its span, complete on the device and visible to
every stream. When ``send`` returns, the spans may be reused *only if* the transport declares ``buffered``; otherwise,
and in any case for ``source_free``, the sender waits for ``flush``: every receiver has read everything.

**Fencing.** Each armed update carries a token; bytes of another token are never written to a span.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from weightplane.controlplane.core.plan import Bucket

if TYPE_CHECKING:
    import torch

    from weightplane.v1.transport_pb2 import ChannelBinding, Rendezvous

__all__ = [
    "ArmToken",
    "Capabilities",
    "ChannelAborted",
    "ChannelSpec",
    "ChannelTimeout",
    "PeerLost",
    "Probe",
    "ReceiveChannel",
    "SendChannel",
    "Transport",
    "TransportError",
]


class TransportError(Exception):
    """Base of every transport failure. ``peers`` names the members involved; the text says what and where.

    ``tensors``: of the bucket, by whoever knows their names.
    """

    tensors: tuple[str, ...] = ()

    def __init__(self, message: str, *, peers: Sequence[str] = (), bucket: int = -1) -> None:
        super().__init__(message)
        self.peers = tuple(peers)
        self.bucket = bucket


class ChannelAborted(TransportError):
    """The channel was aborted (by this side, from another thread). Carries the reason given to ``abort``."""


class ChannelTimeout(TransportError):
    """The armed deadline passed; names the bucket and the peers waited for."""


class PeerLost(TransportError):
    """A peer is gone (process dead, connection reset); names it."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do. ``device_kinds``: ``"cpu"``, ``"cuda"``. ``one_to_many``: one send serves all."""

    device_kinds: frozenset[str]
    one_to_many: bool
    one_sided: bool
    cross_host: bool
    buffered: bool
    collective: bool = False
    moves_bytes: bool = True


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether the transport can work in this process, and if not why and what to do. ``details`` are for ``doctor``."""

    ok: bool
    reason: str = ""
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ArmToken:
    """Fences one call's bytes: they belong to this update, epoch and generation, and to nothing else."""

    update_id: str
    epoch: int
    generation: int


@dataclass(frozen=True)
class ChannelSpec:
    """What both sides know before a channel opens.

    ``channel_id`` is unique for ever; ``key`` is its one-time secret (32 bytes). ``senders`` and ``receivers`` are
    member ids in rank order; ``offers`` holds what each member offered (``Transport.offer``), by member id. ``ordinal``
    counts the channels of this transport that were bound together, for offers that hold one single-use item for each.
    """

    channel_id: str
    group: str
    transport: str
    key: bytes
    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    bucket_bytes: int
    offers: Mapping[str, Rendezvous]
    ordinal: int = 0

    @classmethod
    def of(cls, b: ChannelBinding, group: str) -> ChannelSpec:
        """From the contract's message."""
        return cls(
            channel_id=b.channel_id,
            group=group,
            transport=b.transport,
            key=b.key,
            senders=tuple(b.senders),
            receivers=tuple(b.receivers),
            bucket_bytes=b.bucket_bytes,
            offers=dict(b.offers),
            ordinal=b.ordinal,
        )


class SendChannel(ABC):
    """The sending side of one channel, for one sender."""

    @abstractmethod
    def arm(self, token: ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        """Get ready to send ``buckets`` (this sender's, in plan order) by ``deadline`` (``time.monotonic()`` seconds).

        After it returns nothing is left that can fail locally before ``send``. May be called again for the next
        buckets of the same update, or for a new update: what an earlier update left in flight is dropped.
        """

    @abstractmethod
    def send(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        """Send one bucket. ``spans``: contiguous 1-D uint8 tensors whose bytes, in order, are the bucket's.

        The very list object of an earlier call for this bucket means the same memory: what was worked out for it holds.
        """

    @abstractmethod
    def flush(self) -> None:
        """Block until every receiver has taken every byte sent since ``arm``; after it the source is free."""

    def drop(self, member: str) -> None:
        """Go on for the other receivers only. Any thread; returns at once and unblocks a wait for ``member``.

        After ``PeerLost`` the sender may drop that peer and send the same bucket again. The default aborts the channel:
        a transport that cannot tell its receivers apart cannot go on without one of them.
        """
        self.abort(f"{member} was left out")

    @abstractmethod
    def abort(self, reason: str) -> None:
        """See the thread contract above."""

    @abstractmethod
    def close(self) -> None:
        """Free everything: descriptors, segments, threads. Idempotent, bounded."""


class ReceiveChannel(ABC):
    """The receiving side of one channel, for one receiver."""

    @abstractmethod
    def arm(self, token: ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        """Get ready to receive ``buckets`` (those that name this receiver, in plan order). See ``SendChannel.arm``."""

    @abstractmethod
    def receive(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        """Fill ``spans`` (as in ``send``) with the bucket's bytes; blocks until they are all there.

        Nothing may be queued any more, on whatever stream, that reads or writes the spans: they are filled at once.
        """

    def ahead(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        """Say which ``receive`` comes after the next one: from now on those spans may be filled as well.

        The bucket is armed. Returns at once; the default does nothing. Void after ``arm`` and after a call that raised.
        """
        return None

    @property
    @abstractmethod
    def bytes_landed(self) -> int:
        """Payload bytes landed since the channel opened. Any thread; drives progress and the watchdog.

        A ``receive`` that raises has counted every byte that it may have written: with none counted the spans are
        untouched, and a replica in place may go on with the weights it had.
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """See the thread contract above."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. Idempotent, bounded."""


class Transport(ABC):
    """A factory of channels; one instance per process and transport. Construct with no arguments."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    @abstractmethod
    def probe(self) -> Probe:
        """Whether this transport works here. Cheap (under 50 ms), no side effects that outlive it."""

    @abstractmethod
    def offer(self, member: str) -> Rendezvous:
        """What ``member`` tells the other side before a channel exists (addresses, host ids, device UUIDs)."""

    @abstractmethod
    def open_sender(self, spec: ChannelSpec, member: str) -> SendChannel:
        """Open the sending side for ``member``, one of ``spec.senders``."""

    @abstractmethod
    def open_receiver(self, spec: ChannelSpec, member: str) -> ReceiveChannel:
        """Open the receiving side for ``member``, one of ``spec.receivers``."""

    def shutdown(self) -> None:
        """Free what the transport itself holds (servers, agents). Default: nothing."""
        return None
