"""Writes to the file that meet a lock, a full disk, a failing fsync."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.store.helpers import GROUP, Desk, aborted, committed, rival, state, trainer, update
from weightplane.controlplane import failpoints
from weightplane.controlplane.core.model import Held
from weightplane.controlplane.core.states import Admin
from weightplane.controlplane.store import StoreError, StoreUnknown
from weightplane.controlplane.store.sqlite import SqliteStore

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


def opened(path: Path, **options: Any) -> Desk:
    store = rival(path, **options)
    return Desk(store, store.open().epoch)


# --- locks ---


@pytest.fixture
def blocked(path: Path) -> Iterator[Desk]:
    """A store whose write lock another process holds."""
    d = opened(path, busy_timeout_s=0.2)
    d.freeze(update(1))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    yield d
    other.close()


@pytest.mark.alone
def test_a_held_lock_is_a_definite_failure_within_the_time(blocked: Desk) -> None:
    began = time.monotonic()
    with pytest.raises(StoreError, match="another process holds the write lock"):
        blocked.decide(update(1))
    assert 0.15 < time.monotonic() - began < 1.0
    assert blocked.store.leads(1) and not blocked.store.read_decision(GROUP, "u1"), "readers wait for nobody"


def test_the_lock_let_go_in_time_is_no_failure(path: Path) -> None:
    d = opened(path, busy_timeout_s=5)
    d.freeze(update(1))
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.1, other.execute, ("COMMIT",))
    timer.start()
    assert d.decide(update(1))
    timer.join()
    other.close()


# --- failures of a write ---


def test_a_full_disk_is_a_definite_failure_and_passes(path: Path) -> None:
    d = opened(path)
    db = d.store._db  # type: ignore[attr-defined]
    d.freeze(update(1))
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    db.execute(f"PRAGMA max_page_count = {pages}")
    big = update(2, replicas=2000)
    with pytest.raises(StoreError, match="disk is full"):
        d.freeze(big)
    assert not db.in_transaction and d.store.leads(1)
    with pytest.raises(StoreError, match="disk is full"):
        d.decide(replace(big, update_id="u1", version=1))
    assert not d.store.read_decision(GROUP, "u1")
    db.execute("PRAGMA max_page_count = 100000")
    assert d.decide(update(1)) and d.freeze(big)


class _Commit:
    """A connection whose next COMMIT ends in an I/O error, after it was done or after it was undone."""

    def __init__(self, db: sqlite3.Connection, real: str, code: str) -> None:
        self._db, self._real, self._code, self._armed = db, real, code, True

    def execute(self, sql: str, *args: Any) -> Any:
        if sql != "COMMIT" or not self._armed:
            return self._db.execute(sql, *args)
        self._armed = False
        self._db.execute(self._real)
        e = sqlite3.OperationalError("disk I/O error")
        e.sqlite_errorname = self._code
        raise e

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


@pytest.mark.parametrize("real, decided", [("COMMIT", True), ("ROLLBACK", False)])
def test_an_error_of_the_commit_itself_is_unknown_until_read_back(path: Path, real: str, decided: bool) -> None:
    d = opened(path)
    d.freeze(update(1))
    d.store._db = _Commit(d.store._db, real, "SQLITE_IOERR_FSYNC")  # type: ignore[attr-defined]
    with pytest.raises(StoreUnknown, match="decide write may or may not be durable"):
        d.decide(update(1))
    settled = d.store._db.execute("SELECT settled FROM meta").fetchone()[0]  # type: ignore[attr-defined]
    assert d.store.read_decision(GROUP, "u1") is decided
    assert d.store.read_decision(GROUP, "u1") is decided
    after = d.store._db.execute("SELECT settled FROM meta").fetchone()[0]  # type: ignore[attr-defined]
    assert after == settled + 1, "the answer was settled by a commit of its own, once"
    d.store.close()
    got = rival(path).open().groups[GROUP]
    assert got.state.committed == (Held(1, "u1") if decided else Held())
    assert (got.frozen is None) is decided


def test_a_full_disk_at_the_commit_is_definite(path: Path) -> None:
    d = opened(path)
    d.freeze(update(1))
    d.store._db = _Commit(d.store._db, "ROLLBACK", "SQLITE_FULL")  # type: ignore[attr-defined]
    with pytest.raises(StoreError, match="disk is full"):
        d.decide(update(1))
    assert d.decide(update(1))


def test_the_log_and_the_file_stay_small(path: Path) -> None:
    d = opened(path)
    d.keep = 5
    for v in range(1, 200):
        d.freeze(update(v, replicas=20))
        d.close(aborted(update(v, replicas=20)))
    assert path.stat().st_size < 300_000
    assert Path(f"{path}-wal").stat().st_size < 8_000_000


def test_everything_but_a_close_is_synced(path: Path) -> None:
    d = opened(path)
    seen: list[tuple[str, int]] = []

    def hook(name: str, n: int) -> None:
        if name.endswith(".during"):
            level = d.store._db.execute("PRAGMA synchronous").fetchone()[0]  # type: ignore[attr-defined]
            seen.append((name.split(".")[1], level))

    failpoints.set_hook(hook)
    try:
        for v in (1, 2):
            d.freeze(update(v))
            d.decide(update(v))
            d.close(replace(committed(update(v)), frozen=True))
            d.roster("r1", Admin.DRAINING)
            d.close(aborted(update(9 + v)))  # its freeze was never confirmed: here its version is kept
            d.close(replace(committed(update(v)), frozen=True))
            d.group(state(trainer=trainer(), last_generation=1))
    finally:
        failpoints.set_hook(None)
    once = [("freeze", 2), ("decide", 2), ("close", 1), ("roster", 2), ("close", 2), ("close", 1), ("group", 2)]
    assert seen[:7] == once


_FAILING_FSYNC = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>
static int real(const char *name, int fd) {
    if (access(getenv("FAIL_FSYNC"), F_OK) == 0) { errno = EIO; return -1; }
    return ((int (*)(int))dlsym(RTLD_NEXT, name))(fd);
}
int fsync(int fd) { return real("fsync", fd); }
int fdatasync(int fd) { return real("fdatasync", fd); }
"""

