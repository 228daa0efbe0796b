"""What the parts of a publish share: who this rank is, what it is doing, and the ways in which an update ends badly."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.v1 import common_pb2, update_pb2

from .channels import ChannelPool
from .client import Client
from .errors import failure_from_proto
from .plans import PlanCache

__all__ = [
    "AttemptFailed",
    "Rank",
    "RanksDisagree",
    "UpdateEnded",
    "UserCode",
    "failures_of",
    "guilty",
    "is_aborted",
    "is_over",
    "is_undecided",
]

_UNDECIDED = frozenset(
    {update_pb2.UPDATE_PHASE_PREPARING, update_pb2.UPDATE_PHASE_TRANSFERRING, update_pb2.UPDATE_PHASE_VERIFYING}
)
_QUOTED = re.compile(r"'([^']+/\d+)'")
#: Failures that a replica does not have for the sole reason that the update is being aborted.
_OWN = frozenset(
    {
        Reason.MEMBER_LOST,
        Reason.ENGINE,
        Reason.RESOURCE,
        Reason.DIGEST_MISMATCH,
        Reason.INCOMPLETE,
        Reason.MANIFEST_MISMATCH,
        Reason.CAPABILITY,
    }
)
_ABORTS = frozenset({update_pb2.UPDATE_PHASE_ABORTING, update_pb2.UPDATE_PHASE_ABORTED})


def is_undecided(update: update_pb2.UpdateInfo) -> bool:
    """Whether an update is open and may still be aborted."""
    return update.phase in _UNDECIDED


def is_aborted(update: update_pb2.UpdateInfo) -> bool:
    """Whether an update aborts or was aborted."""
    return update.phase in _ABORTS


def is_over(update: update_pb2.UpdateInfo) -> bool:
    """Whether an update's outcome is known and, if it was aborted, its members are drained."""
    return update.phase in (update_pb2.UPDATE_PHASE_COMMITTED, update_pb2.UPDATE_PHASE_ABORTED)


class UpdateEnded(Exception):
    """The coordinator aborts the update. Internal."""

    def __init__(self, update: update_pb2.UpdateInfo) -> None:
        self.update = update
        self.failure = failure_from_proto(update.failure)
        super().__init__(str(self.failure))

    @property
    def by_rank(self) -> bool:
        """Whether a trainer rank is to blame: then the other ranks' collectives are lost as well."""
        return self.failure.member.startswith("rank/")


class RanksDisagree(Exception):
    """Another rank of this trainer opened an update that this rank does not publish. Internal."""


class AttemptFailed(Exception):
    """An attempt is over without a commit; what it left behind is cleaned up. Internal."""

    version = 0  # of the update, where nothing more was heard of it

    def __init__(
        self, failure: Failure, update: update_pb2.UpdateInfo | None, *, refused: bool = False, update_id: str = ""
    ) -> None:
        super().__init__(str(failure))
        self.failure, self.update, self.refused, self.update_id = failure, update, refused, update_id


def failures_of(update: update_pb2.UpdateInfo) -> dict[str, Failure]:
    """Each replica that says it failed, and each peer that a sending rank lost (whose names its words quote)."""
    found = {o.replica_id: failure_from_proto(o.failure) for o in update.outcomes if o.HasField("failure")}
    failure = failure_from_proto(update.failure)
    for replica_id in _lost_peers(update):
        found.setdefault(replica_id, Failure(Reason.TRANSPORT, failure.message, replica_id, failure.phase))
    return found


def guilty(update: update_pb2.UpdateInfo) -> set[str]:
    """The replicas that an aborted update failed by; the others failed only because it was aborted. Once the update is
    drained this is equal on all ranks."""
    own = {o.replica_id for o in update.outcomes if o.unquiesced or failure_from_proto(o.failure).reason in _OWN}
    member = update.failure.member  # a replica, one of its workers ("r1/0"), or a rank
    names = set() if member.startswith("rank/") else {member, member.rpartition("/")[0]}
    named = {p.replica_id for p in update.participants if p.replica_id in names}
    restarted = update.failure.reason == common_pb2.REASON_MEMBER_RESTARTED
    return own | _lost_peers(update) | (set() if restarted else named)


def _lost_peers(update: update_pb2.UpdateInfo) -> set[str]:
    quoted = {name.rpartition("/")[0] for name in _QUOTED.findall(update.failure.message)}
    return {p.replica_id for p in update.participants if p.replica_id in quoted}


@dataclass
class UserCode:
    """Whether this rank is inside the source's iterator now, since when, and after which tensor."""

    since: float = 0.0
    after: str = ""
    spent: float = 0.0

    def text(self) -> str:
        """For people."""
        where = f"after tensor {self.after!r}" if self.after else "before its first tensor"
        return f"in the source's iterator {where} for {time.monotonic() - self.since:.1f} s"


@dataclass
class Rank:
    """What an attempt needs of its publisher."""

    client: Client
    group: str
    rank: int
    world_size: int
    generation: int
    ttl_s: float
    pool: ChannelPool
    plans: PlanCache
    progress: Callable[[int], None]
    request_ids: list[str] = field(default_factory=list)

    @property
    def member(self) -> str:
        """This rank as the contract names it."""
        return f"rank/{self.rank}"
