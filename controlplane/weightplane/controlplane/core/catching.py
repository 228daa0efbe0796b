"""Catch-up: a replica that is behind is brought to the committed version without the trainer publishing.

Who holds an immutable copy of what was committed (a peer that retained it, or every rank of the trainer: ``holders``)
sends it to the one replica, over a channel of their own, by a plan of their own. The replica takes it as it takes an
update, under an id of its own; its receipts are compared with the digests that the trainer gave for the committed
version. Only then is it told to apply, and it is READY when its workers say that they hold the version.

An update goes first: while one is open no catch-up begins, and those under way move no bytes. Whoever is being caught
up takes part in no update, unless there would be too few without it; then the catch-up is dropped for the update.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace as with_changes

from .events import Compare, MakePlan, PlanMade, RankReport, Report, Verified
from .evolve import replace
from .group_state import GroupState
from .holders import Holder, behind, channel_to, holders, lives, patience, reach
from .model import Held, Replica
from .reasons import Failure, Reason
from .states import Admin, CachePolicy, Liveness, Mode, PauseMode, Phase, Process, Stage, Verify, Weights
from .tx import Tx
from .update_state import CatchUp

__all__ = [
    "drop",
    "end",
    "holds_back",
    "owns",
    "plan_made",
    "rank_report",
    "replica_report",
    "serves",
    "settle",
    "tick",
    "verified",
]

_MOST_S = 60.0  # between two tries


def _begin(tx: Tx, r: Replica, holder: Holder, transport: str) -> None:
    s = tx.state
    seed = f"{s.epoch} {s.revision} {r.replica_id} {r.incarnation}".encode()
    catch_up_id = "k-" + hashlib.sha256(b"catch-up id" + s.secret + seed).hexdigest()[:24]
    pause = s.policy.pause if s.policy.pause in r.pause_modes else next(iter(r.pause_modes), PauseMode.KEEP)
    cache = s.policy.cache if s.policy.cache in r.cache_policies else next(iter(r.cache_policies), CachePolicy.CLEAR)
    made = CatchUp(
        catch_up_id=catch_up_id,
        replica_id=r.replica_id,
        incarnation=r.incarnation,
        target=s.committed,
        trainer_step=s.committed_step,
        lineage=s.committed_lineage,
        generation=s.last_generation,
        manifest_id=s.committed_manifest,
        holder=holder.name,
        holder_life=holder.life,
        senders=holder.senders,
        channel=channel_to(s, catch_up_id, holder, transport, r),
        mode=Mode.STAGED if Mode.STAGED in r.modes else Mode.IN_PLACE,
        pause=pause,
        cache=cache,
        began=tx.now,
        deadline=tx.now + patience(s),
    )
    _put(tx, made)
    tx.set(caught_at=tx.now)
    tx.push([r.replica_id])
    tx.push_trainers()
    who = f"replica {holder.name}" if holder.name else "the trainer"
    tx.say(f"replica {r.replica_id} is caught up to version {made.target.version} by {who} over {transport}")


# --- beginning


def tick(tx: Tx) -> None:
    """Begin what can begin, so many at once for each holder; end what takes too long."""
    for c in list(tx.state.catch_ups.values()):
        most = patience(tx.state)
        if c.waited > max(most, (tx.now - c.began) / 2) and not c.decision:
            text = f"updates leave no time for it: it waited for them {c.waited:.0f} of {tx.now - c.began:.0f} s"
            drop(tx, c, Failure(Reason.DEADLINE, f"{text}. The next one takes it along", c.replica_id))
        elif holds_back(tx.state) and not c.decision:
            _put(tx, with_changes(c, waited=c.waited + tx.now - tx.state.caught_at, deadline=tx.now + most))
        elif tx.now >= c.deadline and not c.decision:
            text = f"the catch-up of {c.replica_id} did not get on for {patience(tx.state):.0f} s"
            where = f"it was at {c.stage.name}, {c.bytes_received} bytes"
            drop(tx, c, Failure(Reason.DEADLINE, f"{text}; {where}", c.replica_id))
        elif c.decision == "ABORT" and tx.now >= c.deadline + tx.state.config.quiesce_s:
            r = tx.state.replicas.get(c.replica_id)
            if r is not None and r.incarnation == c.incarnation:
                tx.put_replica(replace(r, draining=c.catch_up_id))
            end(tx, c)
    if tx.state.catch_ups:
        tx.set(caught_at=tx.now)
    if not tx.state.committed.version or tx.state.rewinding:
        return  # nobody is behind
    could = holders(tx.state)
    if not could and not tx.state.unproven:
        return
    late = [r for r in tx.state.replicas.values() if behind(tx.state, r, tx.now)]
    if tx.state.unproven:
        _say_unproven(tx, late)
        return
    load = {h.name: sum(c.holder == h.name for c in tx.state.catch_ups.values()) for h in could}
    for r in sorted(late, key=lambda r: (r.weights is Weights.READY, r.replica_id)):
        free = [h for h in could if h.name != r.replica_id and load[h.name] < tx.state.config.catch_ups_at_once]
        order = sorted(free, key=lambda h: (load[h.name], not h.name, h.name))
        turn = r.catch_ups_failed % max(1, len(order))  # a copy may be damaged: who failed is not asked again and again
        for holder in order[turn:] + order[:turn]:
            transport = reach(holder, r)
            if transport:
                load[holder.name] += 1
                _begin(tx, r, holder, transport)
                break


def _say_unproven(tx: Tx, late: Iterable[Replica]) -> None:
    """Tell those that nobody can be caught up to what is committed. They take part in the next update."""
    for r in late:
        if r.catch_up_refusal != tx.state.unproven[:512]:
            tx.put_replica(replace(r, catch_up_refusal=tx.state.unproven[:512]))
            tx.say(f"replica {r.replica_id} is not caught up: {tx.state.unproven}")


# --- how one goes on


def owns(state: GroupState, replica_id: str, catch_up_id: str) -> CatchUp | None:
    """The catch-up of that id, if it is the one that the replica is in."""
    c = state.catch_ups.get(replica_id)
    return c if c is not None and c.catch_up_id == catch_up_id else None


def holds_back(state: GroupState) -> bool:
    """Whether catch-ups move no bytes now: an update is on its way."""
    u = state.open
    return u is not None and u.phase in (Phase.PREPARING, Phase.TRANSFERRING, Phase.VERIFYING, Phase.DECIDING)


def replica_report(tx: Tx, e: Report, mixed: bool, held: Held) -> None:
    """What a report says of the catch-up its sender is in, and of those that it serves."""
    _serve_failures(tx, e.serve_failures, e.replica_id)
    c = tx.state.catch_ups.get(e.replica_id)
    if c is None or c.incarnation != e.incarnation:
        return
    if e.update_id != c.catch_up_id:
        if c.stage is not Stage.NONE:  # it was in it, and now it is in another
            end(tx, c)
        return
    before, landed = c.stage, c.bytes_received
    c = with_changes(c, stage=max(c.stage, e.stage), bytes_received=max(c.bytes_received, e.bytes_received))
    if (c.stage, c.bytes_received) != (before, landed) and not c.decision:
        c = with_changes(c, deadline=tx.now + patience(tx.state))
    c = _put(tx, c)
    if e.stage in (Stage.ABORTED, Stage.FAILED):
        failure = c.failure or e.failure or e.dirty_reason or Failure(Reason.ENGINE, "it dropped the catch-up")
        _failed(tx, with_changes(c, failure=failure))
    elif c.decision == "COMMIT":
        if c.stage is Stage.APPLIED and held == c.target and not mixed:
            _done(tx, c)
        elif e.failure is not None or (c.stage is Stage.APPLIED and mixed):
            _failed(tx, with_changes(c, failure=e.failure or e.dirty_reason or Failure(Reason.ENGINE, "it is mixed")))
    elif c.decision == "":
        if e.failure is not None:
            drop(tx, c, e.failure)
            return
        if c.stage >= Stage.JOINED and not c.planning:
            _plan(tx, c)
        elif c.stage >= Stage.ARMED > before:
            _tell_holder(tx, c)
        if c.stage is Stage.PREPARED > before and c.plan is not None:
            plans = ((c.plan.plan_id, c.members),)
            against = c.target.update_id
            tx.effects.append(Compare(c.catch_up_id, c.replica_id, c.incarnation, plans, Verify.FULL, against))


def _plan(tx: Tx, c: CatchUp) -> None:
    r = tx.state.replicas[c.replica_id]
    placed = r.placements.get(c.manifest_id, {})
    receivers = tuple((f"{r.replica_id}/{w.index}", placed.get(w.index, "")) for w in r.workers)
    _put(tx, with_changes(c, planning=True))
    effect = MakePlan(c.catch_up_id, c.channel.channel_id, c.manifest_id, c.senders, receivers, c.channel.bucket_bytes)
    tx.effects.append(effect)


def _by_id(state: GroupState, catch_up_id: str) -> CatchUp | None:
    return next((c for c in state.catch_ups.values() if c.catch_up_id == catch_up_id), None)


def plan_made(tx: Tx, e: PlanMade) -> None:
    """The plan is there: the replica arms, and the holder begins once it is armed."""
    c = _by_id(tx.state, e.update_id)
    if c is None or c.decision:
        tx.quietly("a plan of a catch-up that is over")
    elif e.summary is None:
        drop(tx, c, e.failure or Failure(Reason.INTERNAL, "no plan"))
    else:
        c = _put(tx, with_changes(c, plan=e.summary))
        tx.push([c.replica_id])
        _tell_holder(tx, c)
        tx.say(f"the plan of catch-up {c.catch_up_id} is made: {e.summary.nbytes} bytes")


def verified(tx: Tx, e: Verified) -> None:
    """Its receipts were compared with what the trainer gave for the committed version."""
    c = owns(tx.state, e.replica_id, e.update_id)
    if c is None or c.decision or c.incarnation != e.incarnation:
        tx.quietly("a comparison that no longer matters")
    elif e.failure is not None:
        drop(tx, c, e.failure)
    else:
        c = _put(tx, with_changes(c, decision="COMMIT"))
        tx.push([c.replica_id])
        _tell_holder(tx, c)
        tx.say(f"replica {c.replica_id} is verified: it may apply version {c.target.version}")


def _done(tx: Tx, c: CatchUp) -> None:
    r = replace(
        tx.state.replicas[c.replica_id],
        failures_in_a_row=0,
        failure=None,
        catch_ups_failed=0,
        catch_up_after=0.0,
        catch_up_refusal="",
    )
    if r.admin is Admin.QUARANTINED:
        r = replace(r, admin=Admin.ACTIVE)
        tx.write_roster(r.replica_id, r.admin)
    tx.put_replica(r)
    end(tx, c)
    tx.say(f"replica {c.replica_id} caught up with version {c.target.version} in {tx.now - c.began:.2f} s")


def drop(tx: Tx, c: CatchUp, failure: Failure) -> None:
    """Give one up: it ends here once the replica has drained."""
    if c.decision:
        return
    c = _put(tx, with_changes(c, decision="ABORT", failure=failure, deadline=tx.now))
    tx.push([c.replica_id])
    _tell_holder(tx, c)
    tx.say(f"replica {c.replica_id} is not caught up: {failure}")


def _failed(tx: Tx, c: CatchUp) -> None:
    """It is over, and not well: not at once again."""
    r = tx.state.replicas[c.replica_id]
    n = r.catch_ups_failed + 1
    after = tx.now + min(_MOST_S, tx.state.config.catch_up_retry_s * 2 ** min(n - 1, 10))
    tx.put_replica(replace(r, catch_ups_failed=n, catch_up_after=after, catch_up_refusal=str(c.failure)[:512]))
    end(tx, c)
    tx.say(f"the catch-up of replica {c.replica_id} failed, {n} in a row: {c.failure}")


def end(tx: Tx, c: CatchUp) -> None:
    """Forget one, whatever became of it."""
    left = {rid: x for rid, x in tx.state.catch_ups.items() if rid != c.replica_id}
    tx.set(catch_ups=left)
    tx.push([c.replica_id])
    _tell_holder(tx, c)


def _put(tx: Tx, c: CatchUp) -> CatchUp:
    tx.set(catch_ups={**tx.state.catch_ups, c.replica_id: c})
    return c


def _tell_holder(tx: Tx, c: CatchUp) -> None:
    if c.holder:
        tx.push([c.holder])
    tx.push_trainers()


# --- holders


def rank_report(tx: Tx, e: RankReport) -> None:
    """What a rank of the trainer retains, and what it cannot serve."""
    t = tx.state.trainer
    if t is None or t.generation != e.generation or t.closed or e.rank not in t.ranks:
        tx.quietly("report of a fenced or unknown rank")
        return
    rank = t.ranks[e.rank]
    if (rank.retained, rank.serve_host, rank.serve_offers) != (e.retained, e.host_id, e.offers):
        rank = replace(rank, retained=e.retained, serve_host=e.host_id, serve_offers=e.offers)
        tx.put_trainer(replace(t, ranks={**t.ranks, e.rank: rank}))
        what = f"version {e.retained.held.version}" if e.retained is not None else "nothing"
        tx.say(f"rank {e.rank} retains {what}")
    else:
        tx.quietly(f"report of rank {e.rank}")
    _serve_failures(tx, e.serve_failures, "")


def _serve_failures(tx: Tx, failures: Iterable[tuple[str, Failure]], holder: str) -> None:
    for catch_up_id, failure in failures:
        c = _by_id(tx.state, catch_up_id)
        if c is not None and c.holder == holder:
            drop(tx, c, failure)


def settle(tx: Tx, before: GroupState) -> None:
    """After every event: a catch-up ends with the life of its replica or of its holder, and waits for an update."""
    s = tx.state
    if not s.catch_ups:
        return
    for c in list(s.catch_ups.values()):
        r = s.replicas.get(c.replica_id)
        if r is None or r.incarnation != c.incarnation or r.liveness is Liveness.LOST or _takes_part(s, r):
            end(tx, c)
        elif not c.decision and c.stage < Stage.PREPARED and (why := _holder_gone(s, c)):
            who = c.holder or "the trainer"
            drop(tx, c, Failure(Reason.MEMBER_LOST, f"{who}, which sent the retained copy, is gone: {why}", c.holder))
        elif not c.decision and r.admin not in (Admin.ACTIVE, Admin.QUARANTINED):
            drop(tx, c, Failure(Reason.ABORTED_BY_CALLER, f"the replica is {r.admin}", c.replica_id))
    if holds_back(before) != holds_back(tx.state):
        for c in tx.state.catch_ups.values():
            _tell_holder(tx, c)


def _takes_part(s: GroupState, r: Replica) -> bool:
    part = s.open.parts.get(r.replica_id) if s.open is not None else None
    return part is not None and part.incarnation == r.incarnation and not part.excluded


def _holder_gone(s: GroupState, c: CatchUp) -> str:
    if c.holder:
        h = s.replicas.get(c.holder)
        if h is None or h.incarnation != c.holder_life:
            return "it came back with a new incarnation, or is forgotten"
        return "" if lives(h) else f"it is {h.liveness}, its process {h.process}"
    t = s.trainer
    if t is None or t.closed or str(t.generation) != c.holder_life:
        return "its hold on the group is over"
    lost = [rank.rank for rank in t.ranks.values() if rank.lost or rank.process is not Process.RUNNING]
    return f"ranks {lost} are lost" if lost else ""


def serves(state: GroupState, holder: str) -> Mapping[str, CatchUp]:
    """What ``holder`` ("" for the trainer) is to send, by replica: undecided, and planned."""
    return {
        rid: c for rid, c in state.catch_ups.items() if c.holder == holder and not c.decision and c.plan is not None
    }
