"""Plans that are made before an update asks for them: once all who are bound have said what they hold, no sooner."""

from __future__ import annotations

import dataclasses

from tests.core.harness import Group
from weightplane.controlplane.core import events
from weightplane.controlplane.core.desired import desired_replica
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import Stage
from weightplane.controlplane.core.update_state import PlanSummary


def two_of_three() -> Group:
    """r0 and r1 hold version 1; r2 is here by now."""
    g = Group(replicas=3)
    for rid in ("r0", "r1"):
        g.hello(rid)
        g.report(rid)
    g.init()
    g.publish()
    assert g.s.open is None and g.s.committed.version == 1 and g.s.committed_manifest == "m"
    g.hello("r2")
    g.report("r2")
    return g


def bind(g: Group) -> list[events.MakePlan]:
    """The trainer binds anew, as it does when a replica came; what is asked for with its answer."""
    t = g.s.trainer
    assert t is not None
    made: list[events.MakePlan] = []
    step = g.do
    g.do = lambda event, answer_writes=True: _noted(made, step(event, answer_writes))  # type: ignore[method-assign]
    g.init(generation=t.generation)
    g.do = step  # type: ignore[method-assign]
    return made


def _noted(made: list[events.MakePlan], effects: list[object]) -> list[object]:
    made += [e for e in effects if isinstance(e, events.MakePlan)]
    return effects


def place(g: Group, rid: str, worker: int, manifest_id: str = "m") -> list[events.MakePlan]:
    g.do(events.WorkerPlacement(rid, g.life(rid), manifest_id, worker, f"l-{rid}-{worker}"))
    return [e for e in g.last if isinstance(e, events.MakePlan)]


def receivers(plan: events.MakePlan) -> set[str]:
    return {m for m, _ in plan.receivers}


ALL = {f"r{r}/{w}" for r in range(3) for w in range(2)}


def test_the_plan_is_made_with_the_last_placement_and_is_the_one_that_the_update_asks_for() -> None:
    g = two_of_three()
    assert not bind(g), "r2 has not said what it holds"
    assert not place(g, "r2", 0)
    (ahead,) = place(g, "r2", 1)
    assert not ahead.update_id and receivers(ahead) == ALL
    g.do(events.PlanMade("", ahead.channel_id, None, Failure(Reason.INTERNAL, "no room"), ahead.ahead))
    assert {type(e) for e in g.last} == {events.Note} and "no room" in g.last[0].text, "only the log hears of it"
    g.start("u2")
    for rid in ("r0", "r1", "r2"):
        g.report(rid, update_id="u2", stage=Stage.JOINED)
    (asked,) = [e for e in g.last if isinstance(e, events.MakePlan)]
    assert asked == dataclasses.replace(ahead, update_id="u2", ahead=0)


def test_a_binding_after_the_last_placement_asks_for_it_too() -> None:
    g = two_of_three()
    for worker in range(2):
        assert [receivers(p) for p in place(g, "r2", worker)] == [ALL - {"r2/0", "r2/1"}], (
            "those bound are as they were"
        )
    ahead = bind(g)
    assert ahead and all(receivers(p) == ALL and not p.update_id for p in ahead)


def test_nothing_is_asked_for_ahead_of_another_manifest_or_in_an_update() -> None:
    g = two_of_three()
    bind(g)
    assert not place(g, "r2", 0) and not place(g, "r2", 1, "another")
    g.start("u2")
    assert not place(g, "r2", 1)


def bound_three() -> tuple[Group, events.MakePlan]:
    g = two_of_three()
    bind(g)
    place(g, "r2", 0)
    (ahead,) = place(g, "r2", 1)
    return g, ahead


def told(g: Group, rid: str) -> tuple[str, ...]:
    found = desired_replica(g.s, rid, g.now)
    assert found is not None
    return found.plans_ahead


def made(g: Group, plan: events.MakePlan, plan_id: str = "p-ahead") -> None:
    g.do(events.PlanMade("", plan.channel_id, PlanSummary(plan_id, 1, 8, {}), ahead=plan.ahead))


def test_all_who_will_need_a_plan_made_ahead_are_told_of_it_once() -> None:
    g, ahead = bound_three()
    made(g, ahead)
    assert {r for e in g.last if isinstance(e, events.Push) for r in e.replica_ids} == {"r0", "r1", "r2"}
    assert any(isinstance(e, events.PushTrainers) for e in g.last)
    assert g.s.trainer is not None and g.s.trainer.ahead.plans == {ahead.channel_id: "p-ahead"}
    assert [told(g, r) for r in ("r0", "r1", "r2")] == [("p-ahead",)] * 3
    made(g, ahead)
    assert not g.last, "they know"


def test_a_plan_made_ahead_of_channels_that_are_bound_no_more_is_told_to_nobody() -> None:
    g, ahead = bound_three()
    g.do(events.PlanMade("", "c-gone", PlanSummary("p-gone", 1, 8, {}), ahead=ahead.ahead))
    assert not g.last
    made(g, ahead)
    g.hello("r2", "another")
    g.report("r2")
    bind(g)
    assert told(g, "r0") == () and g.s.trainer is not None and not g.s.trainer.ahead.plans


def test_no_plan_made_ahead_is_told_while_an_update_is_open() -> None:
    g, ahead = bound_three()
    g.start("u2")
    made(g, ahead)
    assert not g.last and told(g, "r0") == ()


def test_who_has_left_is_in_no_plan_made_ahead() -> None:
    g, _ = bound_three()
    g.do(events.Leave("r1", g.life("r1")))
    (at_once,) = [e for e in g.last if isinstance(e, events.MakePlan)]
    (ahead,) = place(g, "r2", 1)
    assert at_once == dataclasses.replace(ahead, ahead=at_once.ahead)
    assert receivers(ahead) == ALL - {"r1/0", "r1/1"}, "bound it is, until its lease is over"


def test_of_two_plans_made_ahead_of_one_channel_the_one_asked_for_last_counts() -> None:
    g, with_it = bound_three()
    g.do(events.Leave("r2", g.life("r2")))
    (without,) = [e for e in g.last if isinstance(e, events.MakePlan)]
    made(g, without, "p-without")
    made(g, with_it, "p-with")
    assert told(g, "r0") == ("p-without",)


def test_a_plan_made_ahead_is_told_while_its_manifest_is_the_committed_one() -> None:
    g, ahead = bound_three()
    made(g, ahead)
    g.do(events.RankPlacement(1, 0, "another", "l-0"))
    g.publish("u2", manifest_id="another")
    assert g.s.committed_manifest == "another" and told(g, "r0") == ()


def test_a_trainer_that_closes_leaves_no_plan_made_ahead() -> None:
    g, ahead = bound_three()
    made(g, ahead)
    g.call(events.CloseTransfer)
    assert told(g, "r0") == ()
