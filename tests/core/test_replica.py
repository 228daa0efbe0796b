"""The replica's machine by example, rule by rule, and what the simulator found."""

from __future__ import annotations

import pytest

from tests.core.harness import Agent, wanted
from weightplane.controlplane.core import replica
from weightplane.controlplane.core.desired import ArmedCall
from weightplane.controlplane.core.model import Held
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import Mode, PauseMode, Stage

NO = Failure(Reason.ENGINE, "no")
CALL = (ArmedCall(1, (("c", 0, 4),)),)


def stage(a: Agent) -> Stage:
    assert a.s.taking is not None
    return a.s.taking.stage


def test_rule_1_an_older_epoch_and_another_incarnation_change_nothing_and_a_new_cluster_resets() -> None:
    a = Agent()
    a.told(epoch=5)
    before = a.s
    assert a.told(wanted(), epoch=4) == [] and a.s is before
    assert a.told(wanted(), epoch=6, incarnation="r0#0") == [] and a.s is before
    a.told(epoch=1, cluster_id="another")
    assert (a.s.cluster_id, a.s.epoch) == ("another", 1)


def test_rule_1_what_is_reported_is_what_the_workers_said() -> None:
    a = Agent()
    a.do(replica.EngineHeld((Held(3, "u3"), Held(2, "u2"))))
    assert replica.report_of(a.s).held == (Held(3, "u3"), Held(2, "u2"))


def test_rule_2_it_joins_an_update_by_checking_and_says_so() -> None:
    a = Agent()
    assert a.told(wanted()) == ["SendReport", "Check"]
    assert a.do(replica.Checked("u1")) == ["SendReport"] and stage(a) is Stage.JOINED


def test_rule_3_in_place_is_armed_only_once_generation_stands_still() -> None:
    a = Agent(mode=Mode.IN_PLACE).to("JOINED")
    assert a.told(wanted(mode=Mode.IN_PLACE, calls=CALL)) == ["Pause"]
    assert a.do(replica.Paused("update")) == ["SendReport", "Arm"]


def test_rule_4_calls_are_armed_in_order_one_at_a_time() -> None:
    a = Agent().to("JOINED")
    two = (*CALL, ArmedCall(2, (("c", 4, 1),)))
    assert a.told(wanted(calls=two, all_called=True)) == ["Arm"]
    assert a.do(replica.Armed("u1", 1)) == ["SendReport"]
    assert a.do(replica.Received("u1", 1)) == ["Arm"]
    a.do(replica.Armed("u1", 2))
    assert a.do(replica.Received("u1", 2)) == ["SendReport", "Prepare"]


def test_rule_5_with_wait_it_drains_before_it_votes() -> None:
    a = Agent(pause=PauseMode.WAIT).to("ARMED")
    a.told(wanted(pause=PauseMode.WAIT, calls=CALL, all_called=True))
    assert a.do(replica.Received("u1", 1)) == ["SendReport", "Pause"]
    assert a.do(replica.Paused("update")) == ["SendReport", "Prepare"]


def test_rule_6_it_applies_only_when_told_and_only_what_it_voted_for() -> None:
    early = Agent().to("ARMED")
    assert "Apply" not in early.told(wanted(calls=CALL, all_called=True, decision="COMMIT"))
    a = Agent().to("PREPARED")
    assert a.told(wanted(calls=CALL, all_called=True, decision="COMMIT")) == ["Pause"]
    assert a.do(replica.Paused("update")) == ["SendReport", "Apply"]


def test_rule_7_before_the_vote_it_aborts_itself_at_the_deadline_and_after_it_never() -> None:
    a = Agent().to("RECEIVED")
    a.now += 11
    assert a.do(replica.Tick()) == ["Drop"]
    voted = Agent().to("PREPARED")
    voted.now += 1000
    assert voted.do(replica.Tick()) == []
    assert voted.told(None) == ["SendReport"], "unmentioned is no outcome: it stays in doubt"
    assert voted.told(wanted("u2")) == ["SendReport"]
    assert voted.told(None, resolutions=(("u1", "ABORT"),)) == ["Drop"]


def test_rule_7_a_failure_after_the_vote_is_reported_and_drops_nothing() -> None:
    a = Agent().to("PREPARED")
    assert a.do(replica.Failed("u1", NO)) == ["SendReport"]
    assert stage(a) is Stage.PREPARED and replica.report_of(a.s).failure == NO


