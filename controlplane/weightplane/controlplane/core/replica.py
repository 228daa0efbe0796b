"""The replica's side of an update: ``step(state, event, now) -> (state, effects, reason)``, pure as the coordinator's.

The agent around it executes effects (check, arm, prepare, apply, drop, pause, resume, sleep) and reports each one's end
as an event. At most one of check, arm, prepare, apply, sleep runs at a time; ``Drop`` may be asked at any time, also
while one of them is blocked, and its end (``Drained``) means that nothing of the update can touch memory any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .desired import DesiredReplica, DesiredUpdate
from .events import Report
from .model import NONE_HELD, Held, Mode, PauseMode, SleepOrder, Stage, Timings
from .reasons import Failure, Reason

__all__ = [
    "Applied",
    "Apply",
    "Arm",
    "Armed",
    "Check",
    "Checked",
    "Desired",
    "Drained",
    "Drop",
    "EngineHeld",
    "Failed",
    "Pause",
    "Paused",
    "Prepare",
    "Prepared",
    "Received",
    "ReplicaState",
    "Resume",
    "SendReport",
    "Sleep",
    "SleepDone",
    "Taking",
    "Tick",
    "fenced",
    "report_of",
    "step",
]


# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Desired:
    """The coordinator's newest desired state."""

    desired: DesiredReplica


@dataclass(frozen=True, slots=True)
class Checked:
    """The manifest fits the engine, and the placements are sent."""

    update_id: str


@dataclass(frozen=True, slots=True)
class Armed:
    """Every worker is armed for call ``seq``."""

    update_id: str
    seq: int


@dataclass(frozen=True, slots=True)
class Received:
    """Every byte of call ``seq`` is in place on every worker."""

    update_id: str
    seq: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """Receipts are delivered; staged: apply pre-validated, memory held; in place: applied, verified, still fenced."""

    update_id: str
    timings: Timings = Timings()  # noqa: RUF009 - frozen


@dataclass(frozen=True, slots=True)
class Applied:
    """Every worker acknowledged apply and cache handling; ``held`` is read from the workers."""

    update_id: str
    held: tuple[Held, ...]
    timings: Timings = Timings()  # noqa: RUF009 - frozen


@dataclass(frozen=True, slots=True)
class Failed:
    """An operation failed. ``dirty``: live memory may hold a mix."""

    update_id: str
    failure: Failure
    dirty: bool = False


@dataclass(frozen=True, slots=True)
class Drained:
    """The dropped update can touch nothing any more. ``wrote``: bytes of it reached live memory."""

    update_id: str
    wrote: bool


@dataclass(frozen=True, slots=True)
class Paused:
    """Generation stands still for ``holder`` (and for WAIT: nothing is in flight)."""

    holder: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """The engine let go of ``holder``'s pause."""

    holder: str


@dataclass(frozen=True, slots=True)
class EngineHeld:
    """What the workers hold, read from them: at start, after an engine restart, after a reconnect. ``why`` dirty."""

    held: tuple[Held, ...]
    dirty: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class SleepDone:
    """An order to sleep or to wake was carried out, or given up for ``failure``. ``asleep``: what is released now.

    ``lost``: why live memory no longer holds what it did (its weights were dropped).
    """

    order: int
    asleep: tuple[str, ...]
    held: tuple[Held, ...]
    failure: Failure | None = None
    lost: Failure | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


# --- effects --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Check:
    """Fetch the manifest, compare it with the engine, send placements."""

    update_id: str
    manifest_id: str
    mode: Mode


