"""Replicas: hello, reports, leases, and the one table that says who may join an update."""

from __future__ import annotations

from itertools import islice

from . import catching, conditions, progress, sleeping
from .events import Beat, EndSession, Leave, ReplicaHello, Report, WorkerPlacement
from .evolve import replace
from .group_state import GroupState
from .model import NONE_HELD, Held, Replica
from .persistent import PersistentMap
from .planning import plan_ahead
from .reasons import Failure, Reason
from .states import Admin, Liveness, PauseMode, Phase, Process, Stage, Weights
from .trainers import rank_beat
from .tx import Tx
from .update_state import Update

__all__ = ["beat", "hello", "leave", "may_join", "report", "routable", "tick", "worker_placement"]

#: Administrative state × is the update FULL → may the replica join? The weights states JOINING, READY and DIRTY may (a
#: full update heals the first and last); UPDATING and PENDING belong to another update first.
_ADMIN_JOINS = {
    Admin.ACTIVE: (True, True),
    Admin.QUARANTINED: (True, False),
    Admin.DRAINING: (False, False),
    Admin.LEAVING: (False, False),
    Admin.PINNED: (False, False),
    Admin.ASLEEP: (False, False),
}
_WEIGHTS_JOINS = {
    Weights.JOINING: True,
    Weights.READY: True,
    Weights.DIRTY: True,
    Weights.UPDATING: False,
    Weights.PENDING: False,
}

_ORDERED = frozenset({"operator", "trainer"})  # whose pauses we order


def may_join(r: Replica, now: float, full: bool = True) -> str:
    """Why ``r`` may not join an update now; empty if it may."""
    if r.liveness is Liveness.LOST:
        return "its lease ended"
    if r.lease_until <= now or r.liveness is Liveness.SUSPECT:
        return "it is silent"
    if r.process is not Process.RUNNING:
        return f"its process is {r.process.lower()}"
    if not r.reported:
        return "it has not reported what it holds"
    if not _ADMIN_JOINS[r.admin][0 if full else 1]:
        return f"it is {r.admin}"
    if "weights" in r.asleep:  # by hand, while it was in another state than ACTIVE
        return "its weights are asleep"
    if r.draining:
        return f"it is still draining update {r.draining}"
    if not _WEIGHTS_JOINS[r.weights]:
        other = r.pending or "another update"
        return f"it is {r.weights} in {other}"
    return ""


def routable(state: GroupState, r: Replica, min_version: int = 0) -> tuple[bool, bool, bool, str]:
    """(live, ready, routable, why not). A publish neither ends readiness nor, at the version held, routability: who is
    PENDING serves what it holds, or stands still for the moment."""
    live = r.liveness is not Liveness.LOST
    if not live:
        return False, False, False, "its lease ended"
    if r.stopped_since >= 0 and state.ticked_at - r.stopped_since >= state.config.routing_budget_s:
        return live, False, False, "its process is stopped"
    others = sorted(set(r.pause_holders) - {"update"})
    if r.weights not in (Weights.READY, Weights.UPDATING, Weights.PENDING) or not _ours(state, r.held):
        return live, False, False, f"its weights are {r.weights}"
    if why := conditions.blocked(state.policy, r):
        return live, False, False, why
    if others:
        return live, False, False, f"generation is paused by {', '.join(others)}"
    if state.rewinding:
        return live, True, False, "the trainer resumed below the committed step and has not published yet"
    if r.admin not in (Admin.ACTIVE, Admin.PINNED):
        return live, True, False, f"it is {r.admin}"
    floor = min_version or state.committed.version
    if r.held.version < floor:
        return live, True, False, f"it holds version {r.held.version}, below {floor}"
    return live, True, True, ""


