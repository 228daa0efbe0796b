"""The state of one group, as the coordinator knows it. Frozen values; ``group.step`` makes new ones.

Three separate states describe a replica (weights, liveness, administrative); ``may_join`` in ``members.py`` is the one
table that reads them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from .persistent import PersistentMap
from .reasons import Failure

__all__ = [
    "NONE_HELD",
    "Admin",
    "CachePolicy",
    "Call",
    "CatchUp",
    "Channel",
    "Choice",
    "Condition",
    "Config",
    "Declaration",
    "Evidence",
    "GroupState",
    "Held",
    "Liveness",
    "Mode",
    "Offer",
    "Options",
    "Parity",
    "ParityPolicy",
    "Part",
    "PauseMode",
    "Phase",
    "PlanSummary",
    "Policy",
    "Process",
    "Rank",
    "Replica",
    "Retained",
    "Stage",
    "Timings",
    "Trainer",
    "Update",
    "Verdict",
    "Verify",
    "Waiter",
    "Weights",
    "Worker",
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


@dataclass(frozen=True)
class Held:
    """Weights that someone holds: never a version alone, since a version may be aborted. (0, "") = none of ours."""

    version: int = 0
    update_id: str = ""


NONE_HELD = Held()


@dataclass(frozen=True)
class Retained:
    """An immutable copy of what a member sent or applied, kept so that others can be caught up from it."""

    held: Held
    manifest_id: str


@dataclass(frozen=True)
class Config:
    """The coordinator's times, in seconds."""

    beat_s: float = 1.0
    ttl_s: float = 3.0
    routing_budget_s: float = 15.0
    update_timeout_s: float = 120.0
    store_timeout_s: float = 1.5
    quiesce_s: float = 5.0
    quarantine_after: int = 3
    history: int = 1000
    lost_kept_s: float = 300.0
    catch_ups_at_once: int = 2
    catch_up_idle_s: float = 2.0
    catch_up_retry_s: float = 1.0
    catch_up_patience_s: float = 30.0


@dataclass(frozen=True)
class Policy:
    """A group's policies. ``at_least`` 0 = ALL. ``verify`` DEFAULT: ``negotiate.verify_by_default``."""

    min_replicas: int = 1
    at_least: int = 0
    cache: CachePolicy = CachePolicy.CLEAR
    pause: PauseMode = PauseMode.KEEP
    failure: str = "RAISE"
    max_stale_versions: int = 0
    verify: Verify = Verify.DEFAULT
    update_timeout_s: float = 120.0
    parity: ParityPolicy = ParityPolicy.RECORD
    declared: Mapping[str, str] = field(default_factory=dict)
    blocking: tuple[str, ...] = ()


@dataclass(frozen=True)
class Declaration:
    """What a group declares of its engines: ``values`` by name, and what its updates do unless they say otherwise."""

    values: Mapping[str, str] = field(default_factory=dict)
    cache: CachePolicy = CachePolicy.CLEAR
    pause: PauseMode = PauseMode.KEEP


@dataclass(frozen=True)
class Condition:
    """One setting of an engine judged against what its group declares, in the form of a Kubernetes condition.

    ``type``: what is judged, a camel-cased noun. ``status``: True (as declared), False (not), Unknown (the engine does
    not tell). ``reason``: one camel-cased word. ``message``: what was found, why it matters, what to do. ``setting``:
    the flag or option that makes it so; empty where the status is True.
    """

    type: str
    status: str
    reason: str
    message: str
    setting: str = ""


@dataclass(frozen=True)
class Offer:
    """What a member offers for one transport: ``data`` is opaque here (a serialised ``Rendezvous``).

    ``same_host``: only members of its own host can use it. ``reaches``: the GPUs that the member can address, by UUID;
    empty: any. ``collective``: all members of a channel act together.
    """

    transport: str
    data: bytes = b""
    same_host: bool = False
    reaches: tuple[str, ...] = ()
    collective: bool = False


#: What a sleep releases, in the order in which it comes back.
SLEEP_TAGS = ("weights", "kv_cache")


@dataclass(frozen=True)
class SleepOrder:
    """An order to sleep (``level`` 1 keeps weights on the host, 2 drops them) or to wake.

    ``asleep``: what of ``SLEEP_TAGS`` is to be released afterwards.
    """

    order: int
    level: int
    asleep: tuple[str, ...]


@dataclass(frozen=True)
class Worker:
    """One worker process of a replica."""

    index: int
    host_id: str = ""
    device_uuid: str = ""
    offers: tuple[Offer, ...] = ()
    refusals: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Timings:
    """A replica's own timings of an update, seconds."""

    wire_s: float = 0.0
    verify_s: float = 0.0
    pause_s: float = 0.0
    apply_s: float = 0.0


