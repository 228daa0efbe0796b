"""The words in which the state of a group is told: phases, stages, modes, policies. The proto's, without prefixes."""

from __future__ import annotations

from enum import IntEnum, StrEnum

__all__ = [
    "Admin",
    "CachePolicy",
    "Evidence",
    "Liveness",
    "Mode",
    "ParityPolicy",
    "PauseMode",
    "Phase",
    "Process",
    "Stage",
    "Verdict",
    "Verify",
    "Weights",
]


class Phase(StrEnum):
    """Where an update stands."""

    PREPARING = "PREPARING"
    TRANSFERRING = "TRANSFERRING"
    VERIFYING = "VERIFYING"
    DECIDING = "DECIDING"
    COMMITTED = "COMMITTED"
    ABORTING = "ABORTING"
    ABORTED = "ABORTED"


class Weights(StrEnum):
    """A replica's weights."""

    JOINING = "JOINING"
    READY = "READY"
    UPDATING = "UPDATING"
    PENDING = "PENDING"
    DIRTY = "DIRTY"


class Liveness(StrEnum):
    """Whether a member is there. SUSPECT: silent past its lease, evicted once an update waits on it."""

    LIVE = "LIVE"
    SUSPECT = "SUSPECT"
    LOST = "LOST"


class Admin(StrEnum):
    """What operators (or the replica itself) decided about a replica."""

    ACTIVE = "ACTIVE"
    DRAINING = "DRAINING"
    LEAVING = "LEAVING"
    PINNED = "PINNED"
    ASLEEP = "ASLEEP"
    QUARANTINED = "QUARANTINED"


class Mode(StrEnum):
    """How a replica takes an update; ANY only as a preference."""

    ANY = "ANY"
    STAGED = "STAGED"
    IN_PLACE = "IN_PLACE"


class PauseMode(StrEnum):
    """What happens to requests in flight; DEFAULT only in requests."""

    DEFAULT = "DEFAULT"
    KEEP = "KEEP"
    WAIT = "WAIT"
    ABORT = "ABORT"


class CachePolicy(StrEnum):
    """What happens to caches; DEFAULT only in requests."""

    DEFAULT = "DEFAULT"
    CLEAR = "CLEAR"
    KEEP = "KEEP"
    SALT = "SALT"


class Verify(StrEnum):
    """How much is hashed; DEFAULT in requests and policies only."""

    DEFAULT = "DEFAULT"
    OFF = "OFF"
    SAMPLED = "SAMPLED"
    FULL = "FULL"


class Verdict(StrEnum):
    """What a parity check found; NOT_MEASURED: nothing was compared."""

    AT_PARITY = "AT_PARITY"
    NOT_AT_PARITY = "NOT_AT_PARITY"
    NOT_MEASURED = "NOT_MEASURED"


class ParityPolicy(StrEnum):
    """What a parity check that failed means to its replica."""

    RECORD = "RECORD"
    QUARANTINE = "QUARANTINE"


class Evidence(IntEnum):
    """How strong a receipt is."""

    NONE = 0
    RECEIVED = 1
    CONSUMED = 2
    LIVE = 3


class Stage(IntEnum):
    """How far a replica is in an update; rises, but ABORTED and FAILED may follow any before APPLIED."""

    NONE = 0
    JOINED = 1
    ARMED = 2
    RECEIVED = 3
    PREPARED = 4
    APPLIED = 5
    ABORTED = 6
    FAILED = 7


class Process(StrEnum):
    """State of a member's process, as its heartbeat helper sees it."""

    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    DEAD = "DEAD"