def hello(tx: Tx, e: ReplicaHello) -> None:
    """A control session began: a new life, or the same one again."""
    s, said = tx.state, e.replica
    old = s.replicas.get(said.replica_id)
    if old is not None and old.session > e.session:
        tx.effects.append(EndSession(said.replica_id, e.session))
        tx.say(f"an older session of {said.replica_id} arrived late and is ended")
        return
    if old is not None and old.session and old.session != e.session:
        tx.effects.append(EndSession(said.replica_id, old.session))
    lease = tx.now + s.config.ttl_s
    new_life = old is None or old.incarnation != said.incarnation
    if old is not None and new_life:
        _life_over(tx, old, Reason.MEMBER_RESTARTED, "it came back with a new incarnation")
        old = tx.state.replicas[said.replica_id]
    if new_life or old is None:
        r = replace(
            said,
            session=e.session,
            liveness=Liveness.LIVE,
            lease_until=lease,
            weights=Weights.JOINING,
            held=NONE_HELD,
            reported=False,
            came_at=tx.now,
            admin=old.admin if old is not None and old.admin is not Admin.LEAVING else Admin.ACTIVE,
            pauses_wanted=old.pauses_wanted if old is not None else {},
            resumed=old.resumed if old is not None else frozenset(),
            failure=old.failure if old is not None else None,
            failures_in_a_row=old.failures_in_a_row if old is not None else 0,
        )
        if r.admin is Admin.PINNED:
            r = replace(r, admin=Admin.ACTIVE)
    else:
        r = replace(
            old,
            session=e.session,
            liveness=Liveness.LIVE,
            lease_until=lease,
            process=Process.RUNNING,
            stopped_since=-1.0,
            workers=said.workers,
            modes=said.modes,
            pause_modes=said.pause_modes,
            cache_policies=said.cache_policies,
            engine=said.engine,
            evidence=said.evidence,
            sleep_levels=said.sleep_levels,
            sleep_refusal=said.sleep_refusal,
            labels=said.labels,
            serving_address=said.serving_address,
            staging_refusal=said.staging_refusal,
            admin=old.admin if old.admin is not Admin.LEAVING else Admin.ACTIVE,
        )
    tx.put_replica(r)
    if r.replica_id not in tx.state.roster:
        tx.set(roster=tx.state.roster | {r.replica_id})
        tx.write_roster(r.replica_id, r.admin)
    if r.reported:
        tx.push([r.replica_id])  # before its first report we do not know what it holds or who paused it
    tx.push_trainers()
    tx.say(f"replica {r.replica_id} is here ({'new' if new_life else 'same'} incarnation {r.incarnation})")


def _life_over(tx: Tx, r: Replica, reason: Reason, why: str) -> None:
    """One life of a replica ended: what it was part of, and what it owed, is settled."""
    u = tx.state.open
    gone = replace(
        r,
        pending="",
        asked="",
        draining="",
        reported=False,
        # Who lets go with nobody there to be told must not find the pause again in the next life's first report.
        resumed=_ORDERED - r.pauses_wanted.keys() if r.reported else r.resumed,
        weights=Weights.JOINING,
        held=NONE_HELD,
        placements={},
        report_seq=-1,
        retained=None,
    )
    tx.put_replica(gone)
    if u is None or r.replica_id not in u.parts or u.parts[r.replica_id].incarnation != r.incarnation:
        return
    u = tx.put_part(u, replace(u.parts[r.replica_id], gone=True))
    failure = Failure(reason, f"replica {r.replica_id}: {why}", r.replica_id, u.phase.value)
    progress.part_failed(tx, u, r.replica_id, failure)


def _lose(tx: Tx, r: Replica, why: str, dead: bool) -> None:
    u = tx.state.open
    tx.put_replica(replace(r, liveness=Liveness.LOST, lost_at=tx.now))
    tx.push_trainers()
    tx.say(f"replica {r.replica_id} is LOST: {why}")
    if u is None or r.replica_id not in u.parts or u.parts[r.replica_id].incarnation != r.incarnation:
        return
    u = tx.put_part(u, replace(u.parts[r.replica_id], gone=dead, unquiesced=not dead))
    failure = Failure(Reason.MEMBER_LOST, f"replica {r.replica_id} is lost: {why}", r.replica_id, u.phase.value)
    progress.part_failed(tx, u, r.replica_id, failure)


