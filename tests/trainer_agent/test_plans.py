"""Manifests, placements and plans as pages, against the pages of the real server."""

from __future__ import annotations

import time

import pytest

from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.placement import Piece, Placement, full_placement
from weightplane.controlplane.core.plan import PlanError
from weightplane.controlplane.core.planner import make_plan
from weightplane.controlplane.core.shards import chunk_placement
from weightplane.controlplane.server.pages import plan_pages
from weightplane.trainer_agent.plans import PlanCache, manifest_pages, placement_pages, plan_from_pages

SMALL = Manifest.of(
    [
        TensorMeta("w", "float32", (9, 4)),
        TensorMeta("tied", "float32", (9, 4), "w"),
        TensorMeta("s", "bfloat16", ()),
        TensorMeta("none", "int8", (0, 3)),
    ]
)


def big(count: int) -> Manifest:
    return Manifest.of(TensorMeta(f"layers.{i}.{'x' * 180}", "bfloat16", (8, 8)) for i in range(count))


def test_a_hundred_thousand_tensors_go_in_pages_far_below_four_megabytes() -> None:
    manifest = big(100_000)
    began = time.monotonic()
    pages = list(manifest_pages(manifest, "g", 3))
    assert max(p.ByteSize() for p in pages) < (2 << 20) and len(pages) > 10
    assert time.monotonic() - began < 20
    assert [p.first for p in pages] == [sum(len(q.tensors) for q in pages[:i]) for i in range(len(pages))]
    assert sum(len(p.tensors) for p in pages) == 100_000 == pages[0].total
    assert {p.manifest_id for p in pages} == {manifest.id} and len({p.request_id for p in pages}) == len(pages)


def test_an_empty_manifest_is_one_page() -> None:
    (page,) = manifest_pages(Manifest.of([]), "g", 1)
    assert page.total == 0 and not page.tensors


def test_a_full_placement_is_one_word_and_others_are_pages() -> None:
    (page,) = placement_pages(full_placement("rank/0", SMALL), SMALL, "g", 1, 0)
    assert page.placement.full and not page.placement.pieces and page.total == 0
    manifest = big(25_000)
    shard = chunk_placement("rank/1", manifest, 1, 4)
    pages = list(placement_pages(shard, manifest, "g", 1, 1))
    assert max(p.ByteSize() for p in pages) < (2 << 20) and [p.first for p in pages] == [0, 10_000, 20_000]
    got = [Piece(x.tensor, tuple((r.start, r.stop) for r in x.box)) for p in pages for x in p.placement.pieces]
    assert tuple(got) == shard.pieces and {p.total for p in pages} == {25_000}
    (nothing,) = placement_pages(Placement("rank/2", ()), manifest, "g", 1, 2)
    assert not nothing.placement.full and nothing.total == 0


@pytest.mark.parametrize("bucket_bytes", [16, 64, 1 << 20])
def test_the_servers_pages_are_the_plan(bucket_bytes: int) -> None:
    senders = [chunk_placement(f"rank/{r}", SMALL, r, 4) for r in range(4)]
    receivers = [full_placement("a/0", SMALL), chunk_placement("b/0", SMALL, 0, 2), chunk_placement("b/1", SMALL, 1, 2)]
    plan = make_plan(SMALL, senders, receivers, bucket_bytes)
    assert plan_from_pages(plan_pages(plan, SMALL), SMALL) == plan


def test_a_plan_is_fetched_once_and_must_be_what_it_says() -> None:
    manifest = big(100_000)
    plan = make_plan(manifest, [full_placement("rank/0", manifest)], [full_placement("r/0", manifest)], 1 << 20)
    pages = plan_pages(plan, manifest)
    assert len(pages) > 1
    asked: list[int] = []

    def page(n: int):
        asked.append(n)
        return pages[n]

    cache = PlanCache()
    assert cache.get(plan.id, manifest, page) == plan == cache.get(plan.id, manifest, page)
    assert asked == list(range(len(pages)))
    with pytest.raises(PlanError, match="asked for plan"):
        PlanCache().get("p-other", manifest, page)
    pages[0].regions[0].nbytes += 1
    with pytest.raises(PlanError, match="its content is"):
        PlanCache().get(plan.id, manifest, page)
    with pytest.raises(PlanError, match="is for manifest"):
        PlanCache().get(plan.id, SMALL, page)
