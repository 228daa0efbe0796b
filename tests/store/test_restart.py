"""What a coordinator finds after a restart: the open update, the trainer, the roster. Every store alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.store.helpers import GROUP, Desk, Opener, desk, reopen, state, trainer, update
from weightplane.controlplane.core.events import ReplicaHello
from weightplane.controlplane.core.group import restarted, step
from weightplane.controlplane.core.model import Held, Policy, Rank, Replica
from weightplane.controlplane.core.reasons import Reason
from weightplane.controlplane.core.states import Admin, CachePolicy, Liveness, PauseMode, Phase, Verify


def test_a_frozen_update_is_the_open_one_after_a_restart(opener: Opener) -> None:
    d, u = desk(opener), update(1)
    assert d.freeze(u)
    assert d.freeze(u), "a repeat is no error"
    got = reopen(opener)
    assert got.frozen == replace(u, frozen=True)
    assert got.state.last_version == 1 and got.state.history == {} and got.state.committed == Held()
    new, dead = restarted(got.state, got.frozen, 9, 100.0)
    assert dead is not None and dead.phase is Phase.ABORTED
    assert dead.failure is not None and dead.failure.reason is Reason.COORDINATOR_RESTARTED
    assert new.requests == {u.request_id: u.update_id}


def test_the_abort_after_a_restart_is_written_down(opener: Opener) -> None:
    desk(opener).freeze(update(1))
    store = opener()
    loaded = store.open()
    got = loaded.groups[GROUP]
    _, dead = restarted(got.state, got.frozen, loaded.epoch, 0.0)
    assert dead is not None and Desk(store, loaded.epoch).close(dead)
    again = reopen(opener)
    assert again.frozen is None and again.state.history == {"u1": dead}


def test_policy_trainer_and_generation_survive(opener: Opener) -> None:
    d = desk(opener)
    policy = Policy(2, 3, CachePolicy.SALT, PauseMode.WAIT, "RETRY", 4, Verify.SAMPLED, 55.5)
    full = replace(trainer(3), ranks={0: Rank(0)}, seed=b"s" * 32, channels=(), placements={"m": {0: "p"}})
    assert d.group(state(trainer=full, last_generation=3, policy=policy, rewinding=True))
    s = reopen(opener).state
    assert s.policy == policy and s.trainer == replace(trainer(3), durable=True) and s.last_generation == 3
    assert s.rewinding


def test_generations_never_fall(opener: Opener) -> None:
    d = desk(opener)
    d.group(state(trainer=trainer(3), last_generation=3))
    d.group(state(trainer=trainer(2), last_generation=2, policy=Policy(min_replicas=4)))
    s = reopen(opener).state
    assert s.last_generation == 3 and s.trainer == replace(trainer(3), durable=True) and s.policy.min_replicas == 4


def test_the_commit_of_the_resumed_trainer_ends_the_rewind(opener: Opener) -> None:
    d = desk(opener)
    resumed = state(trainer=trainer(2), last_generation=2, rewinding=True)
    d.freeze(update(1))
    d.group(resumed)
    d.decide(update(1))
    d.freeze(update(2))
    d.group(replace(resumed, policy=Policy(min_replicas=2)))  # asked for before the store answered
    old, d = reopen(opener).state.rewinding, desk(opener)
    assert old, "the decision was that of generation 1"
    u = replace(update(3, d.epoch), generation=2)
    d.freeze(u)
    d.decide(u)
    d.group(resumed)
    assert not reopen(opener).state.rewinding, "a policy written late revives no rewind"


def test_the_roster_survives_with_administrative_states(opener: Opener) -> None:
    d = desk(opener)
    for i, admin in enumerate([Admin.ACTIVE, Admin.DRAINING, Admin.PINNED, Admin.QUARANTINED, Admin.ACTIVE]):
        assert d.roster(f"r{i}", admin, f"life-{i}")
    assert d.roster("r4", "") and d.roster("r5", "")
    s = reopen(opener).state
    assert s.roster == {"r0", "r1", "r2", "r3"}
    assert {rid: r.admin for rid, r in s.replicas.items()} == {
        "r1": Admin.DRAINING,
        "r2": Admin.PINNED,
        "r3": Admin.QUARANTINED,
    }
    assert all(r.liveness is Liveness.LOST and not r.reported for r in s.replicas.values())


@pytest.mark.parametrize("life, kept", [("life-1", Admin.PINNED), ("life-2", Admin.ACTIVE)])
def test_a_pin_outlives_the_coordinator_but_not_the_engine(opener: Opener, life: str, kept: Admin) -> None:
    desk(opener).roster("r1", Admin.PINNED, "life-1")
    got = reopen(opener)
    s, _ = restarted(got.state, got.frozen, 2, 0.0)
    s, _, _ = step(s, ReplicaHello(1, Replica("r1", life)), 1.0)
    assert s.replicas["r1"].admin is kept and s.replicas["r1"].liveness is Liveness.LIVE


@pytest.mark.parametrize("life", ["life-1", "life-2"])
@pytest.mark.parametrize("admin", [Admin.DRAINING, Admin.QUARANTINED])
def test_a_drain_outlives_both(opener: Opener, admin: Admin, life: str) -> None:
    desk(opener).roster("r1", admin, "life-1")
    got = reopen(opener)
    s, _ = restarted(got.state, got.frozen, 2, 0.0)
    said = Replica("r1", life, pause_modes=(PauseMode.WAIT,), engine="vllm")
    s, _, _ = step(s, ReplicaHello(1, said), 1.0)
    r = s.replicas["r1"]
    assert (r.admin, r.pause_modes, r.engine) == (admin, said.pause_modes, "vllm")