def beat(tx: Tx, e: Beat) -> None:
    """Renew a lease, of a replica or of a trainer rank."""
    if e.agent_id.startswith("rank/"):
        rank_beat(tx, int(e.agent_id.removeprefix("rank/")), e.generation, e.process, e.progress)
        return
    r = tx.state.replicas.get(e.agent_id)
    if r is None or r.incarnation != e.incarnation:
        tx.quietly("heartbeat of an unknown or former life")
        return
    stopped = -1.0
    if e.process is Process.STOPPED:
        stopped = r.stopped_since if r.stopped_since >= 0 else tx.now
    dead, lost = e.process is Process.DEAD, r.liveness is Liveness.LOST
    lives = not dead and not (lost and e.process is Process.STOPPED)
    back = lives and r.liveness is not Liveness.LIVE
    r = replace(
        r,
        lease_until=tx.now + tx.state.config.ttl_s,
        liveness=Liveness.LIVE if lives else r.liveness,
        process=e.process,
        stopped_since=stopped,
        progress=e.progress,
    )
    tx.put_replica(r)
    if back:
        tx.push([r.replica_id])
        tx.push_trainers()
        tx.say(f"replica {r.replica_id} is LIVE again")
    elif dead and not lost:
        _lose(tx, r, "its process died", dead=True)
    else:
        tx.quietly(f"heartbeat of {r.replica_id}")


def leave(tx: Tx, e: Leave) -> None:
    """A replica leaves in good order: unroutable at once, out of the next barrier, no failure."""
    r = tx.state.replicas.get(e.replica_id)
    if r is None or r.incarnation != e.incarnation:
        tx.quietly("goodbye of a former life")
        return
    tx.put_replica(replace(r, admin=Admin.LEAVING))
    tx.push_trainers()
    tx.say(f"replica {r.replica_id} is LEAVING")
    plan_ahead(tx)
    u = tx.state.open
    part = u.parts.get(r.replica_id) if u is not None else None
    if u is not None and part is not None and not part.voted and u.phase is not Phase.COMMITTED:
        failure = Failure(Reason.MEMBER_LOST, f"replica {r.replica_id} is leaving", r.replica_id, u.phase.value)
        progress.part_failed(tx, u, r.replica_id, failure)


def worker_placement(tx: Tx, e: WorkerPlacement) -> None:
    """A worker's placement of a manifest is complete."""
    r = tx.state.replicas.get(e.replica_id)
    if r is None or r.incarnation != e.incarnation:
        tx.quietly("placement of a former life")
        return
    mine = {**r.placements.get(e.manifest_id, {}), e.worker: e.placement_id}
    keep = dict(list(r.placements.items())[-15:])
    tx.put_replica(replace(r, placements={**keep, e.manifest_id: mine}))
    tx.quietly(f"worker {e.worker} of {e.replica_id} placed {e.manifest_id}")
    plan_ahead(tx)