@dataclass(frozen=True, slots=True)
class Arm:
    """Open the channel if need be and arm every worker for one call; then receive it (``Armed``, then ``Received``)."""

    update_id: str
    seq: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Everything is in place: hash, send receipts, validate (staged) or apply (in place). Ends as Prepared."""

    update_id: str


@dataclass(frozen=True, slots=True)
class Apply:
    """Decided: staged: write live parameters; in place: set the version. Then handle caches. Ends as Applied."""

    update_id: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Abort the channel out of band and forget the update. Ends as Drained."""

    update_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop generation for ``holder``. Ends as Paused."""

    holder: str
    mode: PauseMode


@dataclass(frozen=True, slots=True)
class Resume:
    """Remove ``holder``'s pause, also one still on its way: after ``Resumed`` no earlier ``Paused`` of it comes.

    Generation runs once no holder is left. Ends as Resumed.
    """

    holder: str


@dataclass(frozen=True, slots=True)
class Sleep:
    """Carry out an order to sleep or to wake: no update is being taken meanwhile. Ends as SleepDone."""

    order: SleepOrder


@dataclass(frozen=True, slots=True)
class SendReport:
    """Tell the coordinator (``report_of``)."""


@dataclass(frozen=True, slots=True)
class Taking:
    """The update being taken. ``busy`` names the operation in flight, ``pause`` how generation must stand still for it
    (None: it need not)."""

    want: DesiredUpdate
    epoch: int
    deadline: float
    stage: Stage = Stage.NONE
    armed_seq: int = 0
    received_seq: int = 0
    busy: str = ""
    decision: str = ""
    dropping: bool = False
    pause: PauseMode | None = None
    failure: Failure | None = None
    timings: Timings = Timings()  # noqa: RUF009 - frozen

    @property
    def held(self) -> Held:
        """What every worker holds once the update is applied."""
        return Held(self.want.version, self.want.update_id)

    @property
    def voted(self) -> bool:
        """Whether this replica may no longer abort by itself."""
        return self.stage is Stage.PREPARED

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
        return self.stage in (Stage.APPLIED, Stage.ABORTED, Stage.FAILED)


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One life of a replica.

    ``paused``: holders in force; ``pausing`` and ``resuming``: asked of the engine and not confirmed. ``newest`` is the
    last desired state, of ``newest_at``: what it asks for is taken up once the update before it is over.
    ``asleep``: what the engine has released; ``sleep_begun`` and ``sleep_done`` number the last orders about it.
    """

    replica_id: str
    incarnation: str
    workers: int = 1
    cluster_id: str = ""
    epoch: int = 0
    held: tuple[Held, ...] = ()
    dirty: bool = False
    dirty_reason: Failure | None = None
    taking: Taking | None = None
    paused: frozenset[str] = frozenset()
    pausing: frozenset[str] = frozenset()
    resuming: frozenset[str] = frozenset()
    wanted: tuple[tuple[str, PauseMode], ...] = ()
    sequence: int = 0
    updates_since_start: int = 0
    leaving: bool = False
    newest: DesiredReplica | None = None
    newest_at: float = 0.0
    asleep: tuple[str, ...] = ()
    sleep_begun: int = 0
    sleep_done: int = 0
    sleep_failure: Failure | None = None


Effect = Check | Arm | Prepare | Apply | Drop | Pause | Resume | Sleep | SendReport


class _Tx:
    def __init__(self, state: ReplicaState, now: float) -> None:
        self.state, self.now = state, now
        self.effects: list[Effect] = []
        self.reason = "nothing to do"

    def set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def take(self, **changes: Any) -> None:
        assert self.state.taking is not None
        self.set(taking=replace(self.state.taking, **changes))

    def report(self, reason: str) -> None:
        self.reason = reason
        if not any(isinstance(x, SendReport) for x in self.effects):
            self.set(sequence=self.state.sequence + 1)
            self.effects.append(SendReport())


def step(state: ReplicaState, event: Any, now: float) -> tuple[ReplicaState, list[Effect], str]:
    """Take one event. An event about another update than the one being taken changes nothing."""
    tx = _Tx(state, now)
    update_id = getattr(event, "update_id", "")
    t = state.taking
    if update_id and (t is None or t.want.update_id != update_id):
        return state, [], f"an event about {update_id}, which is not being taken"
    if t is not None and type(event) in _ENDS and t.busy != _ENDS[type(event)]:
        return state, [], f"{type(event).__name__}, and no {_ENDS[type(event)]} is under way"
    _HANDLERS[type(event)](tx, event)
    _obey_sleep(tx)
    return tx.state, tx.effects, tx.reason


