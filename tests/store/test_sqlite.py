"""What only the file has: permissions, foreign and damaged files, schemas, full disks, two processes."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.store.helpers import GROUP, Desk, committed, rival, update
from weightplane.controlplane.store import StoreError, StoreHeld, open_store, schema
from weightplane.controlplane.store.memory import MemoryStore
from weightplane.controlplane.store.sqlite import SqliteStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


def opened(path: Path, **options: Any) -> Desk:
    store = rival(path, **options)
    return Desk(store, store.open().epoch)


def filled(path: Path, updates: int = 30) -> None:
    d = opened(path)
    for v in range(1, updates + 1):
        d.freeze(update(v))
        d.decide(update(v))
        d.close(committed(update(v)))
    d.store.close()


def bytes_of(path: Path) -> bytes:
    return path.read_bytes()


# --- the file ---


def test_the_file_is_ours_alone(path: Path) -> None:
    old = os.umask(0)
    try:
        d = opened(path)
        d.freeze(update(1))
        files = {p.name: stat.S_IMODE(p.stat().st_mode) for p in path.parent.iterdir()}
    finally:
        os.umask(old)
    assert files == {f"store.db{suffix}": 0o600 for suffix in ("", "-wal", "-shm", "-mark", "-lock")}
    d.store.close()
    assert [p.name for p in path.parent.iterdir()] == ["store.db"]
    path.chmod(0o644)
    opened(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_commits_are_synced(path: Path) -> None:
    db = opened(path).store._db  # type: ignore[attr-defined]
    assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert db.execute("PRAGMA busy_timeout").fetchone() == (1000,)


def test_odd_paths_work(tmp_path: Path) -> None:
    for name in ("a b", "100%25?mode=memory", "#x", "ü✓.db"):
        opened(tmp_path / name).store.close()
    assert {p.name for p in tmp_path.iterdir()} == {"a b", "100%25?mode=memory", "#x", "ü✓.db"}


def test_urls(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_store("memory:"), MemoryStore)
    store = open_store(f"sqlite:{path}")
    assert isinstance(store, SqliteStore) and store.path == path
    monkeypatch.chdir(path.parent)
    open_store("sqlite:rel.db").open()
    assert (path.parent / "rel.db").exists()
    for bad in ("", "sqlite", "sqlite:", "sqlite::memory:", "memory:x", "postgres:x", str(path)):
        with pytest.raises(StoreError, match="no store is called"):
            open_store(bad)
    with pytest.raises(StoreError, match="not built yet"):
        open_store("etcd://localhost:2379")


def _not_sqlite(path: Path) -> None:
    path.write_bytes(b"this is no database, but someone needs it" * 100)


def _empty(path: Path) -> None:
    path.touch()


def _foreign(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE bookmarks (url TEXT)")
        db.execute("PRAGMA user_version = 1")
    db.close()


def _newer(path: Path) -> None:
    filled(path)
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {schema.SCHEMA_VERSION + 1}")
    db.close()


def _older(path: Path) -> None:
    filled(path)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 0")
    db.close()


def _torn(path: Path) -> None:
    filled(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _scribbled(path: Path) -> None:
    filled(path)
    data = bytearray(path.read_bytes())
    for page in range(1, len(data) // 4096):
        data[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    path.write_bytes(bytes(data))


def _scribbled_index(path: Path) -> None:
    """Damage that reading everything does not meet, but a later write would."""
    filled(path, 300)
    with sqlite3.connect(path) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_updates_1'").fetchone()
    db.close()
    data = bytearray(path.read_bytes())
    data[page * 4096 - 2048 : page * 4096] = b"\xff" * 2048
    path.write_bytes(bytes(data))


def _newer_document(path: Path) -> None:
    filled(path)
    with sqlite3.connect(path) as db:
        db.execute("""UPDATE updates SET doc = replace(doc, '"v":4', '"v":5') WHERE version = 7""")
    db.close()


def _bad_admin(path: Path) -> None:
    filled(path)
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO roster VALUES (?, 'r1', 'ASTRAY', '')", (GROUP,))
    db.close()


def _a_directory(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize(
    "spoil, message",
    [
        (_not_sqlite, "not a store, or damaged.*left as it is"),
        (_empty, "empty, so not a store"),
        (_foreign, "another program"),
        (_newer, r"newer release \(schema 3"),
        (_older, "schema 0 was never released"),
        (_torn, "damaged"),
        (_scribbled, "damaged"),
        (_scribbled_index, "damaged"),
        (_newer_document, "update 'u7': document version 5.*Use the one that wrote it"),
        (_bad_admin, "ASTRAY"),
        (_a_directory, "not a regular file"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_and_left_as_it_is(path: Path, spoil: Any, message: str) -> None:
    spoil(path)
    before = path.read_bytes() if path.is_file() else b""
    store = SqliteStore(path)
    for _ in range(2):
        with pytest.raises(StoreError, match=message) as caught:
            store.open()
        assert str(path) in str(caught.value)
        assert not path.is_file() or path.read_bytes() == before


def test_the_log_of_a_lost_file_is_not_replayed_into_a_new_one(path: Path) -> None:
    d = opened(path)
    d.freeze(update(1))
    (path.parent / "kept-wal").write_bytes(Path(f"{path}-wal").read_bytes())
    d.store.close()
    path.unlink()
    (path.parent / "kept-wal").rename(f"{path}-wal")
    with pytest.raises(StoreError, match="is gone, but"):
        SqliteStore(path).open()
    assert not path.exists()


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_file_that_goes_away_is_noticed_before_a_write_is_lost_in_it(path: Path, how: str) -> None:
    d = opened(path)
    d.freeze(update(1))
    path.unlink()
    if how == "replaced":
        path.write_bytes(b"x")
    with pytest.raises(StoreError, match="while open"):
        d.decide(update(1))
    with pytest.raises(StoreError, match="while open"):
        d.store.leads(1)


def test_a_directory_that_is_not_there_or_not_ours(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot be created.*directory must exist"):
        SqliteStore(tmp_path / "nowhere" / "store.db").open()


def test_many_open_one_new_file_at_once(path: Path) -> None:
    epochs: list[int] = []
    clusters: set[str] = set()
    wrong: list[Exception] = []
    gate = threading.Barrier(6)

    def work() -> None:
        try:
            gate.wait()
            store = SqliteStore(path, busy_timeout_s=10)
            while True:
                try:
                    loaded = store.open()
                    break
                except StoreHeld:
                    time.sleep(0.001)
            store.close()
            epochs.append(loaded.epoch)
            clusters.add(loaded.cluster_id)
        except Exception as e:
            wrong.append(e)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and sorted(epochs) == [1, 2, 3, 4, 5, 6] and len(clusters) == 1
    assert [p.name for p in path.parent.iterdir() if ".new-" in p.name] == []
