"""Catch-up as the coordinator decides it: who, when, for how long, and what goes before it."""

from __future__ import annotations

from typing import Any

from tests.core.harness import Group
from weightplane.controlplane.core import desired, events, states, update_state
from weightplane.controlplane.core.events import Compare, MakePlan
from weightplane.controlplane.core.model import Retained
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import Phase, Stage, Weights
from weightplane.controlplane.core.update_state import CatchUp


def committed(replicas: int = 3, late: int = 1) -> Group:
    """Version 1 is committed by all but the last ``late``, who come now; r0 retains it."""
    g = Group(replicas)
    early = [f"r{i}" for i in range(replicas - late)]
    for rid in early:
        g.hello(rid)
        g.report(rid)
    g.init()
    g.to(Phase.COMMITTED)
    g.applied()
    retain(g, "r0")
    for i in range(replicas - late, replicas):
        g.hello(f"r{i}")
        g.report(f"r{i}")
    return g


def retain(g: Group, rid: str) -> None:
    u = g.s.history[g.s.committed.update_id]
    g.report(rid, update_id=u.update_id, stage=Stage.APPLIED, retained=Retained(g.s.committed, "m"))


def one(g: Group) -> CatchUp:
    [c] = g.s.catch_ups.values()
    return c


def goes(g: Group, *stages: Stage, **fields: Any) -> None:
    c = one(g)
    for stage in stages:
        if stage is Stage.JOINED:
            for w in range(2):
                g.do(events.WorkerPlacement(c.replica_id, c.incarnation, "m", w, f"l-{w}"))
        g.report(c.replica_id, update_id=c.catch_up_id, stage=stage, retained=None, **fields)
        for e in [e for e in g.last if isinstance(e, MakePlan)]:
            assert e.senders == (("r0/0", "l-r0-0"), ("r0/1", "l-r0-1"))
            g.do(events.PlanMade(c.catch_up_id, e.channel_id, update_state.PlanSummary("p", 4, 4, {})))


def wanted(g: Group, rid: str) -> desired.DesiredReplica:
    want = desired.desired_replica(g.s, rid, g.now)
    assert want is not None
    return want


def test_from_the_report_to_ready() -> None:
    g = committed()
    g.do(events.Tick())
    c = one(g)
    assert (c.replica_id, c.holder, c.target) == ("r2", "r0", g.s.committed)
    update = wanted(g, "r2").update
    assert update is not None and update.holds == g.s.committed and not update.calls and not wanted(g, "r0").serve
    goes(g, Stage.JOINED)
    [order] = wanted(g, "r0").serve
    assert (order.plan_id, order.go, order.hold) == ("p", False, False)
    goes(g, Stage.ARMED)
    assert wanted(g, "r0").serve[0].go
    goes(g, Stage.RECEIVED, Stage.PREPARED)
    [compare] = [e for e in g.last if isinstance(e, Compare)]
    assert compare.against == g.s.committed.update_id and g.s.replicas["r2"].weights is Weights.JOINING
    g.do(events.Verified(c.catch_up_id, "r2", "r2#1", states.Evidence.RECEIVED))
    update = wanted(g, "r2").update
    assert update is not None and update.decision == "COMMIT" and not wanted(g, "r0").serve
    g.report("r2", update_id=c.catch_up_id, stage=Stage.APPLIED, held=(g.s.committed,) * 2)
    assert g.s.replicas["r2"].weights is Weights.READY and not g.s.catch_ups


def test_two_at_once_for_each_holder() -> None:
    g = committed(8, late=6)
    g.do(events.Tick())
    assert sorted(g.s.catch_ups) == ["r2", "r3"]
    retain(g, "r1")
    g.do(events.Tick())
    assert sorted(g.s.catch_ups) == ["r2", "r3", "r4", "r5"]
    assert sorted(c.holder for c in g.s.catch_ups.values()) == ["r0", "r0", "r1", "r1"]


def test_a_joiner_waits_to_be_caught_up_and_the_update_goes_without_it() -> None:
    g = committed(8, late=6)
    g.do(events.Tick())
    g.start("u2")
    u = g.s.open
    assert u is not None and sorted(u.parts) == ["r0", "r1"]
    why = dict(u.absent)
    assert why["r2"] == "it is being caught up to version 1" and why["r7"] == "it waits to be caught up"


