"""How participants get on between freeze and decision: reports, arming, votes, verification."""

from __future__ import annotations

from collections.abc import Iterable

from . import ending
from .events import Compare, Report, Verified
from .evolve import replace
from .model import Held
from .reasons import Failure, Reason
from .states import Mode, PauseMode, Phase, Stage, Verify
from .tx import Tx
from .update_state import Part, Update

__all__ = [
    "compare_voted",
    "covered",
    "gate_open",
    "live_channels",
    "maybe_armed",
    "maybe_decide",
    "members_by_channel",
    "part_failed",
    "part_report",
    "tick",
    "time_is_up",
    "verified",
]

_BEFORE = (Phase.PREPARING, Phase.TRANSFERRING, Phase.VERIFYING)


def covered(u: Update, channel: str) -> bool:
    """Whether the calls so far declare every bucket of a channel (calls are disjoint)."""
    plan = u.plans.get(channel)
    return plan is not None and sum(n for call in u.calls for c, _, n in call.ranges if c == channel) == plan.buckets


def live_channels(u: Update) -> list[str]:
    """Channels that still have a worker of an active participant."""
    alive = {c for p in u.active() for c in p.channels}
    return [c for c in u.channels if c in alive]


def gate_open(u: Update) -> bool:
    """Whether in-place participants may be armed: every staged one has voted and was verified (rule 3)."""
    return all(p.voted and p.verified for p in u.newest_first() if p.mode is Mode.STAGED)


#: A member's clock of a deadline may run ahead of ours by about this.
_EARLY_S = 0.1


def _still_dirty(tx: Tx, u: Update, e: Report) -> bool:
    """Whether a mix is one that applying this update heals, and no failure of the update: the replica was DIRTY when it
    joined, or the update is decided."""
    before = e.update_id != u.update_id or e.stage < Stage.APPLIED
    return before and (u.phase is Phase.COMMITTED or e.replica_id in tx.state.healing)


def part_report(tx: Tx, u: Update, replica_id: str, e: Report, mixed: bool, held: Held) -> None:
    """Take over what a participant's report says of the open update."""
    part = u.parts[replica_id]
    mixed = mixed and not _still_dirty(tx, u, e)
    if e.update_id != u.update_id:
        return  # said before it heard of the update; it will say that it dropped it, also if it never joined
    stage = max(part.stage, e.stage)
    new = replace(
        part,
        stage=stage,
        armed_seq=max(part.armed_seq, e.armed_seq),
        bytes_received=max(part.bytes_received, e.bytes_received),
        timings=e.timings,
        drains=_drains(u, part, e),
        dirty=part.dirty or mixed,
        voted=part.voted or (Stage.PREPARED <= e.stage <= Stage.APPLIED and not part.excluded),
    )
    if e.stage in (Stage.ABORTED, Stage.FAILED):
        new = replace(new, quiesced=True, unquiesced=False)
    changed = replace(new, drains=part.drains) != part  # that count is for the failure's text: no news for trainers
    u = tx.put_part(u, new)
    if not changed and e.failure is None:
        return
    tx.push_trainers(u.update_id)
    if u.phase in _BEFORE and not part.excluded:
        if e.failure is not None and e.failure.reason is Reason.DEADLINE and time_is_up(tx, u):
            return  # by its own clock, and it does not know why: it is the first to say so, not the one at fault
        if e.stage in (Stage.ABORTED, Stage.FAILED) or mixed or e.failure is not None:
            failure = e.failure or e.dirty_reason or Failure(Reason.ENGINE, f"replica {replica_id} dropped the update")
            part_failed(tx, u, replica_id, replace(failure, member=failure.member or replica_id, phase=u.phase.value))
            return
        if new.stage >= Stage.JOINED > part.stage:
            from . import starting

            starting.maybe_plan(tx, u)
        if new.armed_seq > part.armed_seq:
            maybe_armed(tx, u)
        if new.stage >= Stage.RECEIVED > part.stage and all(p.stage >= Stage.RECEIVED for p in u.newest_first()):
            u = tx.put_update(replace(tx.state.open or u, received_at=tx.now))
            maybe_verifying(tx, u)
        if new.voted and not part.voted:
            tx.say(f"replica {replica_id} voted", u.update_id)
            compare_voted(tx, tx.state.open or u, replica_id)
    elif u.phase is Phase.ABORTING:
        ending.maybe_aborted(tx, _own_words(tx, u, new, e.failure))
    elif u.phase is Phase.COMMITTED:
        _after_decision(tx, u, replica_id, e, mixed, held)


