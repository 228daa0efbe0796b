"""Manifests, placements and plans in pages; limits; what is evicted and what is not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from tests.server.scripted import Replica, Trainer, fetch_plan, fleet, refused, server
from weightplane.controlplane.core.events import MakePlan
from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.placement import full_placement
from weightplane.controlplane.core.planner import make_plan
from weightplane.controlplane.core.shards import chunk_placement
from weightplane.controlplane.server.artifacts import Artifacts, Limits
from weightplane.controlplane.server.errors import Refused
from weightplane.controlplane.server.pages import PAGE_BYTES, plan_pages
from weightplane.controlplane.server.uploads import Lru, Pages
from weightplane.v1 import agent_pb2 as ag
from weightplane.v1 import common_pb2 as cm
from weightplane.v1 import tensor_pb2 as tn
from weightplane.v1 import update_pb2 as up
from weightplane.v1 import weight_transfer_pb2 as wt


def metas(manifest: Manifest) -> list[tn.TensorMeta]:
    return [tn.TensorMeta(name=t.name, dtype=t.dtype, shape=t.shape, alias_of=t.alias_of) for t in manifest]


async def put_pages(trainer: Trainer, manifest: Manifest, size: int, order: int = 1, **fields: Any) -> list[bool]:
    done = []
    entries = metas(manifest)
    for first in range(0, len(entries), size)[::order]:
        request = wt.PutManifestRequest(
            **{
                "request_id": trainer.id(),
                "group": "g",
                "generation": trainer.generation,
                "manifest_id": manifest.id,
                "first": first,
                "total": len(entries),
                "tensors": entries[first : first + size],
                **fields,
            }
        )
        assert request.ByteSize() < 4 << 20
        done.append((await trainer.stub.PutManifest(request, timeout=20)).complete)
    return done


async def test_a_hundred_thousand_tensors_pass_in_pages_and_come_back() -> None:
    manifest = Manifest.of(
        TensorMeta(f"model.layers.{i}.mlp.experts.{'x' * 60}.weight", "bfloat16", (4, 2)) for i in range(100_000)
    )
    async with server() as running, fleet(running.address, 0) as (trainer, _):
        done = await put_pages(trainer, manifest, 15_000)
        assert done == [False] * (len(done) - 1) + [True]
        assert await put_pages(trainer, manifest, 15_000) == [True] * len(done)
        agent = Replica(running.address)
        names: list[str] = []
        while len(names) < 100_000:
            request = ag.GetManifestRequest(group="g", manifest_id=manifest.id, first=len(names))
            answer = await agent.agent.GetManifest(request, timeout=20)
            assert answer.ByteSize() < PAGE_BYTES and answer.total == 100_000 and answer.tensors
            names.extend(t.name for t in answer.tensors)
        assert names == [t.name for t in manifest]
        await refused(agent.agent.GetManifest(_from(manifest, 100_000), timeout=5), "INVALID_ARGUMENT")
        await agent.kill()


def _from(manifest: Manifest, first: int) -> ag.GetManifestRequest:
    return ag.GetManifestRequest(group="g", manifest_id=manifest.id, first=first)


async def test_pages_in_any_order_and_faults_by_name() -> None:
    manifest = Manifest.of(TensorMeta(f"t{i}", "int8", (2,)) for i in range(10))
    async with server() as running, fleet(running.address, 0) as (trainer, _):
        assert (await put_pages(trainer, manifest, 3, order=-1))[-1]
        error = await refused(put_pages(trainer, manifest, 10, manifest_id="m-" + "0" * 32), "INVALID_ARGUMENT")
        assert manifest.id in (error.details() or "")
        other = Manifest.of([TensorMeta("a", "int8", ())])
        twice = [tn.TensorMeta(name="a", dtype="int8"), tn.TensorMeta(name="a", dtype="int8")]
        error = await refused(put_pages(trainer, other, 1, total=2, tensors=twice), "INVALID_ARGUMENT")
        assert "declared twice" in (error.details() or "")
        quantised = [tn.TensorMeta(name="q", dtype="qint8", shape=[2])]
        error = await refused(put_pages(trainer, other, 1, tensors=quantised), "INVALID_ARGUMENT")
        assert "'qint8'" in (error.details() or "") and "bfloat16" in (error.details() or "")
        await refused(put_pages(trainer, other, 1, total=2_000_000), "LIMIT", grpc.StatusCode.RESOURCE_EXHAUSTED)
        await refused(put_pages(trainer, other, 1, total=-1), "INVALID_ARGUMENT")
        await refused(put_pages(trainer, other, 1, manifest_id="x"), "INVALID_ARGUMENT")
        long = [tn.TensorMeta(name="ж" * 600, dtype="int8")]
        await refused(put_pages(trainer, other, 1, tensors=long), "INVALID_ARGUMENT")


async def test_placements_in_pages_are_validated_and_a_gap_aborts_by_name() -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, _):
        rows = tn.Piece(tensor=0, box=[tn.Range(start=0, stop=2), tn.Range(start=0, stop=4)])
        half = tn.Placement(member="rank/0", pieces=[rows])
        answer = await trainer.put_placement(placement=half, total=2)
        assert answer.placement_id == ""
        rest = tn.Placement(member="rank/0", pieces=[tn.Piece(tensor=1)])
        answer = await trainer.put_placement(placement=rest, first=1, total=2)
        assert answer.placement_id.startswith("l-")
        error = await refused(trainer.start(), "PLACEMENT_MISMATCH", grpc.StatusCode.ABORTED)
        assert "'a'" in (error.details() or "") and "no sender" in (error.details() or "")
        outside = tn.Placement(member="rank/0", pieces=[tn.Piece(tensor=1, box=[tn.Range(start=0, stop=9)])])
        await refused(trainer.put_placement(placement=outside, total=1), "PLACEMENT_MISMATCH")
        unknown = tn.Placement(member="rank/0", pieces=[tn.Piece(tensor=9)])
        await refused(trainer.put_placement(placement=unknown, total=1), "INVALID_ARGUMENT")
        both = tn.Placement(member="rank/0", full=True, pieces=[rows])
        await refused(trainer.put_placement(placement=both), "INVALID_ARGUMENT")
        other = tn.Placement(member="rank/1", full=True)
        await refused(trainer.put_placement(placement=other), "INVALID_ARGUMENT")
        await refused(trainer.put_placement(manifest_id="m-0"), "UNKNOWN_MANIFEST")
        await trainer.put_placement()
        await trainer.init()
        assert (await trainer.publish()).phase == up.UPDATE_PHASE_COMMITTED


async def test_plans_are_cached_by_content() -> None:
    async with server() as running, fleet(running.address, 2) as (trainer, _):
        first = await trainer.start(verify=cm.VERIFY_LEVEL_FULL)
        await trainer.weights(first)
        await trainer.rest(first)
        second = await trainer.start()
        assert second.channels[0].plan_id == first.channels[0].plan_id
        group = running.coordinator.group("g")
        assert len(group.artifacts._plans) == 1


def test_a_big_plan_is_paged_and_rebuilds() -> None:
    manifest = Manifest.of(TensorMeta(f"t{i}", "int8", (4, 4)) for i in range(40_000))
    halves = [chunk_placement(f"r/{w}", manifest, w, 2) for w in range(2)]
    plan = make_plan(manifest, [full_placement("rank/0", manifest)], halves, 4096)
    pages = plan_pages(plan, manifest)
    assert len(pages) > 1 and all(p.ByteSize() < PAGE_BYTES and p.pages == len(pages) for p in pages)
    regions = [r for p in pages for r in p.regions]
    buckets = [b for p in pages for b in p.buckets]
    assert [r.nbytes for r in regions] == [r.nbytes for r in plan.regions]
    assert [[(s.region, s.offset, s.nbytes) for s in b.segments] for b in buckets] == [
        [(s.region, s.offset, s.nbytes) for s in b.segments] for b in plan.buckets
    ]
    assert [tuple((x.start, x.stop) for x in r.box) for r in regions] == [r.box for r in plan.regions]


async def test_a_plan_is_fetched_by_page() -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, _):
        u = await trainer.start()
        plan = await trainer.plan(u.channels[0].plan_id)
        assert not plan.regions[0].box and not plan.regions[0].piece_box  # the whole tensor goes without saying
        assert [r.tensor for r in plan.regions] == [0, 1, 2] and plan.members == ["rank/0", "r0/0"]
        await refused(_page(trainer, u.channels[0].plan_id, 1), "INVALID_ARGUMENT")
        await refused(_page(trainer, u.channels[0].plan_id, -1), "INVALID_ARGUMENT")

        async def get(page: int) -> tn.PlanPage:
            return (
                await trainer.stub.GetPlan(wt.GetPlanRequest(group="g", plan_id=plan_id, page=page), timeout=5)
            ).page

        plan_id = u.channels[0].plan_id
        assert (await fetch_plan(get)).regions == plan.regions


async def _page(trainer: Trainer, plan_id: str, page: int) -> Any:
    return await trainer.stub.GetPlan(wt.GetPlanRequest(group="g", plan_id=plan_id, page=page), timeout=5)


def test_pages_join_whatever_their_cut() -> None:
    pages: Pages[int] = Pages(6)
    pages.add("x", 2, 6, [2, 3, 4])
    assert pages.joined() is None and pages.received == 0
    pages.add("x", 0, 6, [0, 1, 2])
    assert pages.received == 5
    pages.add("x", 4, 6, [4, 5])
    assert pages.joined() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(Refused, match="expected 6"):
        pages.add("x", 0, 7, [0])
    with pytest.raises(Refused):
        pages.add("x", 5, 6, [5, 6])
    with pytest.raises(Refused):
        pages.add("x", 3, 6, [])
    empty: Pages[int] = Pages(0)
    empty.add("x", 0, 0, [])
    assert empty.joined() == []


def test_what_is_in_use_outlives_the_bound() -> None:
    pinned = {"a"}
    cache: Lru[int] = Lru(2, lambda: pinned)
    for n, key in enumerate("abcd"):
        cache.put(key, n)
    assert cache.get("a") == 0 and cache.get("b") is None and cache.get("d") == 3


async def test_a_plan_without_a_placement_says_whose() -> None:
    with ThreadPoolExecutor(1) as executor:
        artifacts = Artifacts(executor, Limits(), set, str)
        manifest = Manifest.of([TensorMeta("a", "int8", ())])
        artifacts.manifests.put(manifest.id, manifest)
        event = MakePlan("u", "c", manifest.id, (("rank/0", ""),), (("r/0", "l-0"),), 4096)
        with pytest.raises(ValueError, match=r"rank/0.*put it.*r/0"):
            await artifacts.make_plan(event)


async def test_a_large_fleet_uploads_its_placements_all_at_once() -> None:
    """They come in pages, and no member's pages push another's out."""
    with ThreadPoolExecutor(1) as executor:
        artifacts = Artifacts(executor, Limits(), set, str)
        manifest = Manifest.of([TensorMeta(name, "int8", (300,)) for name in "ab"])
        artifacts.manifests.put(manifest.id, manifest)
        members = [f"r{i}/0" for i in range(300)]
        for first in (0, 1):
            done = []
            for i, member in enumerate(members):
                piece = tn.Piece(tensor=first, box=[tn.Range(start=i, stop=i + 1)])
                said = tn.Placement(member=member, pieces=[piece])
                done.append(await artifacts.put_placement(manifest.id, member, said, first, 2))
        assert all(done) and len(set(done)) == len(members)


@pytest.mark.parametrize("bucket_bytes", [4096, 1 << 30])
async def test_a_plan_of_too_many_buckets_is_refused_at_once_and_nobody_waits(bucket_bytes: int) -> None:
    elements = 2**33 if bucket_bytes == 4096 else 2**60
    async with server() as running, fleet(running.address, 1, bucket_bytes=bucket_bytes) as (trainer, _):
        trainer.manifest = Manifest.of([TensorMeta("w", "bfloat16", (elements,))])
        await trainer.put_manifest()
        error = await refused(trainer.start(), "PLACEMENT_MISMATCH")
        assert f"in buckets of {bucket_bytes} are" in str(error) and "larger bucket_bytes" in str(error)