def test_a_joiner_that_waited_for_long_takes_part() -> None:
    g = committed()
    g.to(Phase.COMMITTED, "u2")  # no tick: nobody had the time to begin
    assert g.s.open is not None and "r2" not in g.s.open.parts
    g.sleep(g.s.config.catch_up_patience_s + 1)
    g.applied()
    g.init(generation=1)
    g.start("u3")
    assert g.s.open is not None and "r2" in g.s.open.parts


def test_a_catch_up_to_which_updates_leave_no_time_is_given_up_for_one() -> None:
    g = committed()
    g.do(events.Tick())
    goes(g, Stage.JOINED, Stage.ARMED)
    g.start("u2", update_timeout_s=100.0)
    assert wanted(g, "r0").serve[0].hold
    g.sleep(20)
    assert one(g).decision == "" and one(g).waited > 19  # it stands still and is not blamed for it
    g.sleep(15)
    assert one(g).decision == "ABORT" and "updates leave no time for it" in str(one(g).failure)
    c = one(g)
    g.report("r2", update_id=c.catch_up_id, stage=Stage.ABORTED)
    assert not g.s.catch_ups and "updates leave no time" in g.s.replicas["r2"].catch_up_refusal
    g.call(events.AbortUpdate, message="enough")
    g.say(Stage.ABORTED)
    g.init(generation=1)
    g.start("u3")
    assert g.s.open is not None and "r2" in g.s.open.parts


def test_one_that_stands_still_ends_and_is_tried_again_later_and_later() -> None:
    g = committed()
    for tries, pause in ((1, 1.0), (2, 2.0), (3, 4.0)):
        g.do(events.Tick())
        goes(g, Stage.JOINED, Stage.ARMED)
        c = one(g)
        g.sleep(g.s.config.catch_up_patience_s - 1)
        assert one(g).decision == ""
        g.sleep(2)
        failure = one(g).failure
        assert one(g).decision == "ABORT" and failure is not None and failure.reason is Reason.DEADLINE
        g.report("r2", update_id=c.catch_up_id, stage=Stage.ABORTED)
        r = g.s.replicas["r2"]
        assert (r.catch_ups_failed, r.catch_up_after) == (tries, g.now + pause)
        g.do(events.Tick())
        assert not g.s.catch_ups
        g.sleep(pause, beats=True)


def test_a_holder_that_cannot_send_ends_it_and_a_stranger_does_not() -> None:
    g = committed()
    g.do(events.Tick())
    goes(g, Stage.JOINED, Stage.ARMED)
    why = Failure(Reason.TRANSPORT, "the disk is gone", "r0")
    g.report("r1", serve_failures=((one(g).catch_up_id, why),))
    assert one(g).decision == ""
    g.report("r0", retained=Retained(g.s.committed, "m"), serve_failures=((one(g).catch_up_id, why),))
    assert one(g).decision == "ABORT" and one(g).failure == why


def test_one_that_failed_is_tried_from_each_other_holder_in_turn() -> None:
    g = committed(4)
    for rid in ("r1", "r2"):
        retain(g, rid)
    asked = []
    for tries in range(6):
        g.do(events.Tick())
        c = one(g)
        asked.append(c.holder)
        wrong = Failure(Reason.DIGEST_MISMATCH, f"from {c.holder}", "r3")
        g.report("r3", update_id=c.catch_up_id, stage=Stage.FAILED, failure=wrong)
        assert not g.s.catch_ups
        g.sleep(2.0**tries, beats=True)
    assert asked == ["r0", "r1", "r2"] * 2


def test_nobody_is_caught_up_to_what_a_rewound_trainer_takes_back() -> None:
    g = committed()
    g.init("other", takeover=True, resume_step=0)
    assert g.s.rewinding
    g.sleep(5)
    assert not g.s.catch_ups


def test_one_that_does_not_drain_joins_nothing_until_it_has() -> None:
    g = committed()
    g.do(events.Tick())
    goes(g, Stage.JOINED, Stage.ARMED)
    c = one(g)
    g.report(
        "r0", retained=Retained(g.s.committed, "m"), serve_failures=((c.catch_up_id, Failure(Reason.TRANSPORT, "x")),)
    )
    g.sleep(g.s.config.quiesce_s + 1)
    assert not g.s.catch_ups and g.s.replicas["r2"].draining == c.catch_up_id
    g.report("r2", update_id=c.catch_up_id, stage=Stage.FAILED)
    assert g.s.replicas["r2"].draining == ""