def fenced(state: ReplicaState) -> bool:
    """Whether generation must stand still."""
    return bool(state.paused or state.pausing or state.dirty or state.asleep)


def report_of(state: ReplicaState, bytes_received: int = 0, running_requests: int = 0) -> Report:
    """The report that describes ``state``."""
    t = state.taking
    holders = state.paused | state.resuming | ({"dirty"} if state.dirty else set())
    holders |= {"sleep"} if state.asleep else set()
    return Report(
        replica_id=state.replica_id,
        incarnation=state.incarnation,
        sequence=state.sequence,
        held=state.held or (NONE_HELD,) * state.workers,
        epoch=state.epoch,
        dirty=state.dirty,
        dirty_reason=state.dirty_reason,
        update_id=t.want.update_id if t is not None else "",
        stage=t.stage if t is not None else Stage.NONE,
        armed_seq=t.armed_seq if t is not None else 0,
        bytes_received=bytes_received,
        failure=t.failure if t is not None else None,
        timings=t.timings if t is not None else Timings(),
        pause_holders=tuple(sorted(holders)),
        updates_since_start=state.updates_since_start,
        leaving=state.leaving,
        running_requests=running_requests,
        asleep=state.asleep,
        sleep_order=state.sleep_done,
        sleep_failure=state.sleep_failure,
    )


# --- desired state --------------------------------------------------------------------------------------------------


def _desired(tx: _Tx, e: Desired) -> None:
    s, d = tx.state, e.desired
    if d.incarnation != s.incarnation:
        tx.reason = f"meant for incarnation {d.incarnation}"
        return
    if d.cluster_id == s.cluster_id and d.epoch < s.epoch:
        tx.reason = f"epoch {d.epoch} is over, we know {s.epoch}"
        return
    if s.cluster_id not in ("", d.cluster_id):
        tx.set(sleep_begun=0, sleep_done=0, sleep_failure=None)  # orders are numbered by the store's life
    if (d.cluster_id, d.epoch) != (s.cluster_id, s.epoch):
        tx.set(cluster_id=d.cluster_id, epoch=d.epoch)
        tx.report(f"epoch {d.epoch} of cluster {d.cluster_id}")
    tx.set(newest=d, newest_at=tx.now, wanted=d.pauses)
    _settle_pauses(tx)
    t = tx.state.taking
    if t is not None and not t.over and (d.update is None or d.update.update_id != t.want.update_id):
        outcome = dict(d.resolutions).get(t.want.update_id, "")
        _other_update(tx, t, outcome)
        t = tx.state.taking
    if d.update is not None and (t is None or t.over or t.want.update_id == d.update.update_id):
        _take(tx, d.update, tx.now)


def _next(tx: _Tx) -> None:
    """The update we were in is over: take up the one that was asked for meanwhile. Nobody asks twice."""
    s = tx.state
    want = s.newest.update if s.newest is not None else None
    if want is not None and s.taking is not None and s.taking.over and want.update_id != s.taking.want.update_id:
        _take(tx, want, s.newest_at)


def _other_update(tx: _Tx, t: Taking, outcome: str) -> None:
    """The desired state does not name the update we are in: without a vote we drop it, with one we wait to be told."""
    if outcome == "COMMIT" and t.voted:
        _commit(tx)
    elif outcome == "ABORT" or not t.voted:
        failure = Failure(Reason.SUPERSEDED, "the coordinator no longer wants it", tx.state.replica_id)
        _drop(tx, t.failure or failure, "ABORT")
    else:
        tx.report(f"in doubt about {t.want.update_id}")


