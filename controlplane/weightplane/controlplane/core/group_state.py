"""Everything of one group, as the coordinator knows it. A frozen value; ``group.step`` makes new ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .model import NONE_HELD, Config, Held, Policy, Replica, Trainer, Waiter
from .persistent import PersistentMap
from .update_state import CatchUp, Update

__all__ = ["GroupState"]


@dataclass(frozen=True)
class GroupState:
    """Everything of one group. ``roster`` names each replica known to the store; ``healing`` those that were
    DIRTY when the open update froze, and say so until they apply it. ``writes`` are under way: (kind, about
    what); ``unsaved`` are those that ended unknown and are asked for again; ``acks`` names the caller who waits for
    a write. ``catch_ups`` are under way, by replica, looked at last at ``caught_at``; ``secret``: random bytes of this
    epoch, for their keys. ``unproven``: why nobody can be caught up to what is committed, though there may be copies:
    what was stored to prove it, of a former epoch, is not there."""

    group: str
    cluster_id: str
    epoch: int
    config: Config = field(default_factory=Config)
    policy: Policy = field(default_factory=Policy)
    revision: int = 0
    last_version: int = 0
    committed: Held = NONE_HELD
    committed_step: int = -1
    committed_lineage: str = ""
    committed_manifest: str = ""
    rewinding: bool = False
    epoch_began: float = 0.0
    ticked_at: float = -1.0
    sessions: int = 0
    replicas: Mapping[str, Replica] = field(default_factory=lambda: PersistentMap[Replica]())
    roster: frozenset[str] = frozenset()
    trainer: Trainer | None = None
    last_generation: int = 0
    open: Update | None = None
    healing: frozenset[str] = frozenset()
    history: dict[str, Update] = field(default_factory=dict)
    requests: Mapping[str, str] = field(default_factory=dict)
    queue: tuple[tuple[Waiter, object], ...] = ()
    waiters: tuple[Waiter, ...] = ()
    writes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    unsaved: frozenset[tuple[str, str]] = frozenset()
    acks: Mapping[str, str] = field(default_factory=dict)
    stepped_down: bool = False
    catch_ups: Mapping[str, CatchUp] = field(default_factory=dict)
    caught_at: float = 0.0
    secret: bytes = b""
    unproven: str = ""
