"""The trainer's calls of an update: start, update, digests, finish, abort."""

from __future__ import annotations

from collections.abc import Callable

from . import ending, members, negotiate, progress, trainers
from .events import AbortUpdate, DigestsIn, FinishUpdate, MakePlan, PlanMade, StartUpdate, UpdateWeights
from .evolve import replace
from .model import (
    CachePolicy,
    Call,
    Channel,
    Mode,
    Options,
    Part,
    PauseMode,
    Phase,
    Replica,
    Stage,
    Trainer,
    Update,
    Verify,
    Waiter,
    Weights,
)
from .reasons import Failure, Reason
from .tx import Tx

__all__ = ["abort", "digests_in", "finish", "frozen", "maybe_plan", "plan_made", "pump", "start", "weights"]


# --- start ----------------------------------------------------------------------------------------------------------


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
        parts=parts,
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
        (rid, "it has not come back since the restart") for rid in s.roster if rid not in s.replicas
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
    return chosen, sorted(absent)


def _begin_refusal(
    tx: Tx, t: Trainer, o: Options, chosen: list[Replica], absent: list[tuple[str, str]]
) -> Failure | None:
    need = max(tx.state.policy.min_replicas, o.at_least, 1)
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
    told_last_first = reversed(list(u.parts.values()))  # and joining last: most looks end at once
    if any(p.stage < Stage.JOINED and not p.excluded for p in told_last_first):
        return
    tx.put_update(replace(u, planning=True))
    for c in t.channels:
        if c.channel_id in u.channels:
            tx.effects.append(_make_plan(tx, u, t, c))
    tx.say(f"every participant of {u.update_id} joined; plans are made", u.update_id)


def _make_plan(tx: Tx, u: Update, t: Trainer, c: Channel) -> MakePlan:
    mid = u.options.manifest_id
    taking = {p.replica_id for p in u.active() if c.channel_id in p.channels}
    receivers: list[tuple[str, str]] = []
    for member in c.receivers:
        rid, _, worker = member.rpartition("/")
        if rid in taking:
            receivers.append((member, tx.state.replicas[rid].placements.get(mid, {}).get(int(worker), "")))
    senders = tuple((f"rank/{r}", t.placements[mid][r]) for r in sorted(t.placements[mid]))
    return MakePlan(u.update_id, c.channel_id, mid, senders, tuple(receivers), c.bucket_bytes)


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


# --- update ---------------------------------------------------------------------------------------------------------


def _own(tx: Tx, generation: int, update_id: str, epoch: int) -> tuple[Update | None, Failure | None]:
    """The update that a trainer's call names, fenced by generation and epoch."""
    failure = trainers.fence(tx, generation)
    if failure is not None:
        return None, failure
    u = tx.find(update_id)
    if u is None:
        return None, Failure(Reason.UNKNOWN_UPDATE, f"no update {update_id!r} in group {tx.state.group!r}")
    if u.epoch != epoch:
        return u, Failure(Reason.WRONG_PHASE, f"update {update_id}: expected epoch {u.epoch}, found {epoch}")
    if u.failure is not None and u.phase in (Phase.ABORTED, Phase.ABORTING):
        return u, u.failure
    if u.generation != generation:
        return u, Failure(Reason.TRAINER_FENCED, f"update {update_id} belongs to generation {u.generation}")
    return u, None


def weights(tx: Tx, e: UpdateWeights) -> None:
    """UpdateWeights: one rank declares a call; answered once every receiver and every rank is armed."""
    u, failure = _own(tx, e.generation, e.update_id, e.epoch)
    if failure is None and u is not None:
        failure = _weights_refusal(tx, u, e)
    if failure is not None or u is None:
        tx.reply(e.call_id, failure, e.update_id)
        tx.say(f"UpdateWeights refused: {failure}", e.update_id)
        return
    ranges = e.ranges or tuple((c, 0, u.plans[c].buckets) for c in u.channels)
    known = next((c for c in u.calls if c.seq == e.seq), None)
    call = Call(e.seq, ranges, (known.ranks if known else frozenset()) | {e.rank})
    calls = (*(c for c in u.calls if c.seq != e.seq), call)
    waiter = Waiter(e.call_id, "update", e.rank, e.seq, e.deadline)
    u = tx.put_update(replace(u, calls=calls, phase=Phase.TRANSFERRING, waiters=(*u.waiters, waiter)))
    if known is None:
        tx.push(u.parts)
        tx.push_trainers()
    tx.say(f"rank {e.rank} declares call {e.seq} of {u.update_id}", u.update_id)
    progress.maybe_armed(tx, u)


