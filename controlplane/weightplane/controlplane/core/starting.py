"""The beginning of an update: who takes part, frozen and written down; its plans; who waits for its turn."""

from __future__ import annotations

from collections.abc import Callable

from . import ending, holders, members, negotiate, planning, trainers
from .events import PlanMade, StartUpdate
from .evolve import replace
from .model import Replica, Trainer, Waiter
from .persistent import PersistentMap
from .reasons import Failure, Reason
from .states import CachePolicy, Mode, PauseMode, Phase, Stage, Verify, Weights
from .tx import Tx
from .update_state import Options, Part, Update

__all__ = ["begin", "frozen", "maybe_plan", "plan_made", "pump", "start"]


def start(tx: Tx, e: StartUpdate) -> None:
    """StartUpdate: repeat, refuse, wait, supersede, or begin."""
    failure = trainers.fence(tx, e.generation)
    if failure is not None:
        tx.reply(e.call_id, failure)
        tx.say(f"StartUpdate refused: {failure}")
        return
    known = tx.find(tx.state.requests.get(e.request_id, ""))
    if known is not None:
        _repeat(tx, e, known)
        return
    waiter = Waiter(e.call_id, "start", deadline=e.deadline)
    u = tx.state.open
    if u is None and not tx.state.queue and not _roster_missing(tx):
        begin(tx, e)
        return
    if u is not None and e.on_busy == "REFUSE":
        message = (
            f"update {u.update_id} (version {u.version}) is open, {u.phase}: wait for it, abort it, or ask on_busy"
        )
        tx.reply(e.call_id, Failure(Reason.UPDATE_IN_PROGRESS, message, phase=u.phase.value), u.update_id)
        tx.say(f"StartUpdate refused: {u.update_id} is open")
        return
    if u is not None and e.on_busy == "SUPERSEDE":
        ending.abort(tx, u, Failure(Reason.SUPERSEDED, "a newer StartUpdate superseded it"))
    tx.set(queue=(*tx.state.queue, (waiter, e)))
    tx.say("StartUpdate waits")
    pump(tx)


def _repeat(tx: Tx, e: StartUpdate, u: Update) -> None:
    if u.fingerprint != e.fingerprint:
        message = f"request_id {e.request_id!r} was used for update {u.update_id} with other content: mint a new one"
        tx.reply(e.call_id, Failure(Reason.REQUEST_ID_REUSED, message), u.update_id)
    elif u.failure is not None:
        tx.reply(e.call_id, u.failure, u.update_id)
    elif u.ready_at:
        tx.reply(e.call_id, None, u.update_id)
    else:
        tx.put_update(replace(u, waiters=(*u.waiters, Waiter(e.call_id, "start", deadline=e.deadline))))
    tx.say(f"StartUpdate repeated: update {u.update_id}", u.update_id)


def _roster_missing(tx: Tx) -> list[str]:
    """Replicas the store knows that have not come back since this epoch began; waited for up to 2 TTL."""
    s = tx.state
    if tx.now >= s.epoch_began + 2 * s.config.ttl_s:
        return []
    return sorted(r for r in s.roster if r not in s.replicas or not s.replicas[r].reported)


def pump(tx: Tx) -> None:
    """Serve queued StartUpdates once nothing is in their way."""
    late = [w for w, _ in tx.state.queue if w.deadline <= tx.now]
    if late:
        u = tx.state.open
        message = f"update {u.update_id} stayed open" if u is not None else f"waited for replicas {_roster_missing(tx)}"
        reason = Reason.UPDATE_IN_PROGRESS if u is not None else Reason.NOT_ENOUGH_REPLICAS
        tx.set(queue=tuple((w, e) for w, e in tx.state.queue if w not in late))
        for w in late:
            tx.reply(w.call_id, Failure(reason, f"StartUpdate's time ran out: {message}"))
    while tx.state.queue:
        waiter, event = tx.state.queue[0]
        assert isinstance(event, StartUpdate)
        if tx.state.open is not None or _roster_missing(tx):
            return
        tx.set(queue=tx.state.queue[1:])
        failure = trainers.fence(tx, event.generation)
        known = tx.find(tx.state.requests.get(event.request_id, ""))
        if failure is not None:
            tx.reply(waiter.call_id, failure)
        elif known is not None:
            _repeat(tx, event, known)
        else:
            begin(tx, event)


