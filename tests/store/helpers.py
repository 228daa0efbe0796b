"""Updates, states and writes for the store's tests."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from weightplane.controlplane.core import kept as core
from weightplane.controlplane.core.events import Write
from weightplane.controlplane.core.group_state import GroupState
from weightplane.controlplane.core.kept import Kept
from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.model import Config, Replica, Trainer
from weightplane.controlplane.core.placement import full_placement
from weightplane.controlplane.core.planner import make_plan
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import Admin, Mode, Phase
from weightplane.controlplane.core.update_state import Options, Part, Update
from weightplane.controlplane.store import Store, StoredGroup
from weightplane.controlplane.store.memory import Disk, MemoryStore
from weightplane.controlplane.store.sqlite import SqliteStore

GROUP = "policy-model"
Opener = Callable[[], Store]


def update(version: int, epoch: int = 1, update_id: str = "", replicas: int = 2) -> Update:
    parts = {
        f"r{i}": Part(f"r{i}", f"life-{i}", Mode.STAGED, "", ("c0", "c1"), bytes_received=1 << 40)
        for i in range(replicas)
    }
    return Update(
        update_id=update_id or f"u{version}",
        version=version,
        lineage="L1",
        generation=1,
        epoch=epoch,
        request_id=f"req-{update_id or version}",
        fingerprint="fp",
        options=Options("m1", trainer_step=version * 10),
        phase=Phase.PREPARING,
        parts=parts,
        absent=(("r9", "it is silent"),),
        channels=("c0", "c1"),
        started_at=5.0,
        deadline=125.0,
        prepare_deadline=124.0,
    )


def manifest(tensors: int) -> Manifest:
    return Manifest.of(TensorMeta(f"t{i}", "float32", (i + 1, 3)) for i in range(tensors))


def proven(u: Update, tensors: int = 3) -> tuple[Update, Kept]:
    """An update with a manifest of its own, and what is kept of it: digests that follow from its id."""
    m = manifest(tensors)
    body_id, body = core.manifest_body(m)
    plan = make_plan(m, [full_placement("rank/0", m)], [full_placement("r0/0", m)], 4096)
    regions_id, regions = core.regions_body(plan)
    table = array("Q", (hash((u.version, i)) & (1 << 64) - 1 for i in range(tensors)))
    digests = ((regions_id, core.pack(table)),)
    kept = Kept(u.update_id, m.id, "FULL", digests, {body_id: body, regions_id: regions})
    return replace(u, options=replace(u.options, manifest_id=m.id)), kept


def deciding(u: Update) -> Update:
    return replace(u, phase=Phase.DECIDING, frozen=True, decide_at=9.0, deciding_until=10.5)


def aborted(u: Update) -> Update:
    return replace(u, phase=Phase.ABORTED, closed=True, failure=Failure(Reason.DEADLINE, "too late"), ended_at=11.0)


def committed(u: Update) -> Update:
    return replace(u, phase=Phase.COMMITTED, closed=True, decided_at=9.5, ended_at=11.0)


def trainer(generation: int = 1) -> Trainer:
    return Trainer(f"t{generation}", f"life-{generation}", generation, 4, f"L{generation}")


def state(epoch: int = 1, keep: int = 1000, **changes: Any) -> GroupState:
    return replace(GroupState(GROUP, "c", epoch, config=Config(history=keep)), **changes)


class Desk:
    """Writes to one store under one epoch, in few words."""

    def __init__(self, store: Store, epoch: int, keep: int = 1000) -> None:
        self.store, self.epoch, self.keep = store, epoch, keep

    def _write(
        self, kind: str, u: Update | None = None, s: GroupState | None = None, kept: Kept | None = None, **data: object
    ) -> bool:
        write = Write("w", kind, self.epoch, u, data)
        return self.store.write(GROUP, write, s if s is not None else state(self.epoch, self.keep), kept)

    def freeze(self, u: Update) -> bool:
        return self._write("freeze", u)

    def decide(self, u: Update, kept: Kept | None = None) -> bool:
        return self._write("decide", deciding(u), kept=kept)

    def close(self, u: Update) -> bool:
        return self._write("close", u)

    def group(self, s: GroupState) -> bool:
        return self._write("group", s=s)

    def roster(self, replica_id: str, admin: Admin | str, incarnation: str = "life-1") -> bool:
        r = Replica(replica_id, incarnation)
        return self._write("roster", s=state(self.epoch, replicas={replica_id: r}), replica_id=replica_id, admin=admin)


def rival(path: Path, **options: Any) -> SqliteStore:
    """A store over a file that another may have open: as if their lock had been taken away."""
    Path(f"{path}-lock").unlink(missing_ok=True)
    return SqliteStore(path, **options)


def openers(kind: str, tmp_path: Path) -> Opener:
    """Makes stores over one and the same data."""
    if kind == "memory":
        disk = Disk()
        return lambda: MemoryStore(disk)
    return lambda: rival(tmp_path / "store.db", busy_timeout_s=0.2)


def reopen(opener: Opener) -> StoredGroup:
    store = opener()
    try:
        return store.open().groups[GROUP]
    finally:
        store.close()


def desk(opener: Opener, keep: int = 1000) -> Desk:
    store = opener()
    return Desk(store, store.open().epoch, keep)