def report(tx: Tx, e: Report) -> None:
    """What a replica holds and does. Stale lives and older reports change nothing."""
    s = tx.state
    r = s.replicas.get(e.replica_id)
    if r is None or r.incarnation != e.incarnation:
        tx.quietly(f"report of a former life of {e.replica_id}")
        return
    if e.sequence <= r.report_seq:
        tx.quietly(f"older report of {e.replica_id}")
        return
    if e.epoch not in (0, s.epoch):
        if not r.reported and e.epoch < s.epoch:
            tx.put_replica(_adopt_pauses(r, e))
            tx.push([r.replica_id])  # only so does it learn our epoch, and reports under it
        tx.quietly(f"report of {e.replica_id} under epoch {e.epoch}, we are {s.epoch}")
        return
    was = (r.weights, r.held, r.admin, r.pause_holders, r.asleep)
    helds = set(e.held) or {NONE_HELD}
    mixed = e.dirty or len(helds) > 1
    held = next(iter(helds)) if len(helds) == 1 else NONE_HELD
    failure = (
        r.failure
        if not mixed
        else e.dirty_reason
        or Failure(
            Reason.ENGINE, f"its workers hold different versions: {sorted(h.version for h in helds)}", r.replica_id
        )
    )
    u = s.open
    part = u.parts.get(r.replica_id) if u is not None else None
    mine = u is not None and part is not None and part.incarnation == r.incarnation
    doubt = (
        e.update_id
        and Stage.JOINED <= e.stage <= Stage.PREPARED
        and not (mine and u is not None and e.update_id == u.update_id)
        and catching.owns(s, e.replica_id, e.update_id) is None
    )
    drained = e.update_id != r.draining or e.stage in (Stage.APPLIED, Stage.ABORTED, Stage.FAILED)
    first = not r.reported
    if first:
        r = replace(_adopt_pauses(r, e), resumed=frozenset())
    r = replace(
        r,
        report_seq=e.sequence,
        draining="" if drained else r.draining,
        reported=True,
        held=held,
        pending="" if _settled(tx, r, e, held, mixed) else r.pending,
        asked=e.update_id if doubt else "",
        pause_holders=e.pause_holders,
        updates_since_start=e.updates_since_start,
        running_requests=e.running_requests,
        failure=failure,
        admin=Admin.LEAVING if e.leaving else r.admin,
        retained=e.retained,
    )
    r = sleeping.reported(tx, r, e)
    past = s.history.get(r.asked)
    if past is not None and past.phase is Phase.COMMITTED and _owes(past, r):
        r = replace(r, pending=r.asked)  # we restarted between the decision and its confirmation
    r = replace(r, weights=derive_weights(s, r, mixed))
    tx.put_replica(r)
    if doubt or first:
        tx.push([r.replica_id])
    changed = (r.weights, r.held, r.admin, r.pause_holders, r.asleep) != was
    if changed or first:
        tx.push_trainers()
    if changed:
        tx.say(f"replica {r.replica_id} is {r.weights}, holds version {held.version}")
    else:
        tx.quietly(f"report of {r.replica_id}")
    if mine and u is not None:
        progress.part_report(tx, u, r.replica_id, e, mixed, held)
    catching.replica_report(tx, e, mixed, held)
    _late_flip(tx, r, mixed)


def _adopt_pauses(r: Replica, e: Report) -> Replica:
    """We may have restarted: a pause is its holder's to remove, and the replica remembers it."""
    kept = {h: PauseMode.KEEP for h in e.pause_holders if h in _ORDERED and h not in r.resumed}
    return replace(r, pauses_wanted={**kept, **r.pauses_wanted})


def _settled(tx: Tx, r: Replica, e: Report, held: Held, mixed: bool) -> bool:
    """Whether a decided update that ``r`` had not confirmed is confirmed now (or will never be)."""
    u = tx.find(r.pending) if r.pending else None
    if u is None or held == u.held:
        return True
    owes = e.update_id == u.update_id and e.stage <= Stage.PREPARED  # a mix of before, which applying it will heal
    return mixed and not owes


def _owes(u: Update, r: Replica) -> bool:
    part = u.parts.get(r.replica_id)
    return part is not None and part.incarnation == r.incarnation and not part.excluded


def _late_flip(tx: Tx, r: Replica, mixed: bool) -> None:
    """A replica that was PENDING when its update closed has flipped now: its outcome says so."""
    for u in list(islice(reversed(tx.state.history.values()), 3)):
        part = u.parts.get(r.replica_id)
        if (
            u.phase is Phase.COMMITTED
            and part is not None
            and part.stage < Stage.APPLIED
            and r.held == u.held
            and not mixed
        ):
            tx.put_part(u, replace(part, stage=Stage.APPLIED))


def derive_weights(state: GroupState, r: Replica, mixed: bool) -> Weights:
    """A replica's weights state, from what its workers hold and what it takes part in."""
    if r.pending:
        return Weights.PENDING
    if mixed:
        return Weights.DIRTY
    u = state.open
    part = u.parts.get(r.replica_id) if u is not None else None
    if u is not None and part is not None and part.incarnation == r.incarnation and not part.excluded and _undecided(u):
        return Weights.UPDATING
    return Weights.READY if _ours(state, r.held) else Weights.JOINING


