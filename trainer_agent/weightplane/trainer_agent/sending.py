"""Moving one call's buckets: a thread per channel sends in plan order, others hash beside it.

Buckets whose bytes lie in the source's own memory are replayed: the channel gets the list of spans that it knows from
the last update (``replay``). The others are packed into scratch, update by update. What a transport cannot read where
it lies is mirrored to the host first (``mirror``).

A channel's data calls all come from its one thread; ``abort`` and ``drop`` come from any. A lane whose receivers were
all excluded just ends. With ``tolerant`` (a commit policy that can do without some) a lost peer is waited for until the
coordinator says that it is excluded; then the same bucket goes on for the others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import MappingProxyType

import torch

from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.plan import Bucket, Plan
from weightplane.controlplane.failpoints import hit
from weightplane.transports.base import ChannelAborted, PeerLost, TransportError
from weightplane.transports.buckets import SourceSpans

from .channels import OpenChannel
from .hashing import LaneHasher, LiveHasher, RegionDigests, live_groups
from .mirror import Mirror
from .produced import NOTHING_QUEUED, Produced
from .replay import ChannelReplay, LiveGroups, of_channel
from .sources import Local
from .stop import Stop
from .supply import Supply

__all__ = ["Lane", "Sending"]

log = logging.getLogger(__name__)

_RETAINED = 256 << 20  # bytes made for an update that an unbuffered transport may hold before it is flushed
_ROTATION = 4  # scratch sets: one being filled and sent, at most three waiting to be hashed


class Lane:
    """One channel's part of a call."""

    def __init__(self, number: int, opened: OpenChannel, plan: Plan, buckets: Sequence[Bucket]) -> None:
        self.number, self.opened, self.plan, self.buckets = number, opened, plan, buckets
        self.dropped: set[str] = set()
        self.excluded = False
        self.ended = not buckets
        self.error: BaseException | None = None

    @property
    def receivers(self) -> frozenset[str]:
        """Members that its buckets go to."""
        return frozenset(r for b in self.buckets for r in b.receivers)