def test_rule_8_it_resumes_after_all_workers_acknowledged() -> None:
    a = Agent().to("COMMITTING")
    assert a.do(replica.Applied("u1", (Held(1, "u1"),) * 2)) == ["Resume", "SendReport"]
    assert stage(a) is Stage.APPLIED and not replica.fenced(a.s)


@pytest.mark.parametrize("held", [(Held(1, "u1"), Held()), (Held(1, "u0"),) * 2, ()])
def test_rule_8_workers_that_differ_after_the_apply_make_it_dirty(held: tuple[Held, ...]) -> None:
    a = Agent().to("COMMITTING")
    assert a.do(replica.Applied("u1", held)) == ["Pause", "SendReport"]
    assert a.s.dirty and stage(a) is Stage.FAILED and replica.fenced(a.s)


def test_rule_8_the_updates_pause_ends_only_once_the_dirty_fence_stands() -> None:
    a = Agent(mode=Mode.IN_PLACE).to("ARMED")
    a.told(wanted(mode=Mode.IN_PLACE, calls=CALL, decision="ABORT"))
    assert a.do(replica.Drained("u1", True)) == ["Pause", "SendReport"]
    assert a.s.dirty and "update" in a.s.paused
    assert a.do(replica.Paused("dirty")) == ["SendReport", "Resume"]
    assert replica.fenced(a.s)


def test_rule_8_a_pause_and_a_resume_of_one_holder_never_overlap() -> None:
    a = Agent().to("COMMITTING")
    a.do(replica.Applied("u1", (Held(1, "u1"),) * 2))
    assert "update" in a.s.resuming
    want = wanted("u2", mode=Mode.IN_PLACE, version=2)
    a.told(want)
    a.do(replica.Checked("u2"))
    a.told(wanted("u2", mode=Mode.IN_PLACE, version=2, calls=CALL))
    assert a.do(replica.Paused("update")) == [], "the end of an old pause is not that of a new one"
    assert a.do(replica.Resumed("update")) == ["SendReport", "Pause"]
    assert a.do(replica.Paused("update")) == ["SendReport", "Arm"]


def test_rule_8_holders_of_others_stay() -> None:
    a = Agent()
    a.told(None, pauses=(("operator", PauseMode.KEEP), ("trainer", PauseMode.KEEP)))
    for holder in ("operator", "trainer"):
        a.do(replica.Paused(holder))
    assert a.told(None, pauses=(("trainer", PauseMode.KEEP),)) == ["Resume"]
    a.do(replica.Resumed("operator"))
    assert replica.fenced(a.s) and replica.report_of(a.s).pause_holders == ("trainer",)


def test_rule_8_a_full_update_heals_a_dirty_replica() -> None:
    a = Agent()
    a.do(replica.EngineHeld((Held(), Held()), dirty=True))
    a.do(replica.Paused("dirty"))
    a.to("COMMITTING")
    assert a.do(replica.Applied("u1", (Held(1, "u1"),) * 2)) == ["Resume", "Resume", "SendReport"]
    assert not a.s.dirty and not replica.fenced(a.s)


def test_rule_9_dropping_ends_only_when_drained() -> None:
    a = Agent().to("DROPPING")
    assert stage(a) is Stage.JOINED
    a.do(replica.Drained("u1", False))
    assert stage(a) is Stage.ABORTED


def test_rule_9_the_update_asked_for_meanwhile_is_taken_up_once_drained() -> None:
    a = Agent().to("DROPPING")
    assert a.told(wanted("u2", version=2)) == []
    assert a.do(replica.Drained("u1", False)) == ["SendReport", "Check"]
    assert a.s.taking is not None and a.s.taking.want.update_id == "u2"
    assert a.s.taking.deadline == pytest.approx(110.0), "its time runs from when it was asked"


def test_rule_10_a_new_epoch_that_knows_no_update_drops_what_was_not_voted_for() -> None:
    a = Agent().to("ARMED")
    assert "Drop" in a.told(None, epoch=2)


def test_rule_11_one_update_at_a_time() -> None:
    a = Agent().to("ARMED")
    assert a.told(wanted("u2", version=2)) == ["Drop"]
    assert a.s.taking is not None and a.s.taking.want.update_id == "u1"


def test_a_reread_of_the_engine_in_the_middle_of_an_in_place_update_is_no_failure() -> None:
    a = Agent(mode=Mode.IN_PLACE).to("ARMED")
    a.do(replica.EngineHeld((Held(), Held()), dirty=True))
    assert not a.s.dirty