def _weights_refusal(tx: Tx, u: Update, e: UpdateWeights) -> Failure | None:
    t = tx.state.trainer
    assert t is not None
    if u.phase not in (Phase.PREPARING, Phase.TRANSFERRING) or not u.ready_at:
        return Failure(
            Reason.WRONG_PHASE,
            f"update {u.update_id} is {u.phase}: bytes may no longer be declared",
            phase=u.phase.value,
        )
    if not 0 <= e.rank < t.world_size:
        return Failure(Reason.INVALID_ARGUMENT, f"rank: expected 0..{t.world_size - 1}, found {e.rank}")
    for channel, first, count in e.ranges:
        plan = u.plans.get(channel)
        if plan is None:
            return Failure(
                Reason.INVALID_ARGUMENT, f"channel {channel!r} is not one of this update: {list(u.channels)}"
            )
        if first < 0 or count <= 0 or first + count > plan.buckets:
            message = f"buckets {first}..{first + count} of channel {channel}: its plan has {plan.buckets}"
            return Failure(Reason.INVALID_ARGUMENT, message)
    ranges = e.ranges or tuple((c, 0, u.plans[c].buckets) for c in u.channels)
    known = next((c for c in u.calls if c.seq == e.seq), None)
    if known is not None:
        if known.ranges != ranges:
            return Failure(Reason.INVALID_ARGUMENT, f"seq {e.seq} was declared with other buckets: {known.ranges}")
        return None
    if e.seq != len(u.calls) + 1:
        return Failure(Reason.INVALID_ARGUMENT, f"seq: expected {len(u.calls) + 1} (or a repeat), found {e.seq}")
    taken = [r for c in u.calls for r in c.ranges]
    for i, (channel, first, count) in enumerate(ranges):
        for other, f2, n2 in (*taken, *ranges[:i]):
            if channel == other and first < f2 + n2 and f2 < first + count:
                return Failure(
                    Reason.INVALID_ARGUMENT, f"buckets {max(first, f2)} of channel {channel} are declared twice"
                )
    return _in_place_refusal(u, ranges, e.rank)


def _in_place_refusal(u: Update, ranges: tuple[tuple[str, int, int], ...], rank: int) -> Failure | None:
    """In-place channels start only after every staged participant is prepared (rule 3).

    The caller's own digests must be in; other ranks' are waited for, since nobody is armed before the votes are
    verified.
    """
    modes = {c: p.mode for p in u.active() for c in p.channels}
    if len(set(modes.values())) < 2 or all(modes.get(c) is not Mode.IN_PLACE for c, _, _ in ranges):
        return None
    staged = [c for c, m in modes.items() if m is Mode.STAGED]
    message = ""
    if any(modes.get(c) is Mode.STAGED for c, _, _ in ranges):
        message = "a mixed update declares its staged channels first, in a call of their own"
    elif not all(progress.covered(u, c) for c in staged):
        message = f"staged channels {staged} are not fully declared yet"
    elif u.options.verify is not Verify.OFF and not all((c, rank) in u.digests_in for c in staged):
        text = f"a mixed update needs rank {rank}'s digests of its staged channels {staged} before in-place bytes"
        return Failure(Reason.DIGESTS_REQUIRED, text, f"rank/{rank}")
    return Failure(Reason.WRONG_PHASE, message, phase=u.phase.value) if message else None


def digests_in(tx: Tx, e: DigestsIn) -> None:
    """A rank's expected digests of one plan are complete."""
    u, failure = _own(tx, e.generation, e.update_id, e.epoch)
    if failure is not None or u is None or u is not tx.state.open:
        tx.quietly(f"digests of an update that is over: {failure}")
        return
    channels = [c for c, p in u.plans.items() if p.plan_id == e.plan_id]  # plans of no bytes are all one
    if not channels:
        tx.quietly(f"digests of a plan that update {u.update_id} does not use")
        return
    u = tx.put_update(replace(u, digests_in=u.digests_in.union((c, e.rank) for c in channels)))
    tx.say(f"digests of rank {e.rank} for {', '.join(channels)} are in", u.update_id)
    progress.compare_voted(tx, u)


