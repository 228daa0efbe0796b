"""How an update ends: decided once and committed, or aborted and drained (rules 6 to 9)."""

from __future__ import annotations

from . import parity
from .events import ReadBack, StepDown, Stored
from .evolve import replace
from .persistent import PersistentMap
from .reasons import Failure, Reason
from .states import Liveness, Phase, Stage, Weights
from .tx import Tx
from .update_state import Part, Update

__all__ = ["abort", "decide", "decision_stored", "maybe_aborted", "maybe_complete", "step_down", "tick"]

#: An abort near or past the deadline may drain this long, so that an update ends by its deadline plus one second.
_GRACE_S = 0.8


def abort(tx: Tx, u: Update, failure: Failure) -> None:
    """Abort an undecided update. In DECIDING aborts wait; after it they change nothing."""
    if u.phase in (Phase.DECIDING, Phase.COMMITTED, Phase.ABORTING, Phase.ABORTED):
        tx.say(f"abort of {u.update_id} has no effect: it is {u.phase}", u.update_id)
        return
    failure = replace(failure, phase=failure.phase or u.phase.value)
    until = min(tx.now + tx.state.config.quiesce_s, u.deadline + _GRACE_S)
    for w in u.waiters:
        if w.what in ("start", "update"):
            tx.reply(w.call_id, failure, u.update_id)
    waiters = tuple(w for w in u.waiters if w.what not in ("start", "update"))
    parts = u.parts
    if not u.frozen:
        parts = {rid: replace(p, quiesced=True) for rid, p in parts.items()}
    u = replace(u, phase=Phase.ABORTING, failure=failure, aborting_until=until, waiters=waiters, parts=parts)
    tx.put_update(u)
    tx.push(u.parts)
    tx.push_trainers(u.update_id)
    tx.say(f"update {u.update_id} aborts: {failure}", u.update_id)
    maybe_aborted(tx, u)


def maybe_aborted(tx: Tx, u: Update) -> None:
    """ABORTED once every participant has drained, is dead, or is listed as unquiesced."""
    everyone = PersistentMap.of(u.parts).newest_first()  # as in ``Update.newest_first``
    if u.phase is Phase.ABORTING and all(p.quiesced or p.gone or p.unquiesced for p in everyone):
        _close(tx, replace(u, phase=Phase.ABORTED))


def decide(tx: Tx, u: Update) -> None:
    """Write the one decision; the store's answer comes back as ``Stored``."""
    until = tx.now + tx.state.config.store_timeout_s
    u = tx.put_update(replace(u, phase=Phase.DECIDING, decide_at=tx.now, deciding_until=until))
    write_id = tx.write("decide", u)
    tx.put_update(replace(u, write_id=write_id))
    tx.push_trainers(u.update_id)
    tx.say(f"update {u.update_id} is being decided", u.update_id)


def decision_stored(tx: Tx, u: Update, e: Stored) -> None:
    """Commit is sent only after the store confirms; unknown is read back; refused means we do not lead."""
    if u.phase is not Phase.DECIDING:
        tx.quietly("an answer about a decision that is over")
        return
    if e.failed:
        u = tx.put_update(replace(u, phase=Phase.VERIFYING))
        abort(tx, u, Failure(Reason.RESOURCE, f"the decision could not be written: {e.failed}", phase="DECIDING"))
    elif e.ok is None:
        tx.effects.append(ReadBack(e.write_id, u.update_id))
        tx.say(f"the store did not confirm the decision of {u.update_id}; it is read back", u.update_id)
    elif e.ok:
        _commit(tx, u)
    else:
        step_down(tx, "the store refused the decision: another coordinator leads, or the update is not open")


def _rewinds(tx: Tx, u: Update) -> bool:
    """Whether the holder resumes below what ``u`` commits: then ``u`` is another trainer's, and nothing is routable."""
    t = tx.state.trainer
    if t is None or t.generation == u.generation:
        return False
    return tx.state.rewinding or (t.resume_step is not None and t.resume_step < u.options.trainer_step)


def _commit(tx: Tx, u: Update) -> None:
    u = tx.put_update(replace(u, phase=Phase.COMMITTED, decided_at=tx.now))
    tx.set(
        committed=u.held,
        committed_step=u.options.trainer_step,
        committed_lineage=u.lineage,
        committed_manifest=u.options.manifest_id,
        unproven="",
        rewinding=_rewinds(tx, u),
    )
    for part in u.active():
        r = tx.state.replicas.get(part.replica_id)
        if r is not None and r.incarnation == part.incarnation:
            tx.put_replica(replace(r, pending=u.update_id, weights=Weights.PENDING))
    tx.push(u.parts)
    tx.push_trainers(u.update_id)
    tx.say(f"update {u.update_id} is COMMITTED: version {u.version}", u.update_id)
    maybe_complete(tx, u)


def maybe_complete(tx: Tx, u: Update) -> None:
    """FinishUpdate answers once every participant flipped, is dirty, or is gone."""
    if u.phase is not Phase.COMMITTED or u.closed:
        return
    for p in u.newest_first():
        if not (p.stage is Stage.APPLIED or p.dirty or p.gone or _lost(tx, p.replica_id)):
            return
    _close(tx, u)


