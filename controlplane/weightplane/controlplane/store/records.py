"""The rules of a write, shared by every store: given what is stored, what changes, or why it is refused.

Pure. A store reads the group's record and that of the write's update, asks ``settle``, and makes the changes in one
transaction together with the check of the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..core.events import Write
from ..core.group_state import GroupState
from ..core.kept import Kept, sealed
from ..core.model import Held, Replica
from ..core.reasons import Failure, Reason
from ..core.states import Admin, Liveness, Phase
from ..core.update_state import Update
from . import codec
from .base import StoredGroup, StoreError

__all__ = [
    "ABORTED",
    "COMMITTED",
    "OPEN",
    "Changes",
    "GroupRecord",
    "RosterRecord",
    "UpdateRecord",
    "assemble",
    "oldest_kept",
    "settle",
]

OPEN, ABORTED, COMMITTED = "", "ABORTED", "COMMITTED"


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One group. ``policy`` and ``trainer`` are JSON text; an empty ``trainer`` means none."""

    policy: str
    last_version: int = 0
    last_generation: int = 0
    committed_version: int = 0
    committed_update: str = ""
    committed_step: int = -1
    committed_lineage: str = ""
    committed_manifest: str = ""
    rewinding: bool = False
    trainer: str = ""


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """One update: ``epoch`` froze it, ``outcome`` is "" while it is open, ``doc`` is its JSON text."""

    update_id: str
    version: int
    epoch: int
    outcome: str
    decided_epoch: int
    doc: str


