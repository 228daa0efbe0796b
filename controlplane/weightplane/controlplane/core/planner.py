"""The planner: from who holds what to who sends which bytes to whom. Pure, deterministic, linear.

**Regions.** For each root tensor and each distinct piece of it that receivers want, sender boxes are chosen that cover
the piece exactly once; every receiver of that piece gets the same regions. An alias is its root: a sender that holds
only one name of tied bytes serves all names, and a receiver that holds two names of one box is sent it once.
A region lies inside a single piece of its sender.

**Overlap.** Of the senders' boxes, the one that covers most of the piece is taken first (ties: the lowest box), and
what it covers is taken from nobody else. So equal boxes in several senders are replicas, a partly overlapping box gives
only what is still missing, and a sender that holds the whole piece spares cutting it.

**Balance.** Among replicas the sender with the fewest bytes planned so far serves a region (ties: channel order). A
region counts once, however many receivers it has.

**Empty pieces** have no bytes: they count as covered, make no region and no segment, and need no sender.

**Buckets.** All regions of one (sender, receivers) are a stream, in manifest order. A region of at most
``bucket_bytes`` is never split; it opens a new bucket where it does not fit. A larger one is split at multiples of
``LEAF_BYTES`` from its start (of 16 where a bucket holds no leaf, of 1 where it does not hold 16), filling the bucket
that is open. The one total order of all buckets is that of (tensor of the first segment, sender, region, offset), which
keeps each stream's order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate

from .manifest import DTYPE_BYTES, Manifest
from .placement import Box, Piece, Placement, box_numel, box_text, intersect, placement_problems, remove
from .plan import Bucket, Plan, PlanError, Region, Segment

__all__ = ["LEAF_BYTES", "make_plan"]

#: The digest's leaf (128 KiB): large regions split at its multiples, so that a digest can stream leaf by leaf.
LEAF_BYTES = 131072

#: Members by channel order, as indices.
_Members = tuple[int, ...]


def make_plan(
    manifest: Manifest, senders: Sequence[Placement], receivers: Sequence[Placement], bucket_bytes: int
) -> Plan:
    """The plan of one channel; ``senders`` and ``receivers`` are in channel order. See the module's text for the rules.

    Raises ``PlanError`` naming every invalid placement, repeated member, bucket size below 1; or else every piece that
    no sender covers, with its tensor, box and receivers.
    """
    by_sender, by_receiver = _layouts(senders), _layouts(receivers)
    problems = _channel_problems(senders, receivers, bucket_bytes)
    for layouts, placements in ((by_sender, senders), (by_receiver, receivers)):
        for pieces, members in layouts.items():
            if placement_problems(manifest, Placement("of equal layouts one", pieces)):
                problems.extend(text for m in members for text in placement_problems(manifest, placements[m]))
    if problems:
        raise PlanError(problems)
    held, wanted = _boxes_by_root(manifest, by_sender), _boxes_by_root(manifest, by_receiver)
    regions = _plan_regions(manifest, senders, receivers, held, wanted)
    rank = {p.member: i for i, p in enumerate(senders)}
    return Plan.of(manifest.id, bucket_bytes, regions, _pack(regions, rank, bucket_bytes))


def _channel_problems(senders: Sequence[Placement], receivers: Sequence[Placement], bucket_bytes: int) -> list[str]:
    problems = []
    if bucket_bytes < 1:
        problems.append(f"found bucket_bytes {bucket_bytes}, expected at least 1")
    roles: dict[str, str] = {}
    for role, placements in (("sender", senders), ("receiver", receivers)):
        for i, p in enumerate(placements):
            if not p.member:
                problems.append(f"{role} {i} has an empty member name")
            elif p.member in roles:
                problems.append(
                    f"member {p.member!r} is {role} {i} and also {roles[p.member]}, expected one role, once"
                )
            roles[p.member] = f"{role} {i}"
    return problems


def _layouts(placements: Sequence[Placement]) -> dict[tuple[Piece, ...], _Members]:
    """Members grouped by equal pieces, so that work on 100,000 pieces is done once for 8 equal receivers."""
    groups: dict[tuple[Piece, ...], list[int]] = {}
    for i, p in enumerate(placements):
        groups.setdefault(p.pieces, []).append(i)
    return {pieces: tuple(members) for pieces, members in groups.items()}


def _boxes_by_root(manifest: Manifest, layouts: dict[tuple[Piece, ...], _Members]) -> dict[int, dict[Box, _Members]]:
    """Root entry → non-empty box → the members that hold it, in channel order, under whatever name."""
    merged: dict[tuple[_Members, _Members], _Members] = {}
    roots = [manifest.root(i) for i in range(len(manifest))]
    out: dict[int, dict[Box, _Members]] = {}
    for pieces, members in layouts.items():
        for piece in pieces:
            boxes = out.setdefault(roots[piece.tensor], {})
            held = boxes.get(piece.box)
            if held is None:
                if box_numel(piece.box):
                    boxes[piece.box] = members
            elif held is not members:
                both = merged.get((held, members))
                if both is None:
                    both = merged.setdefault((held, members), tuple(sorted({*held, *members})))
                boxes[piece.box] = both
    return out


class _Balancer:
    """Gives the least-loaded sender of a set; heaps are refreshed lazily, since loads only grow."""

    def __init__(self, senders: int) -> None:
        self._load = [0] * senders
        self._heaps: dict[_Members, list[tuple[int, int]]] = {}

    def take(self, members: _Members, nbytes: int) -> int:
        heap = self._heaps.get(members)
        if heap is None:
            heap = self._heaps[members] = [(self._load[m], m) for m in members]
            heapify(heap)
        while heap[0][0] != self._load[heap[0][1]]:
            heapreplace(heap, (self._load[heap[0][1]], heap[0][1]))
        m = heap[0][1]
        self._load[m] += nbytes
        heapreplace(heap, (self._load[m], m))
        return m


class _Holders:
    """The senders' boxes of one root, ready for look-ups by piece."""

    def __init__(self, boxes: dict[Box, _Members]) -> None:
        self._sorted = sorted(boxes.items())
        self._starts: list[int] = []
        self._stops: list[int] = []
        if self._sorted and self._sorted[0][0]:
            self._starts = [box[0][0] for box, _ in self._sorted]
            self._stops = list(accumulate((box[0][1] for box, _ in self._sorted), max))

    def cover(self, piece: Box) -> tuple[list[tuple[Box, _Members]], list[Box]]:
        """Disjoint boxes that cover ``piece`` with the senders of each, in box order; and what nobody covers."""
        groups: dict[Box, _Members] = {}
        first, last = 0, len(self._sorted)
        if self._starts:  # only boxes whose rows can meet the piece's
            first = bisect_right(self._stops, piece[0][0])
            last = bisect_left(self._starts, piece[0][1])
        for box, members in self._sorted[first:last]:
            part = intersect(box, piece)
            if part is not None:
                held = groups.get(part)
                groups[part] = members if held is None else tuple(sorted({*held, *members}))
        whole = groups.get(piece)
        if whole is not None:
            return [(piece, whole)], []
        chosen: list[tuple[Box, _Members]] = []
        missing = [piece]
        for part in sorted(groups, key=lambda b: (-box_numel(b), b)):
            hits = [hit for fragment in missing if (hit := intersect(fragment, part)) is not None]
            if sum(map(box_numel, hits)) == box_numel(part):
                hits = [part]  # none of it was covered before: do not cut it where fragments meet
            chosen.extend((hit, groups[part]) for hit in hits)
            missing = remove(missing, part)
            if not missing:
                break
        return sorted(chosen), sorted(missing)