@dataclass(frozen=True)
class Replica:
    """One replica as known: who it is, its three states, and what it last reported. ``resumed``: pause holders that let
    go before this life's first report, which must not bring their pauses back. ``draining``: an aborted update that
    it did not drain in time; until it has, it joins no other. ``sleep``: the last order of this life; ``asleep``:
    what it says is released, ``sleep_done`` the order up to which it obeyed. ``catch_up_refusal``: why it was not
    caught up when that was tried last, ``catch_ups_failed`` times in a row; not again before ``catch_up_after``.
    ``came_at``: when this life began for us. ``conditions``: as it told them last."""

    replica_id: str
    incarnation: str = ""
    session: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    workers: tuple[Worker, ...] = ()
    modes: tuple[Mode, ...] = (Mode.STAGED,)
    staging_refusal: str = ""
    pause_modes: tuple[PauseMode, ...] = (PauseMode.KEEP,)
    cache_policies: tuple[CachePolicy, ...] = (CachePolicy.CLEAR,)
    engine: str = ""
    evidence: Evidence = Evidence.NONE
    serving_address: str = ""
    weights: Weights = Weights.JOINING
    liveness: Liveness = Liveness.LOST
    admin: Admin = Admin.ACTIVE
    held: Held = NONE_HELD
    lease_until: float = 0.0
    lost_at: float = 0.0
    process: Process = Process.RUNNING
    stopped_since: float = -1.0
    progress: int = 0
    report_seq: int = -1
    reported: bool = False
    pending: str = ""
    asked: str = ""
    draining: str = ""
    pause_holders: tuple[str, ...] = ()
    pauses_wanted: Mapping[str, PauseMode] = field(default_factory=dict)
    resumed: frozenset[str] = frozenset()
    placements: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    updates_since_start: int = 0
    running_requests: int = 0
    failure: Failure | None = None
    failures_in_a_row: int = 0
    sleep_levels: tuple[int, ...] = ()
    sleep_refusal: str = ""
    sleep: SleepOrder | None = None
    asleep: tuple[str, ...] = ()
    sleep_done: int = 0
    retained: Retained | None = None
    catch_up_after: float = 0.0
    catch_ups_failed: int = 0
    catch_up_refusal: str = ""
    came_at: float = 0.0
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True)
class Rank:
    """One rank of the trainer. ``serve_host``, ``serve_offers``: how what it retains can be sent, as it said last: what
    InitTransfer said is gone after a restart of ours."""

    rank: int
    host_id: str = ""
    device_uuid: str = ""
    offers: tuple[Offer, ...] = ()
    refusals: tuple[tuple[str, str], ...] = ()
    session: int = 0
    watches: int = 0
    lease_until: float = 0.0
    process: Process = Process.RUNNING
    stopped_since: float = -1.0
    progress: int = 0
    lost: bool = False
    retained: Retained | None = None
    serve_host: str = ""
    serve_offers: tuple[Offer, ...] = ()


@dataclass(frozen=True)
class Channel:
    """A bound channel: members are fixed; a change of membership makes a new one.

    ``receivers`` are workers, in the order of replica and index; ``replicas`` names (replica_id, incarnation) of each
    replica with a worker among them, of which other channels may serve the rest. ``ordinal``: its place among the
    channels of its transport that were bound together.
    """

    channel_id: str
    transport: str
    key: bytes
    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    replicas: tuple[tuple[str, str], ...]
    modes: tuple[Mode, ...]
    bucket_bytes: int
    offers: Mapping[str, Offer]
    ordinal: int = 0

    @property
    def collective(self) -> bool:
        """Whether none of its members can be left out."""
        return any(o.collective for o in self.offers.values())


@dataclass(frozen=True)
class Choice:
    """How some workers of one life of a replica are reached, and why so: workers of equal fate share a choice.

    ``transport`` and ``channel_id`` are both empty where the replica takes no part: ``reason`` and ``refusals``
    (transport, why) say why.
    """

    replica_id: str
    incarnation: str
    workers: tuple[int, ...]
    transport: str
    reason: str
    refusals: tuple[tuple[str, str], ...] = ()
    channel_id: str = ""


@dataclass(frozen=True)
class Trainer:
    """The holder of the group, or the last one (``closed``).

    ``without``: replicas that the last StartUpdate which asked for a rebind goes without.
    """

    trainer_id: str
    incarnation: str
    generation: int
    world_size: int
    lineage: str
    ranks: Mapping[int, Rank] = field(default_factory=dict)
    closed: bool = False
    resume_step: int | None = None
    durable: bool = False
    forced_transport: str = ""
    bucket_bytes: int = 0  # as suits each channel
    seed: bytes = b""
    channels: tuple[Channel, ...] = ()
    choices: tuple[Choice, ...] = ()
    placements: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    waiters: tuple[Waiter, ...] = ()
    without: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Waiter:
    """A caller that waits for an answer. ``what``: start, update, finish, abort, init, pause, resume,
    sleep."""

    call_id: str
    what: str
    rank: int = 0
    seq: int = 0
    deadline: float = 0.0
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class Options:
    """What StartUpdate asked for, defaults filled in."""

    manifest_id: str
    trainer_step: int
    selector: Mapping[str, str] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    at_least: int = 0
    mode: Mode = Mode.ANY
    pause: PauseMode = PauseMode.KEEP
    cache: CachePolicy = CachePolicy.CLEAR
    verify: Verify = Verify.FULL


