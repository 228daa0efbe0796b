"""Conditions of an engine's settings: told by its replica, and which of them keep it from being ready."""

from __future__ import annotations

from dataclasses import replace

from tests.core.harness import Group
from weightplane.controlplane.core import events
from weightplane.controlplane.core.members import may_join, routable
from weightplane.controlplane.core.model import Condition, Policy
from weightplane.controlplane.core.states import CachePolicy

RAW = Condition("LogprobsMode", "False", "NotAsDeclared", "it is raw", "--logprobs-mode processed_logprobs")
RIGHT = replace(RAW, status="True", setting="")


def tell(g: Group, rid: str, *conditions: Condition, incarnation: str = "") -> None:
    g.do(events.Conditions(rid, incarnation or g.life(rid), conditions))


def fleet(*blocking: str) -> Group:
    g = Group().fleet()
    g.call(events.SetPolicy, policy=Policy(blocking=blocking))
    return g.publish()


def answers(g: Group, rid: str = "r0") -> tuple[bool, bool, bool, str]:
    return routable(g.s, g.s.replicas[rid])


def test_by_default_a_setting_that_is_not_as_declared_only_warns() -> None:
    g = fleet()
    tell(g, "r0", RAW)
    assert g.s.replicas["r0"].conditions == (RAW,)
    assert "LogprobsMode (--logprobs-mode processed_logprobs)" in g.reason
    assert answers(g) == (True, True, True, "")


def test_a_blocking_condition_keeps_its_replica_from_ready_by_name_and_not_from_updates() -> None:
    g = fleet("LogprobsMode")
    tell(g, "r0", RAW)
    tell(g, "r1", RIGHT)
    assert answers(g) == (True, False, False, "condition LogprobsMode is False: it is raw")
    assert answers(g, "r1")[:3] == (True, True, True)
    assert may_join(g.s.replicas["r0"], g.now) == "", "its weights are kept up to date"
    tell(g, "r0", RIGHT)
    assert answers(g)[:3] == (True, True, True)


def test_what_is_unknown_or_not_told_is_not_true() -> None:
    g = fleet("LogprobsMode")
    assert answers(g)[1:] == (False, False, "condition LogprobsMode is not told, and it must be True")
    tell(g, "r0", replace(RAW, status="Unknown"))
    assert answers(g)[1:3] == (False, False)


def test_another_life_has_none_of_the_conditions_before_and_a_former_one_changes_nothing() -> None:
    g = fleet("LogprobsMode")
    tell(g, "r0", RIGHT)
    former = g.life("r0")
    g.hello("r0", "another-life")
    assert g.s.replicas["r0"].conditions == ()
    tell(g, "r0", RIGHT, incarnation=former)
    assert g.s.replicas["r0"].conditions == ()


def test_a_new_session_of_the_same_life_keeps_them() -> None:
    g = fleet()
    tell(g, "r0", RAW)
    g.hello("r0", g.life("r0"))
    assert g.s.replicas["r0"].conditions == (RAW,)


def test_replicas_are_told_when_what_they_are_judged_against_changes() -> None:
    g = fleet()

    def pushed(policy: Policy) -> list[str]:
        g.do(events.SetPolicy("c", policy), answer_writes=False)
        return [r for e in g.last if isinstance(e, events.Push) for r in e.replica_ids]

    assert pushed(Policy(declared={"dtype": "bfloat16"})) == ["r0", "r1"]
    assert pushed(Policy(declared={"dtype": "bfloat16"}, min_replicas=2)) == []
    assert pushed(Policy(declared={"dtype": "bfloat16"}, cache=CachePolicy.KEEP)) == ["r0", "r1"]
