"""What happens to a group (events) and what the group wants done (effects).

Events carry every bit of randomness and time that a decision needs, so that a step is a pure function. ``call_id``
names a waiting caller; the answer goes back in a ``Reply``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .model import Condition, Held, Offer, Policy, Replica, Retained, Timings
from .reasons import Failure
from .states import Admin, CachePolicy, Evidence, Mode, PauseMode, Process, Stage, Verify
from .update_state import Parity, PlanSummary, Update

# --- events: agents -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplicaHello:
    """A control session of a replica began. ``replica`` holds what the hello says; its states are ignored."""

    session: int
    replica: Replica


@dataclass(frozen=True)
class RankHello:
    """A session (or, with ``watch``, a WatchUpdate stream) of a trainer rank began."""

    call_id: str
    session: int
    generation: int
    rank: int
    watch: bool = False


@dataclass(frozen=True)
class RankGone:
    """The WatchUpdate stream of a rank ended: its lease is over unless a session holds it."""

    generation: int
    rank: int


@dataclass(frozen=True)
class Beat:
    """A heartbeat of a replica, or of ``rank/<r>`` under ``generation``."""

    agent_id: str
    incarnation: str
    generation: int = 0
    progress: int = 0
    process: Process = Process.RUNNING


@dataclass(frozen=True)
class Report:
    """What a replica holds and does; the newest ``sequence`` of an incarnation wins."""

    replica_id: str
    incarnation: str
    sequence: int
    held: tuple[Held, ...]
    epoch: int = 0
    dirty: bool = False
    dirty_reason: Failure | None = None
    update_id: str = ""
    stage: Stage = Stage.NONE
    armed_seq: int = 0
    bytes_received: int = 0
    failure: Failure | None = None
    timings: Timings = Timings()  # noqa: RUF009 - frozen
    pause_holders: tuple[str, ...] = ()
    updates_since_start: int = 0
    leaving: bool = False
    running_requests: int = 0
    asleep: tuple[str, ...] = ()
    sleep_order: int = 0
    sleep_failure: Failure | None = None
    retained: Retained | None = None
    serve_failures: tuple[tuple[str, Failure], ...] = ()


@dataclass(frozen=True)
class Conditions:
    """How an engine's settings compare with what the group declares; replaces what its replica told before."""

    replica_id: str
    incarnation: str
    conditions: tuple[Condition, ...]


@dataclass(frozen=True)
class RankReport:
    """What a trainer rank retains, and which catch-ups (catch_up_id, why) it cannot serve. ``host_id``, ``offers``: how
    its copy can be sent."""

    generation: int
    rank: int
    retained: Retained | None = None
    serve_failures: tuple[tuple[str, Failure], ...] = ()
    host_id: str = ""
    offers: tuple[Offer, ...] = ()


@dataclass(frozen=True)
class Leave:
    """A replica said goodbye."""

    replica_id: str
    incarnation: str


@dataclass(frozen=True)
class WorkerPlacement:
    """A worker's placement of a manifest is complete."""

    replica_id: str
    incarnation: str
    manifest_id: str
    worker: int
    placement_id: str


# --- events: trainers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InitTransfer:
    """A rank asks for the lease or rebinds. ``lineage`` is an unused random id, ``seed`` 32 unused secret bytes."""

    call_id: str
    deadline: float
    request_id: str
    trainer_id: str
    incarnation: str
    rank: int
    world_size: int
    generation: int
    lineage: str
    seed: bytes
    takeover: bool = False
    resume_step: int | None = None
    host_id: str = ""
    device_uuid: str = ""
    offers: tuple[Offer, ...] = ()
    refusals: tuple[tuple[str, str], ...] = ()
    transport: str = ""
    bucket_bytes: int = 0


@dataclass(frozen=True)
class RankPlacement:
    """A rank's placement of a manifest is complete."""

    generation: int
    rank: int
    manifest_id: str
    placement_id: str


@dataclass(frozen=True)
class StartUpdate:
    """Opens an update. The manifest is known and complete (the server checked)."""

    call_id: str
    deadline: float
    request_id: str
    generation: int
    manifest_id: str
    trainer_step: int
    update_id: str
    fingerprint: str = ""
    selector: Mapping[str, str] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    at_least: int | None = None
    on_busy: str = "REFUSE"
    mode: Mode = Mode.ANY
    pause: PauseMode = PauseMode.DEFAULT
    cache: CachePolicy = CachePolicy.DEFAULT
    verify: Verify = Verify.DEFAULT
    update_timeout_s: float = 0.0
    prepare_timeout_s: float = 0.0
    unix_ms: int = 0


@dataclass(frozen=True)
class UpdateWeights:
    """Declares buckets as about to be sent. No ranges = every bucket."""

    call_id: str
    deadline: float
    generation: int
    update_id: str
    epoch: int
    rank: int
    seq: int
    ranges: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class DigestsIn:
    """A rank's expected digests for one channel's plan are complete."""

    generation: int
    update_id: str
    epoch: int
    rank: int
    plan_id: str


@dataclass(frozen=True)
class FinishUpdate:
    """A rank sent everything."""

    call_id: str
    deadline: float
    generation: int
    update_id: str
    epoch: int
    rank: int
    gather_s: float = 0.0
    parity: tuple[Parity, ...] = ()