def _take(tx: _Tx, want: DesiredUpdate, since: float) -> None:
    t = tx.state.taking
    if t is None or t.want.update_id != want.update_id:
        if want.decision == "COMMIT":
            tx.reason = f"update {want.update_id} is decided and we are not in it"
            tx.report(tx.reason)
            return
        t = Taking(want, tx.state.epoch, since + want.remaining_s)
        tx.set(taking=t)
        if want.decision == "ABORT":
            tx.take(stage=Stage.ABORTED, decision="ABORT", failure=want.failure)
            tx.report(f"update {want.update_id} was aborted before we joined")
            return
        tx.take(busy="check")
        tx.effects.append(Check(want.update_id, want.manifest_id, want.mode))
        tx.reason = f"joining update {want.update_id}"
        return
    if t.over:
        tx.report(f"update {want.update_id} is {t.stage.name} here")
        return
    tx.take(want=want)
    if want.decision == "ABORT":
        _drop(tx, want.failure or Failure(Reason.ABORTED_BY_CALLER, "aborted"), "ABORT")
    elif want.decision == "COMMIT":
        _commit(tx)
    else:
        _advance(tx)


def _obey_sleep(tx: _Tx) -> None:
    """Begin the newest order to sleep or to wake, once no update is being taken. Each is carried out once."""
    s, t = tx.state, tx.state.taking
    order = s.newest.sleep if s.newest is not None else None
    if order is None or order.order <= s.sleep_begun or s.sleep_begun > s.sleep_done or (t is not None and not t.over):
        return
    tx.set(sleep_begun=order.order)
    tx.effects.append(Sleep(order))
    tx.reason = f"obeying order {order.order}: asleep {order.asleep}"


def _commit(tx: _Tx) -> None:
    t = tx.state.taking
    assert t is not None
    if not t.voted or t.dropping:
        tx.report(f"a commit of {t.want.update_id} that we did not vote for changes nothing")
        return
    if t.decision == "COMMIT":
        tx.reason = "the commit is being carried out"
        return
    tx.take(decision="COMMIT")
    _advance(tx)


def _advance(tx: _Tx) -> None:
    """Start the next operation that the desired state and our stage allow."""
    t = tx.state.taking
    if t is None or t.over or t.dropping or t.busy:
        return
    if t.decision == "COMMIT":
        if _ready_paused(tx, t.want.pause):
            tx.take(busy="apply")
            tx.effects.append(Apply(t.want.update_id))
            tx.reason = "applying"
        return
    if t.stage is Stage.NONE or t.voted:
        return
    pending = next((c for c in t.want.calls if c.seq == t.armed_seq + 1), None)
    if pending is not None and t.received_seq == t.armed_seq:
        if t.want.mode is Mode.STAGED or _ready_paused(tx, t.want.pause):
            tx.take(busy="arm")
            tx.effects.append(Arm(t.want.update_id, pending.seq))
            tx.reason = f"arming call {pending.seq}"
        return
    last = max((c.seq for c in t.want.calls), default=0)
    if t.want.all_called and last and t.received_seq == last:
        if t.stage < Stage.RECEIVED:
            tx.take(stage=Stage.RECEIVED)
            tx.report("every byte is in place")
        drains = t.want.pause is PauseMode.WAIT
        if not drains or _ready_paused(tx, PauseMode.WAIT):
            tx.take(busy="prepare")
            tx.effects.append(Prepare(t.want.update_id))


def _ready_paused(tx: _Tx, mode: PauseMode) -> bool:
    """Whether generation stands still for the update; asks for it otherwise."""
    t = tx.state.taking
    assert t is not None
    if t.pause is None:
        tx.take(pause=mode)
        tx.reason = "pausing for the update"
        _settle_pauses(tx)
    return "update" in tx.state.paused


def _drop(tx: _Tx, failure: Failure, decision: str) -> None:
    t = tx.state.taking
    assert t is not None
    if t.dropping or t.over:
        tx.reason = "already dropped"
        return
    tx.take(dropping=True, decision=decision, failure=t.failure or failure)
    tx.effects.append(Drop(t.want.update_id, str(failure)))
    tx.reason = f"dropping {t.want.update_id}: {failure}"


