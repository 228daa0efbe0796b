"""The SQLite file: its schema, how a new one is made, and how one that cannot be used is told apart untouched."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sqlite3
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from . import mark
from .base import StoreError

__all__ = ["APPLICATION_ID", "SCHEMA_VERSION", "check", "connect", "create", "migrate", "prepare", "says"]

#: "WPst" in SQLite's header: what tells our files from any other program's.
APPLICATION_ID = 0x57507374
SCHEMA_VERSION = 2
_OLDEST = 1  # that can be brought up to date

#: What the second version added: what is kept of each group's committed version, and the bodies that it names.
_KEPT = """
CREATE TABLE kept (
    grp TEXT PRIMARY KEY NOT NULL, update_id TEXT NOT NULL, manifest TEXT NOT NULL, verify TEXT NOT NULL,
    layouts TEXT NOT NULL, digests BLOB NOT NULL, seal TEXT NOT NULL
);
CREATE TABLE bodies (grp TEXT NOT NULL, id TEXT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (grp, id));
"""
_SCHEMA = """
CREATE TABLE meta (
    one INTEGER PRIMARY KEY CHECK (one = 1), cluster_id TEXT NOT NULL, epoch INTEGER NOT NULL, settled INTEGER NOT NULL
);
CREATE TABLE groups (
    name TEXT PRIMARY KEY NOT NULL, policy TEXT NOT NULL, last_version INTEGER NOT NULL,
    last_generation INTEGER NOT NULL, committed_version INTEGER NOT NULL, committed_update TEXT NOT NULL,
    committed_step INTEGER NOT NULL, committed_lineage TEXT NOT NULL, committed_manifest TEXT NOT NULL,
    rewinding INTEGER NOT NULL, trainer TEXT NOT NULL
);
CREATE TABLE updates (
    grp TEXT NOT NULL, update_id TEXT NOT NULL, version INTEGER NOT NULL, epoch INTEGER NOT NULL,
    outcome TEXT NOT NULL CHECK (outcome IN ('', 'ABORTED', 'COMMITTED')), decided_epoch INTEGER NOT NULL,
    doc TEXT NOT NULL, PRIMARY KEY (grp, update_id), UNIQUE (grp, version)
);
CREATE UNIQUE INDEX one_open_update ON updates (grp) WHERE outcome = '';
CREATE TABLE roster (
    grp TEXT NOT NULL, replica_id TEXT NOT NULL, admin TEXT NOT NULL, incarnation TEXT NOT NULL,
    PRIMARY KEY (grp, replica_id)
);
"""


def says(path: Path, e: sqlite3.Error) -> StoreError:
    """SQLite's error in our words, for a failure after which nothing was written."""
    code = getattr(e, "sqlite_errorname", "") or type(e).__name__
    if code == "SQLITE_FULL":
        return StoreError(f"{path}: the disk is full (or the file's limit is reached); nothing was written. Free space")
    if code.startswith("SQLITE_BUSY"):
        return StoreError(f"{path}: another process holds the write lock and does not let go; nothing was written")
    if code in ("SQLITE_NOTADB",) or code.startswith("SQLITE_CORRUPT"):
        return StoreError(
            f"{path}: not a store, or damaged ({e}). It was left as it is: restore a copy, or name another"
        )
    if code.startswith(("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_CANTOPEN")):
        return StoreError(f"{path}: cannot be opened for writing ({e}, {code}): check its directory and permissions")
    return StoreError(f"{path}: {e} ({code}); nothing was written")


def connect(path: Path, mode: str, timeout_s: float) -> sqlite3.Connection:
    """Open an existing file; ``mode`` "ro" or "rw". Transactions are ours to begin. Raises ``sqlite3.Error``."""
    uri = f"file:{quote(str(path.absolute()))}?mode={mode}"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=timeout_s, check_same_thread=False)
    try:
        db.execute("PRAGMA cell_size_check = ON")
        db.execute("PRAGMA trusted_schema = OFF")
    except BaseException:
        db.close()
        raise
    return db


