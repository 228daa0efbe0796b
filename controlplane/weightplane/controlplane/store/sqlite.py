"""The embedded store: one SQLite file, write-ahead log, an fsync for every commit that anything depends on.

One coordinator leads: who opens it holds the lock beside the file (``lock``). Opening raises the epoch in the file, and
every write is conditional on it, so a leader whose lock was taken away writes no more. The file must be on a local
disk.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import Any

from ..core.events import Write
from ..core.group_state import GroupState
from ..core.kept import Kept
from ..failpoints import FailpointError, hit
from . import mark, schema
from .base import Loaded, StoredGroup, StoreError, StoreUnknown
from .lock import StoreLock
from .records import COMMITTED, Changes, GroupRecord, RosterRecord, UpdateRecord, assemble, oldest_kept, settle

__all__ = ["SqliteStore"]

_GROUP = ", ".join(f.name for f in fields(GroupRecord))
_UPDATE = ", ".join(f.name for f in fields(UpdateRecord))


class SqliteStore:
    """A ``Store`` in one file, made (mode 0600) if it is not there. Thread-safe; not to be used across a fork.

    ``busy_timeout_s`` bounds the wait for another process's write lock. Failpoints: ``store.open.*`` and
    ``store.<kind>.*`` with ``before``, ``during`` (the transaction is filled, not committed) and ``after``; the action
    ``raise`` makes a ``StoreError`` of the first two and a ``StoreUnknown`` of the last.
    """

    def __init__(self, path: str | os.PathLike[str], busy_timeout_s: float = 1.0) -> None:
        self.path = Path(path)
        self._busy_timeout_s = busy_timeout_s
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._held: StoreLock | None = None
        self._opened = False  # ever: a file that is gone then was lost, and no new one takes its place
        self._file = (0, 0)
        self._doubt = False
        self._synced = True
        self._life = "", 0  # the store's, and our epoch
        self._bodies: dict[str, set[str]] = {}  # by group, those that we wrote: what was there before may be damaged

    def open(self) -> Loaded:
        """See ``Store.open``. A file that cannot be used is left byte for byte as it was."""
        with self._lock:
            if self._db is not None:
                raise StoreError(f"{self.path}: this store is open already")
            self._held = StoreLock(self.path)
            try:
                if not os.path.lexists(self.path):
                    if self._opened:
                        raise StoreError(f"{self.path}: gone. Restore it; a restart begins a new one")
                    schema.create(self.path)
                schema.check(self.path)
                self._db = schema.connect(self.path, "rw", self._busy_timeout_s)
                schema.prepare(self.path, self._db, self._busy_timeout_s)
                self._synced = True
                self._bodies.clear()
                info = self.path.stat()
                self._file = (info.st_dev, info.st_ino)
                loaded = self._take_over(self._db)
                self._opened = True
                return loaded
            except sqlite3.Error as e:
                self.close()
                raise schema.says(self.path, e) from e
            except OSError as e:
                self.close()
                raise StoreError(f"{self.path}: {e.strerror or e}") from e
            except BaseException:
                self.close()
                raise

    def write(self, group: str, write: Write, state: GroupState, kept: Kept | None = None) -> bool:
        """See ``Store.write``. An I/O error of the commit itself is ``StoreUnknown``; a full disk is ``StoreError``."""
        with self._lock:
            db = self._ready()
            self._hit(write.kind, "before")
            # What a close adds can be lost with the power: the decision, and the version, were synced before.
            self._begin(db, synced=not (write.kind == "close" and write.update is not None and write.update.frozen))
            try:
                changes = self._settle(db, group, write, state, kept)
                if changes is not None:
                    self._apply(db, group, changes, max(state.config.history, 1))
                self._hit(write.kind, "during")
            except (sqlite3.Error, UnicodeError, OverflowError) as e:
                self._rollback(db)
                raise (schema.says(self.path, e) if isinstance(e, sqlite3.Error) else _unfit(write.kind, e)) from e
            except BaseException:
                self._rollback(db)
                raise
            if changes is None:
                self._rollback(db)
                return False
            self._commit(db, write.kind)
            return True

    def read_decision(self, group: str, update_id: str) -> bool:
        """See ``Store.read_decision``. In doubt it commits a mark first, which leaves no room for a late surprise."""
        with self._lock:
            db = self._ready()
            try:
                if self._doubt:
                    self._begin(db)
                    try:
                        db.execute("UPDATE meta SET settled = settled + 1")
                    except BaseException:
                        self._rollback(db)
                        raise
                    self._commit(db, "settle")
                    self._doubt = False
                self._hit("read_decision", "before")
                row = db.execute("SELECT outcome FROM updates WHERE grp = ? AND update_id = ?", (group, update_id))
                found = row.fetchone()
                if found is not None:
                    return bool(found[0] == COMMITTED)
                row = db.execute("SELECT committed_update FROM groups WHERE name = ?", (group,))
                found = row.fetchone()
                return found is not None and update_id != "" and found[0] == update_id
            except sqlite3.Error as e:
                raise StoreError(f"{self.path}: cannot be read: {e}") from e

    def leads(self, epoch: int) -> bool:
        """See ``Store.leads``. A reader: it waits for no writer."""
        with self._lock:
            db = self._ready()
            try:
                return self._epoch(db) == epoch
            except sqlite3.Error as e:
                raise StoreError(f"{self.path}: cannot be read: {e}") from e

    def close(self) -> None:
        """See ``Store.close``."""
        with self._lock:
            db, self._db = self._db, None
            self._doubt = False
            life, self._life = self._life, ("", 0)
            held, self._held = self._held, None
            try:
                if db is not None:
                    db.close()
                    mark.remove(self.path, *life)
            finally:
                if held is not None:
                    held.release()

    # --- a transaction ---

    def _ready(self) -> sqlite3.Connection:
        """The connection, if the file that it has open is still the one under our path."""
        if self._db is None:
            raise StoreError(f"{self.path}: this store is not open")
        try:
            info = os.stat(self.path)
        except OSError as e:
            raise StoreError(f"{self.path}: gone while open ({e.strerror}); what is written now would be lost") from e
        if (info.st_dev, info.st_ino) != self._file:
            raise StoreError(f"{self.path}: replaced while open; what is written now would be lost. Restart")
        return self._db

    def _begin(self, db: sqlite3.Connection, synced: bool = True) -> None:
        """Begin, with the write lock. A commit not ``synced`` is carried along by the next that is: the log is one."""
        try:
            if synced is not self._synced:
                db.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
                self._synced = synced
            db.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as e:
            raise schema.says(self.path, e) from e

    def _rollback(self, db: sqlite3.Connection) -> None:
        """Undo. SQLite may have done so by itself; if it cannot, the lock goes with the connection."""
        try:
            if db.in_transaction:
                db.execute("ROLLBACK")
        except sqlite3.Error:
            self.close()

    def _commit(self, db: sqlite3.Connection, kind: str) -> None:
        try:
            db.execute("COMMIT")
        except sqlite3.Error as e:
            self._rollback(db)
            name = getattr(e, "sqlite_errorname", "")
            if name == "SQLITE_FULL" or name.startswith("SQLITE_BUSY"):
                raise schema.says(self.path, e) from e  # the commit record, which is last, was not written
            self._doubt = True
            raise StoreUnknown(f"{self.path}: the {kind} write may or may not be durable: {e} ({name})") from e
        if self._synced and kind not in ("roster", "settle"):  # those change no number that the mark counts
            mark.note(self.path, db)
        self._hit(kind, "after")

    def _hit(self, kind: str, when: str) -> None:
        try:
            hit(f"store.{kind}.{when}")
        except FailpointError as e:
            raise (StoreUnknown if when == "after" else StoreError)(str(e)) from e

    # --- what is in it ---

    def _epoch(self, db: sqlite3.Connection) -> int:
        return int(db.execute("SELECT epoch FROM meta").fetchone()[0])

    def _settle(
        self, db: sqlite3.Connection, name: str, write: Write, state: GroupState, kept: Kept | None
    ) -> Changes | None:
        row = db.execute(f"SELECT {_GROUP} FROM groups WHERE name = ?", (name,)).fetchone()
        group = _group(row) if row is not None else None
        record = None
        if write.update is not None:
            key = (name, write.update.update_id)
            row = db.execute(f"SELECT {_UPDATE} FROM updates WHERE grp = ? AND update_id = ?", key).fetchone()
            record = UpdateRecord(*row) if row is not None else None
        return settle(self._epoch(db), write, state, group, record, kept)

    def _apply(self, db: sqlite3.Connection, name: str, changes: Changes, keep: int) -> None:
        g, u, r = changes.group, changes.update, changes.roster
        if g is not None:
            marks = ", ".join("?" * (1 + len(fields(g))))
            db.execute(f"INSERT OR REPLACE INTO groups (name, {_GROUP}) VALUES ({marks})", (name, *astuple(g)))
        if changes.abort_open:
            db.execute("UPDATE updates SET outcome = 'ABORTED' WHERE grp = ? AND outcome = ''", (name,))
        if u is not None:
            db.execute(
                f"INSERT INTO updates (grp, {_UPDATE}) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (grp, update_id) "
                "DO UPDATE SET outcome = excluded.outcome, decided_epoch = excluded.decided_epoch, doc = excluded.doc",
                (name, *astuple(u)),
            )
            too_old = "DELETE FROM updates WHERE grp = ? AND outcome != '' AND version <= ?"
            db.execute(too_old, (name, oldest_kept(u, keep) - 1))
        if changes.decides:
            _keep(db, name, changes.kept, self._bodies.setdefault(name, set()))
        if r is not None and r.admin:
            row = (name, r.replica_id, r.admin, r.incarnation)
            db.execute("INSERT OR REPLACE INTO roster (grp, replica_id, admin, incarnation) VALUES (?, ?, ?, ?)", row)
        elif r is not None:
            db.execute("DELETE FROM roster WHERE grp = ? AND replica_id = ?", (name, r.replica_id))

    def _take_over(self, db: sqlite3.Connection) -> Loaded:
        """Raise the epoch and read everything, in one transaction."""
        self._hit("open", "before")
        self._begin(db)
        try:
            schema.migrate(db)
            db.execute("UPDATE meta SET epoch = epoch + 1")
            cluster_id, epoch = db.execute("SELECT cluster_id, epoch FROM meta").fetchone()
            loaded = Loaded(str(cluster_id), int(epoch), self._groups(db, str(cluster_id), int(epoch)))
            self._hit("open", "during")
        except StoreError as e:
            self._rollback(db)
            raise StoreError(f"{self.path}: cannot be read, and was left as it is: {e}") from e
        except BaseException:
            self._rollback(db)
            raise
        self._commit(db, "open")
        self._life = loaded.cluster_id, loaded.epoch
        return loaded

    def _groups(self, db: sqlite3.Connection, cluster_id: str, epoch: int) -> dict[str, StoredGroup]:
        updates: dict[str, list[UpdateRecord]] = defaultdict(list)
        for grp, *rest in db.execute(f"SELECT grp, {_UPDATE} FROM updates ORDER BY grp, version"):
            updates[grp].append(UpdateRecord(*rest))
        roster: dict[str, list[RosterRecord]] = defaultdict(list)
        for grp, *rest in db.execute("SELECT grp, replica_id, admin, incarnation FROM roster ORDER BY grp, replica_id"):
            roster[grp].append(RosterRecord(*rest))
        return {
            str(name): assemble(
                str(name), cluster_id, epoch, _group(rest), updates[name], roster[name], _kept(db, str(name))
            )
            for name, *rest in db.execute(f"SELECT name, {_GROUP} FROM groups ORDER BY name").fetchall()
        }


def _group(row: Sequence[Any]) -> GroupRecord:
    r = GroupRecord(*row)
    return replace(r, rewinding=bool(r.rewinding))


def _keep(db: sqlite3.Connection, group: str, kept: Kept | None, ours: set[str]) -> None:
    """Store what is kept of the version that is decided, in place of the one before. ``ours``: bodies that we wrote."""
    needs = kept.needs if kept is not None else ()
    rows = db.execute("SELECT rowid, CAST(id AS BLOB) FROM bodies WHERE grp = ?", (group,))
    there = {str(i, "utf-8", "replace"): rowid for rowid, i in rows.fetchall()}
    stays = ours.intersection(there).intersection(needs)
    db.executemany("DELETE FROM bodies WHERE rowid = ?", [(rowid,) for i, rowid in there.items() if i not in stays])
    if kept is None:
        db.execute("DELETE FROM kept WHERE grp = ?", (group,))
        return
    new = [(group, i, kept.bodies[i]) for i in needs if i not in stays]
    db.executemany("INSERT INTO bodies (grp, id, body) VALUES (?, ?, ?)", new)
    ours.clear()
    ours.update(needs)
    layouts = json.dumps([[i, len(d)] for i, d in kept.digests])
    digests = b"".join(d for _, d in kept.digests)
    row = (group, kept.update_id, kept.manifest_id, kept.verify, layouts, digests, kept.seal)
    columns = "grp, update_id, manifest, verify, layouts, digests, seal"
    db.execute(f"INSERT OR REPLACE INTO kept ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)


def _kept(db: sqlite3.Connection, group: str) -> Kept | None:
    """As it was stored. What cannot be read comes back without digests, so that its seal does not fit: it is no ground
    to refuse a whole store."""
    columns = ("update_id", "manifest", "verify", "layouts", "seal", "digests")
    query = f"SELECT {', '.join(f'CAST({c} AS BLOB)' for c in columns)} FROM kept WHERE grp = ?"
    row = db.execute(query, (group,)).fetchone()
    if row is None:
        return None
    packed = row[5]
    update_id, manifest_id, verify, layouts, seal = (str(text, "utf-8", "replace") for text in row[:5])
    digests: list[tuple[str, bytes]] = []
    try:
        at = 0
        for body_id, size in json.loads(layouts):
            digests.append((str(body_id), bytes(packed[at : at + size])))
            at += size
    except (TypeError, ValueError):
        digests = []
    rows = db.execute("SELECT CAST(id AS BLOB), CAST(body AS BLOB) FROM bodies WHERE grp = ?", (group,))
    bodies = {str(i, "utf-8", "replace"): bytes(body) for i, body in rows}
    return Kept(update_id, manifest_id, verify, tuple(digests), bodies, seal)


def _unfit(kind: str, e: Exception) -> StoreError:
    return StoreError(f"a {kind!r} write holds what SQLite cannot: {e}")
