"""Why a call is refused or an update fails. The names are those of the contract's ``Reason`` without their prefix."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto

__all__ = ["Failure", "Reason"]


class Reason(StrEnum):
    """One reason per kind of refusal or failure; ``server/errors.py`` gives each its gRPC code."""

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[str]) -> str:
        return name

    INVALID_ARGUMENT = auto()
    DEADLINE_REQUIRED = auto()
    NOT_IMPLEMENTED = auto()
    UNKNOWN_GROUP = auto()
    UNKNOWN_REPLICA = auto()
    UNKNOWN_UPDATE = auto()
    UNKNOWN_MANIFEST = auto()
    UNKNOWN_PLAN = auto()
    GROUP_EXISTS = auto()
    TRAINER_HELD = auto()
    TRAINER_FENCED = auto()
    SESSION_SUPERSEDED = auto()
    UPDATE_IN_PROGRESS = auto()
    WRONG_PHASE = auto()
    NOT_ENOUGH_REPLICAS = auto()
    REBIND_REQUIRED = auto()
    MANIFEST_MISMATCH = auto()
    PLACEMENT_MISMATCH = auto()
    NO_TRANSPORT = auto()
    CAPABILITY = auto()
    DIGESTS_REQUIRED = auto()
    DIGEST_MISMATCH = auto()
    INCOMPLETE = auto()
    DEADLINE = auto()
    MEMBER_LOST = auto()
    MEMBER_RESTARTED = auto()
    TRANSPORT = auto()
    ENGINE = auto()
    RESOURCE = auto()
    ABORTED_BY_CALLER = auto()
    SUPERSEDED = auto()
    COORDINATOR_RESTARTED = auto()
    UNKNOWN_OUTCOME = auto()
    UNAUTHENTICATED = auto()
    PERMISSION_DENIED = auto()
    LIMIT = auto()
    BASE_MISMATCH = auto()
    INTERNAL = auto()
    PEER_RANK_FAILED = auto()
    REQUEST_ID_REUSED = auto()


@dataclass(frozen=True)
class Failure:
    """One failure, fit to be shown: what, where, expected, found, how to mend it. ``tensors`` holds at most five."""

    reason: Reason
    message: str
    member: str = ""
    phase: str = ""
    tensors: tuple[str, ...] = ()
    tensor_count: int = 0

    def __str__(self) -> str:
        where = f" [{self.member}]" if self.member else ""
        return f"{self.reason}{where}: {self.message}"