def _settle_pauses(tx: _Tx) -> None:
    """Bring each holder's pause in line with who wants one: the coordinator's holders, the update, the dirty fence.

    A holder's pause and resume never overlap, so that the end of an old one cannot be taken for that of a new one. The
    update's pause ends only once the dirty fence stands, where there must be one.
    """
    s = tx.state
    t = s.taking
    wanted = dict(s.wanted)
    if t is not None and not t.over and t.pause is not None:
        wanted["update"] = t.pause
    if s.dirty:
        wanted["dirty"] = PauseMode.ABORT
    for holder, mode in wanted.items():
        if holder not in s.paused | s.pausing | s.resuming:
            tx.set(pausing=tx.state.pausing | {holder})
            tx.effects.append(Pause(holder, mode))
    for holder in sorted((s.paused | s.pausing) - wanted.keys()):
        if holder == "update" and s.dirty and "dirty" not in s.paused:
            continue
        now = tx.state
        tx.set(paused=now.paused - {holder}, pausing=now.pausing - {holder}, resuming=now.resuming | {holder})
        tx.effects.append(Resume(holder))


# --- the agent's own events -----------------------------------------------------------------------------------------


def _checked(tx: _Tx, e: Checked) -> None:
    t = tx.state.taking
    assert t is not None
    tx.take(busy="")
    if t.dropping or t.over:
        tx.reason = "checked, but dropped"
        return
    tx.take(stage=Stage.JOINED)
    tx.report(f"joined {e.update_id}")
    _advance(tx)


def _armed(tx: _Tx, e: Armed) -> None:
    t = tx.state.taking
    assert t is not None
    if t.dropping or t.over:
        tx.reason = "armed, but dropped"
        return
    tx.take(stage=max(t.stage, Stage.ARMED), armed_seq=max(t.armed_seq, e.seq))
    tx.report(f"armed for call {e.seq}")


def _received(tx: _Tx, e: Received) -> None:
    t = tx.state.taking
    assert t is not None
    tx.take(busy="")
    if t.dropping or t.over:
        tx.reason = "received, but dropped"
        return
    tx.take(received_seq=max(t.received_seq, e.seq))
    tx.reason = f"call {e.seq} is in place"
    _advance(tx)


def _prepared(tx: _Tx, e: Prepared) -> None:
    t = tx.state.taking
    assert t is not None
    tx.take(busy="", timings=e.timings)
    if t.dropping or t.over:
        tx.reason = "prepared, but dropped"
        return
    tx.take(stage=Stage.PREPARED)
    tx.report(f"voted for {e.update_id}")
    _advance(tx)


def _applied(tx: _Tx, e: Applied) -> None:
    t = tx.state.taking
    assert t is not None
    tx.take(busy="", timings=e.timings)
    tx.set(held=e.held)
    if not e.held or any(h != t.held for h in e.held):
        found = sorted({h.version for h in e.held})
        message = f"after the apply its workers hold versions {found}, expected {t.want.version} on each"
        failure = Failure(Reason.INCOMPLETE, message, tx.state.replica_id)
        tx.take(stage=Stage.FAILED, failure=failure)
        _soil(tx, failure)
    else:
        tx.take(stage=Stage.APPLIED)
        tx.set(dirty=False, dirty_reason=None, updates_since_start=tx.state.updates_since_start + 1)
    _settle_pauses(tx)
    tx.report(f"applied {e.update_id}")
    _next(tx)


def _failed(tx: _Tx, e: Failed) -> None:
    t = tx.state.taking
    assert t is not None
    tx.take(busy="")
    if e.dirty:
        _soil(tx, e.failure)
    if t.over:
        tx.report("a failure after the end")
    elif t.decision == "COMMIT":
        if not e.dirty:
            _soil(tx, e.failure)  # decided, and we could not follow: never serve on
        tx.take(stage=Stage.FAILED, failure=e.failure)
        _settle_pauses(tx)
        tx.report(f"the apply failed: {e.failure}")
        _next(tx)
    elif t.voted and not t.dropping:
        tx.take(failure=e.failure)
        tx.report(f"failed after the vote, and waits to be told: {e.failure}")
    elif not t.dropping:
        tx.take(failure=e.failure)
        _drop(tx, e.failure, "")


