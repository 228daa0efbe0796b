"""The trainer's hold on a group: generations, leases per rank, binding (rule 10)."""

from __future__ import annotations

from . import negotiate
from .events import CloseTransfer, InitTransfer, RankGone, RankHello, RankPlacement
from .evolve import replace
from .model import Ahead, Rank, Trainer, Waiter
from .planning import plan_ahead
from .reasons import Failure, Reason
from .states import Liveness, Phase, Process
from .tx import Tx

__all__ = [
    "close",
    "fence",
    "holder_lives",
    "init",
    "maybe_bind",
    "rank_gone",
    "rank_hello",
    "rank_placement",
    "tick",
    "write_group",
]


def fence(tx: Tx, generation: int) -> Failure | None:
    """Refuse a generation that is not the holder's."""
    t = tx.state.trainer
    if t is not None and generation == t.generation and not t.closed:
        return None
    now = f"generation {t.generation} ({t.trainer_id})" if t is not None and not t.closed else "nobody"
    if generation > tx.state.last_generation or generation <= 0:
        message = f"generation {generation} was never granted; {now} holds the group: call InitTransfer"
        return Failure(Reason.INVALID_ARGUMENT, message)
    message = f"generation {generation} is over: {now} holds the group. Stop; do not re-init by yourself"
    return Failure(Reason.TRAINER_FENCED, message)


def holder_lives(tx: Tx) -> bool:
    """Whether the holder's lease lives: that of any of its ranks."""
    t = tx.state.trainer
    if t is None or t.closed:
        return False
    just_restarted = not t.ranks and tx.now < tx.state.epoch_began + 2 * tx.state.config.ttl_s
    return just_restarted or any(rank_lives(r, tx.now) for r in t.ranks.values())


def rank_lives(rank: Rank, now: float) -> bool:
    """Whether one rank's lease lives."""
    return not rank.lost and rank.process is not Process.DEAD and (_by_stream(rank) or rank.lease_until > now)


def _by_stream(rank: Rank) -> bool:
    """Whether an open stream alone holds its lease. One that sends heartbeats is held to them."""
    return rank.watches > 0 and not rank.beats


def init(tx: Tx, e: InitTransfer) -> None:
    """InitTransfer: join, rebind, or grant a new generation."""
    failure = _init_refusal(tx, e)
    if failure is not None:
        tx.reply(e.call_id, failure)
        tx.say(f"InitTransfer of {e.trainer_id} rank {e.rank} refused: {failure}")
        return
    t = tx.state.trainer
    joins = t is not None and not t.closed and (t.trainer_id, t.incarnation) == (e.trainer_id, e.incarnation)
    if not joins:
        t = _grant(tx, e)
    assert t is not None
    old = t.ranks.get(e.rank)
    rank = Rank(
        e.rank,
        e.host_id,
        e.device_uuid,
        e.offers,
        e.refusals,
        session=old.session if old else 0,
        watches=old.watches if old else 0,
        lease_until=max(old.lease_until if old else 0.0, tx.now + 2 * tx.state.config.ttl_s),
        retained=old.retained if old else None,
        serve_host=old.serve_host if old else "",
        serve_offers=old.serve_offers if old else (),
    )
    waiters = (*(w for w in t.waiters if w.rank != e.rank), Waiter(e.call_id, "init", e.rank, deadline=e.deadline))
    for stale in t.waiters:
        if stale.rank == e.rank:
            tx.reply(stale.call_id, Failure(Reason.SUPERSEDED, f"a newer InitTransfer of rank {e.rank} took its place"))
    t = replace(t, ranks={**t.ranks, e.rank: rank}, waiters=waiters)
    t = replace(t, forced_transport=e.transport, bucket_bytes=e.bucket_bytes, seed=e.seed)
    tx.put_trainer(t)
    tx.say(f"rank {e.rank} of {e.trainer_id} called InitTransfer ({len(waiters)}/{t.world_size})")
    maybe_bind(tx)


def _init_refusal(tx: Tx, e: InitTransfer) -> Failure | None:
    t = tx.state.trainer
    if e.generation:
        failure = fence(tx, e.generation)
        if failure is not None:
            return failure
        assert t is not None
        if (t.trainer_id, t.incarnation) != (e.trainer_id, e.incarnation):
            message = f"generation {e.generation} belongs to {t.trainer_id}, incarnation {t.incarnation}"
            return Failure(Reason.TRAINER_FENCED, message)
    mine = t is not None and not t.closed and (t.trainer_id, t.incarnation) == (e.trainer_id, e.incarnation)
    if mine:
        assert t is not None
        if e.world_size != t.world_size:
            message = (
                f"world_size: expected {t.world_size} as rank {min(t.ranks, default=0)} said, found {e.world_size}"
            )
            return Failure(Reason.INVALID_ARGUMENT, message, member=f"rank/{e.rank}")
        u = tx.state.open
        if u is not None and u.phase is not Phase.COMMITTED:
            message = f"update {u.update_id} is open ({u.phase}): finish or abort it before binding again"
            return Failure(Reason.UPDATE_IN_PROGRESS, message)
        return None
    if t is not None and holder_lives(tx) and not e.takeover:
        message = (
            f"trainer {t.trainer_id!r} (generation {t.generation}) holds group {tx.state.group!r}: {_why_held(tx, t)}. "
            "End that trainer and call again, or fence it by a takeover (--takeover) if it is no longer wanted"
        )
        return Failure(Reason.TRAINER_HELD, message)
    return None


