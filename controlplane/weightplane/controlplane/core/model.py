"""Who is there, and what a group asks of them, as the coordinator knows it. Frozen values; ``group.step``
makes new ones.

Three separate states describe a replica (weights, liveness, administrative); ``may_join`` in ``members.py`` is the one
table that reads them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .reasons import Failure
from .states import Admin, CachePolicy, Evidence, Liveness, Mode, ParityPolicy, PauseMode, Process, Verify, Weights

__all__ = [
    "NONE_HELD",
    "Ahead",
    "Channel",
    "Choice",
    "Condition",
    "Config",
    "Declaration",
    "Held",
    "Offer",
    "Policy",
    "Rank",
    "Replica",
    "Retained",
    "SleepOrder",
    "Timings",
    "Trainer",
    "Waiter",
    "Worker",
]


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
    InitTransfer said is gone after a restart of ours. ``beats``: it sent a heartbeat since it opened a stream (one of
    ``watches``, that hold its lease): a stream of a process that stands still stays open, so it is known by those."""

    rank: int
    host_id: str = ""
    device_uuid: str = ""
    offers: tuple[Offer, ...] = ()
    refusals: tuple[tuple[str, str], ...] = ()
    session: int = 0
    watches: int = 0
    beats: bool = False
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
class Ahead:
    """Plans of a manifest that are made before an update asks for them. ``asked``: by channel, the number of the last
    request, of ``last`` so far; ``plans`` by channel; ``of``: the same by the replicas at its end."""

    manifest_id: str = ""
    last: int = 0
    asked: Mapping[str, int] = field(default_factory=dict)
    plans: Mapping[str, str] = field(default_factory=dict)
    of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


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
    ahead: Ahead = Ahead()


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