def _lost(tx: Tx, replica_id: str) -> bool:
    r = tx.state.replicas.get(replica_id)
    return r is not None and r.liveness is Liveness.LOST


def _close(tx: Tx, u: Update) -> None:
    """An update is over: history, counters, answers, and whoever waited for it."""
    from . import starting

    given_up = any(w.what == "abort" for w in u.waiters)
    u = replace(u, closed=True, ended_at=tx.now)
    for w in u.waiters:
        failure = u.failure if u.phase is Phase.ABORTED and w.what == "finish" else None
        tx.reply(w.call_id, failure, u.update_id)
    u = replace(u, waiters=())
    history = {**tx.state.history, u.update_id: u}
    while len(history) > tx.state.config.history:
        history.pop(next(iter(history)))
    tx.set(open=None, history=history)
    for part in u.parts.values():
        r = tx.state.replicas.get(part.replica_id)
        if r is None or r.incarnation != part.incarnation:
            continue
        healed = u.phase is Phase.COMMITTED and part.stage is Stage.APPLIED and not part.dirty
        if healed and not parity.condemned(tx.state, u, r.replica_id):
            r = replace(r, failures_in_a_row=0, failure=None)
            r = replace(r, catch_ups_failed=0, catch_up_after=0.0, catch_up_refusal="")
            if r.admin.value == "QUARANTINED":
                r = replace(r, admin=type(r.admin).ACTIVE)
                tx.write_roster(r.replica_id, r.admin)
        if part.unquiesced and not part.quiesced:
            r = replace(r, draining=u.update_id)
        if r.weights is Weights.UPDATING:
            from .members import derive_weights

            r = replace(r, weights=derive_weights(tx.state, r, False))
        tx.put_replica(r)
    t = tx.state.trainer
    broken = any(p.unquiesced or p.gone or p.excluded for p in u.parts.values()) or u.phase is Phase.ABORTED or given_up
    if t is not None and t.generation == u.generation and broken and u.calls:
        tx.put_trainer(replace(t, channels=()))  # what the dead could still touch is never used again (rule 9)
    tx.write("close", u)
    tx.push(p.replica_id for p in u.parts.values() if not _settled(u, p))
    tx.push_trainers(u.update_id)
    tx.say(f"update {u.update_id} is over: {u.phase}", u.update_id)
    starting.pump(tx)


def _settled(u: Update, p: Part) -> bool:
    """Whether a participant knows all that there is to know of its end: it applied what was committed."""
    return u.phase is Phase.COMMITTED and p.stage is Stage.APPLIED and not (p.dirty or p.excluded or p.failure)


def abandoned(tx: Tx, u: Update, generation: int) -> None:
    """The trainer gives up an update that is decided and over: it has aborted its channels, so bind it to others."""
    t = tx.state.trainer
    if t is None or not t.generation == generation == u.generation or u.phase is not Phase.COMMITTED:
        return
    if not {c.channel_id for c in t.channels}.isdisjoint(u.channels):
        tx.put_trainer(replace(t, channels=()))


def step_down(tx: Tx, message: str) -> None:
    """Stop leading: nothing more is decided here; callers are told that the outcome is unknown to us."""
    u = tx.state.open
    failure = Failure(Reason.UNKNOWN_OUTCOME, f"{message}. Ask GetUpdate of the coordinator that leads now")
    if u is not None:
        for w in u.waiters:
            tx.reply(w.call_id, failure, u.update_id)
        tx.put_update(replace(u, waiters=()))
    t = tx.state.trainer
    if t is not None and t.waiters:
        tx.put_trainer(replace(t, waiters=()))
    for w in (*(w for w, _ in tx.state.queue), *tx.state.waiters, *(t.waiters if t is not None else ())):
        tx.reply(w.call_id, failure)
    for call_id in tx.state.acks.values():
        tx.reply(call_id, failure)
    tx.set(stepped_down=True, queue=(), waiters=(), acks={})
    tx.effects.append(StepDown(message))  # whoever carries that out says it


def tick(tx: Tx) -> None:
    """Bound the drain, the decision and the flip."""
    u = tx.state.open
    if u is None:
        return
    if u.phase is Phase.DECIDING and tx.now >= u.deciding_until:
        step_down(tx, f"the store did not answer about update {u.update_id} within {tx.state.config.store_timeout_s} s")
    elif u.phase is Phase.ABORTING and tx.now >= u.aborting_until:
        parts = {rid: p if p.quiesced or p.gone else replace(p, unquiesced=True) for rid, p in u.parts.items()}
        u = tx.put_update(replace(u, parts=parts))
        maybe_aborted(tx, u)
    elif u.phase is Phase.COMMITTED and tx.now >= u.deadline:
        _close(tx, replace(u, parts={rid: _unreached(p) for rid, p in u.parts.items()}))


def _unreached(p: Part) -> Part:
    """At the deadline: who did not say that it flipped is PENDING, and that is said to be why."""
    if p.excluded or p.stage is Stage.APPLIED or p.failure is not None:
        return p
    why = "did not say by the deadline that it applied what was committed; it is brought in line once it can be reached"
    return replace(p, failure=Failure(Reason.DEADLINE, why, p.replica_id, Phase.COMMITTED.value))
