"""Every invariant of the design as a named function, judged on what the simulator knows to be true.

Each raises ``Violation`` with its own name. Arguments are old and new states, and the judge's own records (``truth``).
"""

from __future__ import annotations

from typing import Any

from weightplane.controlplane.core import desired, events, members, model, replica, states, update_state
from weightplane.controlplane.core.group_state import GroupState
from weightplane.controlplane.core.model import NONE_HELD, Held
from weightplane.controlplane.core.reasons import Reason
from weightplane.controlplane.core.states import Admin, Liveness, Mode, Phase, Weights

BEFORE = (Phase.PREPARING, Phase.TRANSFERRING, Phase.VERIFYING)


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


# --- the group ------------------------------------------------------------------------------------------------------


def inv_committed_rises(before: Held, after: Held, decided: dict[str, int]) -> None:
    """The committed version only rises, and only to what was decided."""
    if after.version < before.version or (after != before and after.version == before.version):
        raise Violation("inv_committed_rises", f"committed went from {before} to {after}")
    if after != before and after.update_id not in decided:
        raise Violation("inv_committed_rises", f"{after} is committed and was never decided")


def inv_version_never_reused(version: int, update_id: str, minted: dict[int, str]) -> None:
    """A version belongs to one update for ever, and later ones are higher."""
    if minted.get(version, update_id) != update_id:
        raise Violation("inv_version_never_reused", f"version {version} is {minted[version]}'s and {update_id}'s")
    if version not in minted and minted and version <= max(minted):
        raise Violation("inv_version_never_reused", f"version {version} was minted after {max(minted)}")


def is_stale(s: GroupState, e: Any) -> bool:
    """Whether an event carries an epoch, a generation, an incarnation or a sequence that is over."""
    if s.stepped_down:
        return True
    if isinstance(e, events.Report | events.Leave | events.WorkerPlacement | events.Conditions):
        r = s.replicas.get(e.replica_id)
        if r is None or r.incarnation != e.incarnation:
            return True
        if isinstance(e, events.Report) and not r.reported and e.epoch < s.epoch:
            return False  # how a replica of an older epoch introduces itself: only its pauses are taken over
        return isinstance(e, events.Report) and (e.epoch not in (0, s.epoch) or e.sequence <= r.report_seq)
    if isinstance(e, events.Beat):
        if e.agent_id.startswith("rank/"):
            return s.trainer is None or s.trainer.closed or s.trainer.generation != e.generation
        r = s.replicas.get(e.agent_id)
        return r is None or r.incarnation != e.incarnation
    if isinstance(e, events.ReplicaHello):
        r = s.replicas.get(e.replica.replica_id)
        return r is not None and r.session > e.session
    if isinstance(e, events.Verified) and e.update_id.startswith("k-"):
        c = s.catch_ups.get(e.replica_id)
        return c is None or c.catch_up_id != e.update_id or c.incarnation != e.incarnation
    if isinstance(e, events.Verified):
        part = s.open.parts.get(e.replica_id) if s.open is not None and s.open.update_id == e.update_id else None
        return part is None or part.incarnation != e.incarnation
    if isinstance(e, events.PlanMade):
        known = {c.catch_up_id for c in s.catch_ups.values()}
        return e.update_id not in known and (s.open is None or s.open.update_id != e.update_id)
    if isinstance(e, events.Stored):
        return e.write_id not in s.writes
    generation = getattr(e, "generation", 0)
    if not generation:
        return isinstance(e, events.StartUpdate | events.UpdateWeights | events.FinishUpdate | events.DigestsIn)
    t = s.trainer
    if t is None or t.closed or t.generation != generation:
        return True
    if isinstance(e, events.UpdateWeights | events.FinishUpdate | events.DigestsIn):
        u = s.open if s.open is not None and s.open.update_id == e.update_id else s.history.get(e.update_id)
        return u is None or u.epoch != e.epoch
    return False


def inv_stale_changes_nothing(before: GroupState, event: Any, after: GroupState) -> None:
    """A stale epoch, generation or incarnation changes nothing."""
    if after is not before and is_stale(before, event):
        raise Violation("inv_stale_changes_nothing", f"{event} is stale and changed the group")


