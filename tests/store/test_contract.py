"""What every store promises, memory and SQLite alike."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.store.helpers import GROUP, Desk, Opener, aborted, committed, openers, state, trainer, update
from weightplane.controlplane import failpoints
from weightplane.controlplane.core import model as m
from weightplane.controlplane.core.events import ReplicaHello, Write
from weightplane.controlplane.core.group import restarted, step
from weightplane.controlplane.core.model import Admin, Held, Liveness, Phase
from weightplane.controlplane.core.reasons import Reason
from weightplane.controlplane.store import StoredGroup, StoreError, StoreUnknown


@pytest.fixture(params=["memory", "sqlite"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    return openers(request.param, tmp_path)


def reopen(opener: Opener) -> StoredGroup:
    store = opener()
    try:
        return store.open().groups[GROUP]
    finally:
        store.close()


def desk(opener: Opener, keep: int = 1000) -> Desk:
    store = opener()
    return Desk(store, store.open().epoch, keep)


def test_each_open_is_a_new_epoch_of_the_same_cluster(opener: Opener) -> None:
    seen = []
    for _ in range(3):
        store = opener()
        loaded = store.open()
        seen.append((loaded.cluster_id, loaded.epoch))
        assert loaded.groups == {}
        assert store.leads(loaded.epoch) and not store.leads(loaded.epoch + 1) and not store.leads(0)
        store.close()
    assert [epoch for _, epoch in seen] == [1, 2, 3]
    assert len({cluster for cluster, _ in seen}) == 1 and len(seen[0][0]) == 32


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


def test_a_decision_survives_with_everything_that_goes_with_it(opener: Opener) -> None:
    d, u = desk(opener), update(1)
    d.freeze(u)
    assert not d.store.read_decision(GROUP, "u1")
    assert d.decide(u)
    assert d.store.read_decision(GROUP, "u1")
    got = reopen(opener)
    assert got.frozen is None
    s = got.state
    assert (s.committed, s.committed_step, s.committed_lineage, s.committed_manifest) == (Held(1, "u1"), 10, "L1", "m1")
    u1 = s.history["u1"]
    assert u1.phase is Phase.COMMITTED and u1.closed and u1.frozen and u1.decided_at == 9.0 and u1.parts == u.parts
    assert d.store.read_decision(GROUP, "u1"), "a fenced store reads on"


def test_deciding_twice_under_one_epoch_is_one_decision(opener: Opener) -> None:
    d, u = desk(opener), update(1)
    d.freeze(u)
    assert d.decide(u) and d.decide(u)
    assert d.close(committed(u)) and d.decide(u)


def test_a_decision_needs_the_open_update_frozen_under_this_epoch(opener: Opener) -> None:
    d = desk(opener)
    assert not d.decide(update(1)), "never frozen"
    d.freeze(update(1))
    assert not d.decide(update(1, update_id="other"))
    assert not d.decide(replace(update(1), version=2)), "frozen with another version"
    d.close(aborted(update(1)))
    assert not d.decide(update(1)), "aborted"
    d.freeze(update(2))
    d.freeze(update(3))
    assert not d.decide(update(2)), "no longer the open one"
    assert d.decide(update(3))
    d.freeze(update(4))
    late = desk(opener)
    assert not d.decide(update(4)), "fenced"
    assert not late.decide(update(4, epoch=late.epoch)), "no record under a newer epoch means aborted"
    assert not late.decide(update(3)), "decided, but under another epoch"
    assert [late.store.read_decision(GROUP, f"u{v}") for v in (1, 2, 3, 4)] == [False, False, True, False]
    assert not late.store.read_decision(GROUP, "") and not late.store.read_decision("no such group", "u3")


@pytest.mark.parametrize("kind", ["freeze", "decide", "close", "group", "roster"])
def test_a_second_opener_fences_every_kind_of_write(opener: Opener, kind: str) -> None:
    old = desk(opener)
    old.freeze(update(1))
    new = desk(opener)
    before = reopen(opener)
    assert not old.store.leads(old.epoch)
    assert not {
        "freeze": lambda: old.freeze(update(2)),
        "decide": lambda: old.decide(update(1)),
        "close": lambda: old.close(aborted(update(1))),
        "group": lambda: old.group(state(old.epoch, policy=m.Policy(min_replicas=7))),
        "roster": lambda: old.roster("r1", Admin.DRAINING),
    }[kind]()
    after = reopen(opener)
    assert replace(after.state, epoch=0) == replace(before.state, epoch=0) and after.frozen == before.frozen
    assert new.epoch == old.epoch + 1


def test_an_epoch_above_the_stored_one_is_refused_too(opener: Opener) -> None:
    d = desk(opener)
    d.epoch += 1
    assert not d.freeze(update(1)), "the data were put back to an older state: we do not lead by them"


def test_a_version_is_never_minted_twice(opener: Opener) -> None:
    d = desk(opener)
    assert d.freeze(update(5))
    assert not d.freeze(update(5, update_id="other")) and not d.freeze(update(4, update_id="other"))
    d = desk(opener)
    assert not d.freeze(update(5, d.epoch, "other"))
    assert d.freeze(update(6, d.epoch))
    d.close(aborted(update(9, d.epoch)))
    assert reopen(opener).state.last_version == 9, "its freeze failed, but its version was seen"


def test_a_close_records_and_never_decides(opener: Opener) -> None:
    d = desk(opener)
    assert not d.close(committed(update(1))), "never frozen"
    d.freeze(update(1))
    assert not d.close(committed(update(1))), "never decided"
    assert d.decide(update(1))
    assert not d.close(aborted(update(1))), "decided"
    done = replace(committed(update(1)), parts={"r0": replace(update(1).parts["r0"], stage=m.Stage.APPLIED)})
    assert d.close(done) and d.close(done)
    assert d.freeze(update(2)) and d.close(aborted(update(2))) and not d.close(committed(update(2)))
    got = reopen(opener).state
    assert got.history == {"u1": done, "u2": aborted(update(2))} and got.committed == Held(1, "u1")
    with pytest.raises(StoreError, match="only an outcome"):
        d2 = desk(opener)
        d2.close(update(3))


def test_a_lost_close_is_made_good_by_the_next_freeze(opener: Opener) -> None:
    d = desk(opener)
    d.freeze(update(1))
    d.freeze(update(2))
    got = reopen(opener)
    u1 = got.state.history["u1"]
    assert u1.phase is Phase.ABORTED and u1.closed and u1.failure is not None
    assert got.frozen is not None and got.frozen.update_id == "u2"


def test_policy_trainer_and_generation_survive(opener: Opener) -> None:
    d = desk(opener)
    policy = m.Policy(2, 3, m.CachePolicy.SALT, m.PauseMode.WAIT, "RETRY", 4, m.Verify.SAMPLED, 55.5)
    full = replace(trainer(3), ranks={0: m.Rank(0)}, seed=b"s" * 32, channels=(), placements={"m": {0: "p"}})
    assert d.group(state(trainer=full, last_generation=3, policy=policy, rewinding=True))
    s = reopen(opener).state
    assert s.policy == policy and s.trainer == replace(trainer(3), durable=True) and s.last_generation == 3
    assert s.rewinding


def test_generations_never_fall(opener: Opener) -> None:
    d = desk(opener)
    d.group(state(trainer=trainer(3), last_generation=3))
    d.group(state(trainer=trainer(2), last_generation=2, policy=m.Policy(min_replicas=4)))
    s = reopen(opener).state
    assert s.last_generation == 3 and s.trainer == replace(trainer(3), durable=True) and s.policy.min_replicas == 4


def test_the_commit_of_the_resumed_trainer_ends_the_rewind(opener: Opener) -> None:
    d = desk(opener)
    resumed = state(trainer=trainer(2), last_generation=2, rewinding=True)
    d.freeze(update(1))
    d.group(resumed)
    d.decide(update(1))
    d.freeze(update(2))
    d.group(replace(resumed, policy=m.Policy(min_replicas=2)))  # asked for before the store answered
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
    s, _, _ = step(s, ReplicaHello(1, m.Replica("r1", life)), 1.0)
    assert s.replicas["r1"].admin is kept and s.replicas["r1"].liveness is Liveness.LIVE


@pytest.mark.parametrize("life", ["life-1", "life-2"])
@pytest.mark.parametrize("admin", [Admin.DRAINING, Admin.QUARANTINED])
def test_a_drain_outlives_both(opener: Opener, admin: Admin, life: str) -> None:
    desk(opener).roster("r1", admin, "life-1")
    got = reopen(opener)
    s, _ = restarted(got.state, got.frozen, 2, 0.0)
    said = m.Replica("r1", life, pause_modes=(m.PauseMode.WAIT,), engine="vllm")
    s, _, _ = step(s, ReplicaHello(1, said), 1.0)
    r = s.replicas["r1"]
    assert (r.admin, r.pause_modes, r.engine) == (admin, said.pause_modes, "vllm")


def test_the_history_is_bounded_and_in_order(opener: Opener) -> None:
    d = desk(opener, keep=3)
    for v in range(1, 8):
        d.freeze(update(v))
        if v == 1:
            d.decide(update(v))
        d.close(committed(update(v)) if v == 1 else aborted(update(v)))
    d.freeze(update(8))
    got = reopen(opener)
    assert list(got.state.history) == ["u5", "u6", "u7"]
    assert got.frozen is not None and got.frozen.version == 8
    assert d.store.read_decision(GROUP, "u1"), "what is committed is known beyond the history"


def test_groups_do_not_touch_each_other(opener: Opener) -> None:
    store = opener()
    epoch = store.open().epoch
    for name in ("a", "b", "ü/✓ \x00 '; DROP TABLE updates"):
        assert store.write(name, Write("w", "freeze", epoch, update(1, epoch)), state(epoch))
    assert store.write("a", Write("w", "decide", epoch, update(1, epoch)), state(epoch))
    groups = opener().open().groups
    assert {n: g.state.committed.version for n, g in groups.items()} == {
        "a": 1,
        "b": 0,
        "ü/✓ \x00 '; DROP TABLE updates": 0,
    }
    assert all(g.state.group == n for n, g in groups.items())


def test_nonsense_is_a_store_error_and_changes_nothing(opener: Opener) -> None:
    d = desk(opener)
    d.freeze(update(1))
    for write in (
        Write("w", "melt", 1, update(1)),
        Write("w", "decide", 1),
        Write("w", "roster", 1),
        Write("w", "roster", 1, data={"replica_id": "r1", "admin": "GONE"}),
        Write("w", "close", 1, replace(aborted(update(1)), options=None)),  # type: ignore[arg-type]
        Write("w", "close", 1, replace(aborted(update(1)), failure=object())),  # type: ignore[arg-type]
    ):
        with pytest.raises(StoreError):
            d.store.write(GROUP, write, state())
    got = reopen(opener)
    assert got.frozen == replace(update(1), frozen=True) and got.state.history == {} and got.state.roster == frozenset()


def test_a_closed_store_says_so(opener: Opener) -> None:
    store = opener()
    for call in (
        lambda: store.leads(1),
        lambda: store.read_decision(GROUP, "u1"),
        lambda: Desk(store, 1).freeze(update(1)),
    ):
        with pytest.raises(StoreError, match="not open"):
            call()
    store.open()
    with pytest.raises(StoreError, match="open already"):
        store.open()
    store.close()
    store.close()
    assert store.open().epoch == 2, "a closed store can be opened again"


def test_failpoints_stand_for_definite_and_unknown_failures(opener: Opener) -> None:
    def fail(at: str) -> None:
        def hook(name: str, n: int) -> None:
            if name == at:
                raise failpoints.FailpointError(name)

        failpoints.set_hook(hook)

    d = desk(opener)
    d.freeze(update(1))
    try:
        fail("store.decide.before")
        with pytest.raises(StoreError):
            d.decide(update(1))
        assert not d.store.read_decision(GROUP, "u1")
        fail("store.decide.after")
        with pytest.raises(StoreUnknown):
            d.decide(update(1))
    finally:
        failpoints.set_hook(None)
    assert d.store.read_decision(GROUP, "u1")


def test_threads_are_serialised(opener: Opener) -> None:
    d = desk(opener)
    wrong: list[object] = []

    def work(n: int) -> None:
        try:
            for i in range(20):
                d.roster(f"r{n}-{i}", Admin.DRAINING)
                assert d.store.leads(d.epoch)
        except Exception as e:
            wrong.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and len(reopen(opener).state.roster) == 80
