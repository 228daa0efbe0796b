"""What stands still, the coordinator itself included, and who is not asked again before it has drained."""

from __future__ import annotations

from dataclasses import replace

from weightplane.controlplane.core import events as ev
from weightplane.controlplane.core.group import step
from weightplane.controlplane.core.group_state import GroupState
from weightplane.controlplane.core.members import may_join
from weightplane.controlplane.core.model import Config, Held, Rank, Replica, Trainer
from weightplane.controlplane.core.states import Liveness, Mode, Phase, Stage
from weightplane.controlplane.core.update_state import Options, Part, Update

CONFIG = Config(beat_s=1.0, ttl_s=3.0)


def group(**changes: object) -> GroupState:
    lives = Replica("a", "life", reported=True, liveness=Liveness.LIVE, lease_until=13.0)
    trainer = Trainer("t", "i", 1, 1, "l", ranks={0: Rank(0, lease_until=13.0)}, durable=True)
    state = GroupState("g", "c", epoch=1, config=CONFIG, replicas={"a": lives}, trainer=trainer, last_generation=1)
    return replace(state, **changes)  # type: ignore[arg-type]


def test_a_stall_of_the_coordinator_ends_nobodys_lease() -> None:
    state, _, _ = step(group(), ev.Tick(), 10.0)
    state, _, reason = step(state, ev.Tick(), 20.0)
    assert "stood still" in reason
    assert state.replicas["a"].liveness is Liveness.LIVE
    assert state.trainer is not None and state.trainer.ranks[0].lease_until > 20.0


def test_silence_that_the_coordinator_was_awake_for_still_ends_a_lease() -> None:
    state = group()
    for tenth in range(100, 135):
        state, _, _ = step(state, ev.Tick(), tenth / 10)
    assert state.replicas["a"].liveness is Liveness.SUSPECT


def aborting() -> GroupState:
    part = Part("a", "life", Mode.IN_PLACE, "", ("c",), stage=Stage.ARMED)
    u = Update(
        "u", 5, "l", 1, 1, "r", "", Options("m", 1), Phase.ABORTING, {"a": part}, (), ("c",), 0.0, 100.0, 99.0,
        frozen=True, aborting_until=11.0,
    )  # fmt: skip
    return group(open=u, last_version=5)


def test_a_replica_that_did_not_drain_is_not_asked_to_join_before_it_has() -> None:
    state, _, _ = step(aborting(), ev.Tick(), 12.0)
    assert state.open is None and state.history["u"].parts["a"].unquiesced
    assert "draining update u" in may_join(state.replicas["a"], 12.0)
    stuck = ev.Report("a", "life", 1, (Held(),), epoch=1, update_id="u", stage=Stage.ARMED)
    state, _, _ = step(state, stuck, 12.1)
    assert "draining update u" in may_join(state.replicas["a"], 12.1)
    drained = replace(stuck, sequence=2, stage=Stage.ABORTED)
    state, _, _ = step(state, drained, 12.2)
    assert may_join(state.replicas["a"], 12.2) == ""