def create(path: Path) -> None:
    """Make a new, empty store, complete or not at all: built beside ``path``, then linked. An existing file stays.

    Raises ``StoreError``.
    """
    leftovers = [p for p in (f"{path}-wal", f"{path}-journal") if os.path.exists(p)]
    if leftovers:
        raise StoreError(f"{path} is gone, but {leftovers[0]} is there: restore the file, or remove what is left of it")
    new = path.with_name(f"{path.name}.new-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        try:
            with contextlib.closing(connect(new, "rw", 5.0)) as db:
                _use_wal(new, db)
                db.executescript(
                    f"BEGIN EXCLUSIVE; {_SCHEMA}{_KEPT} PRAGMA application_id = {APPLICATION_ID}; "
                    f"PRAGMA user_version = {SCHEMA_VERSION}; "
                    f"INSERT INTO meta VALUES (1, '{secrets.token_hex(16)}', 0, 0); COMMIT;"
                )
            with contextlib.suppress(FileExistsError):  # another coordinator was faster: its file is the store
                os.link(new, path)
        finally:
            for suffix in ("", "-wal", "-shm", "-journal"):
                Path(f"{new}{suffix}").unlink(missing_ok=True)
        with _directory(path) as fd:
            os.fsync(fd)
    except sqlite3.Error as e:
        raise says(path, e) from e
    except OSError as e:
        what = "no space left on the disk" if e.errno == errno.ENOSPC else e.strerror or str(e)
        raise StoreError(f"{path}: cannot be created: {what}. Its directory must exist and be ours to write") from e


def check(path: Path) -> None:
    """Refuse a file that is no store of ours, damaged, or of a newer release; its bytes stay. Raises ``StoreError``."""
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise StoreError(f"{path}: not a regular file")
        if info.st_size == 0:
            raise StoreError(f"{path}: empty, so not a store. Remove it to begin a new one, or restore a copy")
        with contextlib.closing(connect(path, "ro", 5.0)) as db:
            _check(path, db)
        if info.st_mode & 0o077:
            os.chmod(path, 0o600)
    except sqlite3.Error as e:
        raise says(path, e) from e
    except OSError as e:
        raise StoreError(f"{path}: {e.strerror or e}") from e


def _check(path: Path, db: sqlite3.Connection) -> None:
    application, version = _pragma(db, "application_id"), _pragma(db, "user_version")
    if application != APPLICATION_ID:
        raise StoreError(f"{path}: an SQLite file of another program (application_id {application}). Name another file")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path}: written by a newer release (schema {version}; this one reads up to {SCHEMA_VERSION}). "
            "Run that release, or name another file"
        )
    if version < _OLDEST:
        raise StoreError(f"{path}: schema {version} was never released. Restore a copy, or name another file")
    fault = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
    if fault != "ok":
        raise StoreError(f"{path}: damaged: {fault[:200]}. It was left as it is: restore a copy, or name another file")
    mark.check(path, db)


def migrate(db: sqlite3.Connection) -> None:
    """Bring an older schema up to date, in the transaction that is open. Raises ``sqlite3.Error``."""
    if _pragma(db, "user_version") < SCHEMA_VERSION:
        for statement in _KEPT.split(";"):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def prepare(path: Path, db: sqlite3.Connection, timeout_s: float) -> None:
    """Set what makes a commit durable. Raises ``StoreError``, ``sqlite3.Error``."""
    _use_wal(path, db)
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA fullfsync = ON")  # macOS: its fsync does not reach the platter; elsewhere without meaning
    db.execute(f"PRAGMA busy_timeout = {int(timeout_s * 1000)}")
    db.execute("PRAGMA journal_size_limit = 16777216")


def _use_wal(path: Path, db: sqlite3.Connection) -> None:
    until = time.monotonic() + 5.0
    while True:  # SQLite does not wait for a lock here by itself
        try:
            mode = str(db.execute("PRAGMA journal_mode = WAL").fetchone()[0])
            break
        except sqlite3.OperationalError as e:
            if "locked" not in str(e) or time.monotonic() > until:
                raise
            time.sleep(0.02)
    if mode != "wal":
        raise StoreError(f"{path}: its file system cannot do SQLite's write-ahead log ({mode}): use a local disk")


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])


@contextlib.contextmanager
def _directory(path: Path) -> Iterator[int]:
    fd = os.open(path.absolute().parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
