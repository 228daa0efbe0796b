"""What every store promises, memory and SQLite alike."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from tests.store.helpers import GROUP, Desk, Opener, aborted, committed, desk, reopen, state, update
from weightplane.controlplane import failpoints
from weightplane.controlplane.core.events import Write
from weightplane.controlplane.core.model import Held, Policy
from weightplane.controlplane.core.states import Admin, Phase, Stage
from weightplane.controlplane.store import StoreError, StoreUnknown


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
        "group": lambda: old.group(state(old.epoch, policy=Policy(min_replicas=7))),
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
    done = replace(committed(update(1)), parts={"r0": replace(update(1).parts["r0"], stage=Stage.APPLIED)})
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


def test_a_late_close_of_what_left_the_history_is_no_contradiction(opener: Opener) -> None:
    d = desk(opener, keep=1)
    for v in (1, 2):
        d.freeze(update(v))
        d.decide(update(v))
        d.close(committed(update(v)))
    d.freeze(update(3))
    d.close(aborted(update(3)))
    assert d.close(committed(update(1))) and d.close(committed(update(2)))
    assert not d.close(committed(update(3))) and not d.close(committed(update(4)))
    assert list(reopen(opener).state.history) == ["u3"]


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
