"""``shm``: CPU memory to CPU memory on one host, through a ring of shared-memory slots (see ``shm_ring``).

One copy in, one copy out, both processes at once: close to the speed of one memcpy. One send serves all receivers of a
bucket. Both sides run as one user and see one ``/dev/shm`` (containers of a pod may share it as a volume).

Two things a sender can do beyond the contract. After ``PeerLost`` it may ``drop`` that member and ``send`` the same
bucket again: it goes on where it stopped, for the others. ``drop`` may also come first, from any thread. A dropped
member that is not proven gone can still read the ring, so a channel with one serves no further update: bind a new one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from weightplane.controlplane import failpoints
from weightplane.controlplane.core.plan import Bucket

from . import shm_ring as ring
from .base import (
    ArmToken,
    Capabilities,
    ChannelAborted,
    ChannelSpec,
    ChannelTimeout,
    PeerLost,
    Probe,
    ReceiveChannel,
    SendChannel,
    Transport,
    TransportError,
)
from .span_cursor import Copier, SpanCursor

if TYPE_CHECKING:
    from weightplane.v1.transport_pb2 import Rendezvous

__all__ = ["ShmReceiveChannel", "ShmSendChannel", "ShmTransport"]

SLOTS = 16  # some slack for a peer that the scheduler keeps waiting
SLOT_BYTES = 512 << 10  # half of a usual L2: measured best; 1 MiB was at times a third slower
_PEER_CHECK = 0.02  # seconds between two looks at whether a peer lives, while waiting for it


def _directory() -> Path:
    return Path(os.environ.get("WEIGHTPLANE_SHM_DIR", "/dev/shm"))


class _Channel:
    """What both sides share: abort, deadline, and the errors that name bucket and peers."""

    def __init__(self, spec: ChannelSpec, member: str) -> None:
        self._spec, self._member = spec, member
        self._reason: str | None = None
        self._aborted = threading.Event()
        self._lock = threading.Lock()  # segments are touched by other threads (abort, drop) only under it
        self._closed = False
        self._deadline = 0.0
        self._fence = b""
        self._bucket = -1
        self._checked = 0.0
        self._copier = Copier()

    def _check(self, waiting_for: str) -> bool:
        """Raise if aborted or too late; True when it is time to look whether the peer lives."""
        if self._reason is not None:
            raise ChannelAborted(f"channel {self._spec.channel_id}: {self._reason}", bucket=self._bucket)
        now = time.monotonic()
        if now >= self._deadline:
            where = f" in bucket {self._bucket}" if self._bucket >= 0 else ""
            raise ChannelTimeout(
                f"{self._member!r} waited for {waiting_for!r}{where} until the deadline",
                peers=(waiting_for,),
                bucket=self._bucket,
            )
        if now - self._checked < _PEER_CHECK:
            return False
        self._checked = now
        return True

    def _ready(self, bucket: Bucket | None = None) -> None:
        if self._closed:
            raise TransportError(f"channel {self._spec.channel_id} is closed")
        self._bucket = -1 if bucket is None else bucket.index
        if self._reason is not None:
            raise ChannelAborted(f"channel {self._spec.channel_id}: {self._reason}", bucket=self._bucket)
        if bucket is not None and not self._fence:
            raise TransportError(f"bucket {bucket.index}: the channel was never armed")

    def _lost(self, peer: str, why: str) -> PeerLost:
        return PeerLost(f"{peer!r} {why} (bucket {self._bucket})", peers=(peer,), bucket=self._bucket)

    def _cursor(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> SpanCursor:
        cursor = SpanCursor(spans, self._copier)
        if cursor.nbytes != bucket.nbytes:
            raise TransportError(
                f"bucket {bucket.index} has {bucket.nbytes} bytes, its spans {cursor.nbytes}", bucket=bucket.index
            )
        return cursor


_GONE = {ring.ABORTED: "aborted its side", ring.CLOSED: "closed its side"}


class ShmSendChannel(_Channel, SendChannel):
    """Owns the segment. See the module text for ``drop`` and for sending on after ``PeerLost``."""

    def __init__(self, spec: ChannelSpec, member: str, directory: Path, slots: int, slot_bytes: int) -> None:
        super().__init__(spec, member)
        self._path = directory / ring.segment_name(spec.channel_id, member)
        ring.sweep(directory)
        self._segment = ring.Segment.create(
            self._path, spec.key, spec.channel_id, member, len(spec.receivers), slots, slot_bytes
        )
        self._ranks = {m: i for i, m in enumerate(spec.receivers)}
        self._live = frozenset(self._ranks.values())
        self._peers: dict[int, ring.Peer] = {}
        self._seq = 0
        self._occupants: list[list[tuple[int, int]]] = [[] for _ in range(slots)]
        self._armed: set[int] = set()
        self._before = [0] * len(spec.receivers)  # slots posted to each receiver before this update
        self._resume = (-1, 0)

    def arm(self, token: ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        """See ``SendChannel``. Raises ``TransportError`` for foreign buckets, or after a ``drop`` (module text)."""
        self._ready()
        for bucket in buckets:
            if bucket.sender != self._member or not self._ranks.keys() >= set(bucket.receivers):
                raise TransportError(f"bucket {bucket.index} is not {self._member!r}'s on this channel")
        self._deadline = deadline
        fence = ring.fence_of(token.update_id, token.epoch, token.generation)
        if fence != self._fence:
            dropped = [m for m, r in self._ranks.items() if r not in self._live and not self._is_gone(r)]
            if dropped:
                raise TransportError(
                    f"{dropped} were dropped and may still read the ring: bind a new channel", peers=dropped
                )
            self._fence, self._resume = fence, (-1, 0)
            self._before = [self._segment.count(r) for r in self._ranks.values()]
        self._armed = set()

    def send(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        """See ``SendChannel``. Returns when the bytes are in the ring; the spans may be reused."""
        self._ready(bucket)
        failpoints.hit("shm.send.before")
        segment, size = self._segment, self._segment.slot_bytes
        cursor = self._cursor(bucket, spans)
        offset = self._resume[1] if self._resume[0] == bucket.index else 0
        cursor.seek(offset)
        ranks = [self._ranks[m] for m in bucket.receivers]
        for rank in ranks:
            if rank not in self._armed:
                self._wait_armed(rank)
        while offset < bucket.nbytes:
            slot, n = self._seq % segment.slots, min(size, bucket.nbytes - offset)
            for rank, count in self._occupants[slot]:
                if segment.read(rank) < count:
                    self._wait_read(rank, count)
            if self._reason is not None:
                self._check("")
            segment.invalidate(slot)
            cursor.read(segment.slot_at(slot), n)
            self._seq += 1
            segment.write_header(slot, bucket.index, offset, n, self._fence, self._seq)
            self._occupants[slot] = segment.post([r for r in ranks if r in self._live], self._seq)
            offset += n
            self._resume = (bucket.index, offset)
            failpoints.hit("shm.send.inside")
        self._resume = (-1, 0)
        failpoints.hit("shm.send.after")

    def flush(self) -> None:
        """See ``SendChannel``. Dropped members are not waited for."""
        self._ready()
        for rank, before in enumerate(self._before):
            self._wait_read(rank, self._segment.count(rank))
            if rank in self._live and self._segment.skipped(rank) > before:
                raise self._lost(self._spec.receivers[rank], "left this update before it had read everything")

    def drop(self, member: str) -> None:
        """Send to the others only, from now on. Any thread; returns at once; unblocks a wait for that member."""
        rank = self._ranks[member]
        with self._lock:
            self._live -= {rank}
            if not self._closed:
                self._segment.drop(rank)
                self._segment.wake_receiver_words(rank)
                if all(self._segment.receiver_state(r) for r in self._live):
                    self._path.unlink(missing_ok=True)  # nobody else will open it

    def abort(self, reason: str) -> None:
        """See ``SendChannel``; the receivers notice too."""
        if self._reason is None:
            self._reason = reason
        self._aborted.set()
        with self._lock:
            if not self._closed:
                self._segment.state = ring.ABORTED
                for rank in self._ranks.values():
                    self._segment.wake_receiver_words(rank)

    def close(self) -> None:
        """See ``SendChannel``. What is in the ring stays readable for attached receivers."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._reason is None:
                self._segment.state = ring.CLOSED
            self._path.unlink(missing_ok=True)
            for peer in self._peers.values():
                peer.close()
            self._segment.close()

    def _wait_read(self, rank: int, count: int) -> None:
        segment = self._segment
        self._checked = time.monotonic()
        while (seen := segment.read(rank)) < count and rank in self._live:
            if self._copier.contended and segment.spin_read(rank, count):
                return
            gone = self._gone(rank)
            if gone and segment.read(rank) < count and rank in self._live:
                raise self._lost(self._spec.receivers[rank], gone)
            segment.wait_read(rank, seen)

    def _wait_armed(self, rank: int) -> None:
        segment = self._segment
        while rank in self._live:
            seen = segment.arms(rank)
            if segment.receiver_state(rank) and segment.armed(rank) == self._fence:
                self._peer(rank)
                self._armed.add(rank)
                return
            gone = self._gone(rank)
            if gone and rank in self._live:
                raise self._lost(self._spec.receivers[rank], gone)
            segment.wait_arm(rank, seen)

    def _peer(self, rank: int) -> ring.Peer | None:
        if rank not in self._peers and self._segment.receiver_state(rank):
            member = self._spec.receivers[rank]
            try:
                self._peers[rank] = self._segment.receiver_peer(rank, self._spec.key, self._spec.channel_id, member)
            except ring.SegmentError as e:
                raise TransportError(str(e), peers=(member,)) from e
        return self._peers.get(rank)

    def _gone(self, rank: int) -> str:
        """Why a receiver will not come, or nothing. Raises if this side was aborted or is too late."""
        look = self._check(self._spec.receivers[rank])
        why = _GONE.get(self._segment.receiver_state(rank), "")
        if not why and look and (peer := self._peer(rank)) is not None and peer.dead():
            why = "died"
        return why

    def _is_gone(self, rank: int) -> bool:
        """Whether a dropped receiver certainly cannot read the ring any more."""
        peer = self._peer(rank)
        return peer is None or peer.dead()


