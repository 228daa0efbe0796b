"""The trainer's calls in an update that began (``starting``): update, digests, finish, abort."""

from __future__ import annotations

from . import ending, parity, progress, trainers
from .events import AbortUpdate, DigestsIn, FinishUpdate, UpdateWeights
from .evolve import replace
from .model import Waiter
from .reasons import Failure, Reason
from .states import Mode, Phase, Verify
from .tx import Tx
from .update_state import Call, Update

__all__ = ["abort", "digests_in", "finish", "weights"]


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


def finish(tx: Tx, e: FinishUpdate) -> None:
    """FinishUpdate of one rank; bytes may still be on the wire. With the last rank's, and the last byte, verification
    begins. Every rank gets the outcome."""
    u, failure = _own(tx, e.generation, e.update_id, e.epoch)
    if failure is None and e.parity:
        failure = _rank_refusal(tx, e) or parity.record(tx, e.parity)
        u = tx.find(e.update_id)
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
    if (failure := _rank_refusal(tx, e)) is not None:
        return failure
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


def _rank_refusal(tx: Tx, e: FinishUpdate) -> Failure | None:
    t = tx.state.trainer
    assert t is not None
    if 0 <= e.rank < t.world_size:
        return None
    return Failure(Reason.INVALID_ARGUMENT, f"rank: expected 0..{t.world_size - 1}, found {e.rank}")


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
    if e.generation and e.rank < 0 and progress.time_is_up(tx, u):
        now = tx.find(u.update_id)
        if now is None or now.failure is not None:
            return  # a peer that ended by its own clock is lost to the sender: that is not the cause
        u = now
    who = f"rank/{e.rank}" if e.generation and e.rank >= 0 else ""
    reason = Reason.PEER_RANK_FAILED if who else Reason.ABORTED_BY_CALLER
    ending.abort(tx, u, Failure(reason, e.message or "aborted by its caller", who, u.phase.value))
