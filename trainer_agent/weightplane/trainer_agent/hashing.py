"""The digests a rank owes: one per region that it sends, each distinct (root, box) hashed once, beside the wire.

Host memory is hashed bucket by bucket, by a thread beside each lane. Device memory that stays is hashed where it lies,
all of it at once, from tables made once; what is packed on a device is hashed there too, bucket by bucket.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from weightplane.controlplane.core.placement import Box
from weightplane.controlplane.core.plan import Bucket, Plan, Segment
from weightplane.controlplane.core.states import Verify
from weightplane.controlplane.core.verify import sampled_regions
from weightplane.transports import digest_cuda
from weightplane.transports.digest import LEAF_BYTES, digest_bytes, memory_of
from weightplane.transports.digest_cuda import PartDigest, digest_tensors, grouped
from weightplane.transports.identity import LiveSpans

from .produced import Produced
from .replay import ChannelReplay, LiveGroups

__all__ = ["LaneHasher", "LiveHasher", "RegionDigests", "live_groups"]

Key = tuple[int, Box]

_QUEUED = 2  # buckets that may wait to be hashed: bounds the scratch that they hold
_KEPT = 4
_ONE_LAUNCH = 1 << 62  # the trainer's digests are not waited for while bytes are on the wire: keep the card busiest


class _Owed:
    """What follows from the plans alone, worked out once. An id for each distinct (root, box) that ``member`` sends."""

    def __init__(self, plans: Sequence[Plan], member: str, share: bool) -> None:
        self.keys: list[Key] = []
        self.sent: dict[str, list[int]] = {}  # by plan: the regions it sends, in order
        self.ids: dict[str, list[int]] = {}  # by plan: their ids
        self.mine: dict[str, dict[int, int]] = {}  # by plan: the ids that its lane hashes, by region
        known: dict[Key, int] = {}
        for plan in plans:
            if not share:
                known = {}
            ids: list[int] = []
            sent: list[int] = []
            mine: dict[int, int] = {}
            for i, r in enumerate(plan.regions):
                if r.sender != member:
                    continue
                key = (r.tensor, r.box)
                number = known.get(key)
                if number is None:
                    number = known[key] = mine[i] = len(self.keys)
                    self.keys.append(key)
                sent.append(i)
                ids.append(number)
            self.sent[plan.id], self.ids[plan.id], self.mine[plan.id] = sent, ids, mine


_lock = threading.Lock()
_owed: OrderedDict[tuple[object, ...], _Owed] = OrderedDict()


def _owed_of(plans: Sequence[Plan], member: str, share: bool) -> _Owed:
    key = (tuple(p.id for p in plans), member, share)
    with _lock:
        found = _owed.get(key)
        if found is None:
            found = _owed[key] = _Owed(plans, member, share)
            while len(_owed) > _KEPT:
                _owed.popitem(last=False)
        _owed.move_to_end(key)
        return found


class RegionDigests:
    """The digests of one update, filled by the hashers of its lanes. With ``share`` a region that several plans have is
    hashed by the first one's lane only. With ``verify`` SAMPLED each lane hashes its plan's sample for ``update_id``.
    """

    def __init__(
        self, plans: Sequence[Plan], member: str, *, share: bool, update_id: str = "", verify: Verify = Verify.FULL
    ) -> None:
        self.sampled = verify is Verify.SAMPLED
        self._owed = _owed_of(plans, member, share and len(plans) > 1 and not self.sampled)
        self._sample: dict[str, dict[int, int]] = {}  # by plan: region -> id
        if self.sampled:
            for plan in plans:
                ids = dict(zip(self._owed.sent[plan.id], self._owed.ids[plan.id], strict=True))
                picked = {ids[r]: r for r in reversed(sampled_regions(update_id, len(plan.regions))) if r in ids}
                self._sample[plan.id] = {r: i for i, r in picked.items()}
        self.found: dict[int, int] = {}  # by id

    @property
    def values(self) -> dict[Key, int]:
        """What was hashed, by (root, box)."""
        return {self._owed.keys[i]: v for i, v in self.found.items()}

    def mine(self, plan: Plan) -> Mapping[int, int]:
        """The regions of ``plan`` that its lane must hash, and the id under which ``found`` gets the digest."""
        return self._sample[plan.id] if self.sampled else self._owed.mine[plan.id]

    def of_plan(self, plan: Plan, late: Callable[[Plan, int], int]) -> list[int]:
        """The digests of the regions of ``plan`` that this rank sends, in order; ``late`` hashes what no lane did.

        With SAMPLED those outside the sample are 0.
        """
        ids, found = self._owed.ids[plan.id], self.found
        out = list(map(found.get, ids))
        if None in out:
            wanted = set(self._sample[plan.id].values()) if self.sampled else None
            for i, region in zip(ids, self._owed.sent[plan.id], strict=True):
                if i not in found and (wanted is None or i in wanted):
                    found[i] = late(plan, region)
            out = [found.get(i, 0) for i in ids]
        return out  # type: ignore[return-value]


class LaneHasher:
    """Hashes one lane's buckets in a thread of its own, while the lane sends them.

    ``feed`` hands over a bucket and its spans, which must be complete and must not change until three more buckets were
    fed, or ``finish`` returned. Regions in ``skip`` are left to somebody else.
    """

    def __init__(self, lane: int, plan: Plan, digests: RegionDigests, skip: Collection[int] = ()) -> None:
        self._plan, self._found, self._skip = plan, digests.found, skip
        self._mine = digests.mine(plan)
        self._queue: queue.Queue[tuple[Bucket, Sequence[torch.Tensor]] | None] = queue.Queue(_QUEUED)
        self._open: dict[int, PartDigest] = {}
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"weightplane-hash-{lane}", daemon=True)
        self._thread.start()

    def feed(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        """Take one bucket; blocks while two are waiting, so that at most three are held."""
        self._queue.put((bucket, spans))

    def finish(self) -> None:
        """Wait for all that was fed. Raises what hashing raised."""
        self._queue.put(None)
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self.error is None:
                try:
                    self._hash(*item)
                except BaseException as e:  # raised by ``finish``, in the lane's thread
                    self.error = e

    def _hash(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        mine, found, regions, skip = self._mine, self._found, self._plan.regions, self._skip
        on_device: list[tuple[int, torch.Tensor]] = []
        for segment, span, view in zip(bucket.segments, spans, _memory(spans), strict=True):
            i = mine.get(segment.region)
            if i is None or i in found or segment.region in skip:
                continue
            if segment.nbytes != regions[segment.region].nbytes:
                self._go_on(bucket, segment, span)
            elif view is not None:
                found[i] = digest_bytes(view)
            else:
                on_device.append((i, span))
        if on_device:
            values = digest_tensors([span for _, span in on_device])
            found.update(zip((i for i, _ in on_device), values, strict=True))

    def _go_on(self, bucket: Bucket, segment: Segment, span: torch.Tensor) -> None:
        region, size = segment.region, self._plan.regions[segment.region].nbytes
        cut = self._open.get(region)
        if cut is None:
            aligned = self._plan.bucket_bytes >= LEAF_BYTES  # then the planner cuts between leaves
            cut = self._open[region] = PartDigest(span.device, size, aligned=aligned)
        if cut.nbytes != segment.offset:
            raise RuntimeError(
                f"bucket {bucket.index}: region {region} goes on at byte {segment.offset}, "
                f"but was hashed to {cut.nbytes}"
            )
        cut.update(span)
        if cut.nbytes == size:
            self._found[self._mine[region]] = self._open.pop(region).value


def _memory(spans: Sequence[torch.Tensor]) -> Sequence[memoryview | None]:
    """The spans as buffers, those on the host; kept with a list that stays."""
    if not isinstance(spans, LiveSpans):
        return [memory_of(s) if s.device.type == "cpu" else None for s in spans]
    if spans.memory is None and all(s.device.type == "cpu" for s in spans):
        spans.memory = list(map(memory_of, spans))
    return spans.memory if spans.memory is not None else [None] * len(spans)


def live_groups(replay: ChannelReplay, digests: RegionDigests) -> LiveGroups:
    """What the lane of ``replay`` owes and has in device memory that stays, as launches; made once for all updates that
    owe the same."""
    mine = digests.mine(replay.plan)
    known = replay.groups
    if known is not None and known.mine is mine and known.version == replay.version:
        return known
    live = replay.live
    if replay.launches is None or replay.launches[0] != replay.version:
        here = [(r, flat) for r, flat in live.items() if digest_cuda.on_device(flat)]
        replay.launches = replay.version, grouped(here, _ONE_LAUNCH)
    groups = [part for group in replay.launches[1] if (part := group.part(mine)) is not None]
    found = LiveGroups(mine, replay.version, groups, frozenset(r for g in groups for r in g.keys))
    if not digests.sampled:
        replay.groups = found
    return found


class LiveHasher:
    """Hashes a lane's groups in a thread of its own, beside the wire, which it does not wait for.

    ``produced``: what must have run before that memory holds what is sent. ``changed`` is called once it has ended.
    """

    def __init__(
        self, lane: int, live: LiveGroups, digests: RegionDigests, produced: Produced, changed: Callable[[], None]
    ) -> None:
        self._live, self._found, self._produced, self._changed = live, digests.found, produced, changed
        self.done = False  # every digest of ``live`` is found
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=f"weightplane-hash-live-{lane}", daemon=True)
        self.thread.start()

    def finish(self) -> None:
        """Wait for the digests; the memory may change from now on. Raises what hashing raised."""
        self.thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            self._produced.wait()
            mine = self._live.mine
            for group in self._live.groups:
                group.start()
            for group in self._live.groups:
                self._found.update(zip((mine[r] for r in group.keys), group.values(), strict=True))
            self.done = True
        except BaseException as e:  # raised by ``finish``, in the lane's thread
            self.error = e
        self._changed()