def _why_held(tx: Tx, t: Trainer) -> str:
    """Why its lease lives, and for how long if nothing renews it."""
    if any(_by_stream(r) and rank_lives(r, tx.now) for r in t.ranks.values()):
        return "it is connected, and holds it for as long as it stays so"
    ends = max((r.lease_until for r in t.ranks.values()), default=tx.state.epoch_began + 2 * tx.state.config.ttl_s)
    return f"its lease ends in {max(ends - tx.now, 0.0):.1f} s unless it is heard of before"


def _grant(tx: Tx, e: InitTransfer) -> Trainer:
    from . import ending  # the two halves of one machine call each other

    s = tx.state
    if s.trainer is not None:
        for w in s.trainer.waiters:
            tx.reply(w.call_id, Failure(Reason.TRAINER_FENCED, f"trainer {e.trainer_id!r} took over"))
    generation = s.last_generation + 1
    t = Trainer(e.trainer_id, e.incarnation, generation, e.world_size, lineage=e.lineage, resume_step=e.resume_step)
    rewinding = s.rewinding or (e.resume_step is not None and e.resume_step < s.committed_step)
    tx.set(trainer=t, last_generation=generation, rewinding=rewinding)  # first: what waits must find its holder fenced
    if s.open is not None:
        ending.abort(tx, s.open, Failure(Reason.SUPERSEDED, f"trainer {e.trainer_id!r} took the group over"))
    write_id = write_group(tx)
    tx.say(f"generation {generation} granted to {e.trainer_id} (write {write_id})")
    if rewinding:
        tx.say(
            f"training resumes at {e.resume_step}, below {s.committed_step}: no replica is routable until it commits"
        )
        tx.push(s.replicas)
    tx.push_trainers()
    return tx.state.trainer or t


def write_group(tx: Tx, call_id: str = "") -> str:
    """Write the group down; its answer says which generation is durable with it."""
    return tx.write("group", subject=str(tx.state.last_generation), call_id=call_id)


def maybe_bind(tx: Tx) -> None:
    """Once the generation is durable and every rank has called: bind channels and answer all."""
    t = tx.state.trainer
    if t is None or t.closed or not t.durable or not t.waiters:
        return
    if {w.rank for w in t.waiters} != set(range(t.world_size)):
        return
    ready = [r for r in tx.state.replicas.values() if r.reported and r.liveness is not Liveness.LOST and r.workers]
    from .members import may_join  # the two halves of one machine call each other

    outside = dict.fromkeys(t.without, "the last update went without it")
    outside.update((r.replica_id, why) for r in ready if (why := may_join(r, tx.now)))
    channels, choices = negotiate.bind(t.ranks, ready, t.forced_transport, t.bucket_bytes, t.channels, t.seed, outside)
    tx.put_trainer(replace(t, channels=channels, choices=choices, waiters=(), ahead=Ahead(last=t.ahead.last)))
    for w in t.waiters:
        tx.reply(w.call_id)
    lost = negotiate.out_of_reach(choices)
    without = f"; {len(lost)} cannot be reached: {next(iter(lost.values()))}" if lost else ""
    whole = len(ready) - len(lost)
    tx.say(f"generation {t.generation} bound {len(channels)} channel(s) to {whole} replica(s){without}")
    tx.push_trainers()
    plan_ahead(tx)


def rank_hello(tx: Tx, e: RankHello) -> None:
    """A rank opened its session, or a WatchUpdate stream that holds its lease."""
    failure = fence(tx, e.generation)
    t = tx.state.trainer
    if failure is None and t is not None and not 0 <= e.rank < t.world_size:
        failure = Failure(Reason.INVALID_ARGUMENT, f"rank: expected 0..{t.world_size - 1}, found {e.rank}")
    if failure is not None or t is None:
        tx.reply(e.call_id, failure)
        tx.say(f"hello of rank {e.rank} refused: {failure}")
        return
    rank = t.ranks.get(e.rank) or Rank(e.rank)
    lease = max(rank.lease_until, tx.now + tx.state.config.ttl_s)
    if e.watch:
        rank = replace(rank, watches=rank.watches + 1, beats=False, lost=False)
    else:
        rank = replace(
            rank, session=e.session, lease_until=lease, lost=False, process=Process.RUNNING, stopped_since=-1.0
        )
    tx.put_trainer(replace(t, ranks={**t.ranks, e.rank: rank}))
    tx.reply(e.call_id)
    tx.say(f"rank {e.rank} of generation {e.generation} is here")


