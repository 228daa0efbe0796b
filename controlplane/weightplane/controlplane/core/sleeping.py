"""Orders to sleep and to wake: one at a time to a replica, never beside an update, never so that weights are lost.

A replica is ASLEEP from the order on until it says that its weights are awake: no update may write to memory that is
released. With its weights awake and its key-value cache asleep it takes updates and generates nothing (it holds
generation paused by "sleep"); that is when weights that a sleep dropped come back.
"""

from __future__ import annotations

from .events import Report, SetAwake, SetSleep
from .evolve import replace
from .model import SLEEP_TAGS, Replica, SleepOrder, Waiter
from .reasons import Failure, Reason
from .states import Admin, Liveness, Phase, Weights
from .tx import Tx

__all__ = ["awaited", "reported", "set_awake", "set_sleep"]


def set_sleep(tx: Tx, e: SetSleep) -> None:
    """Put a replica to sleep; answered once its memory is released."""
    r = tx.state.replicas.get(e.replica_id)
    failure = _refused(tx, r, e.replica_id)
    if failure is None and r is not None:
        if e.level not in r.sleep_levels:
            have = f"its engine has {list(r.sleep_levels)}" if r.sleep_levels else r.sleep_refusal or "it cannot sleep"
            failure = Failure(Reason.CAPABILITY, f"sleep at level {e.level}: {have}", e.replica_id)
        elif set(r.asleep) == set(SLEEP_TAGS) and e.level <= (r.sleep.level if r.sleep is not None else 1):
            tx.reply(e.call_id)
            tx.quietly(f"replica {r.replica_id} sleeps already")
            return
        elif r.asleep:
            text = f"{_names(r.asleep)} sleeps already: wake it up first"
            failure = Failure(Reason.WRONG_PHASE, f"replica {r.replica_id}: {text}", r.replica_id)
        elif r.admin is not Admin.ACTIVE:
            failure = Failure(Reason.WRONG_PHASE, f"replica {r.replica_id} is {r.admin}", r.replica_id)
    if failure is not None or r is None:
        tx.reply(e.call_id, failure)
        tx.say(f"sleep refused: {failure}")
        return
    _order(tx, replace(r, admin=Admin.ASLEEP), e.level, SLEEP_TAGS, e.call_id, e.deadline)
    tx.write_roster(r.replica_id, Admin.ASLEEP)
    tx.say(f"replica {r.replica_id} is put to sleep at level {e.level}")


def set_awake(tx: Tx, e: SetAwake) -> None:
    """Wake a replica, or a part of it; answered once that is awake."""
    r = tx.state.replicas.get(e.replica_id)
    failure = _refused(tx, r, e.replica_id)
    if failure is None and r is not None:
        left = tuple(t for t in r.asleep if e.tags and t not in e.tags)
        if left == r.asleep:
            tx.reply(e.call_id)
            tx.quietly(f"replica {r.replica_id}: that is awake already")
            return
        failure = _loses(r, left)
        if failure is None:
            level = r.sleep.level if r.sleep is not None else 1
            _order(tx, r, level, left, e.call_id, e.deadline)
            tx.say(f"replica {r.replica_id} is woken; asleep stays: {_names(left) or 'nothing'}")
            return
    tx.reply(e.call_id, failure)
    tx.say(f"waking refused: {failure}")


def _loses(r: Replica, left: tuple[str, ...]) -> Failure | None:
    """Why what would be awake is not to be served."""
    if "weights" in left:
        text = "the weights come first: they may need an update before anything is generated"
    elif not left and r.weights is Weights.DIRTY:
        why = r.failure.message if r.failure is not None else "its weights are a mix"
        text = f"it would serve weights that are lost: {why}. Wake up the weights, publish, then wake up the rest"
    else:
        return None
    return Failure(Reason.WRONG_PHASE, f"replica {r.replica_id}: {text}", r.replica_id)


def _refused(tx: Tx, r: Replica | None, replica_id: str) -> Failure | None:
    """Why no order can be given now."""
    if r is None:
        return Failure(Reason.UNKNOWN_REPLICA, f"no replica {replica_id!r} in group {tx.state.group!r}")
    text = ""
    if r.liveness is not Liveness.LIVE or not r.reported:
        text = "it is not there"
    elif _pending(r):
        text = "an earlier order to sleep or to wake is under way"
    elif busy := _takes_part(tx, r):
        text = f"it takes part in update {busy}: repeat the call when that is over"
    return Failure(Reason.WRONG_PHASE, f"replica {replica_id}: {text}", replica_id) if text else None


def _takes_part(tx: Tx, r: Replica) -> str:
    u = tx.state.open
    part = u.parts.get(r.replica_id) if u is not None else None
    if u is not None and part is not None and part.incarnation == r.incarnation and u.phase is not Phase.ABORTED:
        return u.update_id
    return r.pending or r.draining


def _pending(r: Replica) -> bool:
    return r.sleep is not None and r.sleep_done < r.sleep.order


def _order(tx: Tx, r: Replica, level: int, asleep: tuple[str, ...], call_id: str, deadline: float) -> None:
    order = tx.state.revision + 1  # rises, over restarts too
    tx.put_replica(replace(r, sleep=SleepOrder(order, level, asleep)))
    tx.push([r.replica_id])
    tx.push_trainers()
    tx.set(waiters=(*tx.state.waiters, Waiter(call_id, "sleep", seq=order, deadline=deadline, extra=(r.replica_id,))))


def reported(tx: Tx, r: Replica, e: Report) -> Replica:
    """What a report says of sleep; who waits for the order is answered."""
    if e.sleep_failure is not None and e.sleep_order > r.sleep_done:
        tx.say(f"replica {r.replica_id} gave order {e.sleep_order} to sleep or to wake up: {e.sleep_failure}")
    if r.asleep != e.asleep or e.sleep_order > r.sleep_done:
        r = replace(r, asleep=e.asleep, sleep_done=max(r.sleep_done, e.sleep_order))
    if not _pending(r) and r.admin in (Admin.ACTIVE, Admin.ASLEEP):
        admin = Admin.ASLEEP if "weights" in r.asleep else Admin.ACTIVE
        if admin is not r.admin:
            r = replace(r, admin=admin)
            tx.write_roster(r.replica_id, admin)
    for w in tx.state.waiters:
        if w.what == "sleep" and w.extra == (r.replica_id,) and w.seq == e.sleep_order:
            tx.reply(w.call_id, e.sleep_failure)
            tx.set(waiters=tuple(x for x in tx.state.waiters if x is not w))
    return r


def awaited(tx: Tx, w: Waiter) -> bool:
    """Whether a caller waits on; who cannot be answered any more by a report is answered here."""
    r = tx.state.replicas.get(w.extra[0])
    if r is None or r.liveness is Liveness.LOST or r.sleep is None or r.sleep.order != w.seq:
        failure = Failure(Reason.MEMBER_LOST, f"replica {w.extra[0]} was lost meanwhile", w.extra[0])
    elif w.deadline <= tx.now:
        failure = Failure(Reason.DEADLINE, f"replica {r.replica_id} has not obeyed yet; the order stands", r.replica_id)
    else:
        return True
    tx.reply(w.call_id, failure)
    return False


def _names(tags: tuple[str, ...]) -> str:
    return " and ".join(tags)
