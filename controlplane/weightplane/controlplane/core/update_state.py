"""One update, and one catch-up, as the coordinator knows them. Frozen values; ``group.step`` makes new ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .model import Channel, Held, Timings, Waiter
from .persistent import PersistentMap
from .reasons import Failure
from .states import CachePolicy, Evidence, Mode, PauseMode, Phase, Stage, Verdict, Verify

__all__ = ["Call", "CatchUp", "Options", "Parity", "Part", "PlanSummary", "Update"]


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
    """One participant in an update. ``channels``: by which its bytes come, one for each worker, by worker index.
    ``drains``: how many requests it said it waits for before it votes (pause WAIT); -1: it waits for none."""

    replica_id: str
    incarnation: str
    mode: Mode
    mode_reason: str
    channels: tuple[str, ...]
    stage: Stage = Stage.NONE
    armed_seq: int = 0
    bytes_received: int = 0
    drains: int = -1
    verified: bool = False
    voted: bool = False
    excluded: bool = False
    quiesced: bool = False
    unquiesced: bool = False
    dirty: bool = False
    gone: bool = False
    failure: Failure | None = None
    evidence: Evidence = Evidence.NONE
    timings: Timings = field(default_factory=Timings)


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