def inv_ends_in_time(s: GroupState, now: float) -> None:
    """Every update ends by its deadline plus one second, and the store's time-out where it was being decided."""
    u = s.open
    if u is None or s.stepped_down:
        return
    limit = u.deadline + 1.0 + (s.config.store_timeout_s if u.decide_at else 0.0)
    if now > limit + 1e-6:
        raise Violation("inv_ends_in_time", f"{u.update_id} is {u.phase} {now - u.deadline:.2f} s past its deadline")


def inv_participants_frozen(before: update_state.Update | None, after: update_state.Update) -> None:
    """Participants (replica, incarnation, mode, channels) never change once frozen."""
    if before is not None:
        old = [(p.replica_id, p.incarnation, p.mode, p.channels) for p in before.parts.values()]
        new = [(p.replica_id, p.incarnation, p.mode, p.channels) for p in after.parts.values()]
        if old != new:
            raise Violation("inv_participants_frozen", f"{after.update_id}: participants went from {old} to {new}")


def inv_only_eligible_join(s: GroupState, u: update_state.Update, now: float) -> None:
    """Who is frozen has a live lease, may join by its administrative state, and is bound; enough take part."""
    if len(u.parts) < max(1, s.policy.min_replicas):
        raise Violation("inv_only_eligible_join", f"{u.update_id} opened with {len(u.parts)} participant(s)")
    for p in u.parts.values():
        r = s.replicas[p.replica_id]
        fit = r.liveness is Liveness.LIVE and r.lease_until > now and r.reported and r.incarnation == p.incarnation
        if not fit or r.admin not in (Admin.ACTIVE, Admin.QUARANTINED) or p.replica_id in u.options.exclude:
            why = f"{r.liveness}, {r.admin}, lease until {r.lease_until:.2f} at {now:.2f}, life {r.incarnation}"
            raise Violation("inv_only_eligible_join", f"{p.replica_id} takes part in {u.update_id}: {why}")
        if "weights" in r.asleep:
            raise Violation("inv_only_eligible_join", f"{p.replica_id} takes part in {u.update_id} asleep")


def inv_sleep_orders(before: GroupState, event: Any, after: GroupState) -> None:
    """An order to sleep or to wake reaches a replica of that level, alone, never beside an update; from the order to
    sleep on it is ASLEEP. What would be served awake is whole, and weights come before the rest."""
    rid = event.replica_id
    b, a = before.replicas.get(rid), after.replicas.get(rid)
    if b is None or a is None or a.sleep is b.sleep or a.sleep is None:
        return
    u, why = before.open, ""
    part = u.parts.get(rid) if u is not None else None
    if b.sleep is not None and b.sleep_done < b.sleep.order:
        why = f"beside order {b.sleep.order}"
    elif u is not None and part is not None and part.incarnation == b.incarnation and u.phase is not Phase.ABORTED:
        why = f"beside {u.update_id}"
    elif b.pending or b.draining:
        why = f"while it owes {b.pending or b.draining}"
    elif isinstance(event, events.SetSleep):
        if event.level not in b.sleep_levels:
            why = f"at level {event.level} of {b.sleep_levels}"
        elif a.admin is not Admin.ASLEEP or set(a.sleep.asleep) != set(model.SLEEP_TAGS):
            why = f"and is {a.admin}, {a.sleep.asleep} asleep"
    elif "weights" in a.sleep.asleep:
        why = "and its weights sleep on"
    elif not a.sleep.asleep and b.weights is Weights.DIRTY:
        why = "and what it would serve is lost"
    if why:
        raise Violation("inv_sleep_orders", f"{rid} gets {event} {why}")


