"""A store in memory: for tests, and for a control plane that may forget. With injectable faults."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from ..core.events import Write
from ..core.group_state import GroupState
from ..core.kept import Kept
from ..failpoints import FailpointError, hit
from .base import Loaded, StoreError, StoreUnknown
from .records import (
    ABORTED,
    COMMITTED,
    OPEN,
    Changes,
    GroupRecord,
    RosterRecord,
    UpdateRecord,
    assemble,
    oldest_kept,
    settle,
)

__all__ = ["Disk", "Fault", "MemoryStore"]


class Fault(Enum):
    """What an injected fault does to a call."""

    FAIL = auto()
    """Nothing is written; ``StoreError``."""
    UNKNOWN_WRITTEN = auto()
    """It is written; ``StoreUnknown``."""
    UNKNOWN_LOST = auto()
    """Nothing is written; ``StoreUnknown``."""


@dataclass(slots=True)
class _Group:
    record: GroupRecord
    updates: dict[str, UpdateRecord] = field(default_factory=dict)
    roster: dict[str, RosterRecord] = field(default_factory=dict)
    kept: Kept | None = None


@dataclass(slots=True)
class Disk:
    """What survives a restart: hand it to several stores to play restarts and rival coordinators. Thread-safe."""

    cluster_id: str = field(default_factory=lambda: secrets.token_hex(16))
    epoch: int = 0
    groups: dict[str, _Group] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)


class MemoryStore:
    """A ``Store`` over a ``Disk``. Thread-safe.

    ``inject`` queues a fault for the next write of a kind. ``delay``, if set, is called with ("freeze", "before") and
    the like around each write (and "read_decision"), outside the lock: it may sleep, block, or raise.
    """

    def __init__(self, disk: Disk | None = None) -> None:
        self.disk = disk if disk is not None else Disk()
        self.delay: Callable[[str, str], None] | None = None
        self._faults: list[tuple[str, Fault]] = []
        self._is_open = False

    def inject(self, fault: Fault, kind: str = "", times: int = 1) -> None:
        """Let the next ``times`` calls of ``kind`` fail; "" = any write. Kind "read_decision" is a call, too."""
        self._faults.extend([(kind, fault)] * times)

    def open(self) -> Loaded:
        """See ``Store.open``. Never fails, unless it is open already (``StoreError``)."""
        with self.disk.lock:
            if self._is_open:
                raise StoreError("this store is open already")
            self._is_open = True
            self.disk.epoch += 1
            d = self.disk
            groups = {
                name: assemble(
                    name,
                    d.cluster_id,
                    d.epoch,
                    g.record,
                    sorted(g.updates.values(), key=lambda r: r.version),
                    list(g.roster.values()),
                    g.kept,
                )
                for name, g in d.groups.items()
            }
            return Loaded(d.cluster_id, d.epoch, groups)

    def write(self, group: str, write: Write, state: GroupState, kept: Kept | None = None) -> bool:
        """See ``Store.write``. Raises what was injected."""
        fault = self._around(write.kind, "before")
        if fault is Fault.FAIL:
            raise StoreError(f"injected: the {write.kind} write failed")
        if fault is Fault.UNKNOWN_LOST:
            raise StoreUnknown(f"injected: the {write.kind} write is unknown")
        with self.disk.lock:
            self._check()
            g = self.disk.groups.get(group)
            record = g.updates.get(write.update.update_id) if g is not None and write.update is not None else None
            changes = settle(self.disk.epoch, write, state, g.record if g is not None else None, record, kept)
            if changes is not None:
                self._apply(group, changes, max(state.config.history, 1))
        self._around(write.kind, "after")
        if fault is Fault.UNKNOWN_WRITTEN:
            raise StoreUnknown(f"injected: the {write.kind} write is unknown")
        return changes is not None

    def read_decision(self, group: str, update_id: str) -> bool:
        """See ``Store.read_decision``. Raises what was injected."""
        fault = self._around("read_decision", "before")
        if fault is not None:
            raise (StoreError if fault is Fault.FAIL else StoreUnknown)("injected: the decision cannot be read")
        with self.disk.lock:
            self._check()
            g = self.disk.groups.get(group)
            record = g.updates.get(update_id) if g is not None else None
            if record is not None:
                return record.outcome == COMMITTED
            return g is not None and update_id != "" and g.record.committed_update == update_id

    def leads(self, epoch: int) -> bool:
        """See ``Store.leads``."""
        with self.disk.lock:
            self._check()
            return self.disk.epoch == epoch

    def close(self) -> None:
        """See ``Store.close``. The disk keeps everything; this store can be opened again, as a new epoch."""
        self._is_open = False

    def _check(self) -> None:
        if not self._is_open:
            raise StoreError("this store is not open")

    def _around(self, kind: str, when: str) -> Fault | None:
        try:
            hit(f"store.{kind}.{when}")
        except FailpointError as e:
            raise (StoreError if when == "before" else StoreUnknown)(str(e)) from e
        if self.delay is not None:
            self.delay(kind, when)
        if when != "before":
            return None
        any_write = ("",) if kind != "read_decision" else ()
        for i, (wanted, fault) in enumerate(self._faults):
            if wanted == kind or wanted in any_write:
                del self._faults[i]
                return fault
        return None

    def _apply(self, name: str, changes: Changes, keep: int) -> None:
        g = self.disk.groups.get(name)
        if changes.group is not None:
            if g is None:
                g = self.disk.groups[name] = _Group(changes.group)
            g.record = changes.group
        if g is None:
            return
        if changes.abort_open:
            for r in [r for r in g.updates.values() if r.outcome == OPEN]:
                g.updates[r.update_id] = replace(r, outcome=ABORTED)
        if changes.update is not None:
            g.updates[changes.update.update_id] = changes.update
            oldest = oldest_kept(changes.update, keep)
            for update_id in [r.update_id for r in g.updates.values() if r.outcome != OPEN and r.version < oldest]:
                del g.updates[update_id]
        if changes.decides:
            g.kept = changes.kept
        if changes.roster is not None and changes.roster.admin:
            g.roster[changes.roster.replica_id] = changes.roster
        elif changes.roster is not None:
            g.roster.pop(changes.roster.replica_id, None)
