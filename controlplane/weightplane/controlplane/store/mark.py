"""A high-water mark beside the SQLite file, so that a lost write-ahead log is noticed rather than believed.

What was committed last is in ``PATH-wal`` until SQLite moves it into the file. Without that log an intact file is the
store as it was some time ago: decisions would be gone in silence, and their versions minted again. So after each synced
commit the newest epoch, and the sum of every number that only rises (versions, generations), are noted in
``PATH-mark``: one small write, and no sync, for it must never say more than what is durable. A store that holds less
than its mark is refused. A clean close leaves nothing in the log, and takes the mark away.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import zlib
from pathlib import Path

from .base import StoreError

__all__ = ["check", "note", "remove"]

log = logging.getLogger("weightplane.controlplane")

_SUM = "SELECT COALESCE(SUM(last_version + committed_version + last_generation), 0) FROM groups"


def _path(path: Path) -> Path:
    return path.with_name(f"{path.name}-mark")


def _now(db: sqlite3.Connection) -> tuple[str, int, int]:
    """(cluster_id, epoch, sum) of what the file and its log hold."""
    cluster_id, epoch = db.execute("SELECT cluster_id, epoch FROM meta").fetchone()
    return str(cluster_id), int(epoch), int(db.execute(_SUM).fetchone()[0])


def _line(cluster_id: str, epoch: int, total: int) -> bytes:
    text = f"weightplane 1 {cluster_id} {epoch:020d} {total:020d}".encode()
    return text + f" {zlib.crc32(text):08x}\n".encode()


def _read(path: Path) -> tuple[str, int, int] | None:
    """The mark; ``None`` if there is none, or it is torn: then nothing can be told by it."""
    try:
        line = _path(path).read_bytes()
        words = line.decode("ascii").split()
        found = words[2], int(words[3]), int(words[4])
    except (FileNotFoundError, ValueError, IndexError):
        return None
    except OSError as e:
        log.warning("%s: cannot be read, so that nothing tells whether the store is whole: %s", _path(path), e)
        return None
    return found if line == _line(*found) else None


def check(path: Path, db: sqlite3.Connection) -> None:
    """Raise ``StoreError`` if the store holds less than its mark. A mark of another store's life means nothing."""
    mark, now = _read(path), _now(db)
    if mark is None or mark[0] != now[0] or (now[1] >= mark[1] and now[2] >= mark[2]):
        return
    raise StoreError(
        f"{path}: older than what was written to it: it holds epoch {now[1]} and {now[2]} of {mark[2]} versions and "
        f"generations counted up to epoch {mark[1]}. Its write-ahead log ({path}-wal) is lost, or an older copy was "
        f"put in its place. It was left as it is: bring back {path.name} and its -wal together. To go on without "
        f"what is missing, remove {_path(path)}: versions that replicas may hold are then minted again"
    )


def note(path: Path, db: sqlite3.Connection) -> None:
    """Note what is committed, and synced, now. That it cannot be noted is logged: the commit is none the worse."""
    try:
        fd = os.open(_path(path), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, _line(*_now(db)), 0)
        finally:
            os.close(fd)
    except (OSError, sqlite3.Error) as e:
        log.warning("%s: cannot be written: a loss of the write-ahead log would go unnoticed: %s", _path(path), e)


def remove(path: Path, cluster_id: str, epoch: int) -> None:
    """After a close under ``epoch``: if it left nothing in the log, and nobody leads since."""
    mark = _read(path)
    if mark is not None and mark[:2] == (cluster_id, epoch) and not os.path.lexists(f"{path}-wal"):
        _path(path).unlink(missing_ok=True)