def _own_words(tx: Tx, u: Update, part: Part, failure: Failure | None) -> Update:
    """Keep what a participant itself failed by: word of it may come after an abort that it caused, by a sender that
    lost it. One that only heard of the abort says the abort's own words."""
    heard = u.failure.message if u.failure is not None else ""
    if failure is None or part.failure is not None or failure.message == heard:
        return u
    return tx.put_part(u, replace(part, failure=replace(failure, member=failure.member or part.replica_id)))


def _after_decision(tx: Tx, u: Update, replica_id: str, e: Report, mixed: bool, held: Held) -> None:
    part = u.parts[replica_id]
    failed = e.stage in (Stage.FAILED, Stage.ABORTED)
    if (mixed or failed) and not part.excluded:
        failure = e.dirty_reason or e.failure or Failure(Reason.ENGINE, "the apply failed")
        failure = replace(failure, member=failure.member or replica_id, phase=u.phase.value)
        u = tx.put_part(u, replace(part, dirty=True, failure=failure))
        _count_failure(tx, replica_id, failure)
        tx.say(f"replica {replica_id} is DIRTY after the decision: {failure}", u.update_id)
    elif part.stage is Stage.APPLIED and held != u.held:
        u = tx.put_part(u, replace(part, stage=Stage.PREPARED))
    ending.maybe_complete(tx, u)


def _count_failure(tx: Tx, replica_id: str, failure: Failure) -> None:
    r = tx.state.replicas.get(replica_id)
    if r is None:
        return
    from .states import Admin

    n = r.failures_in_a_row + 1
    limit = n >= tx.state.config.quarantine_after and r.admin is Admin.ACTIVE
    tx.put_replica(replace(r, failure=failure, failures_in_a_row=n, admin=Admin.QUARANTINED if limit else r.admin))
    if limit:
        tx.write_roster(replica_id, Admin.QUARANTINED)
        tx.say(f"replica {replica_id} is QUARANTINED after {n} failures in a row")


def part_failed(tx: Tx, u: Update, replica_id: str, failure: Failure) -> None:
    """A participant cannot go on: exclude it where the policy allows, else abort. After the decision nobody votes."""
    part = u.parts[replica_id]
    if part.excluded:
        ending.maybe_aborted(tx, u)
        return
    if u.phase is Phase.COMMITTED:
        tx.put_part(u, replace(part, failure=part.failure or failure))
        ending.maybe_complete(tx, tx.state.open or u)
        return
    if u.phase in (Phase.ABORTING, Phase.DECIDING):
        u = tx.put_part(u, replace(part, failure=part.failure or failure))
        ending.maybe_aborted(tx, u)
        return
    u = tx.put_part(u, replace(part, failure=failure))
    _count_failure(tx, replica_id, failure)
    u = tx.state.open or u
    others = len(u.active()) - 1
    if u.options.at_least and others >= max(u.options.at_least, tx.state.policy.min_replicas):
        exclude(tx, u, replica_id)
    else:
        ending.abort(tx, u, failure)


def exclude(tx: Tx, u: Update, replica_id: str) -> None:
    """Leave a participant out: it can never vote again, and the update goes on without it."""
    u = tx.put_part(u, replace(u.parts[replica_id], excluded=True, voted=False))
    tx.push([replica_id])
    tx.push_trainers(u.update_id)
    tx.say(f"replica {replica_id} is excluded from {u.update_id}: {u.parts[replica_id].failure}", u.update_id)
    from . import starting

    starting.maybe_plan(tx, u)
    u = tx.state.open or u
    if gate_open(u):
        tx.push(p.replica_id for p in u.active() if p.mode is Mode.IN_PLACE)
    maybe_armed(tx, u)
    maybe_verifying(tx, tx.state.open or u)


def maybe_armed(tx: Tx, u: Update) -> None:
    """Answer the UpdateWeights calls whose ranks have all called and whose receivers are all armed."""
    t = tx.state.trainer
    if u.phase is not Phase.TRANSFERRING or t is None:
        return
    everyone = frozenset(range(t.world_size))
    done: set[int] = set()
    for call in u.calls:
        if call.ranks != everyone:
            continue
        channels = {c for c, _, _ in call.ranges}
        if all(p.armed_seq >= call.seq or channels.isdisjoint(p.channels) for p in u.newest_first()):
            done.add(call.seq)
    answered = [w for w in u.waiters if w.what == "update" and w.seq in done]
    if not answered:
        return
    for w in answered:
        tx.reply(w.call_id, None, u.update_id)
    left = tuple(w for w in u.waiters if w not in answered)
    tx.put_update(replace(u, waiters=left, armed_at=u.armed_at or tx.now))
    tx.say(f"everyone is armed for call(s) {sorted({w.seq for w in answered})} of {u.update_id}", u.update_id)