def begin(tx: Tx, e: StartUpdate) -> None:
    """Freeze the participants, mint the version, and write both down."""
    s = tx.state
    t = s.trainer
    assert t is not None
    options = _options(tx, e)
    chosen, absent = _eligible(tx, options)
    failure = _begin_refusal(tx, t, options, chosen, absent)
    if failure is not None:
        if failure.reason is Reason.REBIND_REQUIRED:
            tx.put_trainer(replace(t, without=frozenset(s.replicas).difference(r.replica_id for r in chosen)))
        tx.reply(e.call_id, failure)
        tx.say(f"StartUpdate refused: {failure}")
        return
    bound = negotiate.members_of(t.channels)
    parts: dict[str, Part] = {}
    for r in chosen:
        mode, why = _mode(options.mode, r)
        channels = tuple(bound[f"{r.replica_id}/{w.index}"] for w in r.workers)
        parts[r.replica_id] = Part(r.replica_id, r.incarnation, mode, why, channels)
    used = {c for p in parts.values() for c in p.channels}
    if options.verify is Verify.DEFAULT:
        options = replace(options, verify=negotiate.verify_by_default(t.ranks, chosen, t.channels))
    total = e.update_timeout_s or s.policy.update_timeout_s
    prepare = e.prepare_timeout_s or max(total - 1.0, total * 0.9)
    u = Update(
        update_id=e.update_id,
        version=s.last_version + 1,
        lineage=t.lineage,
        generation=e.generation,
        epoch=s.epoch,
        request_id=e.request_id,
        fingerprint=e.fingerprint,
        options=options,
        phase=Phase.PREPARING,
        parts=PersistentMap(parts),
        absent=tuple(absent),
        channels=tuple(c.channel_id for c in t.channels if c.channel_id in used),
        started_at=tx.now,
        deadline=tx.now + total,
        prepare_deadline=tx.now + min(prepare, total),
        started_unix_ms=e.unix_ms,
        waiters=(Waiter(e.call_id, "start", deadline=e.deadline),),
    )
    requests = {**s.requests, e.request_id: e.update_id}
    while len(requests) > s.config.history:
        requests.pop(next(iter(requests)))
    healing = frozenset(r.replica_id for r in chosen if r.weights is Weights.DIRTY)
    tx.set(open=u, healing=healing, last_version=u.version, requests=requests)
    write_id = tx.write("freeze", u)
    tx.put_update(replace(u, write_id=write_id))
    tx.say(
        f"update {u.update_id} opens: version {u.version}, {len(parts)} participant(s), {len(absent)} absent",
        u.update_id,
    )


def _options(tx: Tx, e: StartUpdate) -> Options:
    p = tx.state.policy
    pause = p.pause if e.pause is PauseMode.DEFAULT else e.pause
    return Options(
        manifest_id=e.manifest_id,
        trainer_step=e.trainer_step,
        selector=e.selector,
        exclude=e.exclude,
        at_least=p.at_least if e.at_least is None else e.at_least,
        mode=e.mode,
        pause=PauseMode.ABORT if tx.state.rewinding else pause,
        cache=p.cache if e.cache is CachePolicy.DEFAULT else e.cache,
        verify=p.verify if e.verify is Verify.DEFAULT else e.verify,
    )


def _eligible(tx: Tx, o: Options) -> tuple[list[Replica], list[tuple[str, str]]]:
    s = tx.state
    chosen: list[Replica] = []
    absent: list[tuple[str, str]] = [
        (rid, "it has not come back since the restart") for rid in sorted(s.roster) if rid not in s.replicas
    ]
    lost = negotiate.out_of_reach(s.trainer.choices) if s.trainer is not None else {}
    for rid in sorted(s.replicas):
        r = s.replicas[rid]
        why = members.may_join(r, tx.now)
        if not why and rid in o.exclude:
            why = "the trainer left it out"
        if not why and any(r.labels.get(k) != v for k, v in o.selector.items()):
            why = "its labels do not match the selector"
        why = why or lost.get((rid, r.incarnation), "")
        if why:
            absent.append((rid, why))
        else:
            chosen.append(r)
    return _without_those_caught_up(tx, o, chosen, absent)


def _without_those_caught_up(
    tx: Tx, o: Options, chosen: list[Replica], absent: list[tuple[str, str]]
) -> tuple[list[Replica], list[tuple[str, str]]]:
    """Who is being caught up, or soon will be, is left to that, as long as enough others take part. Who was told to
    apply always is."""
    under_way, could = tx.state.catch_ups, holders.holders(tx.state)
    out = {rid: f"it is being caught up to version {c.target.version}" for rid, c in under_way.items()}
    for r in chosen:
        if r.replica_id not in out and could and holders.waits(tx.state, r, tx.now, could):
            out[r.replica_id] = "it waits to be caught up"
    if sum(r.replica_id not in out for r in chosen) < _least(tx, o):
        out = {rid: why for rid, why in out.items() if rid in under_way and under_way[rid].decision}
    left = [(r.replica_id, out[r.replica_id]) for r in chosen if r.replica_id in out]
    return [r for r in chosen if r.replica_id not in out], sorted([*absent, *left])


def _least(tx: Tx, o: Options) -> int:
    return max(tx.state.policy.min_replicas, o.at_least, 1)


