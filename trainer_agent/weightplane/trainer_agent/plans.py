"""Manifests, placements and plans between this library and the wire: pages out, pages in, cached by their hashes."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.placement import Box, Placement, full_box, full_placement
from weightplane.controlplane.core.plan import Bucket, Plan, PlanError, Region, Segment
from weightplane.v1 import tensor_pb2
from weightplane.v1 import weight_transfer_pb2 as wt

__all__ = ["PlanCache", "manifest_pages", "placement_pages", "plan_from_pages"]

_PAGE_BYTES = 1 << 20
_PAGE_PIECES = 10_000
_KEPT = 8


def manifest_pages(manifest: Manifest, group: str, generation: int) -> Iterator[wt.PutManifestRequest]:
    """PutManifest calls that deliver a manifest; each is about 1 MiB at most."""
    page: list[tensor_pb2.TensorMeta] = []
    size = first = 0

    def request(end: int) -> wt.PutManifestRequest:
        return wt.PutManifestRequest(
            request_id=uuid.uuid4().hex,
            group=group,
            generation=generation,
            manifest_id=manifest.id,
            first=first,
            total=len(manifest),
            tensors=page,
        )

    for i, t in enumerate(manifest):
        meta = tensor_pb2.TensorMeta(name=t.name, dtype=t.dtype, shape=t.shape, alias_of=t.alias_of)
        nbytes = meta.ByteSize() + 4
        if page and size + nbytes > _PAGE_BYTES:
            yield request(i)
            page, size, first = [], 0, i
        page.append(meta)
        size += nbytes
    yield request(len(manifest))


def placement_pages(
    placement: Placement, manifest: Manifest, group: str, generation: int, rank: int
) -> Iterator[wt.PutPlacementRequest]:
    """PutPlacement calls that deliver a placement; a full one is one word."""

    def request(message: tensor_pb2.Placement, first: int, total: int) -> wt.PutPlacementRequest:
        return wt.PutPlacementRequest(
            request_id=uuid.uuid4().hex,
            group=group,
            generation=generation,
            manifest_id=manifest.id,
            rank=rank,
            placement=message,
            first=first,
            total=total,
        )

    pieces = placement.pieces
    if len(pieces) == len(manifest) and pieces == full_placement(placement.member, manifest).pieces:
        yield request(tensor_pb2.Placement(member=placement.member, full=True), 0, 0)
        return
    for first in range(0, max(len(pieces), 1), _PAGE_PIECES):
        message = tensor_pb2.Placement(member=placement.member)
        for p in pieces[first : first + _PAGE_PIECES]:
            box = [tensor_pb2.Range(start=a, stop=b) for a, b in p.box]
            message.pieces.append(tensor_pb2.Piece(tensor=p.tensor, box=box))
        yield request(message, first, len(pieces))


def plan_from_pages(pages: Iterable[tensor_pb2.PlanPage], manifest: Manifest) -> Plan:
    """The plan that these pages are, all of them in order. ``PlanError`` if its content is not what its id says."""
    plan_id = ""
    bucket_bytes = 0
    regions: list[Region] = []
    buckets: list[Bucket] = []
    for page in pages:
        plan_id, bucket_bytes = page.plan_id, page.bucket_bytes
        if page.manifest_id != manifest.id:
            raise PlanError([f"plan {plan_id} is for manifest {page.manifest_id}, not {manifest.id}"])
        members = list(page.members)
        sets = [tuple(members[i] for i in s.members) for s in page.receiver_sets]
        for r in page.regions:
            whole = full_box(manifest.tensors[r.tensor].shape)
            piece_box = _box(r.piece_box) or whole
            box = _box(r.box) or whole
            regions.append(Region(r.tensor, piece_box, box, members[r.sender], sets[r.receiver_set], r.nbytes))
        for b in page.buckets:
            segments = tuple(Segment(s.region, s.offset, s.nbytes) for s in b.segments)
            nbytes = sum(s.nbytes for s in segments)
            buckets.append(Bucket(len(buckets), members[b.sender], sets[b.receiver_set], segments, nbytes))
    plan = Plan.of(manifest.id, bucket_bytes, regions, buckets)
    if plan.id != plan_id:
        raise PlanError([f"the plan calls itself {plan_id}, its content is {plan.id}"])
    return plan


def _box(ranges: Iterable[tensor_pb2.Range]) -> Box:
    return tuple((r.start, r.stop) for r in ranges)


class PlanCache:
    """The last few plans, by id. One thread at a time."""

    def __init__(self) -> None:
        self._plans: OrderedDict[str, Plan] = OrderedDict()

    def get(self, plan_id: str, manifest: Manifest, page: Callable[[int], tensor_pb2.PlanPage]) -> Plan:
        """The plan; ``page(n)`` fetches what is not here yet."""
        plan = self._plans.get(plan_id)
        if plan is None:
            first = page(0)
            plan = plan_from_pages([first, *(page(n) for n in range(1, first.pages))], manifest)
            if plan.id != plan_id:
                raise PlanError([f"asked for plan {plan_id}, got {plan.id}"])
            self._plans[plan_id] = plan
            while len(self._plans) > _KEPT:
                self._plans.popitem(last=False)
        self._plans.move_to_end(plan_id)
        return plan