def inv_catch_up(before: GroupState, after: GroupState, receipts: Any) -> None:
    """A catch-up brings what was committed, is told to commit only what was verified, and is beside no update of its
    replica; none begins while an update is open; a holder sends to so many at once."""
    for rid, c in after.catch_ups.items():
        old = before.catch_ups.get(rid)
        fresh = old is None or old.catch_up_id != c.catch_up_id
        why = ""
        if fresh and (c.target != after.committed or after.open is not None or after.rewinding):
            why = f"begins with {c.target}, {after.committed} is committed, open: {after.open is not None}"
        elif fresh and after.unproven:
            why = f"begins, and nothing proves {c.target}: {after.unproven}"
        elif c.decision == "COMMIT" and (old is None or not old.decision):
            got = receipts.get((c.catch_up_id, rid, c.incarnation))
            if got is None or any(piece != c.target for worker in got for piece in worker):
                why = f"may commit, and holds {got}"
        part = after.open.parts.get(rid) if after.open is not None else None
        if part is not None and part.incarnation == c.incarnation and not part.excluded:
            why = f"goes on beside {after.open and after.open.update_id}"
        if why:
            raise Violation("inv_catch_up", f"{c.catch_up_id} of {rid} {why}")
    load: dict[str, int] = {}
    for c in after.catch_ups.values():
        load[c.holder] = load.get(c.holder, 0) + 1
    if any(n > after.config.catch_ups_at_once for n in load.values()):
        raise Violation("inv_catch_up", f"holders send to too many at once: {load}")


def inv_proven(s: GroupState, damaged: bool) -> None:
    """Whoever takes over can prove what is committed, unless what was stored with the decision is damaged: then it says
    so."""
    if s.committed.version and bool(s.unproven) != damaged:
        raise Violation("inv_proven", f"restarted at {s.committed}, damaged: {damaged}, says {s.unproven!r}")


def inv_sleep_alone(after: replica.ReplicaState, effects: list[Any]) -> None:
    """A replica obeys an order to sleep only while it takes no update."""
    t = after.taking
    if any(isinstance(e, replica.Sleep) for e in effects) and t is not None and not t.over:
        raise Violation("inv_sleep_alone", f"{after.incarnation} falls asleep in the middle of {t.want.update_id}")


def inv_channels(s: GroupState, u: update_state.Update) -> None:
    """Every worker of a participant receives by one channel that it is a member of; a channel never mixes modes."""
    channels = {c.channel_id: c for c in s.trainer.channels} if s.trainer is not None else {}
    modes: dict[str, Mode] = {}
    for p in u.parts.values():
        workers = s.replicas[p.replica_id].workers
        members = [f"{p.replica_id}/{w.index}" for w in workers]
        fit = len(members) == len(p.channels) and all(
            c in u.channels and c in channels and member in channels[c].receivers
            for member, c in zip(members, p.channels, strict=True)
        )
        if not fit:
            raise Violation("inv_channels", f"{members} take part in {u.update_id} by {p.channels} of {u.channels}")
        for worker, c in zip(workers, p.channels, strict=True):
            if channels[c].transport not in {o.transport for o in worker.offers}:
                raise Violation("inv_channels", f"{p.replica_id}/{worker.index} does not offer {channels[c].transport}")
            if modes.setdefault(c, p.mode) is not p.mode:
                raise Violation(
                    "inv_channels", f"channel {c} of {u.update_id} is staged for one and in place for another"
                )


def inv_one_update(before: GroupState, event: Any, after: GroupState, effects: list[Any]) -> None:
    """One update at a time; a busy group refuses, queues or supersedes as asked."""
    b, a = before.open, after.open
    if b is not None and (a is None or a.update_id != b.update_id):
        over = after.history.get(b.update_id)
        if over is None or not over.closed:
            raise Violation("inv_one_update", f"{b.update_id} ({b.phase}) was replaced and not ended")
    if isinstance(event, events.StartUpdate) and b is not None and event.request_id not in before.requests:
        if event.on_busy == "REFUSE" and (a is None or a.update_id != b.update_id or after.queue != before.queue):
            raise Violation("inv_one_update", f"{event.update_id} asked to be refused while {b.update_id} is open")
        held = after.open is not None and after.open.update_id == b.update_id and after.open.phase in BEFORE
        if event.on_busy == "SUPERSEDE" and held:
            raise Violation("inv_one_update", f"{b.update_id} goes on although {event.update_id} supersedes it")