class ShmReceiveChannel(_Channel, ReceiveChannel):
    """Attaches to every sender's segment when it is first armed."""

    def __init__(self, spec: ChannelSpec, member: str, directory: Path) -> None:
        super().__init__(spec, member)
        self._directory = directory
        self._rank = spec.receivers.index(member)
        self._segments: dict[str, ring.Segment] = {}
        self._peers: dict[str, ring.Peer] = {}
        self._done: dict[str, int] = {}  # slots behind us, by sender
        self._landed = 0

    @property
    def bytes_landed(self) -> int:
        """See ``ReceiveChannel``."""
        return self._landed

    def arm(self, token: ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        """See ``ReceiveChannel``. Waits, until the deadline, for senders that have not opened their side yet."""
        self._ready()
        for bucket in buckets:
            if self._member not in bucket.receivers or bucket.sender not in self._spec.senders:
                raise TransportError(f"bucket {bucket.index} is not {self._member!r}'s on this channel")
        self._deadline = deadline
        needed = {b.sender for b in buckets}
        for sender in self._spec.senders:
            if sender not in self._segments:
                self._attach(sender, sender in needed)
        fence = ring.fence_of(token.update_id, token.epoch, token.generation)
        for sender, segment in self._segments.items():
            if segment.dropped(self._rank):
                raise ChannelAborted(f"{sender!r} dropped {self._member!r}", peers=(sender,))
            if fence != self._fence:  # what an earlier update left in flight is not ours
                queued = segment.count(self._rank)
                if queued > self._done.get(sender, 0):
                    segment.publish_skipped(self._rank, queued)
                self._done[sender] = queued
            segment.publish_read(self._rank, self._done.setdefault(sender, 0))
            segment.publish_arm(self._rank, fence)
        self._fence = fence

    def receive(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        """See ``ReceiveChannel``."""
        self._ready(bucket)
        failpoints.hit("shm.receive.before")
        cursor = self._cursor(bucket, spans)
        sender, rank, offset = bucket.sender, self._rank, 0
        segment = self._segments[sender]
        while offset < bucket.nbytes:
            done = self._done[sender]
            if segment.count(rank) <= done:
                self._wait_filled(sender, segment, done)
            if self._reason is not None:
                self._check(sender)
            seq = segment.queued(rank, done)
            slot = (seq - 1) % segment.slots
            number, index, start, n, fence = segment.read_header(slot)
            if segment.dropped(rank) or number != seq:
                raise ChannelAborted(f"{sender!r} dropped {self._member!r}", peers=(sender,), bucket=bucket.index)
            if fence == self._fence:
                if (index, start) != (bucket.index, offset) or n > bucket.nbytes - offset:
                    raise TransportError(
                        f"expected bucket {bucket.index} at byte {offset}, {sender!r} sent bucket {index} at {start}: "
                        "the two sides replay different plans",
                        peers=(sender,),
                        bucket=bucket.index,
                    )
                cursor.write(segment.slot_at(slot), n)
                self._landed += n
                if segment.dropped(rank):  # then the slot may have changed under the copy
                    raise ChannelAborted(f"{sender!r} dropped {self._member!r}", peers=(sender,), bucket=bucket.index)
                offset += n
            else:
                segment.publish_skipped(rank, done + 1)
            self._done[sender] = done + 1
            segment.publish_read(rank, done + 1)
            failpoints.hit("shm.receive.inside")
        failpoints.hit("shm.receive.after")

    def abort(self, reason: str) -> None:
        """See ``ReceiveChannel``; the senders notice too."""
        if self._reason is None:
            self._reason = reason
        self._aborted.set()
        with self._lock:
            for segment in () if self._closed else tuple(self._segments.values()):
                segment.publish_state(self._rank, ring.ABORTED)
                segment.wake_bell()

    def close(self) -> None:
        """See ``ReceiveChannel``."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for peer in self._peers.values():
                peer.close()
            for segment in self._segments.values():
                if self._reason is None:
                    segment.publish_state(self._rank, ring.CLOSED)
                segment.close()

    def _attach(self, sender: str, needed: bool) -> None:
        path, pause = self._directory / ring.segment_name(self._spec.channel_id, sender), 0.001
        while True:
            try:
                segment = ring.Segment.attach(
                    path,
                    self._spec.key,
                    self._spec.channel_id,
                    sender,
                    len(self._spec.receivers),
                    self._rank,
                    self._member,
                )
                break
            except FileNotFoundError:
                if not needed:
                    return
                self._check(sender)
                self._aborted.wait(pause)
                pause = min(2 * pause, ring.WAIT_SLICE)
            except ring.SenderDied as e:
                raise PeerLost(str(e), peers=(sender,)) from e
            except ring.SegmentError as e:
                raise TransportError(str(e), peers=(sender,)) from e
        with self._lock:
            self._segments[sender] = segment
            self._peers[sender] = segment.sender_peer()
            if self._reason is not None:
                segment.publish_state(self._rank, ring.ABORTED)

    def _wait_filled(self, sender: str, segment: ring.Segment, done: int) -> None:
        rank = self._rank
        self._checked = time.monotonic()
        while True:
            seen = segment.bell
            if segment.count(rank) > done or (self._copier.contended and segment.spin_count(rank, done + 1)):
                return
            look = self._check(sender)
            if segment.dropped(rank):
                raise ChannelAborted(f"{sender!r} dropped {self._member!r}", peers=(sender,), bucket=self._bucket)
            why = _GONE.get(segment.state, "")
            if not why and look and self._peers[sender].dead():
                why = "died"
            if why and segment.count(rank) <= done:
                raise self._lost(sender, why)
            segment.wait_bell(seen)


class ShmTransport(Transport):
    """See the module text."""

    name: ClassVar[str] = "shm"
    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cpu"}), one_to_many=True, one_sided=False, cross_host=False, buffered=True
    )

    def __init__(self) -> None:
        self._directory = _directory()
        self._slots, self._slot_bytes = SLOTS, SLOT_BYTES

    def probe(self) -> Probe:
        """Makes, locks and removes one small private segment."""
        path = self._directory / f"{ring.PREFIX}probe-{os.getpid()}-{threading.get_ident():x}"
        try:
            segment = ring.Segment.create(path, b"probe", "probe", "probe", 1, 2, 4096)
        except (OSError, ring.SegmentError) as e:
            return Probe(False, str(e), {"directory": str(self._directory)})
        path.unlink(missing_ok=True)
        segment.close()
        stat = os.statvfs(self._directory)
        details = {"directory": str(self._directory), "free_bytes": str(stat.f_bavail * stat.f_frsize)}
        return Probe(True, "", details)

    def offer(self, member: str) -> Rendezvous:
        """Names the host, the shared-memory mount and the user: all three must be equal on both sides."""
        from weightplane.v1.transport_pb2 import Rendezvous, ShmRendezvous

        return Rendezvous(transport=self.name, shm=ShmRendezvous(host_id=self._host_id(), pid=os.getpid()))

    def open_sender(self, spec: ChannelSpec, member: str) -> ShmSendChannel:
        """Makes the segment (8 MiB and a little). ``TransportError``: what the machine lacks, or who is elsewhere."""
        self._validate(spec, member, spec.senders)
        try:
            return ShmSendChannel(spec, member, self._directory, self._slots, self._slot_bytes)
        except ring.SegmentError as e:
            raise TransportError(str(e)) from e

    def open_receiver(self, spec: ChannelSpec, member: str) -> ShmReceiveChannel:
        """Takes nothing yet: segments are opened by the first ``arm``."""
        self._validate(spec, member, spec.receivers)
        return ShmReceiveChannel(spec, member, self._directory)

    def _host_id(self) -> str:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        stat = os.stat(self._directory)
        return f"{boot}/{stat.st_dev:x}.{stat.st_ino:x}/{os.geteuid()}"

    def _validate(self, spec: ChannelSpec, member: str, members: Sequence[str]) -> None:
        if member not in members:
            raise TransportError(f"{member!r} is not a member of channel {spec.channel_id} in that role")
        if len(spec.key) != 32:
            raise TransportError(f"channel {spec.channel_id}: the key has {len(spec.key)} bytes, expected 32")
        ours = self._host_id()
        for other, offer in spec.offers.items():
            theirs = offer.shm.host_id
            if theirs and theirs != ours:
                raise TransportError(
                    f"{other!r} is at {theirs} and {member!r} at {ours} (boot id / shared-memory mount / user): "
                    "shm needs one host, one mount of /dev/shm and one user; use grpc or ucx between them",
                    peers=(other,),
                )
