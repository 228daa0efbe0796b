"""Manifests and plans in pages of under 2 MiB, as every client's default limit allows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.placement import Box
from weightplane.controlplane.core.plan import Plan
from weightplane.v1 import agent_pb2, tensor_pb2

from .artifacts import Artifacts
from .fields import between

__all__ = ["PAGE_BYTES", "manifest_page", "plan_page", "plan_pages"]

PAGE_BYTES = 2 << 20
_ROOM = PAGE_BYTES - (64 << 10)


def manifest_page(manifest: Manifest, first: int) -> agent_pb2.GetManifestResponse:
    """Tensors from ``first`` on, as many as fit."""
    answer = agent_pb2.GetManifestResponse(total=len(manifest))
    size = 0
    for t in manifest.tensors[first : first + 65536]:
        entry = _tensor(t)
        size += entry.ByteSize() + 4
        if size > _ROOM:
            break
        answer.tensors.append(entry)
    return answer


def _tensor(t: TensorMeta) -> tensor_pb2.TensorMeta:
    return tensor_pb2.TensorMeta(name=t.name, dtype=t.dtype, shape=t.shape, alias_of=t.alias_of)


async def plan_page(artifacts: Artifacts, plan_id: str, page: int) -> tensor_pb2.PlanPage:
    """One page of a plan; the pages are made once, in a worker thread."""
    index = artifacts.plan(plan_id)
    making = artifacts.plan_pages.get(plan_id)
    if making is None:
        manifest = artifacts.manifest(index.plan.manifest_id)
        making = asyncio.get_running_loop().run_in_executor(artifacts.executor, plan_pages, index.plan, manifest)
        artifacts.plan_pages.put(plan_id, making)
    made = await asyncio.shield(making)
    between("page", page, 0, len(made) - 1)
    return made[page]


def plan_pages(plan: Plan, manifest: Manifest) -> list[tensor_pb2.PlanPage]:
    """A plan as pages: each repeats the members and receiver sets, and carries the next regions, then buckets."""
    members: dict[str, int] = {}
    sets: dict[tuple[str, ...], int] = {}
    for r in plan.regions:
        members.setdefault(r.sender, len(members))
        if r.receivers not in sets:
            sets[r.receivers] = len(sets)
            for m in r.receivers:
                members.setdefault(m, len(members))
    head = tensor_pb2.PlanPage(
        plan_id=plan.id,
        manifest_id=plan.manifest_id,
        bucket_bytes=plan.bucket_bytes,
        members=members,
        receiver_sets=[tensor_pb2.ReceiverSet(members=[members[m] for m in s]) for s in sets],
    )
    pages = [_fresh(head)]
    size = head.ByteSize()
    for r in plan.regions:
        whole: Box = tuple((0, d) for d in manifest.tensors[r.tensor].shape)
        region = tensor_pb2.PlanRegion(
            tensor=r.tensor,
            piece_box=_ranges(r.piece_box, whole),
            box=_ranges(r.box, whole),
            sender=members[r.sender],
            receiver_set=sets[r.receivers],
            nbytes=r.nbytes,
        )
        size = _room_for(pages, head, size, region.ByteSize() + 5)
        pages[-1].regions.append(region)
    for b in plan.buckets:
        bucket = tensor_pb2.PlanBucket(
            sender=members[b.sender],
            receiver_set=sets[b.receivers],
            segments=[tensor_pb2.PlanSegment(region=s.region, offset=s.offset, nbytes=s.nbytes) for s in b.segments],
        )
        size = _room_for(pages, head, size, bucket.ByteSize() + 5)
        pages[-1].buckets.append(bucket)
    for page in pages:
        page.pages = len(pages)
    return pages


def _fresh(head: tensor_pb2.PlanPage) -> tensor_pb2.PlanPage:
    page = tensor_pb2.PlanPage()
    page.CopyFrom(head)
    return page


def _room_for(pages: list[tensor_pb2.PlanPage], head: tensor_pb2.PlanPage, size: int, more: int) -> int:
    """Open a new page where ``more`` bytes do not fit. Returns the size of the last page with them."""
    if size + more > _ROOM and size > head.ByteSize():
        pages.append(_fresh(head))
        size = head.ByteSize()
    return size + more


def _ranges(box: Box, whole: Box) -> Iterable[tensor_pb2.Range]:
    """Ranges of a box; none for the whole tensor."""
    return [] if box == whole else [tensor_pb2.Range(start=a, stop=b) for a, b in box]
