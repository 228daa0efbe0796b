"""What durable state is to the coordinator: the ``Store`` protocol, its errors, and what an ``open`` gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ..core.events import Write
from ..core.group_state import GroupState
from ..core.kept import Kept
from ..core.update_state import Update

__all__ = ["Loaded", "Store", "StoreError", "StoreHeld", "StoreUnknown", "StoredGroup"]


class StoreError(Exception):
    """A definite failure: what was asked did not happen and will not. The message says what to do."""


class StoreHeld(StoreError):
    """Another process leads on this store. The message names it and no path: whoever asks may read it."""


class StoreUnknown(Exception):
    """The write may or may not be durable: ask ``read_decision``, or step down. Deliberately no ``StoreError``."""


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """One group as stored, ready for ``core.group.restarted(state, frozen, epoch, now)``.

    ``state.config`` is the default one: the server puts its own. ``state.history`` holds closed updates in the order of
    their versions, decided ones as COMMITTED also where the coordinator died before it closed them. ``state.replicas``
    holds a LOST placeholder per roster entry that is not ACTIVE, so that its administrative state survives a restart.
    ``frozen`` is the update that was opened and neither decided nor closed. ``kept`` is what was stored with the last
    decision, as it was read: ``core.kept.problem`` says whether it can be used.
    """

    state: GroupState
    frozen: Update | None = None
    kept: Kept | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a store held when it was opened. ``epoch`` is ours from now on, and already durable."""

    cluster_id: str
    epoch: int
    groups: Mapping[str, StoredGroup]


class Store(Protocol):
    """Durable state of one coordinator. Every method blocks.

    Threads: made for one worker thread that takes the writes in the order in which the core asked for them. The stores
    here are thread-safe all the same: calls are serialised. None may be used across a fork.

    Time: a store bounds its waits for locks, but no program can bound an fsync of a hung disk. The caller keeps its own
    time-out and treats an answer that is late as unknown.

    A method of a closed store raises ``StoreError``.
    """

    def open(self) -> Loaded:
        """Take over: durably raise the epoch by one, which fences every earlier opener, and read everything.

        Raises ``StoreError`` if the data cannot be used (unreachable, corrupt, written by a newer release), nothing was
        changed then; ``StoreHeld`` if another process leads. Raises ``StoreUnknown`` if the new epoch may be durable:
        open again.
        """
        ...

    def write(self, group: str, write: Write, state: GroupState, kept: Kept | None = None) -> bool:
        """Make one write of the core durable, in one transaction.

        ``state`` is the group's state as of the step that asked for the write. Kinds:

        - ``freeze``: a new open update with its participants; its version can never be minted again. An earlier update
          that is open still, undecided, is ABORTED by this.
        - ``decide``: the one decision. Only for the open update, frozen under this epoch. A repeat under the same epoch
          is True again. ``kept`` is stored with it, in place of what was stored with the decision before; bodies that
          are there already are not written again.
        - ``close``: the outcome, for the history (the last ``state.config.history`` per group are kept). It records
          what ``decide`` stored and never makes a decision: COMMITTED without a stored decision is refused. The one
          write that a loss of power may undo.
        - ``group``: policy, trainer, generation.
        - ``roster``: ``replica_id`` and its ``admin``; "" removes it.

        True: durable. False: fenced, or against what is stored (see ``decide``, ``close``); whoever gets this no longer
        leads. Raises ``StoreUnknown`` if the outcome is not known, ``StoreError`` if it definitely did not happen.
        """
        ...

    def read_decision(self, group: str, update_id: str) -> bool:
        """Whether the decision to commit is stored. After a ``StoreUnknown``, False is final: it cannot surface later.

        Raises ``StoreUnknown`` if that cannot be told, ``StoreError`` if the store cannot be read.
        """
        ...

    def leads(self, epoch: int) -> bool:
        """Whether ``epoch`` is the newest. Raises ``StoreError`` if the store cannot be read."""
        ...

    def close(self) -> None:
        """Release everything. A repeat is no error. Nothing is lost without it."""
        ...
