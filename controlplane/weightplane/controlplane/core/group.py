"""The coordinator's state machine of one group: ``step(state, event, now) -> (state, effects, reason)``.

Pure and deterministic: no clock, no randomness, no I/O. ``now`` is seconds on a monotonic clock. The reason says in
words what happened, also when nothing did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import (
    catching,
    conditions,
    ending,
    members,
    operators,
    planning,
    progress,
    sleeping,
    starting,
    trainers,
    updates,
)
from .events import (
    AbortUpdate,
    Beat,
    CallGone,
    CloseTransfer,
    Conditions,
    DigestsIn,
    Effect,
    Event,
    FinishUpdate,
    InitTransfer,
    Leave,
    PlanMade,
    RankGone,
    RankHello,
    RankPlacement,
    RankReport,
    ReplicaHello,
    Report,
    SetAdmin,
    SetAwake,
    SetPause,
    SetPolicy,
    SetSleep,
    StartUpdate,
    Stored,
    Tick,
    UpdateWeights,
    Verified,
    WorkerPlacement,
)
from .evolve import replace
from .group_state import GroupState
from .model import Replica, Trainer
from .reasons import Failure, Reason
from .states import Phase
from .tx import Tx
from .update_state import Update

__all__ = ["restarted", "step"]


def step(state: GroupState, event: Event, now: float) -> tuple[GroupState, list[Effect], str]:
    """Take one event. Raises ``KeyError`` for a type that is no event; nothing else."""
    tx = Tx(state, now)
    if state.stepped_down:
        call_id = getattr(event, "call_id", "")
        if call_id and not isinstance(event, CallGone):
            failure = Failure(Reason.UNKNOWN_OUTCOME, "this coordinator stepped down: ask the one that leads now")
            tx.reply(call_id, failure)
        tx.quietly("stepped down")
        return tx.done(state)
    _HANDLERS[type(event)](tx, event)
    catching.settle(tx, state)
    return tx.done(state)


def _report(tx: Tx, e: Report) -> None:
    before = tx.state
    members.report(tx, e)
    if tx.state is not before:
        operators.settle_pauses(tx)
        starting.pump(tx)


def _plan_made(tx: Tx, e: PlanMade) -> None:
    u = tx.state.open
    if not e.update_id:
        planning.made_ahead(tx, e)
    else:
        (starting if u is not None and u.update_id == e.update_id else catching).plan_made(tx, e)


def _verified(tx: Tx, e: Verified) -> None:
    c = catching.owns(tx.state, e.replica_id, e.update_id)
    (progress if c is None else catching).verified(tx, e)


def _stored(tx: Tx, e: Stored) -> None:
    asked = tx.state.writes.get(e.write_id)
    if asked is None:
        tx.quietly(f"an answer about write {e.write_id}, long settled")
        return
    kind, update_id = asked  # or a replica's id, or the generation
    if not (kind == "decide" and e.ok is None and not e.failed):
        tx.set(writes={k: v for k, v in tx.state.writes.items() if k != e.write_id})
    u = tx.find(update_id) if update_id else None
    _acknowledge(tx, e)
    if e.ok is False:
        ending.step_down(tx, f"the store refused a {kind} write: another coordinator leads")
    elif kind == "freeze" and u is not None:
        starting.frozen(tx, u, e.ok, e.failed)
    elif kind == "decide" and u is not None:
        ending.decision_stored(tx, u, e)
    elif e.ok is None:
        tx.set(unsaved=tx.state.unsaved | {asked})
        tx.say(f"the store did not confirm a {kind} write; it is repeated")
    elif kind == "group":
        t = tx.state.trainer
        if t is not None and not t.durable and update_id == str(t.generation):
            tx.put_trainer(replace(t, durable=True))
            tx.say(f"generation {t.generation} is durable")
            trainers.maybe_bind(tx)
        else:
            tx.quietly("group written")
    else:
        tx.quietly(f"{kind} written: {e.ok}")


def _acknowledge(tx: Tx, e: Stored) -> None:
    """Answer the caller of a write: done only once it is durable."""
    call_id = tx.state.acks.get(e.write_id)
    if call_id is None:
        return
    tx.set(acks={k: v for k, v in tx.state.acks.items() if k != e.write_id})
    failure = None
    if e.ok is False:
        text = "nothing was written: another coordinator leads on this store (the newest started). Repeat the call"
        failure = Failure(Reason.COORDINATOR_RESTARTED, text)
    elif e.ok is None:
        what = e.failed or "the store did not confirm it"
        reason = Reason.RESOURCE if e.failed else Reason.UNKNOWN_OUTCOME
        failure = Failure(
            reason, f"in force now, but not durable yet: {what}. It is repeated; repeat the call to be sure"
        )
    tx.reply(call_id, failure)


def _save_again(tx: Tx) -> None:
    """Repeat the writes that ended unknown: each says what is true now, so a repeat is harmless."""
    for kind, subject in sorted(tx.state.unsaved):
        u = tx.find(subject) if kind == "close" else None
        if kind == "group":
            trainers.write_group(tx)
        elif kind == "roster":
            r = tx.state.replicas.get(subject)
            tx.write_roster(subject, r.admin if r is not None and subject in tx.state.roster else "")
        elif u is not None:
            tx.write("close", u)
    if tx.state.unsaved:
        tx.set(unsaved=frozenset())


def _call_gone(tx: Tx, e: CallGone) -> None:
    """A caller left: forget its waiting. The update goes on; the outcome is unknown to that caller."""
    s = tx.state
    u, t = s.open, s.trainer
    if u is not None and any(w.call_id == e.call_id for w in u.waiters):
        tx.put_update(replace(u, waiters=tuple(w for w in u.waiters if w.call_id != e.call_id)))
    elif t is not None and any(w.call_id == e.call_id for w in t.waiters):
        tx.put_trainer(replace(t, waiters=tuple(w for w in t.waiters if w.call_id != e.call_id)))
    elif any(w.call_id == e.call_id for w, _ in s.queue):
        tx.set(queue=tuple((w, q) for w, q in s.queue if w.call_id != e.call_id))
    elif any(w.call_id == e.call_id for w in s.waiters):
        tx.set(waiters=tuple(w for w in s.waiters if w.call_id != e.call_id))
    tx.quietly(f"caller {e.call_id} left")


def _tick(tx: Tx, e: Tick) -> None:
    members.tick(tx)
    trainers.tick(tx)
    progress.tick(tx)
    ending.tick(tx)
    operators.settle_pauses(tx)
    starting.pump(tx)
    catching.tick(tx)
    _save_again(tx)
    if not tx.reasons:
        tx.quietly("tick")


_HANDLERS: dict[type[Any], Callable[[Tx, Any], None]] = {
    ReplicaHello: members.hello,
    Beat: members.beat,
    Report: _report,
    Conditions: conditions.take,
    Leave: members.leave,
    WorkerPlacement: members.worker_placement,
    RankHello: trainers.rank_hello,
    RankGone: trainers.rank_gone,
    RankReport: catching.rank_report,
    InitTransfer: trainers.init,
    RankPlacement: trainers.rank_placement,
    CloseTransfer: trainers.close,
    StartUpdate: starting.start,
    UpdateWeights: updates.weights,
    DigestsIn: updates.digests_in,
    FinishUpdate: updates.finish,
    AbortUpdate: updates.abort,
    PlanMade: _plan_made,
    Verified: _verified,
    SetPolicy: operators.set_policy,
    SetPause: operators.set_pause,
    SetAdmin: operators.set_admin,
    SetSleep: sleeping.set_sleep,
    SetAwake: sleeping.set_awake,
    Stored: _stored,
    CallGone: _call_gone,
    Tick: _tick,
}


def _unconfirmed(u: Update, stored: GroupState) -> bool:
    """Whether ``u`` is the committed update, and the coordinator ended before its replicas confirmed it."""
    return u.phase is Phase.COMMITTED and u.held == stored.committed and not u.ended_at


def restarted(stored: GroupState, frozen: Update | None, epoch: int, now: float) -> tuple[GroupState, Update | None]:
    """The state a new epoch starts from, given what the store holds.

    ``frozen`` is an update whose freeze was stored and whose decision was not: without a record it is aborted (rule 6).
    Decided updates are in ``stored.history``; the replicas that took part confirm when they come back. Returns the
    state and the update that was aborted, to be written down.
    """
    history = dict(stored.history)
    aborted: Update | None = None
    if frozen is not None and frozen.update_id not in history:
        failure = Failure(
            Reason.COORDINATOR_RESTARTED, "the coordinator restarted before the decision", phase=frozen.phase.value
        )
        aborted = replace(frozen, phase=Phase.ABORTED, failure=failure, closed=True, frozen=True, waiters=())
        history[frozen.update_id] = aborted
    flipping = next((u for u in history.values() if _unconfirmed(u, stored)), None)
    if flipping is not None:  # FinishUpdate answers once its replicas are back and serve it, or after 2 TTL
        del history[flipping.update_id]
        flipping = replace(flipping, closed=False, deadline=now + 2 * stored.config.ttl_s, waiters=())
    t: Trainer | None = stored.trainer
    if t is not None:
        t = replace(t, ranks={}, waiters=(), channels=(), choices=(), placements={}, durable=True)
    known = (*history.values(), *((flipping,) if flipping is not None else ()))
    requests = {u.request_id: u.update_id for u in known if u.request_id}
    absent = {rid: Replica(rid) for rid in sorted(stored.roster)}
    replicas = {rid: replace(r, lost_at=now) for rid, r in {**absent, **stored.replicas}.items()}
    state = replace(
        stored,
        epoch=epoch,
        epoch_began=now,
        revision=epoch << 32,  # rises over restarts too: watchers resume by it
        replicas=replicas,
        history=history,
        requests=requests,
        trainer=t,
        open=flipping,
        queue=(),
        waiters=(),
        writes={},
        unsaved=frozenset(),
        acks={},
        healing=frozenset(),
        stepped_down=False,
        catch_ups={},
    )
    return state, aborted