# --- finish and abort -----------------------------------------------------------------------------------------------


def finish(tx: Tx, e: FinishUpdate) -> None:
    """FinishUpdate of one rank; bytes may still be on the wire. With the last rank's, and the last byte, verification
    begins. Every rank gets the outcome."""
    u, failure = _own(tx, e.generation, e.update_id, e.epoch)
    waits = u is not None and (u.phase is Phase.ABORTING or (u.phase is Phase.COMMITTED and not u.closed))
    if u is not None and waits and (failure is None or failure is u.failure):
        tx.put_update(replace(u, waiters=(*u.waiters, Waiter(e.call_id, "finish", e.rank, deadline=e.deadline))))
        tx.quietly("FinishUpdate waits for the end")
        return
    if failure is None and u is not None and u.closed:
        tx.reply(e.call_id, None, u.update_id)
        tx.quietly("FinishUpdate repeated")
        return
    if failure is None and u is not None:
        failure = _finish_refusal(tx, u, e)
    if failure is not None or u is None:
        tx.reply(e.call_id, failure, e.update_id)
        tx.say(f"FinishUpdate refused: {failure}", e.update_id)
        return
    t = tx.state.trainer
    assert t is not None
    waiter = Waiter(e.call_id, "finish", e.rank, deadline=e.deadline)
    ranks = u.finished_ranks | {e.rank}
    gather = max(u.gather_s, e.gather_s)
    u = tx.put_update(replace(u, finished_ranks=ranks, waiters=(*u.waiters, waiter), gather_s=gather))
    tx.push_trainers()
    tx.say(f"rank {e.rank} has declared all of {u.update_id} ({len(ranks)}/{t.world_size})", u.update_id)
    progress.maybe_verifying(tx, u)


def _finish_refusal(tx: Tx, u: Update, e: FinishUpdate) -> Failure | None:
    t = tx.state.trainer
    assert t is not None
    if not 0 <= e.rank < t.world_size:
        return Failure(Reason.INVALID_ARGUMENT, f"rank: expected 0..{t.world_size - 1}, found {e.rank}")
    missing = [c for c in u.channels if not progress.covered(u, c)]
    if u.phase is Phase.PREPARING or missing:
        message = (
            f"update {u.update_id} is {u.phase}; buckets of channels {missing or list(u.channels)} were not declared"
        )
        return Failure(Reason.INCOMPLETE, message, phase=u.phase.value)
    if u.options.verify is not Verify.OFF and not all((c, e.rank) in u.digests_in for c in progress.live_channels(u)):
        need = [u.plans[c].plan_id for c in progress.live_channels(u) if (c, e.rank) not in u.digests_in]
        return Failure(
            Reason.DIGESTS_REQUIRED, f"rank {e.rank} has not put the digests of plans {need}", f"rank/{e.rank}"
        )
    return None


def abort(tx: Tx, e: AbortUpdate) -> None:
    """AbortUpdate: of the trainer (fenced), or of an operator (generation 0)."""
    failure = trainers.fence(tx, e.generation) if e.generation else None
    u = tx.find(e.update_id) if e.update_id else tx.state.open
    if failure is None and u is None:
        failure = Failure(Reason.UNKNOWN_UPDATE, f"no update {e.update_id!r}" if e.update_id else "no update is open")
    if failure is not None or u is None:
        tx.reply(e.call_id, failure, e.update_id)
        tx.say(f"AbortUpdate refused: {failure}")
        return
    if u.closed:
        ending.abandoned(tx, u, e.generation)
        tx.reply(e.call_id, None, u.update_id)
        tx.quietly("AbortUpdate of an update that is over")
        return
    u = tx.put_update(replace(u, waiters=(*u.waiters, Waiter(e.call_id, "abort", deadline=e.deadline))))
    who = f"rank/{e.rank}" if e.generation and e.rank >= 0 else ""
    reason = Reason.PEER_RANK_FAILED if who else Reason.ABORTED_BY_CALLER
    ending.abort(tx, u, Failure(reason, e.message or "aborted by its caller", who, u.phase.value))