def _ours(state: GroupState, held: Held) -> bool:
    """Whether someone holds what this group committed once: not nothing, not another store's version."""
    if held == NONE_HELD:
        return False
    u = state.open
    past = state.history.get(held.update_id) or (u if u is not None and u.update_id == held.update_id else None)
    return held == state.committed or (past is not None and past.phase is Phase.COMMITTED and past.held == held)


def _undecided(u: Update) -> bool:
    return u.phase not in (Phase.COMMITTED, Phase.ABORTED)


def waits_on(u: Update | None, r: Replica) -> bool:
    """Whether an open update waits on this replica now."""
    part = u.parts.get(r.replica_id) if u is not None else None
    if u is None or part is None or part.incarnation != r.incarnation or part.excluded or part.dirty:
        return False
    if u.phase is Phase.COMMITTED:
        return False  # decided: FinishUpdate lists it as PENDING at the deadline
    if u.phase is Phase.ABORTING:
        return not (part.quiesced or part.unquiesced or part.gone)
    return True


def tick(tx: Tx) -> None:
    """End leases. Silence makes a member SUSPECT, LOST once an update waits on it or its routing budget is over."""
    config, now = tx.state.config, tx.now
    _forgive_our_own_stall(tx)
    for r in list(tx.state.replicas.values()):
        if r.liveness is Liveness.LIVE and now < r.lease_until and r.stopped_since < 0:
            continue  # nearly always, ten times a second for each of a thousand
        u = tx.state.open
        if r.liveness is Liveness.LOST:
            if (
                r.lost_at
                and tx.now - r.lost_at > config.lost_kept_s
                and not (u is not None and r.replica_id in u.parts)
            ):
                _forget(tx, r)
            continue
        silent = tx.now - r.lease_until
        stopped = r.stopped_since >= 0 and tx.now - r.stopped_since >= config.ttl_s
        if silent < 0 and not (stopped and waits_on(u, r)):
            continue
        if silent >= 0 and r.liveness is Liveness.LIVE:
            tx.put_replica(replace(r, liveness=Liveness.SUSPECT))
            r = tx.state.replicas[r.replica_id]
            tx.push_trainers()
            tx.say(f"replica {r.replica_id} is SUSPECT: silent past its lease")
        if waits_on(u, r):
            _lose(
                tx, r, "its process is stopped" if stopped and silent < 0 else "it is silent past its lease", dead=False
            )
        elif silent >= config.routing_budget_s - config.ttl_s:
            _lose(tx, r, "it is silent past its routing budget", dead=False)


def _forgive_our_own_stall(tx: Tx) -> None:
    """While we did not run we heard nobody: leases that were alive then are prolonged by the time we missed."""
    last, beat = tx.state.ticked_at, tx.state.config.beat_s
    if 0 <= tx.now - last < beat / 2:
        return
    gap = tx.now - last
    tx.set(ticked_at=tx.now)
    if last < 0 or gap < beat:
        return
    alive = {
        rid: replace(r, lease_until=r.lease_until + gap)
        for rid, r in tx.state.replicas.items()
        if r.liveness is Liveness.LIVE and r.lease_until > last
    }
    tx.set(replicas=PersistentMap.of(tx.state.replicas).put_all(alive))
    t = tx.state.trainer
    if t is not None:
        ranks = {
            i: replace(r, lease_until=r.lease_until + gap) if r.lease_until > last else r for i, r in t.ranks.items()
        }
        tx.put_trainer(replace(t, ranks=ranks))
    tx.say(f"we stood still for {gap:.1f} s: {len(alive)} lease(s) are prolonged by it")


def _forget(tx: Tx, r: Replica) -> None:
    replicas = PersistentMap.of(tx.state.replicas).without(r.replica_id)
    tx.set(replicas=replicas, roster=tx.state.roster - {r.replica_id})
    tx.write_roster(r.replica_id, "")
    tx.push_trainers()
    tx.say(f"replica {r.replica_id} is forgotten, lost for {tx.state.config.lost_kept_s:.0f} s")