def rank_gone(tx: Tx, e: RankGone) -> None:
    """A lease-holding stream of a rank ended."""
    t = tx.state.trainer
    if t is None or t.generation != e.generation or e.rank not in t.ranks:
        tx.quietly("a fenced rank's stream ended")
        return
    rank = t.ranks[e.rank]
    watches = max(0, rank.watches - 1)
    until = rank.lease_until if watches else tx.now + tx.state.config.ttl_s  # time to dial again, and no more
    rank = replace(rank, watches=watches, lease_until=until)
    tx.put_trainer(replace(t, ranks={**t.ranks, e.rank: rank}))
    tx.quietly(f"a stream of rank {e.rank} ended")


def rank_beat(tx: Tx, rank_index: int, generation: int, process: Process, progress: int) -> None:
    """Renew a rank's lease; after a restart of ours, before the rank's stream is back, begin it."""
    t = tx.state.trainer
    if t is None or t.generation != generation or t.closed or not 0 <= rank_index < t.world_size:
        tx.quietly("heartbeat of a fenced or unknown rank")
        return
    rank = t.ranks.get(rank_index) or Rank(rank_index)
    stopped = -1.0
    if process is Process.STOPPED:
        stopped = rank.stopped_since if rank.stopped_since >= 0 else tx.now
    lease = tx.now + tx.state.config.ttl_s
    lost = process is Process.DEAD
    rank = replace(rank, lease_until=lease, process=process, stopped_since=stopped, progress=progress, lost=lost)
    rank = replace(rank, beats=True)
    tx.put_trainer(replace(t, ranks={**t.ranks, rank_index: rank}))
    tx.quietly(f"heartbeat of rank {rank_index}")
    if process is not Process.RUNNING:
        tick(tx)


def rank_placement(tx: Tx, e: RankPlacement) -> None:
    """A rank's placement of a manifest is complete."""
    t = tx.state.trainer
    if t is None or t.generation != e.generation or t.closed:
        tx.quietly("placement of a fenced trainer")
        return
    mine = {**t.placements.get(e.manifest_id, {}), e.rank: e.placement_id}
    keep = dict(list(t.placements.items())[-15:])
    tx.put_trainer(replace(t, placements={**keep, e.manifest_id: mine}))
    tx.say(f"rank {e.rank} placed manifest {e.manifest_id}")


def close(tx: Tx, e: CloseTransfer) -> None:
    """CloseTransfer: the hold ends, and with it an undecided update."""
    from . import ending

    t = tx.state.trainer
    if t is None or t.generation != e.generation or t.closed:
        over = t is not None and t.generation == e.generation
        tx.reply(e.call_id, None if over else fence(tx, e.generation))
        tx.quietly("CloseTransfer repeated or fenced")
        return
    for w in t.waiters:
        tx.reply(w.call_id, Failure(Reason.ABORTED_BY_CALLER, f"rank {e.rank} closed the transfer"))
    # First: what waits must find it closed.
    tx.put_trainer(replace(t, closed=True, channels=(), waiters=(), ranks={}, ahead=Ahead()))
    u = tx.state.open
    if u is not None and u.generation == t.generation:
        ending.abort(tx, u, Failure(Reason.ABORTED_BY_CALLER, f"rank {e.rank} closed the transfer", f"rank/{e.rank}"))
    write_group(tx, e.call_id)
    tx.push_trainers()
    tx.say(f"generation {e.generation} closed by rank {e.rank}")


def _silent_s(tx: Tx, rank: Rank) -> float:
    return tx.now - (rank.lease_until - tx.state.config.ttl_s)


def tick(tx: Tx) -> None:
    """Notice ranks whose lease ended while an update waits on the trainer (any rank's loss aborts)."""
    from . import ending

    t, u = tx.state.trainer, tx.state.open
    if t is None or t.closed:
        return
    for w in t.waiters:
        if w.deadline <= tx.now:
            here = {x.rank for x in t.waiters}
            missing = sorted(set(range(t.world_size)) - here)
            message = (
                f"InitTransfer: ranks {missing} of {t.world_size} did not call in time"
                if missing
                else "not durable in time"
            )
            tx.reply(w.call_id, Failure(Reason.DEADLINE, message))
            tx.say(message)
    left = tuple(w for w in t.waiters if w.deadline > tx.now)
    if left != t.waiters:
        t = replace(t, waiters=left)
        tx.put_trainer(t)
    if (
        u is None
        or u.generation != t.generation
        or u.phase not in (Phase.PREPARING, Phase.TRANSFERRING, Phase.VERIFYING)
    ):
        return
    for rank in t.ranks.values():
        stopped = rank.process is Process.STOPPED and tx.now - rank.stopped_since >= tx.state.config.ttl_s
        if rank_lives(rank, tx.now) and not stopped:
            continue
        why = (
            "its process is stopped"
            if stopped
            else "its process died"
            if rank.process is Process.DEAD
            else f"no heartbeat came for {_silent_s(tx, rank):.1f} s, though its connection is open: it stands still"
            if rank.watches > 0
            else "its lease ended"
        )
        failure = Failure(
            Reason.MEMBER_LOST, f"trainer rank {rank.rank} is lost: {why}", f"rank/{rank.rank}", u.phase.value
        )
        ending.abort(tx, u, failure)
        return