def inv_pending_first(s: GroupState, u: update_state.Update, agents: dict[str, Any], decided: dict[str, int]) -> None:
    """PENDING is resolved before that replica joins another update."""
    for p in u.parts.values():
        r = s.replicas[p.replica_id]
        if r.pending or r.weights is Weights.PENDING:
            raise Violation("inv_pending_first", f"{p.replica_id} is pending in {r.pending} and joins {u.update_id}")
        agent = agents[p.replica_id]
        t = agent.state.taking
        mine = agent.incarnation == p.incarnation and t is not None and not t.over and t.want.update_id in decided
        past = s.history.get(t.want.update_id) if mine else None
        if mine and t.voted and past is not None and not past.parts[p.replica_id].excluded:
            raise Violation("inv_pending_first", f"{p.replica_id} owes {t.want.update_id} and joins {u.update_id}")


def inv_finish_complete(u: update_state.Update, receipts: dict[Any, Any], min_replicas: int) -> None:
    """A decision needs every active participant prepared and verified, on bytes that are whole, and enough of them."""
    active = [p for p in u.parts.values() if not p.excluded]
    need = max(u.options.at_least or len(u.parts), min_replicas, 1)
    if len(active) < need:
        raise Violation("inv_finish_complete", f"{u.update_id} is decided by {len(active)}, {need} are needed")
    for p in active:
        got = receipts.get((u.update_id, p.replica_id, p.incarnation))
        if not (p.voted and p.verified):
            raise Violation("inv_finish_complete", f"{p.replica_id} ({p.stage.name}) is not verified in {u.update_id}")
        if got is None or any(piece != u.held for worker in got for piece in worker):
            raise Violation("inv_finish_complete", f"{u.update_id} is decided, and {p.replica_id} holds {got}")
    for c in {c for p in active for c in p.channels}:
        declared = sum(n for call in u.calls for ch, _, n in call.ranges if ch == c)
        if c not in u.plans or declared != u.plans[c].buckets:
            raise Violation("inv_finish_complete", f"{u.update_id}: {declared} buckets of channel {c} were declared")


def inv_decided_once(update_id: str, version: int, decided: dict[str, int], aborted: set[str]) -> None:
    """One decision per update, never against an abort, in rising order."""
    if update_id in decided:
        raise Violation("inv_decided_once", f"{update_id} was decided twice")
    if update_id in aborted:
        raise Violation("inv_decided_once", f"{update_id} was aborted and is decided now")
    if decided and version <= max(decided.values()):
        raise Violation("inv_decided_once", f"version {version} is decided after {max(decided.values())}")


def inv_commit_after_store(want: desired.DesiredReplica, decided: dict[str, int]) -> None:
    """Commit is sent only after the store has it; in a catch-up: the version that it brings."""
    u = want.update
    told = [(u.holds.update_id if u.holds is not None else u.update_id, u.decision)] if u is not None else []
    if u is not None and u.holds is not None and decided.get(u.holds.update_id) != u.version:
        raise Violation("inv_catch_up", f"{want.replica_id} is caught up to {u.holds}, which was never decided")
    for update_id, outcome in (*told, *want.resolutions):
        if outcome == "COMMIT" and update_id not in decided and not update_id.startswith("k-"):
            raise Violation("inv_commit_after_store", f"{want.replica_id} is told to commit {update_id}, undecided")


def inv_one_outcome(s: GroupState, want: desired.DesiredReplica, decided: dict[str, int]) -> None:
    """What was decided is never told as aborted, except to who was excluded."""
    u = want.update
    told = [(u.update_id, u.decision)] if u is not None else []
    for update_id, outcome in (*told, *want.resolutions):
        if outcome == "ABORT" and update_id in decided:
            known = s.open if s.open is not None and s.open.update_id == update_id else s.history.get(update_id)
            part = known.parts.get(want.replica_id) if known is not None else None
            if part is None or (part.incarnation == want.incarnation and not part.excluded):
                raise Violation("inv_one_outcome", f"{want.replica_id} is told to drop {update_id}, which is decided")


def inv_excluded_never_votes(s: GroupState, u: update_state.Update, want: desired.DesiredReplica | None = None) -> None:
    """Who was excluded has no vote and is never told to commit."""
    for p in u.parts.values():
        if p.excluded and p.voted:
            raise Violation("inv_excluded_never_votes", f"{p.replica_id} is excluded from {u.update_id} and voted")


