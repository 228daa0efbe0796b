"""One step being taken: the state so far, the effects so far, and the reason in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .events import Effect, Note, Push, PushTrainers, Reply, Write
from .evolve import replace
from .group_state import GroupState
from .model import Replica, Trainer
from .persistent import PersistentMap
from .reasons import Failure
from .update_state import Part, Update

__all__ = ["Tx"]


class Tx:
    """Collects what one event changes. Values are replaced, never mutated, so the old state stays intact."""

    def __init__(self, state: GroupState, now: float) -> None:
        self.state = state
        self.now = now
        self.effects: list[Effect] = []
        self.reasons: list[str] = []
        self._pushed: dict[str, None] = {}
        self._trainers: dict[str, None] = {}
        self._writes = 0

    # --- state ---

    def set(self, **changes: Any) -> None:
        """Replace fields of the group."""
        self.state = replace(self.state, **changes)

    def put_replica(self, replica: Replica) -> None:
        """Replace one replica."""
        self.set(replicas=PersistentMap.of(self.state.replicas).put(replica.replica_id, replica))

    def put_trainer(self, trainer: Trainer) -> None:
        """Replace the trainer."""
        self.set(trainer=trainer)

    def find(self, update_id: str) -> Update | None:
        """The open update or one of the history."""
        u = self.state.open
        if u is not None and u.update_id == update_id:
            return u
        return self.state.history.get(update_id)

    def put_update(self, update: Update) -> Update:
        """Replace an update, open or past."""
        u = self.state.open
        if u is not None and u.update_id == update.update_id:
            self.set(open=update)
        else:
            history = dict(self.state.history)
            history[update.update_id] = update
            self.set(history=history)
        return update

    def put_part(self, update: Update, part: Part) -> Update:
        """Replace one participant of an update."""
        return self.put_update(replace(update, parts=PersistentMap.of(update.parts).put(part.replica_id, part)))

    # --- effects ---

    def reply(self, call_id: str, failure: Failure | None = None, update_id: str = "") -> None:
        """Answer one caller."""
        self.effects.append(Reply(call_id, failure, update_id))

    def push(self, replica_ids: Iterable[str]) -> None:
        """Send these replicas their desired state, once, at the end of the step."""
        self._pushed.update(dict.fromkeys(replica_ids))

    def push_trainers(self, update_id: str = "") -> None:
        """Tell trainer ranks and watchers, once, at the end of the step."""
        self._trainers[update_id] = None

    def write_roster(self, replica_id: str, admin: str, call_id: str = "") -> None:
        """Write down that a replica belongs to the group, and its administrative state; "" = it does no more."""
        self.write("roster", subject=replica_id, call_id=call_id, replica_id=replica_id, admin=admin)

    def write(
        self, kind: str, update: Update | None = None, subject: str = "", call_id: str = "", **data: object
    ) -> str:
        """Ask for a durable write; its id comes back in ``Stored``, and only then is ``call_id`` answered."""
        self._writes += 1
        write_id = f"w{self.state.epoch}.{self.state.revision}.{self._writes}"
        about = (kind, update.update_id if update else subject)
        self.set(writes={**self.state.writes, write_id: about}, unsaved=self.state.unsaved - {about})
        if call_id:
            self.set(acks={**self.state.acks, write_id: call_id})
        self.effects.append(Write(write_id, kind, self.state.epoch, update, data))
        return write_id

    def say(self, text: str, update_id: str = "") -> None:
        """Give the reason of this step, fit for a person; it also goes to the log."""
        self.reasons.append(text)
        self.effects.append(Note(text, update_id))

    def quietly(self, text: str) -> None:
        """Give the reason of a step that changes nothing worth a log line."""
        self.reasons.append(text)

    def done(self, before: GroupState) -> tuple[GroupState, list[Effect], str]:
        """Close the step."""
        if self.state is not before:
            self.set(revision=before.revision + 1)
        if self._pushed:
            self.effects.append(Push(tuple(sorted(self._pushed))))  # callers give sets: their order is a process's own
        self.effects.extend(PushTrainers(u) for u in self._trainers)
        return self.state, self.effects, "; ".join(self.reasons) or "nothing to do"
