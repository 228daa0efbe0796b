"""What is stored with a decision so that others can be caught up to it after a restart: replaced, refused, migrated."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.store.helpers import (
    GROUP,
    Desk,
    Opener,
    committed,
    deciding,
    desk,
    manifest,
    proven,
    reopen,
    rival,
    state,
    update,
)
from weightplane.controlplane import failpoints
from weightplane.controlplane.core import kept as core
from weightplane.controlplane.core.events import Write
from weightplane.controlplane.core.kept import Kept, KeptError
from weightplane.controlplane.core.model import Held
from weightplane.controlplane.core.states import Verify
from weightplane.controlplane.core.verify import sampled_regions
from weightplane.controlplane.store import StoreError, schema
from weightplane.controlplane.store.sqlite import SqliteStore


def publish(d: Desk, version: int, tensors: int = 3) -> Kept:
    u, kept = proven(update(version, d.epoch), tensors)
    assert d.freeze(u) and d.decide(u, kept) and d.close(committed(u))
    return kept


def found(opener: Opener) -> tuple[Kept | None, str]:
    got = reopen(opener)
    return got.kept, core.problem(got.kept, got.state.committed, got.state.committed_manifest)


def test_it_comes_back_as_it_was_and_only_the_newest(opener: Opener) -> None:
    d = desk(opener)
    publish(d, 1)
    wanted = core.sealed(publish(d, 2, 4))
    got, why = found(opener)
    assert got is not None and got == wanted and why == ""
    assert core.manifest_of(got).tensors == manifest(4).tensors
    known = core.known(got)
    assert [tensor for tensor, _ in known] == [0, 1, 2, 3]
    assert known[2, ((0, 3), (0, 3))] == hash((2, 2)) & (1 << 64) - 1


def test_an_update_that_is_not_decided_changes_nothing(opener: Opener) -> None:
    d = desk(opener)
    wanted = core.sealed(publish(d, 1))
    u, kept = proven(update(2, d.epoch))
    assert d.freeze(u)
    assert not d.decide(replace(u, version=3), kept)
    assert found(opener) == (wanted, "")


def test_a_decision_without_it_leaves_nothing_of_another(opener: Opener) -> None:
    d = desk(opener)
    publish(d, 1)
    d.freeze(update(2))
    assert d.decide(update(2))
    got, why = found(opener)
    assert got is None and "holds no digests of version 2 (update u2)" in why


def test_that_of_another_update_is_refused_with_the_decision(opener: Opener) -> None:
    d = desk(opener)
    u, _ = proven(update(1))
    d.freeze(u)
    with pytest.raises(StoreError, match="with what is kept of u2"):
        d.decide(u, proven(update(2))[1])
    assert not d.store.read_decision(GROUP, "u1")
    stale = proven(update(2))[1]
    why = core.problem(stale, Held(1, "u1"), stale.manifest_id)
    assert why.startswith("the store holds no digests of version 1 (update u1), but of update 'u2'")


def test_what_was_sampled_is_known_where_it_was_hashed() -> None:
    _, kept = proven(update(1), 40)
    sample = core.known(core.sealed(replace(kept, verify=Verify.SAMPLED.value)))
    assert [tensor for tensor, _ in sample] == sampled_regions("u1", 40) and len(sample) == 16


@pytest.mark.parametrize("at", ["before", "during"])
def test_a_decision_that_fails_leaves_what_was_there(at: str, tmp_path: Path) -> None:
    def opener() -> SqliteStore:
        return rival(tmp_path / "store.db")

    d = desk(opener)
    wanted = core.sealed(publish(d, 1))
    u, kept = proven(update(2, d.epoch), 5)
    d.freeze(u)

    def hook(name: str, n: int) -> None:
        if name == f"store.decide.{at}":
            raise failpoints.FailpointError(name)

    failpoints.set_hook(hook)
    try:
        with pytest.raises(StoreError):
            d.decide(u, kept)
    finally:
        failpoints.set_hook(None)
    assert found(opener) == (wanted, "")
    d.store.close()
    d = desk(opener)
    wanted = core.sealed(publish(d, 3, 5))
    assert found(opener) == (wanted, "")


# --- the file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


def opened(path: Path) -> Desk:
    return desk(lambda: rival(path))


def ask(path: Path, query: str) -> list[tuple[object, ...]]:
    with sqlite3.connect(path) as db:
        rows = db.execute(query).fetchall()
    db.close()
    return rows


class Counted:
    """A connection that notes what is written and how often it commits."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.commits = 0
        self.bodies = 0
        db.set_trace_callback(self._saw)

    def _saw(self, statement: str) -> None:
        self.commits += statement.startswith("COMMIT")
        self.bodies += statement.startswith("INSERT INTO bodies")