def inv_excluded_never_applies(s: GroupState, want: desired.DesiredReplica) -> None:
    """Who was excluded is never told to commit."""
    u = want.update
    told = [(u.update_id, u.decision)] if u is not None else []
    for update_id, outcome in (*told, *want.resolutions):
        known = s.open if s.open is not None and s.open.update_id == update_id else s.history.get(update_id)
        part = known.parts.get(want.replica_id) if known is not None else None
        if outcome == "COMMIT" and part is not None and part.excluded:
            raise Violation("inv_excluded_never_votes", f"excluded {want.replica_id} is told to commit {update_id}")


def inv_quiesced(u: update_state.Update, agents: dict[str, Any], leads: bool) -> None:
    """ABORTED is reported per member: drained, gone, or listed as unquiesced; and drained is true."""
    for p in u.parts.values():
        if not (p.quiesced or p.gone or p.unquiesced):
            raise Violation("inv_quiesced", f"{u.update_id} is ABORTED and nothing is said of {p.replica_id}")
        agent = agents[p.replica_id]
        t = agent.state.taking
        mine = agent.incarnation == p.incarnation and t is not None and t.want.update_id == u.update_id
        if p.quiesced and mine and not t.over:
            raise Violation("inv_quiesced", f"{p.replica_id} is said to be drained of {u.update_id}: {t.stage.name}")


def inv_armed_first(s: GroupState, e: events.UpdateWeights, agents: dict[str, Any]) -> None:
    """UpdateWeights answers once every receiving worker is armed and every rank has called."""
    u = s.open
    if u is None or u.update_id != e.update_id:
        return
    call = next((c for c in u.calls if c.seq == e.seq), None)
    if call is None or len(call.ranks) < (s.trainer.world_size if s.trainer is not None else 0):
        raise Violation("inv_armed_first", f"call {e.seq} of {u.update_id} was answered before every rank made it")
    channels = {c for c, _, _ in call.ranges}
    for p in u.parts.values():
        agent = agents[p.replica_id]
        if p.excluded or channels.isdisjoint(p.channels) or agent.incarnation != p.incarnation:
            continue
        t = agent.state.taking
        if t is None or t.want.update_id != u.update_id or t.armed_seq < e.seq:
            raise Violation("inv_armed_first", f"call {e.seq} of {u.update_id} may send; {p.replica_id} is not armed")
        armed = agent.armed_for.get((u.update_id, e.seq), ())
        for worker, channel in enumerate(p.channels):
            needs = {b for c, first, n in call.ranges if c == channel for b in range(first, first + n)}
            if not needs <= (armed[worker] if worker < len(armed) else set()):
                raise Violation("inv_armed_first", f"call {e.seq}: {p.replica_id}/{worker} is armed for {armed}")


def inv_generation(before: GroupState, event: Any, after: GroupState, holder_seen: float, now: float) -> None:
    """Generations rise; a living holder is replaced by a takeover only."""
    if after.last_generation == before.last_generation:
        return
    if after.last_generation < before.last_generation or not isinstance(event, events.InitTransfer):
        raise Violation("inv_generation", f"generation went {before.last_generation} -> {after.last_generation}")
    t = before.trainer
    lives = t is not None and not t.closed and now - holder_seen < before.config.ttl_s
    if lives and not event.takeover:
        raise Violation("inv_generation", f"{event.trainer_id} took the group from {t.trainer_id if t else ''}, alive")