@dataclass(frozen=True)
class AbortUpdate:
    """Aborts; ``generation`` 0 = an operator. ``update_id`` "" = whatever is open."""

    call_id: str
    deadline: float
    generation: int
    update_id: str
    message: str
    rank: int = -1


@dataclass(frozen=True)
class CloseTransfer:
    """A rank gives up the hold."""

    call_id: str
    generation: int
    rank: int


# --- events: operators ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SetPolicy:
    """Replaces the group's policies."""

    call_id: str
    policy: Policy


@dataclass(frozen=True)
class SetPause:
    """Pauses (or, with ``on`` False, resumes) generation for one holder."""

    call_id: str
    deadline: float
    replica_ids: tuple[str, ...]
    holder: str
    on: bool
    mode: PauseMode = PauseMode.KEEP


@dataclass(frozen=True)
class SetAdmin:
    """Drains, pins, or puts a replica back to work."""

    call_id: str
    replica_id: str
    admin: Admin


@dataclass(frozen=True)
class SetSleep:
    """Puts a replica to sleep at ``level``."""

    call_id: str
    deadline: float
    replica_id: str
    level: int


@dataclass(frozen=True)
class SetAwake:
    """Wakes ``tags`` of a replica; none = all that sleeps."""

    call_id: str
    deadline: float
    replica_id: str
    tags: tuple[str, ...]


# --- events: the server itself --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallGone:
    """A waiting caller left. Nothing is undone."""

    call_id: str


@dataclass(frozen=True)
class PlanMade:
    """A channel's plan is ready, or cannot be made. ``ahead``: as it was asked for."""

    update_id: str
    channel_id: str
    summary: PlanSummary | None
    failure: Failure | None = None
    ahead: int = 0


@dataclass(frozen=True)
class Verified:
    """A participant's receipts were compared with the expected digests."""

    update_id: str
    replica_id: str
    incarnation: str
    evidence: Evidence
    failure: Failure | None = None


@dataclass(frozen=True)
class Stored:
    """A write ended: ``ok`` True, False (refused: our epoch no longer leads, or the update is over), None unknown.

    ``failed`` (with ``ok`` None) says why nothing was written for certain, a full disk say.
    """

    write_id: str
    ok: bool | None
    failed: str = ""


@dataclass(frozen=True)
class Tick:
    """Time passed."""


Event = (
    ReplicaHello
    | RankHello
    | RankGone
    | RankReport
    | Beat
    | Report
    | Conditions
    | Leave
    | WorkerPlacement
    | InitTransfer
    | RankPlacement
    | StartUpdate
    | UpdateWeights
    | DigestsIn
    | FinishUpdate
    | AbortUpdate
    | CloseTransfer
    | SetPolicy
    | SetPause
    | SetAdmin
    | SetSleep
    | SetAwake
    | CallGone
    | PlanMade
    | Verified
    | Stored
    | Tick
)

# --- effects --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """Answers a caller: with a failure, or well. ``update_id`` names the update that the answer is about."""

    call_id: str
    failure: Failure | None = None
    update_id: str = ""


@dataclass(frozen=True)
class Push:
    """The desired state of these replicas changed."""

    replica_ids: tuple[str, ...]


@dataclass(frozen=True)
class PushTrainers:
    """What trainer ranks and watchers should know changed."""

    update_id: str = ""


@dataclass(frozen=True)
class MakePlan:
    """Make the plan of one channel; answer with ``PlanMade``. Placement ids are in member order.

    ``update_id`` empty: made ahead of an update, which asks for the same and should find it made; ``ahead`` numbers
    such requests.
    """

    update_id: str
    channel_id: str
    manifest_id: str
    senders: tuple[tuple[str, str], ...]
    receivers: tuple[tuple[str, str], ...]
    bucket_bytes: int
    ahead: int = 0


@dataclass(frozen=True)
class Compare:
    """Compare a participant's receipts with the expected digests; answer with ``Verified``.

    ``plans``: (plan_id, the participant's members that receive by it), each worker in exactly one. ``against``: in a
    catch-up, the committed update whose digests are expected.
    """

    update_id: str
    replica_id: str
    incarnation: str
    plans: tuple[tuple[str, tuple[str, ...]], ...]
    verify: Verify
    against: str = ""


@dataclass(frozen=True)
class Write:
    """A durable write; answer with ``Stored``. ``kind``: freeze, decide, close, group, roster."""

    write_id: str
    kind: str
    epoch: int
    update: Update | None = None
    data: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class ReadBack:
    """Read whether a decision was stored; answer with ``Stored`` of the same write."""

    write_id: str
    update_id: str


@dataclass(frozen=True)
class StepDown:
    """We may no longer lead: stop serving this group."""

    message: str


@dataclass(frozen=True)
class EndSession:
    """End a session: a newer one superseded it."""

    agent_id: str
    session: int


@dataclass(frozen=True)
class Note:
    """A line for the log: the change, in words."""

    text: str
    update_id: str = ""


Effect = Reply | Push | PushTrainers | MakePlan | Compare | Write | ReadBack | StepDown | EndSession | Note
