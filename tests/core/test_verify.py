"""Receipts against plan and expected digests: each way to be wrong is found and named."""

from __future__ import annotations

import time
from array import array
from dataclasses import replace

import pytest

from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.placement import Placement, full_placement
from weightplane.controlplane.core.planner import make_plan
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.shards import chunk_placement
from weightplane.controlplane.core.states import Evidence, Verify
from weightplane.controlplane.core.verify import PlanIndex, WorkerReceipt, compare, expected_table, sampled_regions

MANIFEST = Manifest.of(
    [
        TensorMeta("emb", "float32", (8, 4)),
        TensorMeta("head", "float32", (8, 4), alias_of="emb"),
        *(TensorMeta(f"w{i}", "bfloat16", (4,)) for i in range(6)),
        TensorMeta("scale", "int8", ()),
        TensorMeta("none", "int8", (0,)),
    ]
)
SENDERS = [chunk_placement(f"rank/{r}", MANIFEST, r, 2) for r in range(2)]
INDEX = PlanIndex(
    make_plan(MANIFEST, SENDERS, [full_placement("a/0", MANIFEST), chunk_placement("a/1", MANIFEST, 0, 2)], 64),
    MANIFEST,
)
MEMBERS = ("a/0", "a/1")


def digest(region: int) -> int:
    return (region * 0x9E3779B97F4A7C15 + 7) % (1 << 64)


def expected() -> dict[str, list[int]]:
    return {s: [digest(i) for i in INDEX.sent_by(s)] for s in ("rank/0", "rank/1")}


def receipts() -> dict[str, WorkerReceipt]:
    out = {}
    for m in MEMBERS:
        regions = INDEX.received_by(m)
        sizes = [INDEX.plan.regions[i] for i in regions]
        elements = sum(
            r.nbytes // {"float32": 4, "bfloat16": 2, "int8": 1}[MANIFEST.tensors[r.tensor].dtype] for r in sizes
        )
        digests = array("Q", (digest(i) for i in regions))
        out[m] = WorkerReceipt(INDEX.plan.id, Evidence.LIVE, sum(r.nbytes for r in sizes), elements, digests)
    return out


def check(
    got: dict[str, WorkerReceipt], verify: Verify = Verify.FULL, want: dict[str, list[int]] | None = None
) -> tuple[Evidence, Failure | None]:
    table = expected_table(INDEX, expected() if want is None else want)
    if isinstance(table, Failure):
        return Evidence.NONE, table
    return compare(INDEX, "u-1", verify, table, MEMBERS, got)


@pytest.mark.parametrize("verify", [Verify.FULL, Verify.SAMPLED, Verify.OFF])
def test_what_was_sent_is_what_is_held(verify: Verify) -> None:
    assert check(receipts(), verify) == (Evidence.LIVE, None)


def test_the_weakest_worker_names_the_evidence() -> None:
    got = receipts()
    got["a/1"] = replace(got["a/1"], evidence=Evidence.RECEIVED, elements_written=0)
    assert check(got) == (Evidence.RECEIVED, None)
    got["a/1"] = replace(got["a/1"], evidence=Evidence.NONE)
    evidence, failure = check(got)
    assert evidence is Evidence.NONE and failure is not None and failure.reason is Reason.INCOMPLETE


@pytest.mark.parametrize(
    ("change", "reason", "says"),
    [
        ({"bytes_received": 3}, Reason.INCOMPLETE, "payload bytes"),
        ({"elements_written": 3}, Reason.INCOMPLETE, "elements written"),
        ({"plan_id": "p-other"}, Reason.INCOMPLETE, "p-other"),
        ({"digests": array("Q")}, Reason.INCOMPLETE, "digests, found 0"),
    ],
)
def test_counts_and_missing_digests_are_named(change: dict[str, object], reason: Reason, says: str) -> None:
    got = receipts()
    got["a/1"] = replace(got["a/1"], **change)  # type: ignore[arg-type]
    evidence, failure = check(got)
    assert evidence is Evidence.NONE and failure is not None
    assert failure.reason is reason and failure.member == "a/1" and says in failure.message