def inv_routable(s: GroupState, r: model.Replica, truth: Any, now: float) -> None:
    """No replica is routable below the floor, while training rewinds, when dirty or pending, at weights that its
    engine never got, or while a condition blocks it."""
    live, _, ok, _ = members.routable(s, r)
    if not ok:
        return
    why = ""
    if not live or r.liveness is Liveness.LOST:
        why = "lost"
    elif r.held.version < s.committed.version or r.held.version <= 0:
        why = f"at version {r.held.version}, and {s.committed.version} is committed"
    elif truth.rewinding:
        why = "while training resumes below the committed step"
    elif r.held.update_id not in truth.decided:
        why = f"at {r.held.update_id}, never decided"
    elif r.weights not in (Weights.READY, Weights.UPDATING):
        why = f"and {r.weights}"
    elif set(r.pause_holders) - {"update"}:
        why = f"and paused by {r.pause_holders}"
    elif r.admin not in (Admin.ACTIVE, Admin.PINNED):
        why = f"and {r.admin}"
    elif r.asleep or (r.sleep is not None and r.sleep.asleep and r.sleep_done < r.sleep.order):
        why = f"and {r.asleep} asleep, or about to be"
    elif not set(s.policy.blocking) <= {c.type for c in r.conditions if c.status == "True"}:
        why = f"and of {s.policy.blocking} not all are True: {r.conditions}"
    if why:
        raise Violation("inv_routable", f"{r.replica_id} is routable {why}")


def inv_held_is_true(r: model.Replica, truth: dict[str, set[Held]]) -> None:
    """An engine that never got an update is never reported at its version: held is what that life's workers held."""
    if r.held != NONE_HELD and r.held not in truth.get(r.incarnation, ()):
        raise Violation("inv_held_is_true", f"{r.incarnation} is known to hold {r.held}, which its engine never did")
    if r.weights is Weights.READY and r.held == NONE_HELD:
        raise Violation("inv_held_is_true", f"{r.incarnation} is READY and holds nothing of ours")


def inv_report_is_true(agent: Any, report: events.Report) -> None:
    """A report says what the workers hold, and owns up to a mix."""
    engine = agent.engine
    if engine.life != agent.engine_life or agent.op is not None or engine.unseen:
        return
    if report.asleep != engine.asleep and agent.sleeping_until <= agent.world.now:
        raise Violation("inv_report_is_true", f"{agent.incarnation} reports {report.asleep} asleep: {engine.asleep}")
    if report.held != tuple(engine.labels):
        raise Violation("inv_report_is_true", f"{agent.incarnation} reports {report.held}, workers: {engine.labels}")
    if engine.mixed and not (report.dirty or "update" in report.pause_holders):
        raise Violation("inv_report_is_true", f"{agent.incarnation} reports whole weights: {engine.memory}")


def inv_pause_holders(before: GroupState, event: Any, after: GroupState) -> None:
    """Each pause holder removes only its own."""
    for rid, r in after.replicas.items():
        b = before.replicas.get(rid)
        if b is None or b.pauses_wanted == r.pauses_wanted:
            continue
        mine = event.holder if isinstance(event, events.SetPause) else ""
        others = {h: m for h, m in b.pauses_wanted.items() if h != mine}
        if {h: m for h, m in r.pauses_wanted.items() if h != mine} != others:
            raise Violation("inv_pause_holders", f"{rid}: {b.pauses_wanted} -> {r.pauses_wanted} by {mine or event}")


def inv_answered(c: Any) -> None:
    """A coordinator that steps down leaves no caller waiting."""
    if c.calls:
        left = [type(x.event).__name__ for x in c.calls.values()]
        raise Violation("inv_answered", f"stepped down and left {left} without an answer")


def inv_silence_detected(s: GroupState, seen: dict[Any, float], stopped: dict[Any, float], now: float, slack: float):
    """A silent or stopped member that an open update waits on is found within TTL + 1 beat."""
    u = s.open
    if u is None or u.phase not in BEFORE:
        return
    limit = s.config.ttl_s + s.config.beat_s + slack
    for p in u.parts.values():
        if p.excluded:
            continue
        key = (s.epoch, p.replica_id, p.incarnation)
        if now - max(seen.get(key, u.started_at), s.epoch_began) > limit:
            raise Violation("inv_silence_detected", f"{u.update_id} still waits on silent {p.replica_id}")
        if key in stopped and now - max(stopped[key], u.started_at) > limit:
            raise Violation("inv_silence_detected", f"{u.update_id} still waits on stopped {p.replica_id}")
    t = s.trainer
    if t is None or t.generation != u.generation:
        return
    for rank in t.ranks.values():
        mine = (s.epoch, f"rank/{rank.rank}", t.generation)
        last = max(seen.get(mine, s.epoch_began), seen.get(("init", *mine), 0.0))
        if rank.watches == 0 and now - last > limit:
            raise Violation("inv_silence_detected", f"{u.update_id} still waits on silent rank {rank.rank}")
        if key in stopped and now - max(stopped[key], u.started_at) > limit:
            raise Violation("inv_silence_detected", f"{u.update_id} still waits on stopped rank {rank.rank}")