def _plan_regions(
    manifest: Manifest,
    senders: Sequence[Placement],
    receivers: Sequence[Placement],
    held: dict[int, dict[Box, _Members]],
    wanted: dict[int, dict[Box, _Members]],
) -> list[Region]:
    balancer = _Balancer(len(senders))
    names: dict[_Members, tuple[str, ...]] = {}
    regions: list[Region] = []
    problems: list[str] = []
    for root in sorted(wanted):
        holders = _Holders(held.get(root, {}))
        size = DTYPE_BYTES[manifest.tensors[root].dtype]
        for piece, members in sorted(wanted[root].items()):
            to = names.get(members)
            if to is None:
                to = names[members] = tuple(receivers[m].member for m in members)
            chosen, missing = holders.cover(piece)
            if missing:
                problems.append(_missing_text(manifest, root, piece, missing, [receivers[m] for m in members]))
                continue
            for box, replicas in chosen:
                nbytes = box_numel(box) * size
                sender = senders[balancer.take(replicas, nbytes)].member
                regions.append(Region(root, piece, box, sender, to, nbytes))
    if problems:
        raise PlanError(problems)
    return regions


def _missing_text(manifest: Manifest, root: int, piece: Box, missing: list[Box], holders: list[Placement]) -> str:
    """One uncovered piece, under the root's name and, where a receiver knows it by another, that one too."""
    name = manifest.tensors[root].name
    known = {q.tensor for p in holders for q in p.pieces if q.box == piece and manifest.root(q.tensor) == root}
    also = ", ".join(repr(manifest.tensors[i].name) for i in sorted(known - {root}))
    who = ", ".join(repr(p.member) for p in holders[:5]) + (f" and {len(holders) - 5} more" if len(holders) > 5 else "")
    lost, total = sum(map(box_numel, missing)), box_numel(piece)
    gap = "no sender holds any of it" if lost == total else f"no sender holds {lost} of its {total} elements"
    return (
        f"tensor {name!r}{f' (alias {also})' if also else ''}, box {box_text(piece)}, wanted by {who}: {gap}, "
        f"first {box_text(missing[0])}"
    )


def _pack(regions: list[Region], sender_rank: dict[str, int], bucket_bytes: int) -> list[Bucket]:
    """Segments packed into buckets, stream by stream, then put in the one total order."""
    grain = LEAF_BYTES if bucket_bytes >= LEAF_BYTES else 16 if bucket_bytes >= 16 else 1
    streams: dict[tuple[str, tuple[str, ...]], list[list[Segment]]] = {}
    room: dict[tuple[str, tuple[str, ...]], int] = {}  # left in the stream's last bucket
    for i, r in enumerate(regions):
        stream = (r.sender, r.receivers)
        buckets = streams.setdefault(stream, [])
        left = room.get(stream, 0)
        offset = 0
        while offset < r.nbytes:
            rest = r.nbytes - offset
            take = rest if rest <= left else left // grain * grain if r.nbytes > bucket_bytes else 0
            if take == 0:
                buckets.append([])
                left = bucket_bytes
                continue
            buckets[-1].append(Segment(i, offset, take))
            offset += take
            left -= take
        room[stream] = left
    packed = [(stream, bucket) for stream, buckets in streams.items() for bucket in buckets]
    packed.sort(key=lambda p: _bucket_order(regions, sender_rank, p[1][0]))
    return [
        Bucket(index, sender, to, tuple(segments), sum(s.nbytes for s in segments))
        for index, ((sender, to), segments) in enumerate(packed)
    ]


def _bucket_order(regions: list[Region], sender_rank: dict[str, int], first: Segment) -> tuple[int, int, int, int]:
    region = regions[first.region]
    return region.tensor, sender_rank[region.sender], first.region, first.offset
