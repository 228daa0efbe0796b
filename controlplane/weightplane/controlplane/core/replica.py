"""The replica's side of an update: ``step(state, event, now) -> (state, effects, reason)``, pure as the coordinator's.

The agent around it executes effects (check, arm, prepare, apply, drop, pause, resume, sleep) and reports each one's end
as an event. At most one of check, arm, prepare, apply, sleep runs at a time; ``Drop`` may be asked at any time, also
while one of them is blocked, and its end (``Drained``) means that nothing of the update can touch memory any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .desired import DesiredUpdate
from .reasons import Failure, Reason
from .replica_events import (
    Applied,
    Apply,
    Arm,
    Armed,
    Check,
    Checked,
    Desired,
    Drained,
    Drop,
    Effect,
    EngineHeld,
    Failed,
    Kept,
    Pause,
    Paused,
    Prepare,
    Prepared,
    Received,
    Resume,
    Resumed,
    SendReport,
    ServeFailed,
    Sleep,
    SleepDone,
    Tick,
)
from .replica_state import ReplicaState, Taking, Tx, fenced, report_of
from .states import Mode, PauseMode, Stage

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
    "Effect",
    "EngineHeld",
    "Failed",
    "Kept",
    "Pause",
    "Paused",
    "Prepare",
    "Prepared",
    "Received",
    "ReplicaState",
    "Resume",
    "Resumed",
    "SendReport",
    "ServeFailed",
    "Sleep",
    "SleepDone",
    "Taking",
    "Tick",
    "fenced",
    "report_of",
    "step",
]


def step(state: ReplicaState, event: Any, now: float) -> tuple[ReplicaState, list[Effect], str]:
    """Take one event. An event about another update than the one being taken changes nothing."""
    tx = Tx(state, now)
    update_id = getattr(event, "update_id", "")
    t = state.taking
    if update_id and (t is None or t.want.update_id != update_id):
        return state, [], f"an event about {update_id}, which is not being taken"
    if t is not None and type(event) in _ENDS and t.busy != _ENDS[type(event)]:
        return state, [], f"{type(event).__name__}, and no {_ENDS[type(event)]} is under way"
    _HANDLERS[type(event)](tx, event)
    _obey_sleep(tx)
    return tx.state, tx.effects, tx.reason


def _desired(tx: Tx, e: Desired) -> None:
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


def _next(tx: Tx) -> None:
    """The update we were in is over: take up the one that was asked for meanwhile. Nobody asks twice."""
    s = tx.state
    want = s.newest.update if s.newest is not None else None
    if want is not None and s.taking is not None and s.taking.over and want.update_id != s.taking.want.update_id:
        _take(tx, want, s.newest_at)


def _other_update(tx: Tx, t: Taking, outcome: str) -> None:
    """The desired state does not name the update we are in: without a vote we drop it, with one we wait to be told."""
    if outcome == "COMMIT" and t.voted:
        _commit(tx)
    elif outcome == "ABORT" or not t.voted:
        failure = Failure(Reason.SUPERSEDED, "the coordinator no longer wants it", tx.state.replica_id)
        _drop(tx, t.failure or failure, "ABORT")
    else:
        tx.report(f"in doubt about {t.want.update_id}")


def _take(tx: Tx, want: DesiredUpdate, since: float) -> None:
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


def _obey_sleep(tx: Tx) -> None:
    """Begin the newest order to sleep or to wake, once no update is being taken. Each is carried out once."""
    s, t = tx.state, tx.state.taking
    order = s.newest.sleep if s.newest is not None else None
    if order is None or order.order <= s.sleep_begun or s.sleep_begun > s.sleep_done or (t is not None and not t.over):
        return
    tx.set(sleep_begun=order.order)
    tx.effects.append(Sleep(order))
    tx.reason = f"obeying order {order.order}: asleep {order.asleep}"


def _commit(tx: Tx) -> None:
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


def _advance(tx: Tx) -> None:
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


def _ready_paused(tx: Tx, mode: PauseMode) -> bool:
    """Whether generation stands still for the update; asks for it otherwise."""
    t = tx.state.taking
    assert t is not None
    if t.pause is None:
        tx.take(pause=mode)
        tx.reason = "pausing for the update"
        _settle_pauses(tx)
    return "update" in tx.state.paused


def _drop(tx: Tx, failure: Failure, decision: str) -> None:
    t = tx.state.taking
    assert t is not None
    if t.dropping or t.over:
        tx.reason = "already dropped"
        return
    tx.take(dropping=True, decision=decision, failure=t.failure or failure)
    tx.effects.append(Drop(t.want.update_id, str(failure)))
    tx.reason = f"dropping {t.want.update_id}: {failure}"


def _settle_pauses(tx: Tx) -> None:
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


def _checked(tx: Tx, e: Checked) -> None:
    t = tx.state.taking
    assert t is not None
    tx.take(busy="")
    if t.dropping or t.over:
        tx.reason = "checked, but dropped"
        return
    tx.take(stage=Stage.JOINED)
    tx.report(f"joined {e.update_id}")
    _advance(tx)


def _armed(tx: Tx, e: Armed) -> None:
    t = tx.state.taking
    assert t is not None
    if t.dropping or t.over:
        tx.reason = "armed, but dropped"
        return
    tx.take(stage=max(t.stage, Stage.ARMED), armed_seq=max(t.armed_seq, e.seq))
    tx.report(f"armed for call {e.seq}")


def _received(tx: Tx, e: Received) -> None:
    t = tx.state.taking
    assert t is not None
    tx.take(busy="")
    if t.dropping or t.over:
        tx.reason = "received, but dropped"
        return
    tx.take(received_seq=max(t.received_seq, e.seq))
    tx.reason = f"call {e.seq} is in place"
    _advance(tx)


def _prepared(tx: Tx, e: Prepared) -> None:
    t = tx.state.taking
    assert t is not None
    tx.take(busy="", timings=e.timings)
    if t.dropping or t.over:
        tx.reason = "prepared, but dropped"
        return
    tx.take(stage=Stage.PREPARED)
    tx.report(f"voted for {e.update_id}")
    _advance(tx)


def _applied(tx: Tx, e: Applied) -> None:
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


def _failed(tx: Tx, e: Failed) -> None:
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


def _drained(tx: Tx, e: Drained) -> None:
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


def _soil(tx: Tx, failure: Failure) -> None:
    tx.set(dirty=True, dirty_reason=tx.state.dirty_reason or failure)
    _settle_pauses(tx)


def _paused(tx: Tx, e: Paused) -> None:
    s = tx.state
    if e.holder not in s.pausing:
        tx.reason = f"a pause by {e.holder} that is no longer wanted"
        return
    tx.set(paused=s.paused | {e.holder}, pausing=s.pausing - {e.holder})
    tx.report(f"paused by {e.holder}")
    _settle_pauses(tx)
    _advance(tx)


def _resumed(tx: Tx, e: Resumed) -> None:
    s = tx.state
    if e.holder not in s.resuming:
        tx.reason = f"a resume of {e.holder} that nobody waits for"
        return
    tx.set(resuming=s.resuming - {e.holder})
    tx.report(f"{e.holder} lets generation run")
    _settle_pauses(tx)


def _engine_held(tx: Tx, e: EngineHeld) -> None:
    t = tx.state.taking
    writing = t is not None and not t.over and t.want.mode is Mode.IN_PLACE and "update" in tx.state.paused
    tx.set(held=e.held)
    if e.dirty and not writing:  # in place a mix is what we are making, behind a fence
        why = f": {e.why}" if e.why else ""
        _soil(tx, Failure(Reason.ENGINE, f"the engine says that its weights may be mixed{why}", tx.state.replica_id))
    tx.report("held versions read from the workers")


def _sleep_done(tx: Tx, e: SleepDone) -> None:
    tx.set(asleep=e.asleep, held=e.held)
    if e.order == tx.state.sleep_begun:  # else another cluster's, whose numbers mean nothing any more
        tx.set(sleep_done=e.order, sleep_failure=e.failure)
    if e.lost is not None:
        _soil(tx, e.lost)
    tx.report(f"order {e.order} to sleep: {e.failure or 'done'}; asleep {e.asleep}")


def _kept(tx: Tx, e: Kept) -> None:
    if tx.state.retained == e.retained:
        tx.reason = "kept as before"
        return
    tx.set(retained=e.retained)
    tx.report(f"retains version {e.retained.held.version}" if e.retained is not None else "retains nothing")


def _serve_failed(tx: Tx, e: ServeFailed) -> None:
    tx.set(serve_failures=(*tx.state.serve_failures, (e.catch_up_id, e.failure))[-8:])
    tx.report(f"cannot send in catch-up {e.catch_up_id}: {e.failure}")


def _tick(tx: Tx, e: Tick) -> None:
    t = tx.state.taking
    if t is None or t.over or t.voted or t.dropping or tx.now < t.deadline:
        return
    doing = t.busy or t.stage.name.lower()
    failure = Failure(Reason.DEADLINE, f"did not vote in time; was at {doing}", tx.state.replica_id)
    _drop(tx, failure, "")


#: The operation that each of these ends (arming ends twice: armed, then received).
_ENDS: dict[type[Any], str] = {Checked: "check", Armed: "arm", Received: "arm", Prepared: "prepare", Applied: "apply"}

_HANDLERS: dict[type[Any], Callable[[Tx, Any], None]] = {
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
    Kept: _kept,
    ServeFailed: _serve_failed,
    Tick: _tick,
}