def compare_voted(tx: Tx, u: Update, only: str = "") -> None:
    """Ask for the comparison of every vote whose expected digests, of all its channels, are in (or not needed)."""
    if u.phase not in _BEFORE:
        return
    t = tx.state.trainer
    for part in [u.parts[only]] if only else u.active():
        if not part.voted or part.verified or part.excluded:
            continue
        ranks = range(t.world_size) if t is not None else range(0)
        members = members_by_channel(part)
        ready = u.options.verify is Verify.OFF or all((c, r) in u.digests_in for c in members for r in ranks)
        if not ready or part.replica_id not in tx.state.replicas:
            continue
        plans = tuple((u.plans[c].plan_id, of_it) for c, of_it in members.items())
        tx.effects.append(Compare(u.update_id, part.replica_id, part.incarnation, plans, u.options.verify))


def members_by_channel(part: Part) -> dict[str, tuple[str, ...]]:
    """A participant's channels, each with the members of it that receive there, in worker order."""
    out: dict[str, tuple[str, ...]] = {}
    for worker, channel in enumerate(part.channels):
        out[channel] = (*out.get(channel, ()), f"{part.replica_id}/{worker}")
    return out


def verified(tx: Tx, e: Verified) -> None:
    """A participant's receipts were compared."""
    u = tx.state.open
    part = u.parts.get(e.replica_id) if u is not None else None
    if (
        u is None
        or u.update_id != e.update_id
        or part is None
        or part.incarnation != e.incarnation
        or u.phase not in _BEFORE
    ):
        tx.quietly("a comparison that no longer matters")
        return
    if e.failure is not None:
        u = tx.put_part(u, replace(part, evidence=e.evidence, voted=False))
        tx.say(f"replica {e.replica_id} fails verification: {e.failure}", u.update_id)
        part_failed(
            tx, u, e.replica_id, replace(e.failure, member=e.failure.member or e.replica_id, phase=u.phase.value)
        )
        return
    u = tx.put_part(u, replace(part, verified=True, evidence=e.evidence))
    tx.say(f"replica {e.replica_id} is verified", u.update_id)
    if gate_open(u):
        tx.push(p.replica_id for p in u.active() if p.mode is Mode.IN_PLACE)
    maybe_decide(tx, u)


def finished(tx: Tx, u: Update) -> bool:
    """Whether every rank of the trainer has said that nothing more will be declared."""
    t = tx.state.trainer
    return t is not None and u.finished_ranks == frozenset(range(t.world_size))


def maybe_verifying(tx: Tx, u: Update) -> None:
    """Once the trainer has finished and every byte is where it should be: verify; then perhaps decide."""
    if u.phase is Phase.TRANSFERRING and finished(tx, u) and all(p.stage >= Stage.RECEIVED for p in u.newest_first()):
        u = tx.put_update(replace(u, phase=Phase.VERIFYING, verify_at=tx.now))
        tx.push_trainers(u.update_id)
    maybe_decide(tx, u)


def maybe_decide(tx: Tx, u: Update) -> None:
    """Once the trainer has finished and all that remain are prepared and verified: decide."""
    if u.phase is Phase.VERIFYING and all(p.voted and p.verified for p in u.newest_first()) and u.active():
        ending.decide(tx, u)


def _waited_for(u: Update) -> str:
    late = [
        f"{p.replica_id} ({p.stage.name if p.stage else 'not joined'})"
        for p in u.active()
        if not (p.voted and p.verified)
    ]
    return "replicas " + ", ".join(late[:5]) if late else ""


def time_is_up(tx: Tx, u: Update) -> bool:
    """Whether what somebody says at this moment comes of the prepare deadline; it is then enforced."""
    if u.phase not in _BEFORE or tx.now < u.prepare_deadline - _EARLY_S:
        return False
    tx.put_update(replace(tx.state.open or u, prepare_deadline=min(tx.now, u.prepare_deadline)))
    tick(tx)
    return True