@dataclass(frozen=True)
class PlanSummary:
    """What the core needs of a plan: its id, how many buckets, and payload bytes per receiving member."""

    plan_id: str
    buckets: int
    nbytes: int
    bytes_for: Mapping[str, int]


@dataclass(frozen=True)
class Part:
    """One participant in an update. ``channels``: by which its bytes come, one for each worker, by worker index."""

    replica_id: str
    incarnation: str
    mode: Mode
    mode_reason: str
    channels: tuple[str, ...]
    stage: Stage = Stage.NONE
    armed_seq: int = 0
    bytes_received: int = 0
    verified: bool = False
    voted: bool = False
    excluded: bool = False
    quiesced: bool = False
    unquiesced: bool = False
    dirty: bool = False
    gone: bool = False
    failure: Failure | None = None
    evidence: Evidence = Evidence.NONE
    timings: Timings = Timings()


@dataclass(frozen=True)
class Parity:
    """A parity check of one replica at one version, in short; nats, NaN where there was nothing to compare."""

    replica_id: str
    version: int
    verdict: Verdict
    tokens: int = 0
    mean_abs: float = 0.0
    p99_abs: float = 0.0
    max_abs: float = 0.0
    kl: float = 0.0
    ess: float = 0.0
    clip_fraction: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Call:
    """One UpdateWeights call: its bucket ranges (channel_id, first, count) and the ranks that made it."""

    seq: int
    ranges: tuple[tuple[str, int, int], ...]
    ranks: frozenset[int]


@dataclass(frozen=True)
class Update:
    """One update. ``parts`` is frozen at StartUpdate: entries change, none comes or goes."""

    update_id: str
    version: int
    lineage: str
    generation: int
    epoch: int
    request_id: str
    fingerprint: str
    options: Options
    phase: Phase
    parts: Mapping[str, Part]
    absent: tuple[tuple[str, str], ...]
    channels: tuple[str, ...]
    started_at: float
    deadline: float
    prepare_deadline: float
    started_unix_ms: int = 0
    frozen: bool = False
    plans: Mapping[str, PlanSummary] = field(default_factory=dict)
    planning: bool = False
    calls: tuple[Call, ...] = ()
    digests_in: frozenset[tuple[str, int]] = frozenset()
    finished_ranks: frozenset[int] = frozenset()
    failure: Failure | None = None
    aborting_until: float = 0.0
    deciding_until: float = 0.0
    write_id: str = ""
    waiters: tuple[Waiter, ...] = ()
    gather_s: float = 0.0
    ready_at: float = 0.0
    armed_at: float = 0.0
    received_at: float = 0.0
    verify_at: float = 0.0
    decide_at: float = 0.0
    decided_at: float = 0.0
    ended_at: float = 0.0
    closed: bool = False
    parity: tuple[Parity, ...] = ()

    @property
    def held(self) -> Held:
        """What a replica holds once it applied this update."""
        return Held(self.version, self.update_id)

    def active(self) -> list[Part]:
        """Participants that still count."""
        return [p for p in self.parts.values() if not p.excluded]

    def newest_first(self) -> Iterator[Part]:
        """Participants that still count, those told last first: who asks whether all have got somewhere, after each
        report, mostly knows at the first of them, since they get there last."""
        return (p for p in PersistentMap.of(self.parts).newest_first() if not p.excluded)


@dataclass(frozen=True)
class CatchUp:
    """One life of a replica is being brought to ``target``, which was committed, from a copy that ``holder`` retains.

    ``holder`` is a replica (of life ``holder_life``), or "" for the trainer (of that generation). ``senders``: its
    members and the layouts of their copies, in channel order. ``decision``: "", "COMMIT" or "ABORT". ``waited``: the
    seconds that it stood still for updates.
    """

    catch_up_id: str
    replica_id: str
    incarnation: str
    target: Held
    trainer_step: int
    lineage: str
    generation: int
    manifest_id: str
    holder: str
    holder_life: str
    senders: tuple[tuple[str, str], ...]
    channel: Channel
    mode: Mode
    pause: PauseMode
    cache: CachePolicy
    began: float
    deadline: float
    stage: Stage = Stage.NONE
    plan: PlanSummary | None = None
    planning: bool = False
    bytes_received: int = 0
    waited: float = 0.0
    decision: str = ""
    failure: Failure | None = None

    @property
    def members(self) -> tuple[str, ...]:
        """The replica's workers, as receivers."""
        return self.channel.receivers


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
    config: Config = Config()
    policy: Policy = Policy()
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