@dataclass(frozen=True, slots=True)
class RosterRecord:
    """One replica of the roster. ``admin`` "" removes it. ``incarnation``: the life that was put into ``admin``."""

    replica_id: str
    admin: str
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a write changes. ``abort_open`` comes first: every open update of the group becomes ABORTED.

    ``decides``: what is kept of the committed version is ``kept`` from now on.
    """

    group: GroupRecord | None = None
    abort_open: bool = False
    update: UpdateRecord | None = None
    roster: RosterRecord | None = None
    decides: bool = False
    kept: Kept | None = None


_NOTHING = Changes()


def settle(
    epoch: int,
    write: Write,
    state: GroupState,
    group: GroupRecord | None,
    record: UpdateRecord | None,
    kept: Kept | None = None,
) -> Changes | None:
    """What ``write`` changes under ``epoch`` (the store's); None = refused. ``record`` is that of ``write.update``.

    Raises ``StoreError`` for a write that makes no sense or cannot be encoded.
    """
    if write.epoch != epoch:
        return None  # a higher one fences us; a lower one means that the data is not what we opened
    try:
        known = group if group is not None else GroupRecord(_policy(state))
        if write.kind == "group":
            return Changes(_group(known, state))
        if write.kind == "roster":
            return Changes(None if group is not None else known, roster=_roster(write, state))
        u = write.update
        if u is None:
            raise StoreError(f"a {write.kind!r} write without an update")
        if write.kind == "freeze":
            return _freeze(write, u, known, record)
        if write.kind == "decide":
            return _decide(write, u, known, record, kept)
        if write.kind == "close":
            return _close(write, u, known, record)
        raise StoreError(f"no write is of kind {write.kind!r}")
    except (AttributeError, TypeError, ValueError) as e:
        raise StoreError(f"a {write.kind!r} write of group {state.group!r} cannot be encoded: {e}") from e


def oldest_kept(newest: UpdateRecord, keep: int) -> int:
    """The oldest version that the history keeps once ``newest`` is written: of ``keep`` closed updates, and one more
    while it is open. By number, since each update mints the next: to count them would read the whole history."""
    return newest.version - keep + (newest.outcome != OPEN)


def _policy(state: GroupState) -> str:
    return codec.dumps(codec.encode_policy(state.policy))


def _doc(update: Update) -> str:
    return codec.dumps(codec.encode_update(update))


def _group(known: GroupRecord, state: GroupState) -> GroupRecord:
    new = replace(known, policy=_policy(state))
    if state.last_generation < known.last_generation:
        return new  # generations never fall
    trainer = codec.dumps(codec.encode_trainer(state.trainer)) if state.trainer is not None else ""
    granted = state.last_generation > known.last_generation
    # Only a grant begins a rewind. A policy that was asked for while a decision was on its way must not revive it.
    rewinding = state.rewinding and (granted or known.rewinding)
    return replace(new, trainer=trainer, last_generation=state.last_generation, rewinding=rewinding)


def _roster(write: Write, state: GroupState) -> RosterRecord:
    replica_id, admin = write.data.get("replica_id"), write.data.get("admin")
    if not isinstance(replica_id, str) or not replica_id or not isinstance(admin, str):
        raise StoreError(f"a roster write needs replica_id and admin, found {dict(write.data)!r}")
    if not admin:
        return RosterRecord(replica_id, "")
    r = state.replicas.get(replica_id)
    return RosterRecord(replica_id, Admin(admin).value, r.incarnation if r is not None else "")


def _freeze(write: Write, u: Update, known: GroupRecord, record: UpdateRecord | None) -> Changes | None:
    if record is not None:
        same = (record.outcome, record.epoch, record.version) == (OPEN, write.epoch, u.version)
        return _NOTHING if same else None
    if u.version <= known.last_version:
        return None
    new = UpdateRecord(u.update_id, u.version, write.epoch, OPEN, 0, _doc(replace(u, frozen=True)))
    return Changes(replace(known, last_version=u.version), abort_open=True, update=new)


def _decide(
    write: Write, u: Update, known: GroupRecord, record: UpdateRecord | None, kept: Kept | None
) -> Changes | None:
    if record is None or (record.epoch, record.version) != (write.epoch, u.version):
        return None  # never frozen, or frozen under another epoch: no record means aborted
    if record.outcome == COMMITTED and record.decided_epoch == write.epoch:
        return _NOTHING
    if record.outcome != OPEN:
        return None
    if kept is not None and kept.update_id != u.update_id:
        raise StoreError(f"a 'decide' write of update {u.update_id} with what is kept of {kept.update_id}")
    decided = replace(u, phase=Phase.COMMITTED, frozen=True, decided_at=u.decided_at or u.decide_at)
    group = replace(
        known,
        committed_version=u.version,
        committed_update=u.update_id,
        committed_step=u.options.trainer_step,
        committed_lineage=u.lineage,
        committed_manifest=u.options.manifest_id,
        rewinding=known.rewinding and u.generation != known.last_generation,
    )
    new = UpdateRecord(u.update_id, u.version, record.epoch, COMMITTED, write.epoch, _doc(decided))
    return Changes(group, update=new, decides=True, kept=sealed(kept) if kept is not None else None)


def _close(write: Write, u: Update, known: GroupRecord, record: UpdateRecord | None) -> Changes | None:
    outcome = u.phase.value
    if outcome not in (ABORTED, COMMITTED):
        raise StoreError(f"update {u.update_id} is {u.phase}: only an outcome can be written by close")
    if record is None and outcome == COMMITTED:
        # One older than what is committed may have left the history: nothing to record. Any other was never decided.
        gone = u.version < known.committed_version or u.update_id == known.committed_update
        return _NOTHING if gone else None
    if record is None:  # its freeze was never stored
        if u.version <= known.last_version:
            return _NOTHING
        new = UpdateRecord(u.update_id, u.version, u.epoch, ABORTED, 0, _doc(u))
        return Changes(replace(known, last_version=u.version), update=new)
    if record.outcome != outcome and not (record.outcome == OPEN and outcome == ABORTED):
        return None
    return Changes(update=replace(record, outcome=outcome, doc=_doc(u)))


def assemble(
    name: str,
    cluster_id: str,
    epoch: int,
    group: GroupRecord,
    updates: Iterable[UpdateRecord],
    roster: Iterable[RosterRecord],
    kept: Kept | None = None,
) -> StoredGroup:
    """The group that these records hold; ``updates`` in the order of their versions. Raises ``CodecError``."""
    frozen: Update | None = None
    history: dict[str, Update] = {}
    for record in updates:
        try:
            u = codec.decode_update(codec.loads(record.doc))
        except codec.CodecError as e:
            raise codec.CodecError(f"group {name!r}, update {record.update_id!r}: {e}") from None
        if record.outcome == OPEN:
            frozen = u
        else:
            history[u.update_id] = _over(u, record.outcome)
    try:
        trainer = codec.decode_trainer(codec.loads(group.trainer)) if group.trainer else None
        policy = codec.decode_policy(codec.loads(group.policy))
        members = {r.replica_id: Admin(r.admin) for r in roster}
    except (codec.CodecError, ValueError) as e:
        raise codec.CodecError(f"group {name!r}: {e}") from None
    lives = {r.replica_id: r.incarnation for r in roster}
    state = GroupState(
        name,
        cluster_id,
        epoch,
        policy=policy,
        last_version=group.last_version,
        committed=Held(group.committed_version, group.committed_update),
        committed_step=group.committed_step,
        committed_lineage=group.committed_lineage,
        committed_manifest=group.committed_manifest,
        rewinding=group.rewinding,
        roster=frozenset(members),
        replicas={rid: _placeholder(rid, a, lives[rid]) for rid, a in members.items() if a is not Admin.ACTIVE},
        trainer=replace(trainer, durable=True) if trainer is not None else None,
        last_generation=group.last_generation,
        history=history,
    )
    return StoredGroup(state, frozen, kept)


def _over(u: Update, outcome: str) -> Update:
    """An update as the history shows it, also when its coordinator died between the outcome and the close."""
    if u.phase.value == outcome and u.closed:
        return u
    failure = u.failure
    if outcome == ABORTED and failure is None:
        failure = Failure(Reason.UNKNOWN_OUTCOME, "no decision was stored, so it is aborted; why was not written down")
    return replace(u, phase=Phase(outcome), failure=failure, closed=True)


def _placeholder(replica_id: str, admin: Admin, incarnation: str) -> Replica:
    # A pin belongs to one life of the engine, so hello must be able to tell whether that life still goes on. The other
    # states outlive lives: without an incarnation, hello takes over everything that the replica says of itself.
    mine = incarnation if admin is Admin.PINNED else ""
    return Replica(replica_id, incarnation=mine, liveness=Liveness.LOST, admin=admin, reported=False)