def tick(tx: Tx) -> None:
    """Enforce the prepare deadline (rule 6: AT_LEAST decides then; rule 2 of everything: it ends)."""
    u = tx.state.open
    if u is None or u.phase not in _BEFORE:
        return
    late = tuple(w for w in u.waiters if w.what in ("start", "update") and w.deadline <= tx.now)
    if late:
        last = _last(u)
        text, member = f"still {u.phase}; waits for {_waited_for(u)}", last.replica_id if last is not None else ""
        for w in late:
            tx.reply(w.call_id, Failure(Reason.DEADLINE, text, member, u.phase.value), u.update_id)
        u = tx.put_update(replace(u, waiters=tuple(w for w in u.waiters if w not in late)))
    if tx.now < u.prepare_deadline:
        return
    ready = [p for p in u.active() if p.voted and p.verified]
    over = finished(tx, u)
    if over and u.options.at_least and len(ready) >= max(u.options.at_least, tx.state.policy.min_replicas):
        for p in u.active():
            if p not in ready:
                text = f"not prepared in time ({p.stage.name})" + (f"; {why}" if (why := _held_up(p)) else "")
                failure = Failure(Reason.DEADLINE, text, p.replica_id, u.phase.value)
                u = tx.put_part(tx.state.open or u, replace(p, failure=failure))
                _count_failure(tx, p.replica_id, failure)
                exclude(tx, tx.state.open or u, p.replica_id)
        return
    t = tx.state.trainer
    last = _last(u)
    ranks = sorted(set(range(t.world_size)) - u.finished_ranks) if t is not None else []
    sending = bool(ranks) and any(_short(u, p) for p in u.active())
    if ranks and all(p.voted for p in u.active()):
        who = f"trainer ranks {ranks}, which did not finish"
    else:
        who = _waited_for(u) or "the trainer"
        for p in u.active():
            if not p.voted and over and (last is None or p.replica_id == last.replica_id):
                _count_failure(tx, p.replica_id, Failure(Reason.DEADLINE, "not prepared in time", p.replica_id))
    message = f"the prepare deadline passed in {u.phase}; waited for {who}"
    if last is not None:
        message += f"; {last.replica_id} is furthest behind, with {last.bytes_received} bytes"
    held_up = [f"{p.replica_id}: {why}" for p in u.active() if not p.voted and (why := _held_up(p))]
    message += "".join(f"; {text}" for text in held_up[:5])
    if sending:  # whether those take nothing or these send nothing cannot be told from here
        message += f"; trainer ranks {ranks} did not finish sending to them"
    member = last.replica_id if last is not None else ""
    ending.abort(tx, tx.state.open or u, Failure(Reason.DEADLINE, message, member, u.phase.value))


def _drains(u: Update, part: Part, e: Report) -> int:
    """``Part.drains`` by a report. Who gave up says nothing new: what it waited for did not end by that."""
    if e.stage in (Stage.ABORTED, Stage.FAILED):
        return part.drains
    due = e.stage is Stage.RECEIVED or (
        part.mode is Mode.IN_PLACE and e.stage is Stage.JOINED and bool(u.calls) and gate_open(u)
    )
    waits = due and u.options.pause is PauseMode.WAIT and "update" not in e.pause_holders
    return e.running_requests if waits else -1


def _held_up(p: Part) -> str:
    """By what a participant was kept from its vote, where that is its own requests; empty if not."""
    if p.drains < 0:
        return ""
    n = p.drains
    told = f"{n} request(s) still in flight" if n else "its engine tells of no request in flight: does it answer?"
    return f"generation does not stand still yet (pause=wait), {told}"


def _due(u: Update, p: Part) -> int:
    """Bytes that are to come to a participant."""
    return sum(n for s in u.plans.values() for m, n in s.bytes_for.items() if m.rpartition("/")[0] == p.replica_id)


def _short(u: Update, p: Part) -> bool:
    """Whether a participant was ready to receive, and not everything came. (It may have given up by its own clock.)"""
    return p.armed_seq > 0 and not p.voted and p.bytes_received < _due(u, p)


def _last(u: Update) -> Part | None:
    """The one participant that is behind all others, if there is one: a sender that fills a ring holds them all up for
    it. When the sender is what they wait for, all have got equally far."""

    def far(p: Part) -> tuple[int, float]:
        return p.stage, p.bytes_received / max(_due(u, p), 1)

    late = sorted((*far(p), p.replica_id) for p in u.active() if not p.voted)
    if not late or (len(late) > 1 and late[0][:2] == late[1][:2]):
        return None
    return u.parts[late[0][2]]


def parts_by_stage(parts: Iterable[Part]) -> dict[str, int]:
    """How many participants are at each stage, for logs."""
    count: dict[str, int] = {}
    for p in parts:
        count[p.stage.name] = count.get(p.stage.name, 0) + 1
    return count
