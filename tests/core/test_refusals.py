"""Pairs of (state, event) that the simulator cannot reach, or that are refused: shown one by one.

``COORDINATOR_PAIRS`` and ``REPLICA_PAIRS`` are all pairs there are; ``DIRECT`` are those that a test here shows to
change nothing. ``tests/sim/test_sim.py`` checks that every other one was visited.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.core.harness import Agent, Group
from weightplane.controlplane.core import events, replica, states, update_state
from weightplane.controlplane.core.model import Held
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import Phase

PHASES = ("NONE", "PREPARING", "TRANSFERRING", "VERIFYING", "DECIDING", "COMMITTED", "ABORTING")
PLACES = (
    "IDLE",
    "CHECKING",
    "JOINED",
    "ARMED",
    "RECEIVED",
    "PREPARED",
    "COMMITTING",
    "DROPPING",
    "APPLIED",
    "ABORTED",
    "FAILED",
)
COORDINATOR_EVENTS = [t.__name__ for t in events.Event.__args__]
REPLICA_EVENTS = [t.__name__ for t in replica._HANDLERS]
COORDINATOR_PAIRS = [(p, e) for p in PHASES for e in COORDINATOR_EVENTS]
REPLICA_PAIRS = [(p, e) for p in PLACES for e in REPLICA_EVENTS]

#: Where each end of an operation counts; anywhere else it is refused.
ENDS = {
    "Checked": ("CHECKING", "DROPPING"),
    "Armed": ("JOINED", "ARMED", "RECEIVED", "DROPPING"),
    "Received": ("ARMED", "RECEIVED", "DROPPING"),
    "Prepared": ("RECEIVED", "DROPPING"),
    "Applied": ("COMMITTING",),
    "Drained": ("DROPPING",),
}
REFUSED_ENDS = [(p, e) for e, where in ENDS.items() for p in PLACES if p not in where]
#: Agents cancel what they drop, so that these ends are rare: shown here, whatever the simulator meets.
LATE_ENDS = [("DROPPING", e) for e in ("Checked", "Armed", "Received", "Prepared")]
NO_UPDATE = [("IDLE", "Failed")]
#: Rare: the end of an operator's pause has to come in the moment of a drop.
PAUSE_ENDS = [("DROPPING", "Resumed")]
DIRECT = {("replica", *pair) for pair in (*REFUSED_ENDS, *LATE_ENDS, *NO_UPDATE, *PAUSE_ENDS)}


def end_of(name: str, update_id: str) -> Any:
    made = {
        "Checked": replica.Checked(update_id),
        "Armed": replica.Armed(update_id, 1),
        "Received": replica.Received(update_id, 1),
        "Prepared": replica.Prepared(update_id),
        "Applied": replica.Applied(update_id, (Held(1, update_id),) * 2),
        "Drained": replica.Drained(update_id, False),
        "Failed": replica.Failed(update_id, Failure(Reason.ENGINE, "no")),
    }
    return made[name]


@pytest.mark.parametrize(("place", "event"), REFUSED_ENDS)
def test_the_end_of_an_operation_that_is_not_under_way_changes_nothing(place: str, event: str) -> None:
    agent = Agent().to(place)
    before = agent.s
    assert agent.do(end_of(event, "u1")) == []
    assert agent.s is before


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("event", [*ENDS, "Failed"])
def test_the_end_of_an_operation_of_another_update_changes_nothing(place: str, event: str) -> None:
    agent = Agent().to(place)
    before = agent.s
    assert agent.do(end_of(event, "another")) == []
    assert agent.s is before


def test_a_pause_that_ends_while_dropping_is_reported_and_the_drop_goes_on() -> None:
    agent = Agent().to("DROPPING")
    before = agent.s.taking
    agent.s = replace(agent.s, resuming=agent.s.resuming | {"operator"})
    assert agent.do(replica.Resumed("operator")) == ["SendReport"]
    assert agent.s.taking is before and "operator" not in agent.s.resuming


@pytest.mark.parametrize(("place", "event"), LATE_ENDS)
def test_what_ends_while_dropping_neither_votes_nor_reports(place: str, event: str) -> None:
    agent = Agent().to(place)
    assert agent.do(end_of(event, "u1")) == []
    t = agent.s.taking
    assert t is not None and t.dropping and not t.voted


@pytest.mark.parametrize("place", PLACES)
def test_the_end_of_an_order_to_sleep_that_was_not_begun_counts_for_no_order_and_touches_no_update(place: str) -> None:
    agent = Agent().to(place)
    before = agent.s
    agent.do(replica.SleepDone(7, (), before.held))
    assert agent.s.taking == before.taking and agent.s.held == before.held
    assert (agent.s.sleep_begun, agent.s.sleep_done, agent.s.asleep) == (0, 0, ())


def group_in(phase: str) -> Group:
    g = Group().fleet()
    return g if phase == "NONE" else g.to(Phase(phase))


STALE = {
    "another plan": lambda g: events.PlanMade("old", "c-old", update_state.PlanSummary("p", 1, 1, {})),
    "another comparison": lambda g: events.Verified("old", "r0", g.life("r0"), states.Evidence.LIVE),
    "a former life's comparison": lambda g: events.Verified("u1", "r0", "r0#0", states.Evidence.LIVE),
    "a former life's report": lambda g: events.Report("r0", "r0#0", 99, (Held(9, "x"),)),
    "an older report": lambda g: events.Report("r0", g.life("r0"), 0, (Held(9, "x"),)),
    "a report of another epoch": lambda g: events.Report("r0", g.life("r0"), 99, (Held(9, "x"),), epoch=7),
    "a former life's heartbeat": lambda g: events.Beat("r0", "r0#0"),
    "a stranger's heartbeat": lambda g: events.Beat("r9", "r9#1"),
    "a former life's goodbye": lambda g: events.Leave("r0", "r0#0"),
    "a former life's placement": lambda g: events.WorkerPlacement("r0", "r0#0", "m", 0, "l"),
    "a fenced rank's heartbeat": lambda g: events.Beat("rank/0", "", 99),
    "a fenced rank's placement": lambda g: events.RankPlacement(99, 0, "m", "l"),
    "a fenced rank's hello": lambda g: events.RankHello("c", 1, 99, 0),
    "the end of a fenced rank's stream": lambda g: events.RankGone(99, 0),
    "a fenced start": lambda g: events.StartUpdate("c", 1e9, "q", 99, "m", 1, "u9"),
    "a fenced call": lambda g: events.UpdateWeights("c", 1e9, 99, "u1", 1, 0, 1),
    "a call of another epoch": lambda g: events.UpdateWeights("c", 1e9, 1, "u1", 9, 0, 1),
    "fenced digests": lambda g: events.DigestsIn(99, "u1", 1, 0, "p"),
    "a fenced finish": lambda g: events.FinishUpdate("c", 1e9, 99, "u1", 1, 0),
    "a finish of another epoch": lambda g: events.FinishUpdate("c", 1e9, 1, "u1", 9, 0),
    "a fenced abort": lambda g: events.AbortUpdate("c", 1e9, 99, "u1", "no"),
    "a fenced close": lambda g: events.CloseTransfer("c", 99, 0),
    "a fenced rebind": lambda g: events.InitTransfer("c", 1e9, "q", "job", "job/1", 0, 1, 99, "l", b""),
    "another trainer": lambda g: events.InitTransfer("c", 1e9, "q", "other", "o/1", 0, 1, 0, "l", b""),
    "a write long settled": lambda g: events.Stored("w0", True),
    "an operator's drain of a stranger": lambda g: events.SetAdmin("c", "r9", states.Admin.DRAINING),
    "an operator's pause of a stranger": lambda g: events.SetPause("c", 1e9, ("r9",), "operator", True),
    "an order to a stranger to sleep": lambda g: events.SetSleep("c", 1e9, "r9", 1),
    "an order to a stranger to wake": lambda g: events.SetAwake("c", 1e9, "r9", ()),
    "a caller who never called": lambda g: events.CallGone("nobody"),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("what", STALE)
def test_what_is_stale_or_unknown_changes_nothing_in_any_phase(phase: str, what: str) -> None:
    g = group_in(phase)
    before = g.s
    g.do(STALE[what](g))
    assert g.s is before, f"{what} changed a group in {phase}: {g.reason}"
    assert all(isinstance(e, events.Reply | events.Note) for e in g.last)
    assert all(e.failure is not None for e in g.last if isinstance(e, events.Reply))


REFUSALS = [
    ("PREPARING", events.FinishUpdate, {}, Reason.INCOMPLETE),
    ("VERIFYING", events.UpdateWeights, {"seq": 2}, Reason.WRONG_PHASE),
    ("DECIDING", events.UpdateWeights, {"seq": 2}, Reason.WRONG_PHASE),
    ("COMMITTED", events.UpdateWeights, {"seq": 2}, Reason.WRONG_PHASE),
    ("TRANSFERRING", events.UpdateWeights, {"seq": 5}, Reason.INVALID_ARGUMENT),
    ("TRANSFERRING", events.UpdateWeights, {"seq": 1, "rank": 7}, Reason.INVALID_ARGUMENT),
    ("TRANSFERRING", events.FinishUpdate, {"rank": 7}, Reason.INVALID_ARGUMENT),
    ("NONE", events.UpdateWeights, {"seq": 1, "update_id": "u7"}, Reason.UNKNOWN_UPDATE),
    ("NONE", events.FinishUpdate, {"update_id": "u7"}, Reason.UNKNOWN_UPDATE),
    ("NONE", events.AbortUpdate, {"update_id": "", "message": "x"}, Reason.UNKNOWN_UPDATE),
]


@pytest.mark.parametrize(("phase", "kind", "fields", "reason"), REFUSALS)
def test_calls_out_of_turn_are_refused_by_name(phase: str, kind: type, fields: dict[str, Any], reason: Reason) -> None:
    g = group_in(phase)
    before = g.s
    assert g.failure(g.call(kind, **fields)) is reason
    assert g.s is before


@pytest.mark.parametrize("phase", [p for p in PHASES if p != "NONE"])
def test_who_takes_part_in_an_update_is_put_to_sleep_and_woken_only_when_that_is_over(phase: str) -> None:
    g = group_in(phase)
    able = replace(g.s.replicas["r0"], sleep_levels=(1, 2))
    g.s = before = replace(g.s, replicas={**g.s.replicas, "r0": able})
    assert g.failure(g.call(events.SetSleep, replica_id="r0", level=1)) is Reason.WRONG_PHASE
    assert g.failure(g.call(events.SetAwake, replica_id="r0", tags=())) is Reason.WRONG_PHASE
    assert g.s is before


@pytest.mark.parametrize("phase", [p for p in PHASES if p not in ("NONE", "COMMITTED")])
def test_an_open_update_refuses_another_and_a_rebind(phase: str) -> None:
    g = group_in(phase)
    before = g.s
    assert g.failure(g.start("u2")) is Reason.UPDATE_IN_PROGRESS
    assert g.failure(g.init(generation=1)[0]) is Reason.UPDATE_IN_PROGRESS
    assert g.s.open is before.open
