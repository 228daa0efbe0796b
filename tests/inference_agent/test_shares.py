"""Who stays when another joins or leaves works out nothing anew: in another plan its own bytes come as before."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests.inference_agent.models import Awkward, manifest_of
from tests.inference_agent.server import server
from tests.inference_agent.test_agent import holds, replica
from tests.inference_agent.trainer import Trainer
from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.placement import Piece, Placement, full_placement
from weightplane.controlplane.core.plan import Plan
from weightplane.controlplane.core.planner import make_plan
from weightplane.controlplane.core.states import Mode
from weightplane.inference_agent import operations, shares
from weightplane.inference_agent.engines.conformance import values_for
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.receipts import RegionMemory, WorkerPlan
from weightplane.inference_agent.shares import Shares
from weightplane.inference_agent.sink import Sink

SHAPES = ((64, 8), (32,), (16, 16))
MANIFEST = Manifest.of([TensorMeta(f"t{i}", "float32", shape) for i, shape in enumerate(SHAPES)])
TARGETS = {i: (torch.zeros(s), tuple((0, d) for d in s)) for i, s in enumerate(SHAPES)}
KINDS = frozenset({"cpu"})


def half(member: str, first: bool) -> Placement:
    rows = tuple((0, s[0] // 2) if first else (s[0] // 2, s[0]) for s in SHAPES)
    return Placement.of(member, [Piece(i, (rows[i], *((0, d) for d in s[1:]))) for i, s in enumerate(SHAPES)])


def planned(*receivers: Placement, senders: Sequence[Placement] = (), bucket_bytes: int = 1024) -> Plan:
    return make_plan(MANIFEST, senders or [full_placement("s", MANIFEST)], receivers, bucket_bytes)


def full(*names: str) -> list[Placement]:
    return [full_placement(n, MANIFEST) for n in names]


ALONE = planned(*full("a"))


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (planned(*full("a", "b")), True),
        (planned(*full("a"), senders=full("s0")), True),
        (planned(*full("a"), bucket_bytes=512), False),
        (planned(*full("a"), half("b", True)), False),  # what a receives is cut as b takes it
    ],
    ids=["another receiver", "another sender", "other buckets", "other regions"],
)
def test_a_reception_is_the_same_where_the_same_bytes_come_in_the_same_buckets(other: Plan, same: bool) -> None:
    assert other.id != ALONE.id
    a, b = WorkerPlan(ALONE, MANIFEST, "a"), WorkerPlan(other, MANIFEST, "a")
    assert (a.reception == b.reception) is same
    known = Shares(4)
    (one, first), (two, second) = (known.get(p, MANIFEST, "a", KINDS, "here", lambda: TARGETS) for p in (ALONE, other))
    assert (one.plan, two.plan) == (ALONE, other) and (first is second) is same
    for bucket in two.buckets:  # whatever it is made for
        spans, _ = second.spans(bucket)
        assert sum(s.numel() for s in spans) == bucket.nbytes
        second.complete(bucket)


def test_a_share_that_was_worked_out_ahead_is_the_one_that_is_used() -> None:
    known, plan = Shares(4), planned(*full("a", "b"))
    ahead = known.ahead(plan, MANIFEST, "a")
    assert {"regions", "buckets", "reception"} <= vars(ahead).keys()
    assert known.get(plan, MANIFEST, "a", KINDS, "here", lambda: TARGETS)[0] is ahead
    assert known.ahead(plan, MANIFEST, "a") is ahead is not known.ahead(plan, MANIFEST, "b")


def test_other_memory_another_member_or_kind_of_device_has_a_sink_of_its_own() -> None:
    known, plan = Shares(9), planned(*full("a", "b"))
    asked: list[tuple[str, frozenset[str], str]] = [
        ("a", KINDS, "here"),
        ("b", KINDS, "here"),
        ("a", frozenset({"cpu", "cuda"}), "here"),
        ("a", KINDS, "there"),
    ]

    def sink(member: str, kinds: frozenset[str], where: str) -> Sink:
        return known.get(plan, MANIFEST, member, kinds, where, lambda: TARGETS)[1]

    sinks = [sink(*k) for k in asked]
    assert len(set(map(id, sinks))) == len(asked)
    assert [sink(*k) for k in asked] == sinks
    known.clear()
    assert sink(*asked[0]) is not sinks[0]


@pytest.mark.parametrize("mode", [Mode.STAGED, Mode.IN_PLACE])
def test_joins_and_leaves_cost_who_stays_no_new_spans(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str]] = []

    def noted(kind: type[Any]) -> Any:
        class Noted(kind):  # type: ignore[misc]
            def __init__(self, share: WorkerPlan, *args: Any) -> None:
                made.append((kind.__name__, share.member))
                super().__init__(share, *args)

        return Noted

    monkeypatch.setattr(shares, "Sink", noted(Sink))
    monkeypatch.setattr(operations, "RegionMemory", noted(RegionMemory))
    with ExitStack() as stack, server() as plane:
        engines = {n: TorchModuleEngine(Awkward()) for n in ("r0", "r1")}
        manifest = manifest_of(Awkward())
        plans: set[str] = set()
        replica(stack, plane, "r0", engines["r0"])
        trainer = stack.enter_context(Trainer(plane.address, manifest, "shm", bucket_bytes=4096))

        def publish(step: int) -> None:
            trainer.init()
            values = values_for(manifest, step)
            trainer.publish(values, step, mode=mode)
            update = list(plane.state().history.values())[-1]
            plans.update(s.plan_id for s in update.plans.values())
            for name in update.parts:
                assert holds(engines[name], values)

        publish(1)
        other = replica(stack, plane, "r1", engines["r1"])
        publish(2)
        other.stop()
        publish(3)
    assert len(plans) == 2
    assert sorted(made) == [(k, m) for k in ("RegionMemory", "Sink") for m in ("r0/0", "r1/0")]
