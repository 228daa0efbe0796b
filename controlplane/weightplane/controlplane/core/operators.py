"""Operators' calls: pauses by holder, administrative states, policies."""

from __future__ import annotations

from . import conditions, progress, sleeping, trainers
from .events import SetAdmin, SetPause, SetPolicy
from .evolve import replace
from .model import Replica, Waiter
from .reasons import Failure, Reason
from .states import Admin, Liveness, Phase, Weights
from .tx import Tx

__all__ = ["set_admin", "set_pause", "set_policy", "settle_pauses"]


def set_policy(tx: Tx, e: SetPolicy) -> None:
    """Replace the policies; the next update uses them."""
    judged = conditions.declaration(tx.state.policy) != conditions.declaration(e.policy)
    tx.set(policy=e.policy)
    if judged:
        tx.push(tx.state.replicas)
    trainers.write_group(tx, e.call_id)
    tx.push_trainers()
    tx.say("policies replaced")


def set_pause(tx: Tx, e: SetPause) -> None:
    """Add or remove one holder's pause; answered once every live replica named says so."""
    ids = e.replica_ids or tuple(tx.state.replicas)
    unknown = sorted(set(ids) - set(tx.state.replicas))
    if unknown:
        tx.reply(e.call_id, Failure(Reason.UNKNOWN_REPLICA, f"no replica {unknown[0]!r} in group {tx.state.group!r}"))
        tx.say("pause of an unknown replica refused")
        return
    for rid in ids:
        r = tx.state.replicas[rid]
        if e.on and r.liveness is Liveness.LIVE and e.mode not in r.pause_modes:
            have = ", ".join(r.pause_modes)
            tx.reply(e.call_id, Failure(Reason.CAPABILITY, f"pause mode {e.mode}: replica {rid} has {have}", rid))
            tx.say("pause mode refused")
            return
    for rid in ids:
        r = tx.state.replicas[rid]
        wanted = {h: m for h, m in r.pauses_wanted.items() if h != e.holder}
        if e.on:
            wanted[e.holder] = e.mode
        resumed = r.resumed - {e.holder} if e.on or r.reported else r.resumed | {e.holder}
        tx.put_replica(replace(r, pauses_wanted=wanted, resumed=resumed))
    tx.push(ids)
    tx.push_trainers()
    what = "pause" if e.on else "resume"
    tx.set(waiters=(*tx.state.waiters, Waiter(e.call_id, what, deadline=e.deadline, extra=(e.holder, *ids))))
    tx.say(f"{what} by {e.holder} of {len(ids)} replica(s)")
    settle_pauses(tx)


def settle_pauses(tx: Tx) -> None:
    """Answer the pauses, resumes and orders to sleep that are in force everywhere, or whose time is over."""
    left: list[Waiter] = []
    for w in tx.state.waiters:
        if w.what == "sleep":
            if sleeping.awaited(tx, w):
                left.append(w)
            continue
        holder, *ids = w.extra
        late = [rid for rid in ids if not _in_force(tx.state.replicas.get(rid), holder, w.what == "pause")]
        if not late:
            tx.reply(w.call_id)
            tx.say(f"{w.what} by {holder} is in force")
        elif w.deadline <= tx.now:
            message = f"{w.what} by {holder} is not in force on {late[:5]}; it stays wanted: repeat the call to wait on"
            tx.reply(w.call_id, Failure(Reason.DEADLINE, message, late[0]))
        else:
            left.append(w)
    if len(left) != len(tx.state.waiters):
        tx.set(waiters=tuple(left))


def _in_force(r: Replica | None, holder: str, on: bool) -> bool:
    if r is None or r.liveness is Liveness.LOST:
        return True
    return (holder in r.pause_holders) is on and r.reported


def set_admin(tx: Tx, e: SetAdmin) -> None:
    """Drain, pin, or activate one replica. Repeats are no errors."""
    r = tx.state.replicas.get(e.replica_id)
    failure: Failure | None = None
    if r is None:
        failure = Failure(Reason.UNKNOWN_REPLICA, f"no replica {e.replica_id!r} in group {tx.state.group!r}")
    elif e.admin is Admin.PINNED and r.admin is not Admin.PINNED and r.weights is not Weights.READY:
        failure = Failure(
            Reason.WRONG_PHASE, f"replica {r.replica_id} is {r.weights}: only a READY one can be pinned", r.replica_id
        )
    elif r.admin is Admin.ASLEEP and e.admin is not Admin.ASLEEP:  # once ACTIVE it would be updated in released memory
        failure = Failure(Reason.WRONG_PHASE, f"replica {r.replica_id} is ASLEEP: wake it up first", r.replica_id)
    elif e.admin is Admin.PINNED and r.admin not in (Admin.ACTIVE, Admin.PINNED):
        # The end of the pin would be the end of that too.
        text = f"replica {r.replica_id} is {r.admin}: only an ACTIVE one can be pinned, activate it first"
        failure = Failure(Reason.WRONG_PHASE, text, r.replica_id)
    if failure is not None or r is None:
        tx.reply(e.call_id, failure)
        tx.say(f"{e.admin} refused: {failure}")
        return
    if r.admin is e.admin:
        tx.reply(e.call_id)
        tx.quietly(f"replica {r.replica_id} is {e.admin} already")
        return
    failures = 0 if e.admin is Admin.ACTIVE else r.failures_in_a_row
    tx.put_replica(replace(r, admin=e.admin, failures_in_a_row=failures))
    tx.write_roster(r.replica_id, e.admin, e.call_id)
    tx.push([r.replica_id])
    tx.push_trainers()
    tx.say(f"replica {r.replica_id} is {e.admin}")
    u = tx.state.open
    if u is not None and e.admin is Admin.DRAINING and r.replica_id in u.parts and u.phase is Phase.PREPARING:
        why = Failure(Reason.ABORTED_BY_CALLER, f"replica {r.replica_id} is being drained", r.replica_id)
        progress.part_failed(tx, u, r.replica_id, why)
