"""What is answered only once it is durable, and what a restart must not forget."""

from __future__ import annotations

from dataclasses import replace

from weightplane.controlplane.core import events as ev
from weightplane.controlplane.core.group import restarted, step
from weightplane.controlplane.core.group_state import GroupState
from weightplane.controlplane.core.members import routable
from weightplane.controlplane.core.model import Config, Held, Offer, Policy, Replica, Trainer, Worker
from weightplane.controlplane.core.reasons import Reason
from weightplane.controlplane.core.states import Admin, Evidence, Liveness, Mode, PauseMode, Phase, Stage, Weights
from weightplane.controlplane.core.update_state import Options, Part, Update


def group(**changes: object) -> GroupState:
    return replace(GroupState("g", "cluster", epoch=1), **changes)  # type: ignore[arg-type]


def replies(effects: list[ev.Effect]) -> list[ev.Reply]:
    return [e for e in effects if isinstance(e, ev.Reply)]


def writes(effects: list[ev.Effect], kind: str) -> list[ev.Write]:
    return [e for e in effects if isinstance(e, ev.Write) and e.kind == kind]


def test_a_policy_is_acknowledged_only_once_it_is_durable() -> None:
    state, effects, _ = step(group(), ev.SetPolicy("call", Policy(min_replicas=2)), 1.0)
    assert replies(effects) == []
    (write,) = writes(effects, "group")
    state, effects, _ = step(state, ev.Stored(write.write_id, True), 1.1)
    assert replies(effects) == [ev.Reply("call")]
    assert state.policy.min_replicas == 2


def test_a_drain_whose_write_failed_says_so_and_is_written_again() -> None:
    state = group(replicas={"a": Replica("a", "life", reported=True, liveness=Liveness.LIVE, lease_until=99)})
    state, effects, _ = step(state, ev.SetAdmin("call", "a", Admin.DRAINING), 1.0)
    (write,) = writes(effects, "roster")
    state, effects, _ = step(state, ev.Stored(write.write_id, None, "the disk is full"), 1.1)
    (reply,) = replies(effects)
    assert reply.failure is not None
    assert reply.failure.reason is Reason.RESOURCE and "the disk is full" in reply.failure.message
    _, effects, _ = step(state, ev.Tick(), 1.2)
    assert len(writes(effects, "roster")) == 1


def verifying(generation: int = 1, step_: int = 10) -> GroupState:
    """A group one verified vote away from its decision."""
    part = Part("a", "life", Mode.STAGED, "", ("c",), stage=Stage.PREPARED, voted=True)
    u = Update(
        update_id="u",
        version=5,
        lineage="l1",
        generation=generation,
        epoch=1,
        request_id="r",
        fingerprint="",
        options=Options("m", step_),
        phase=Phase.VERIFYING,
        parts={"a": part},
        absent=(),
        channels=("c",),
        started_at=0.0,
        deadline=100.0,
        prepare_deadline=99.0,
        frozen=True,
        finished_ranks=frozenset({0}),
    )
    replica = Replica("a", "life", reported=True, liveness=Liveness.LIVE, lease_until=99, weights=Weights.UPDATING)
    trainer = Trainer("old", "i1", generation, 1, "l1", durable=True)
    return group(replicas={"a": replica}, open=u, trainer=trainer, last_generation=generation, last_version=5)


def test_a_decision_that_the_store_certainly_did_not_write_aborts_and_leadership_goes_on() -> None:
    state, effects, _ = step(verifying(), ev.Verified("u", "a", "life", Evidence.LIVE), 1.0)
    (write,) = writes(effects, "decide")
    state, effects, _ = step(state, ev.Stored(write.write_id, None, "the disk is full"), 1.1)
    assert state.open is not None and state.open.phase is Phase.ABORTING
    assert state.open.failure is not None and state.open.failure.reason is Reason.RESOURCE
    assert not state.stepped_down
    assert not any(isinstance(e, ev.ReadBack) for e in effects)


def test_a_commit_of_the_former_trainer_does_not_end_the_rewind_of_its_successor() -> None:
    state, effects, _ = step(verifying(step_=10), ev.Verified("u", "a", "life", Evidence.LIVE), 1.0)
    (write,) = writes(effects, "decide")
    init = ev.InitTransfer(
        "init", 50.0, "r2", "new", "i2", 0, 1, 0, lineage="l2", seed=b"s" * 32, takeover=True, resume_step=3
    )
    state, _, _ = step(state, init, 1.1)
    state, _, _ = step(state, ev.Stored(write.write_id, True), 1.2)
    assert state.committed == Held(5, "u")
    assert state.rewinding, "step 10 was committed by the old trainer; the new one resumes at 3"
    held = ev.Report("a", "life", 1, (Held(5, "u"),), epoch=1, update_id="u", stage=Stage.APPLIED)
    state, _, _ = step(state, held, 1.3)
    assert not routable(state, state.replicas["a"])[2]


def test_a_replica_that_never_comes_back_after_a_restart_is_forgotten_in_time() -> None:
    config = Config(lost_kept_s=10.0)
    state, _ = restarted(group(config=config, roster=frozenset({"gone"})), None, epoch=2, now=100.0)
    assert state.replicas["gone"].liveness is Liveness.LOST
    state, _, _ = step(state, ev.Tick(), 109.0)
    assert "gone" in state.roster
    state, effects, _ = step(state, ev.Tick(), 111.0)
    assert "gone" not in state.roster
    assert writes(effects, "roster")


def test_the_revision_rises_over_a_restart() -> None:
    before = group(revision=12345)
    after, _ = restarted(before, None, epoch=2, now=0.0)
    assert after.revision > before.revision


def test_an_operators_pause_outlives_the_coordinator() -> None:
    state, _ = restarted(group(roster=frozenset({"a"})), None, epoch=2, now=0.0)
    said = Replica("a", "life", workers=(Worker(0, offers=(Offer("grpc"),)),))
    state, effects, _ = step(state, ev.ReplicaHello(1, said), 0.1)
    assert not any(isinstance(e, ev.Push) for e in effects), "nothing is asked of it before it said who paused it"
    report = ev.Report("a", "life", 1, (Held(),), pause_holders=("operator",))
    state, effects, _ = step(state, report, 0.2)
    assert state.replicas["a"].pauses_wanted == {"operator": PauseMode.KEEP}
    assert any(isinstance(e, ev.Push) for e in effects)