_CHILD = """
import os, shutil, sys
from tests.store.helpers import GROUP, Desk, update
from weightplane.controlplane.store import StoreUnknown
from weightplane.controlplane.store.sqlite import SqliteStore

folder, flag = sys.argv[1], os.environ["FAIL_FSYNC"]

def crash_now(name):
    os.mkdir(f"{folder}/{name}")
    for file in ("store.db", "store.db-wal"):
        shutil.copy(f"{folder}/{file}", f"{folder}/{name}/")

store = SqliteStore(f"{folder}/store.db")
d = Desk(store, store.open().epoch)
assert d.freeze(update(1))
open(flag, "w").close()
for call, name in ((lambda: d.decide(update(1)), "before"), (lambda: store.read_decision(GROUP, "u1"), "between")):
    try:
        call()
        raise SystemExit("an fsync failed and nobody noticed")
    except StoreUnknown:
        crash_now(name)
os.unlink(flag)
print(store.read_decision(GROUP, "u1"))
crash_now("after")
"""


@pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler and LD_PRELOAD")
def test_after_a_failed_fsync_the_answer_read_back_is_final(path: Path) -> None:
    """The log holds the whole decision although its fsync failed: a crash would bring it up, unless reading settles."""
    folder, shim = path.parent, path.parent / "shim.so"
    (folder / "shim.c").write_text(_FAILING_FSYNC)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, folder / "shim.c", "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(shim), "FAIL_FSYNC": str(folder / "flag")}
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, folder], cwd=REPO, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (child.returncode, child.stdout) == (0, "False\n"), child.stderr

    def committed_at(name: str) -> Held:
        return SqliteStore(folder / name / "store.db").open().groups[GROUP].state.committed

    assert committed_at("before") == Held(1, "u1"), "without this the test shows nothing"
    assert committed_at("after") == Held()