# --- the replica ----------------------------------------------------------------------------------------------------


def inv_stale_desired(before: replica.ReplicaState, event: Any, after: replica.ReplicaState, effects: list) -> None:
    """A desired state of another life or an older epoch changes nothing; nor does the end of an older update."""
    if isinstance(event, replica.Desired):
        d = event.desired
        old = d.incarnation != before.incarnation or (d.cluster_id == before.cluster_id and d.epoch < before.epoch)
    else:
        update_id = getattr(event, "update_id", "")
        old = bool(update_id) and (before.taking is None or before.taking.want.update_id != update_id)
    if old and (after is not before or effects):
        raise Violation("inv_stale_changes_nothing", f"{event} is stale and changed {before.incarnation}: {effects}")


def told(event: Any, update_id: str) -> str:
    """What an event says about the outcome of an update."""
    if not isinstance(event, replica.Desired):
        return ""
    u = event.desired.update
    if u is not None and u.update_id == update_id:
        return u.decision
    return dict(event.desired.resolutions).get(update_id, "")


def inv_vote_binds(before: replica.ReplicaState, event: Any, after: replica.ReplicaState, effects: list[Any]) -> None:
    """After voting a replica neither applies nor drops until told."""
    t = before.taking
    if t is None or not t.voted or t.decision:
        return
    outcome = told(event, t.want.update_id)
    for e in effects:
        if (isinstance(e, replica.Apply) and outcome != "COMMIT") or (
            isinstance(e, replica.Drop) and outcome != "ABORT"
        ):
            what = type(e).__name__
            raise Violation("inv_vote_binds", f"{before.incarnation} voted and would {what} on {type(event).__name__}")
    a = after.taking
    if a is None or a.want.update_id != t.want.update_id or (a.stage is not t.stage and outcome == ""):
        raise Violation("inv_vote_binds", f"{before.incarnation} voted for {t.want.update_id} and forgot it")


def inv_apply_only_when_told(before: replica.ReplicaState, event: Any, effects: list[Any], outcomes: Any) -> None:
    """Apply needs a vote and a decision."""
    for e in effects:
        if isinstance(e, replica.Apply):
            t = before.taking
            brings = t.held.update_id if t is not None else ""
            if t is None or not t.voted or brings not in outcomes:
                raise Violation("inv_apply_only_when_told", f"{before.incarnation} applies {e.update_id}")


def inv_one_at_a_time(before: replica.ReplicaState, event: Any, after: replica.ReplicaState) -> None:
    """A replica takes up another update only when the one before is over (in the very step that ends it, at best)."""
    b, a = before.taking, after.taking
    if isinstance(event, replica.Drained | replica.Applied | replica.Failed):
        return
    if b is not None and a is not None and b.want.update_id != a.want.update_id and not b.over:
        raise Violation("inv_pending_first", f"{before.incarnation} left {b.want.update_id} for {a.want.update_id}")


def inv_own_pause(after: replica.ReplicaState, effects: list[Any], engine: Any) -> None:
    """A resume removes a pause that nobody wants any more, and never opens a fence."""
    for e in effects:
        if not isinstance(e, replica.Resume):
            continue
        if e.holder in {h for h, _ in after.wanted} or (e.holder == "dirty" and after.dirty):
            raise Violation("inv_pause_holders", f"{after.incarnation} lets go of {e.holder}'s pause, which is wanted")
        if e.holder == "update" and engine.mixed and engine.life and not after.dirty and not engine.asleep:
            raise Violation("inv_flip", f"{after.incarnation} resumes although its workers hold {engine.labels}")
        t = after.taking
        if e.holder == "update" and t is not None and not t.over and t.pause is not None:
            raise Violation("inv_pause_holders", f"{after.incarnation} resumes in the middle of {t.want.update_id}")