def _drained(tx: _Tx, e: Drained) -> None:
    t = tx.state.taking
    assert t is not None
    if not t.dropping:
        tx.reason = "drained, and nothing was being dropped"
        return
    if e.wrote:
        why = f"update {e.update_id} was dropped after its first byte reached live parameters: {t.failure}"
        _soil(tx, Failure(Reason.INCOMPLETE, why, tx.state.replica_id))
    tx.take(stage=Stage.ABORTED if t.decision == "ABORT" else Stage.FAILED, dropping=False, busy="")
    _settle_pauses(tx)
    tx.report(f"drained {e.update_id}")
    _next(tx)


def _soil(tx: _Tx, failure: Failure) -> None:
    tx.set(dirty=True, dirty_reason=tx.state.dirty_reason or failure)
    _settle_pauses(tx)


def _paused(tx: _Tx, e: Paused) -> None:
    s = tx.state
    if e.holder not in s.pausing:
        tx.reason = f"a pause by {e.holder} that is no longer wanted"
        return
    tx.set(paused=s.paused | {e.holder}, pausing=s.pausing - {e.holder})
    tx.report(f"paused by {e.holder}")
    _settle_pauses(tx)
    _advance(tx)


def _resumed(tx: _Tx, e: Resumed) -> None:
    s = tx.state
    if e.holder not in s.resuming:
        tx.reason = f"a resume of {e.holder} that nobody waits for"
        return
    tx.set(resuming=s.resuming - {e.holder})
    tx.report(f"{e.holder} lets generation run")
    _settle_pauses(tx)


def _engine_held(tx: _Tx, e: EngineHeld) -> None:
    t = tx.state.taking
    writing = t is not None and not t.over and t.want.mode is Mode.IN_PLACE and "update" in tx.state.paused
    tx.set(held=e.held)
    if e.dirty and not writing:  # in place a mix is what we are making, behind a fence
        why = f": {e.why}" if e.why else ""
        _soil(tx, Failure(Reason.ENGINE, f"the engine says that its weights may be mixed{why}", tx.state.replica_id))
    tx.report("held versions read from the workers")


def _sleep_done(tx: _Tx, e: SleepDone) -> None:
    tx.set(asleep=e.asleep, held=e.held)
    if e.order == tx.state.sleep_begun:  # else another cluster's, whose numbers mean nothing any more
        tx.set(sleep_done=e.order, sleep_failure=e.failure)
    if e.lost is not None:
        _soil(tx, e.lost)
    tx.report(f"order {e.order} to sleep: {e.failure or 'done'}; asleep {e.asleep}")


def _tick(tx: _Tx, e: Tick) -> None:
    t = tx.state.taking
    if t is None or t.over or t.voted or t.dropping or tx.now < t.deadline:
        return
    doing = t.busy or t.stage.name.lower()
    failure = Failure(Reason.DEADLINE, f"did not vote in time; was at {doing}", tx.state.replica_id)
    _drop(tx, failure, "")


#: The operation that each of these ends (arming ends twice: armed, then received).
_ENDS: dict[type[Any], str] = {Checked: "check", Armed: "arm", Received: "arm", Prepared: "prepare", Applied: "apply"}

_HANDLERS: dict[type[Any], Callable[[_Tx, Any], None]] = {
    Desired: _desired,
    Checked: _checked,
    Armed: _armed,
    Received: _received,
    Prepared: _prepared,
    Applied: _applied,
    Failed: _failed,
    Drained: _drained,
    Paused: _paused,
    Resumed: _resumed,
    EngineHeld: _engine_held,
    SleepDone: _sleep_done,
    Tick: _tick,
}
