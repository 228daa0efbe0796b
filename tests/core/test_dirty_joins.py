"""A DIRTY replica takes part in a full update and is healed by it: its being dirty until then is no failure of it."""

from __future__ import annotations

from weightplane.controlplane.core import events as ev
from weightplane.controlplane.core.group import step
from weightplane.controlplane.core.group_state import GroupState
from weightplane.controlplane.core.model import Held, Offer, Replica, Worker
from weightplane.controlplane.core.states import Evidence, Phase, Stage, Verify, Weights
from weightplane.controlplane.core.update_state import PlanSummary


def play(state: GroupState, *events: ev.Event) -> GroupState:
    """Take events, with every write stored at once and every plan made."""
    queue = list(events)
    while queue:
        state, effects, _ = step(state, queue.pop(0), 1.0)
        for effect in effects:
            if isinstance(effect, ev.Write):
                queue.insert(0, ev.Stored(effect.write_id, True))
            elif isinstance(effect, ev.MakePlan):
                plan = PlanSummary("p", 0, 0, {})
                queue.insert(0, ev.PlanMade(effect.update_id, effect.channel_id, plan))
            elif isinstance(effect, ev.Compare):
                evidence = Evidence.LIVE
                queue.append(ev.Verified(effect.update_id, effect.replica_id, effect.incarnation, evidence))
    return state


def report(sequence: int, stage: Stage, dirty: bool, held: Held = Held()) -> ev.Report:  # noqa: B008 - frozen
    update = "u" if stage else ""
    return ev.Report("r", "i", sequence, (held,), dirty=dirty, update_id=update, stage=stage, armed_seq=1)


def test_a_dirty_replica_is_healed() -> None:
    state = play(
        GroupState("g", "c", 1),
        ev.ReplicaHello(1, Replica("r", "i", workers=(Worker(0, offers=(Offer("grpc"),)),))),
        report(1, Stage.NONE, dirty=True),
        ev.InitTransfer("c1", 99.0, "q1", "job", "life", 0, 1, 0, "l", bytes(32), offers=(Offer("grpc"),)),
        ev.RankPlacement(1, 0, "m", "l"),
        ev.StartUpdate("c2", 99.0, "q2", 1, "m", 1, "u", verify=Verify.OFF),
    )
    assert state.replicas["r"].weights is Weights.DIRTY
    state = play(state, report(2, Stage.JOINED, dirty=True))
    assert state.open is not None and state.open.phase is Phase.PREPARING and state.open.ready_at
    state = play(
        state,
        ev.UpdateWeights("c3", 99.0, 1, "u", 1, 0, 1),
        report(3, Stage.ARMED, dirty=True),
        ev.FinishUpdate("c4", 99.0, 1, "u", 1, 0),
        report(4, Stage.PREPARED, dirty=True),
    )
    assert state.open is not None and state.open.phase is Phase.COMMITTED
    state = play(state, report(5, Stage.PREPARED, dirty=True))  # "paused for the apply": still nothing new
    assert state.open is not None and not state.open.parts["r"].dirty
    state = play(state, report(6, Stage.APPLIED, dirty=False, held=Held(1, "u")))
    assert state.open is None and state.replicas["r"].weights is Weights.READY
    assert not state.history["u"].parts["r"].dirty


def test_one_that_applied_and_is_dirty_all_the_same_is_named() -> None:
    state = GroupState("g", "c", 1)
    state = play(
        state,
        ev.ReplicaHello(1, Replica("r", "i", workers=(Worker(0, offers=(Offer("grpc"),)),))),
        report(1, Stage.NONE, dirty=True),
        ev.InitTransfer("c1", 99.0, "q1", "job", "life", 0, 1, 0, "l", bytes(32), offers=(Offer("grpc"),)),
        ev.RankPlacement(1, 0, "m", "l"),
        ev.StartUpdate("c2", 99.0, "q2", 1, "m", 1, "u", verify=Verify.OFF),
        report(2, Stage.JOINED, dirty=True),
        ev.UpdateWeights("c3", 99.0, 1, "u", 1, 0, 1),
        ev.FinishUpdate("c4", 99.0, 1, "u", 1, 0),
        report(4, Stage.PREPARED, dirty=True),
    )
    state = play(
        state,
        report(5, Stage.APPLIED, dirty=True, held=Held(1, "u")),
    )
    assert state.open is None and state.history["u"].parts["r"].dirty
    assert state.replicas["r"].weights is Weights.DIRTY