def inv_vote_is_true(before: replica.ReplicaState, after: replica.ReplicaState, agent: Any) -> None:
    """Prepared means: everything received; drained where it pauses with wait; fenced where in place."""
    a, b = after.taking, before.taking
    if a is None or not a.voted or (b is not None and b.voted):
        return
    if not a.want.all_called or a.received_seq < max(c.seq for c in a.want.calls if c.ranges):
        raise Violation("inv_vote_is_true", f"{after.incarnation} votes for {a.want.update_id}, bytes are missing")
    short = [w for w in range(agent.engine.workers) if len(agent.staging.get(w, ())) < agent.pieces]
    if short and agent.engine.life == agent.engine_life:
        raise Violation(
            "inv_vote_is_true", f"{after.incarnation} votes for {a.want.update_id}, workers {short} lack bytes"
        )
    fenced = a.want.mode is Mode.IN_PLACE or a.want.pause is states.PauseMode.WAIT
    if fenced and not agent.engine.paused:
        raise Violation("inv_vote_is_true", f"{after.incarnation} votes for {a.want.update_id} while it generates")


def inv_in_place_last(agent: Any, effects: list[Any], s: GroupState | None) -> None:
    """In place: armed only while fenced, and only after every staged participant is prepared and verified."""
    for e in effects:
        t = agent.state.taking
        if not isinstance(e, replica.Arm) or t is None or t.want.mode is not Mode.IN_PLACE:
            continue
        if "update" not in agent.engine.paused and agent.engine.life == agent.engine_life:
            raise Violation("inv_in_place_last", f"{agent.incarnation} arms live parameters while it generates")
        u = s.open if s is not None else None
        if u is None or u.update_id != e.update_id or u.phase not in BEFORE:
            continue
        late = [p.replica_id for p in u.parts.values() if p.mode is Mode.STAGED and not p.excluded and not p.verified]
        if late:
            raise Violation("inv_in_place_last", f"{agent.incarnation} is armed in place before {late} are prepared")


def inv_fenced(agent: Any) -> None:
    """DIRTY never generates, nor does anyone whom a holder paused. A fence that is asked for and not standing yet, over
    weights that are whole (an engine failed before it wrote anything), is no breach: what is mixed never serves."""
    s = agent.state
    if agent.engine.generating and agent.engine.life == agent.engine_life:
        if s.dirty and ("dirty" not in s.pausing or agent.engine.mixed):
            raise Violation("inv_dirty_never_generates", f"{agent.incarnation} is dirty and generates")
        if s.paused:
            raise Violation("inv_pause_holders", f"{agent.incarnation} generates although paused by {set(s.paused)}")


def inv_no_mix(agent: Any) -> None:
    """No replica, and no token, mixes versions."""
    if agent.engine.generating and agent.engine.mixed:
        raise Violation("inv_no_mix", f"{agent.incarnation} generates with {agent.engine.memory}")


def inv_still_when_written(agent: Any) -> None:
    """Live parameters are written only while generation stands still, and to memory that is there."""
    if "weights" in agent.engine.asleep:
        raise Violation("inv_awake_when_written", f"{agent.incarnation} writes weights that are asleep")
    if agent.engine.generating:
        raise Violation("inv_no_mix", f"{agent.incarnation} writes live parameters while it generates")


def inv_abort_spreads(agent: Any, update_id: str, since: float) -> None:
    """One second from detection to abort everywhere (where the network works)."""
    t = agent.state.taking
    if t is not None and t.want.update_id == update_id and not t.over and not t.dropping:
        raise Violation("inv_abort_spreads", f"{agent.incarnation} goes on with {update_id} a second after its abort")


def inv_heals(ok: bool, why: str) -> None:
    """After any failure a full update works with no restart of the survivors."""
    if not ok:
        raise Violation("inv_heals", why)


def refused(effects: list[Any], reason: Reason) -> bool:
    return any(isinstance(e, events.Reply) and e.failure is not None and e.failure.reason is reason for e in effects)