def test_a_publish_takes_three_transactions_and_bodies_are_written_when_they_are_new(path: Path) -> None:
    d = opened(path)
    seen = Counted(d.store._db)  # type: ignore[attr-defined]
    counts = []
    for version, tensors in ((1, 3), (2, 3), (3, 4), (4, 4)):
        before = seen.commits, seen.bodies
        publish(d, version, tensors)
        counts.append((seen.commits - before[0], seen.bodies - before[1]))
    assert counts == [(3, 2), (3, 0), (3, 2), (3, 0)]
    d.store.close()
    assert len(ask(path, "SELECT id FROM bodies")) == 2 and len(ask(path, "SELECT grp FROM kept")) == 1


def _flip(column: str) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        with sqlite3.connect(path) as db:
            (old,) = db.execute(f"SELECT CAST({column} AS BLOB) FROM kept").fetchone()
            new = bytes([old[0] ^ 1]) + old[1:]
            db.execute(f"UPDATE kept SET {column} = CAST(? AS {'BLOB' if column == 'digests' else 'TEXT'})", (new,))
        db.close()

    return spoil


def _statement(text: str) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        ask(path, text)

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        *(_flip(c) for c in ("digests", "seal", "verify", "manifest", "layouts")),
        _statement("UPDATE kept SET layouts = '7'"),
        _statement("UPDATE kept SET seal = CAST(X'FFFE' AS TEXT)"),
        _statement("UPDATE kept SET digests = X''"),
    ],
)
def test_damaged_digests_are_refused_by_name_and_the_next_publish_heals_them(
    spoil: Callable[[Path], None], path: Path
) -> None:
    d = opened(path)
    publish(d, 1)
    d.store.close()
    spoil(path)
    _, why = found(lambda: rival(path))
    assert why.startswith("the stored digests of version 1 (update u1) are damaged"), why
    d = opened(path)
    wanted = core.sealed(publish(d, 2))
    d.store.close()
    assert found(lambda: rival(path)) == (wanted, "")


@pytest.mark.parametrize("body", ["m-", "r-"])
@pytest.mark.parametrize("new", ["zeroblob(40)", "substr(body, 1, 20)", "CAST('no' AS TEXT)", ""])
def test_damaged_bodies_are_refused_by_name_and_the_next_publish_heals_them(body: str, new: str, path: Path) -> None:
    d = opened(path)
    publish(d, 1)
    d.store.close()
    where = f"id LIKE '{body}%'"
    ask(path, f"UPDATE bodies SET body = {new} WHERE {where}" if new else f"DELETE FROM bodies WHERE {where}")
    got, why = found(lambda: rival(path))
    assert got is not None and not why
    with pytest.raises(KeptError, match=f"the stored (manifest|list of regions) {body}.* is (damaged|missing)"):
        core.check(got)
    d = opened(path)
    wanted = core.sealed(publish(d, 2))
    d.store.close()
    assert found(lambda: rival(path)) == (wanted, "")


def _as_first_released(path: Path) -> None:
    """The file as schema 1 had it, with a committed update in it."""
    d = opened(path)
    u, _ = proven(update(1))
    assert d.freeze(u) and d.decide(u) and d.close(committed(u))
    d.store.close()
    with sqlite3.connect(path) as db:
        db.executescript("DROP TABLE kept; DROP TABLE bodies; PRAGMA user_version = 1;")
    db.close()


def test_a_file_of_the_first_schema_is_brought_up_to_date(path: Path) -> None:
    _as_first_released(path)
    got, why = found(lambda: rival(path))
    assert got is None and "holds no digests of version 1" in why
    assert ask(path, "PRAGMA user_version") == [(schema.SCHEMA_VERSION,)]
    assert reopen(lambda: rival(path)).state.committed == Held(1, "u1")
    d = opened(path)
    wanted = core.sealed(publish(d, 2))
    assert found(lambda: rival(path)) == (wanted, "")


def test_a_migration_that_fails_leaves_the_file_as_it_was(path: Path) -> None:
    _as_first_released(path)

    def hook(name: str, n: int) -> None:
        if name == "store.open.during":
            raise failpoints.FailpointError(name)

    failpoints.set_hook(hook)
    try:
        with pytest.raises(StoreError):
            opened(path)
    finally:
        failpoints.set_hook(None)
    assert ask(path, "PRAGMA user_version") == [(1,)] and ask(path, "SELECT epoch FROM meta") == [(1,)]
    assert ("kept",) not in ask(path, "SELECT name FROM sqlite_master")
    opened(path)


def test_groups_keep_their_own(opener: Opener) -> None:
    store = opener()
    epoch = store.open().epoch
    for name, tensors in (("a", 3), ("b", 3)):
        u, kept = proven(update(1, epoch), tensors)
        for kind, what in (("freeze", u), ("decide", deciding(u))):
            assert store.write(name, Write("w", kind, epoch, what), state(epoch), kept if kind == "decide" else None)
    u = update(2, epoch)
    assert store.write("a", Write("w", "freeze", epoch, u), state(epoch))
    assert store.write("a", Write("w", "decide", epoch, deciding(u)), state(epoch))
    groups = opener().open().groups
    assert groups["a"].kept is None and groups["b"].kept == core.sealed(proven(update(1, epoch), 3)[1])