def _begin_refusal(
    tx: Tx, t: Trainer, o: Options, chosen: list[Replica], absent: list[tuple[str, str]]
) -> Failure | None:
    need = _least(tx, o)
    if len(chosen) < need:
        who = "; ".join(f"{rid}: {why}" for rid, why in absent[:5]) or "no replica has joined the group"
        return Failure(
            Reason.NOT_ENOUGH_REPLICAS, f"expected at least {need} eligible replica(s), found {len(chosen)}. {who}"
        )
    bound = _bound(t)
    unbound = [r.replica_id for r in chosen if not bound(r)]
    if unbound or len(t.ranks) < t.world_size:
        message = (
            f"replicas {unbound[:5]} are not bound to a channel of generation {t.generation}: call InitTransfer with it"
        )
        return Failure(Reason.REBIND_REQUIRED, message)
    for c in t.channels:
        strangers = {rid for rid, _ in c.replicas} - {r.replica_id for r in chosen}
        if c.collective and strangers and len(strangers) < len(c.replicas):
            said = dict(absent).get(min(strangers), "another life of it was bound")
            message = (
                f"all members of a channel of {c.transport} act together, and {min(strangers)} of {c.channel_id} takes "
                f"no part ({said}): call InitTransfer with generation {t.generation}"
            )
            return Failure(Reason.REBIND_REQUIRED, message, min(strangers))
    placed = t.placements.get(o.manifest_id, {})
    missing = sorted(set(range(t.world_size)) - set(placed))
    if missing:
        return Failure(Reason.PLACEMENT_MISMATCH, f"ranks {missing} did not PutPlacement for manifest {o.manifest_id}")
    for r in chosen:
        if o.pause not in r.pause_modes:
            have = ", ".join(r.pause_modes)
            return Failure(Reason.CAPABILITY, f"pause mode {o.pause}: replica {r.replica_id} has {have}", r.replica_id)
        if o.cache not in r.cache_policies:
            have = ", ".join(r.cache_policies)
            return Failure(
                Reason.CAPABILITY, f"cache policy {o.cache}: replica {r.replica_id} has {have}", r.replica_id
            )
    return None


def _bound(t: Trainer) -> Callable[[Replica], bool]:
    """Whether a replica's present life is bound, every worker of it."""
    lives = {life for c in t.channels for life in c.replicas}
    workers = negotiate.members_of(t.channels)

    def is_bound(r: Replica) -> bool:
        return (r.replica_id, r.incarnation) in lives and all(f"{r.replica_id}/{w.index}" in workers for w in r.workers)

    return is_bound


def _mode(wanted: Mode, r: Replica) -> tuple[Mode, str]:
    if wanted is Mode.IN_PLACE and Mode.IN_PLACE not in r.modes:
        return Mode.STAGED, "the engine takes staged updates only"
    if wanted is not Mode.IN_PLACE and Mode.STAGED not in r.modes:
        return Mode.IN_PLACE, r.staging_refusal or "the engine has no staging"
    return (Mode.STAGED if wanted is Mode.ANY else wanted), ""


def frozen(tx: Tx, u: Update, ok: bool | None, failed: str = "") -> None:
    """The freeze is durable (or not): tell the participants."""
    if u.phase is not Phase.PREPARING:
        tx.quietly("the freeze of an update that is over")
        return
    if ok:
        tx.put_update(replace(u, frozen=True))
        tx.push(u.parts)
        tx.push_trainers()
        tx.say(f"update {u.update_id} is frozen", u.update_id)
    elif ok is None:
        reason = Reason.RESOURCE if failed else Reason.UNKNOWN_OUTCOME
        ending.abort(tx, u, Failure(reason, f"the store did not freeze it ({failed or 'no answer'}); nothing was sent"))
    else:
        ending.step_down(tx, "the store refused the freeze: another coordinator leads")


def maybe_plan(tx: Tx, u: Update) -> None:
    """Once every active participant has joined: ask for the plans."""
    t = tx.state.trainer
    if u.phase is not Phase.PREPARING or u.planning or not u.frozen or t is None:
        return
    if any(p.stage < Stage.JOINED for p in u.newest_first()):
        return
    tx.put_update(replace(u, planning=True))
    for c in t.channels:
        if c.channel_id in u.channels:
            taking = {p.replica_id for p in u.active() if c.channel_id in p.channels}
            tx.effects.append(planning.asked(tx, t, c, u.options.manifest_id, taking, u.update_id))
    tx.say(f"every participant of {u.update_id} joined; plans are made", u.update_id)


def plan_made(tx: Tx, e: PlanMade) -> None:
    """A plan is ready; with the last one StartUpdate answers."""
    u = tx.state.open
    if u is None or u.update_id != e.update_id or u.phase is not Phase.PREPARING:
        tx.quietly("a plan of an update that is over")
        return
    if e.summary is None:
        ending.abort(tx, u, e.failure or Failure(Reason.INTERNAL, "no plan"))
        return
    u = tx.put_update(replace(u, plans={**u.plans, e.channel_id: e.summary}))
    if set(u.plans) < set(u.channels):
        tx.quietly("a plan is ready; others are missing")
        return
    for w in u.waiters:
        if w.what == "start":
            tx.reply(w.call_id, None, u.update_id)
    waiters = tuple(w for w in u.waiters if w.what != "start")
    u = tx.put_update(replace(u, ready_at=tx.now, waiters=waiters))
    tx.push_trainers()
    tx.say(f"update {u.update_id} is ready to be armed", u.update_id)