class _Packing:
    """Spans of buckets that are not replayed: asked of the supply and packed, each time. The lane's thread.

    A set of scratch is written again three buckets later, when its bucket has been hashed (``LaneHasher.feed``).
    """

    def __init__(self, lane: Lane, manifest: Manifest, supply: Supply) -> None:
        self._lane, self._supply = lane.number, supply
        self._current: dict[int, Local | Sequence[Local]] = {}
        self.retained: list[torch.Tensor] = []  # what an unbuffered transport may still read, if it is ours to free
        keep = not lane.opened.transport.capabilities.buffered
        member = lane.opened.member
        # No dict: SourceSpans would keep what it saw of one, and with it every tensor that was made for this update.
        now = MappingProxyType(self._current)
        self._sets = deque(SourceSpans(lane.plan, manifest, member, now, keep=keep) for _ in range(_ROTATION))

    def spans(self, bucket: Bucket) -> list[torch.Tensor]:
        """The bucket's spans, complete on their devices."""
        taken = self._supply.take(self._lane, bucket)
        self._current.clear()
        self._current.update(taken)
        spans = self._sets[0].spans(bucket)
        self._sets.rotate(-1)
        for device in {s.device for s in spans if s.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()  # packing and casting are queued there
        return spans

    def retain(self, spans: Sequence[torch.Tensor]) -> int:
        """Hold the last bucket's spans if they were made for it; the bytes that an unbuffered transport keeps of it
        beside the source: those, or what was packed."""
        if not self._supply.transient:
            return self._sets[-1].scratch_bytes
        self.retained.extend(spans)
        return sum(s.numel() for s in spans)


class Sending:
    """All lanes of one call. ``start``, then ``wait``. ``exclude`` from any thread."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        manifest: Manifest,
        supply: Supply,
        digests: RegionDigests | None,
        stop: Stop,
        *,
        tolerant_s: float = 0.0,
        one_at_a_time: bool = False,
        progress: Callable[[], None] = lambda: None,
        on_error: Callable[[BaseException], None] = lambda e: None,
        produced: Produced = NOTHING_QUEUED,
    ) -> None:
        """``produced``: what must have run before the source's tensors hold what is to be sent."""
        self.lanes = list(lanes)
        self._produced = produced
        self._manifest, self._supply, self._digests, self._stop = manifest, supply, digests, stop
        self._tolerant_s, self._progress, self._on_error = tolerant_s, progress, on_error
        self._one_at_a_time = one_at_a_time
        self._threads: list[threading.Thread] = []
        self._mirrors: list[Mirror] = []
        self._replays: dict[int, ChannelReplay] = {}  # by lane
        self._live: dict[int, LiveGroups] = {}  # what a lane owes and has in device memory that stays
        self._beside: dict[int, LiveHasher] = {}  # what hashes that

    @property
    def mirrored(self) -> tuple[int, float]:
        """Bytes copied to the host for transports that read nothing else, and the seconds that it took (all lanes)."""
        return sum(m.nbytes for m in self._mirrors), sum(m.seconds for m in self._mirrors)

    def prepare(self) -> None:
        """Find what the lanes send, and begin to hash what lies in device memory that stays: beside the call that arms
        everybody, since neither touches a channel. Raises ``SpanError`` and what the source raises."""
        for lane in self.lanes:
            opened = lane.opened
            replay = of_channel(opened.channel, lane.plan, self._manifest, opened.member)
            self._replays[lane.number] = replay
            if self._supply.watch is not None and opened.transport.capabilities.moves_bytes and not lane.ended:
                replay.look(self._supply.source, self._supply.watch)
            if self._digests is None or lane.ended:
                continue
            live = self._live[lane.number] = live_groups(replay, self._digests)
            if live.groups:
                hasher = LiveHasher(lane.number, live, self._digests, self._produced, self._stop.poke)
                self._beside[lane.number] = hasher

    def start(self) -> None:
        """Start a thread for every lane that has buckets of ours."""
        if not self._replays:
            self.prepare()
        for lane in self.lanes:
            if not lane.ended:
                thread = threading.Thread(
                    target=self._run, args=(lane,), name=f"weightplane-send-{lane.opened.spec.transport}", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def wait_hashed(self, deadline: float) -> bool:
        """Wait until every digest is found that no lane must feed; True if those are all, so that none depends on what
        is on the wire. Raises the reason to stop."""
        if any(not self._live[lane.number].complete for lane in self.lanes if lane.number in self._live):
            return False
        beside = list(self._beside.values())
        over = self._stop.wait(lambda: all(h.done or h.error is not None for h in beside), deadline)
        return over and all(h.done for h in beside)

    def wait(self, deadline: float) -> bool:
        """Wait until every lane ended; False at the deadline. Raises a lane's error, or the reason to stop."""
        over = self._stop.wait(lambda: all(x.ended for x in self.lanes) or self.error is not None, deadline)
        if self.error is not None:
            raise self.error
        for hasher in self._beside.values():  # of a lane that was excluded before it began, too: it reads the source
            hasher.finish()
        if over:
            for known in (self._beside, self._live, self._replays):
                known.clear()  # they hold on to the source's memory
        return over

    @property
    def error(self) -> BaseException | None:
        """The first lane's error."""
        return next((x.error for x in self.lanes if x.error is not None), None)

    def exclude(self, replica_ids: Sequence[str]) -> None:
        """These replicas are out of the update: go on for the others."""
        for lane in self.lanes:
            members = [m for m in lane.receivers - lane.dropped if m.rpartition("/")[0] in replica_ids]
            if not members:
                continue
            lane.dropped.update(members)
            if lane.receivers <= lane.dropped:
                lane.excluded = True
                lane.opened.channel.abort(f"all its receivers were excluded: {sorted(set(replica_ids))}")
            else:
                for member in members:
                    lane.opened.channel.drop(member)
        self._stop.poke()

    def join(self, seconds: float) -> bool:
        """Wait for the threads; whether all have left their channels."""
        end = time.monotonic() + seconds
        threads = [*self._threads, *(h.thread for h in self._beside.values())]
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(t.is_alive() for t in threads)

    # --- one lane's thread ---

    def _run(self, lane: Lane) -> None:
        fed: LaneHasher | None = None
        try:
            try:
                self._produced.wait()
                live = self._live.get(lane.number)
                if self._digests is not None and live is not None and not live.complete:
                    fed = LaneHasher(lane.number, lane.plan, self._digests, live.regions)
                made = self._send_all(lane, self._replays[lane.number], fed)
            finally:
                self._supply.leave(lane.number)
                if fed is not None:
                    fed.finish()
                if lane.number in self._beside:
                    self._beside[lane.number].finish()
            if made and not lane.excluded:
                self._let_go(lane)
        except BaseException as e:
            if not (lane.excluded and isinstance(e, ChannelAborted | PeerLost)) and self._stop.error is None:
                lane.error = e
                self._stop.poke()
                self._on_error(e)
        lane.ended = True
        self._stop.poke()

    @staticmethod
    def _let_go(lane: Lane) -> None:
        """Nobody else holds what was made for this update any more: neither shall the channel."""
        try:
            lane.opened.channel.flush()
        except TransportError as e:
            log.debug("channel %s: %s", lane.opened.spec.channel_id, e)  # everything was read

    def _send_all(self, lane: Lane, replay: ChannelReplay, hasher: LaneHasher | None) -> bool:
        """Whether the channel was given memory that was made for this update."""
        channel, capabilities = lane.opened.channel, lane.opened.transport.capabilities
        packed = _Packing(lane, self._manifest, self._supply)
        mirror, kinds = self._mirror(lane, replay, hasher is not None), capabilities.device_kinds
        held = begun = made = 0
        for n, bucket in enumerate(lane.buckets):
            if lane.excluded:
                return False
            if self._one_at_a_time and not capabilities.buffered:
                self._patiently(lane, channel.flush)
                packed.retained.clear()
            live = replay.spans(bucket)
            parts: Sequence[torch.Tensor] = live if live is not None else packed.spans(bucket)
            if mirror is not None and any(p.device.type not in kinds for p in parts):
                if not capabilities.buffered and begun >= mirror.slots - 1:
                    self._patiently(lane, channel.flush)  # a slot that is still being read must not be written
                    begun = 0
                parts = mirror.take(bucket, parts)
                ahead = replay.spans(lane.buckets[n + 1]) if n + 1 < len(lane.buckets) else None
                if ahead is not None:
                    mirror.begin(lane.buckets[n + 1], ahead)
                begun += 1
            if hasher is not None:
                hasher.feed(bucket, parts)
            hit("trainer.send.bucket")
            self._patiently(lane, lambda b=bucket, p=parts: channel.send(b, p))  # type: ignore[misc]
            if live is None:
                if not capabilities.buffered:
                    kept = packed.retain(parts)
                    held, made = held + kept, made + kept
                    if held > _RETAINED:
                        self._patiently(lane, channel.flush)
                        packed.retained.clear()
                        held = 0
                self._supply.done(lane.number, bucket)
            self._progress()
        if not lane.excluded:
            self._patiently(lane, channel.flush)
        return made > 0

    def _mirror(self, lane: Lane, replay: ChannelReplay, fed: bool) -> Mirror | None:
        """Where the lane's buckets are copied to; ``None`` if its transport reads the source's memory where it lies."""
        capabilities = lane.opened.transport.capabilities
        kinds = capabilities.device_kinds
        if not capabilities.moves_bytes or not lane.buckets or self._supply.device_kinds <= kinds:
            return None
        slots = _ROTATION + 1 if fed else 3  # one being filled, one sent, and what waits to be hashed
        slot_bytes = max(b.nbytes for b in lane.buckets)
        mirror = replay.mirror
        if mirror is None or mirror.slot_bytes < slot_bytes or mirror.slots < slots:
            mirror = replay.mirror = Mirror(slot_bytes, slots)
        mirror.reset()
        self._mirrors.append(mirror)
        return mirror

    def _patiently(self, lane: Lane, step: Callable[[], None]) -> None:
        """Run a data call; after a lost peer wait until it is excluded, if that may happen, and run it again. For a
        moment in any case: that it left is hardly ever the cause, and the coordinator mostly knows that already."""
        while not lane.excluded:
            try:
                return step()
            except PeerLost as e:
                peers = set(e.peers)
                if not peers or peers <= lane.dropped:
                    raise
                end = time.monotonic() + self._tolerant_s
                if not self._stop.wait(lambda p=peers: p <= lane.dropped, end):  # type: ignore[misc]
                    raise
        return None