def test_a_missing_receipt_and_missing_expectations() -> None:
    got = receipts()
    del got["a/0"]
    _, failure = check(got)
    assert failure is not None and failure.member == "a/0" and "PutReceipt" in failure.message
    want = expected()
    del want["rank/1"]
    _, failure = check(receipts(), want=want)
    assert failure is not None and failure.reason is Reason.DIGESTS_REQUIRED and failure.member == "rank/1"
    want = expected()
    want["rank/1"].pop()
    _, failure = check(receipts(), want=want)
    assert failure is not None and failure.reason is Reason.DIGESTS_REQUIRED


def test_a_mismatch_names_tensors_counts_them_and_shows_the_first() -> None:
    got = receipts()
    wrong = array("Q", (d ^ 1 for d in got["a/0"].digests))
    got["a/0"] = replace(got["a/0"], digests=wrong)
    _, failure = check(got)
    assert failure is not None and failure.reason is Reason.DIGEST_MISMATCH
    names = {MANIFEST.tensors[r.tensor].name for r in INDEX.plan.regions}
    assert failure.tensor_count == len(names) and len(failure.tensors) == 5
    assert failure.tensors[0] == "emb" and "and more" in failure.message and "rank/0" in failure.message
    assert f"{wrong[0]:016x}" in failure.message and f"{wrong[0] ^ 1:016x}" in failure.message


def test_one_bit_of_one_region_is_enough_for_full_and_for_its_sample() -> None:
    sample = set(sampled_regions("u-1", len(INDEX.plan.regions)))
    for n, region in enumerate(INDEX.received_by("a/1")):
        got = receipts()
        changed = array("Q", got["a/1"].digests)
        changed[n] ^= 1 << 63
        got["a/1"] = replace(got["a/1"], digests=changed)
        assert check(got)[1] is not None
        assert (check(got, Verify.SAMPLED)[1] is not None) == (region in sample)
        assert check(got, Verify.OFF)[1] is None


def test_samples_are_seeded_bounded_and_spread() -> None:
    assert sampled_regions("u", 0) == [] and sampled_regions("u", 10) == list(range(10))
    one, two = sampled_regions("u-1", 100_000), sampled_regions("u-2", 100_000)
    assert one == sampled_regions("u-1", 100_000) != two
    assert len(one) == 4096 == len(set(one)) and one[0] >= 0 and one[-1] < 100_000
    assert len(sampled_regions("u", 1000)) == 62 and len(sampled_regions("u", 200)) == 16
    hits = [0] * 10
    for n in range(300):
        for i in sampled_regions(f"u-{n}", 400):
            hits[i // 40] += 1
    assert min(hits) > 0.75 * max(hits)


def test_the_sample_is_fixed_for_other_languages() -> None:
    sample = [4, 8, 11, 15, 17, 24, 25, 29, 33, 36, 45, 46, 51, 52, 56, 58]
    assert sampled_regions("u-0123456789abcdef01234567", 64) == sample


@pytest.mark.alone
def test_equal_receivers_are_compared_at_the_speed_of_memory() -> None:
    manifest = Manifest.of(TensorMeta(f"t{i}", "int8", (4,)) for i in range(20_000))
    pieces = full_placement("any", manifest).pieces
    workers = [Placement(f"r{i}/0", pieces) for i in range(8)]
    index = PlanIndex(make_plan(manifest, [full_placement("rank/0", manifest)], workers, 1 << 20), manifest)
    digests = array("Q", range(20_000))
    table = expected_table(index, {"rank/0": digests})
    assert not isinstance(table, Failure)
    began = time.perf_counter()
    for w in workers * 20:
        got = WorkerReceipt(index.plan.id, Evidence.LIVE, 80_000, 80_000, array("Q", digests))
        assert compare(index, "u", Verify.FULL, table, [w.member], {w.member: got}) == (Evidence.LIVE, None)
    assert time.perf_counter() - began < 1.0
