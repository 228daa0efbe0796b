"""Planted bugs: each patches product code only, and says which assertion must find it.

``hint`` is the seed where it was found first; the test begins there and goes on with others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from weightplane.controlplane.core import (
    catching,
    conditions,
    desired,
    ending,
    events,
    group,
    holders,
    members,
    negotiate,
    operators,
    progress,
    replica,
    sleeping,
    starting,
    states,
    trainers,
)
from weightplane.controlplane.core.model import NONE_HELD
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import Mode, PauseMode, Phase, Weights
from weightplane.controlplane.store import records

__all__ = ["PLANTS", "Plant", "planted"]


@dataclass(frozen=True)
class Plant:
    """One bug. ``covers``: the rule or invariant of the design that it breaks."""

    name: str
    covers: str
    what: str
    patch: Callable[[Patch], None]
    found_by: str
    hint: int = 0
    boost: tuple[str, ...] = ()  # faults that the schedule gets more of, where the bug needs a rare one


class Patch:
    """Replaces attributes and table entries, and puts them back."""

    def __init__(self) -> None:
        self.undo: list[Callable[[], None]] = []

    def attr(self, owner: Any, name: str, value: Any) -> Any:
        old = getattr(owner, name)
        self.undo.append(lambda: setattr(owner, name, old))
        setattr(owner, name, value)
        for table in (group._HANDLERS, replica._HANDLERS):
            for key, handler in list(table.items()):
                if handler is old:
                    self.item(table, key, value)
        return old

    def item(self, table: Any, key: Any, value: Any) -> Any:
        old = table[key]
        self.undo.append(lambda: table.__setitem__(key, old))
        table[key] = value
        return old


@contextmanager
def planted(plant: Plant):
    """Run with the bug in the product."""
    patch = Patch()
    try:
        plant.patch(patch)
        yield
    finally:
        for undo in reversed(patch.undo):
            undo()


PLANTS: list[Plant] = []

#: Seeds that find a plant fast today. Any seed may serve: the search goes on with the others.
HINTS: dict[str, int] = {
    "damaged_digests_count": 112,
    "reports_of_former_lives_count": 3,
    "drained_replicas_join": 3,
    "participants_follow_restarts": 7,
    "only_the_first_channel_is_covered": 1,
    "votes_before_drained": 1,
    "unknown_means_written": 1,
    "aborts_do_not_wait_in_deciding": 7,
    "doubt_means_drop": 3,
    "one_worker_is_enough": 30,
    "a_living_holder_loses_the_group": 1,
    "rewinding_waits_for_rollouts": 2,
    "a_busy_group_begins_another": 2,
    "a_restart_forgets_what_is_committed": 2,
    "the_freeze_forgets_its_version": 2,
    "beats_of_former_lives_count": 9,
    "the_prepare_deadline_is_not_enforced": 5,
    "a_drain_may_take_for_ever": 5,
    "silent_replicas_are_waited_for": 3,
    "silent_trainers_are_waited_for": 9,
    "votes_are_not_compared": 5,
    "only_the_first_channel_is_compared": 1,
    "dirty_replicas_stay_dirty": 4,
    "the_store_decides_again": 8,
    "doubt_resolves_to_abort": 27,
    "asleep_joins": 25,
    "sleeps_in_the_middle": 51,
    "pending_replicas_join": 2,
    "excluded_replicas_vote": 31,
    "excluded_replicas_commit": 8,
    "dirty_is_not_fenced": 2,
    "a_resume_removes_every_pause": 3,
    "fenced_trainers_go_on": 2,
    "a_new_life_inherits_its_version": 2,
    "voters_abort_at_the_deadline": 3,
    "catch_ups_are_not_compared": 5,
    "catch_ups_begin_beside_updates": 2,
    "ready_means_routable": 2,
    "stepping_down_in_silence": 7,
    "only_the_first_channel_is_waited_for": 1,
    "decisions_are_stored_alone": 2,
}


def plant(covers: str, found_by: str, boost: tuple[str, ...] = ()):
    def add(fn: Callable[[Patch], None]) -> Callable[[Patch], None]:
        name = fn.__name__
        what = " ".join((fn.__doc__ or "").split())
        PLANTS.append(Plant(name, covers, what, fn, found_by, HINTS.get(name, 0), boost))
        return fn

    return add


# --- the rules ------------------------------------------------------------------------------------------------------


@plant("rule 1", "inv_stale_changes_nothing")
def reports_of_former_lives_count(p: Patch) -> None:
    """A report's incarnation is not compared."""
    old = members.report

    def report(tx, e):
        r = tx.state.replicas.get(e.replica_id)
        old(tx, replace(e, incarnation=r.incarnation) if r is not None else e)

    p.attr(members, "report", report)


@plant("rule 1", "inv_stale_changes_nothing", ("c.rival", "r.break"))
def agents_obey_any_epoch(p: Patch) -> None:
    """An agent does not compare the epoch of a desired state with its own."""
    old = replica._desired

    def obey(tx, e):
        if e.desired.epoch < tx.state.epoch:
            e = replica.Desired(replace(e.desired, epoch=tx.state.epoch))
        old(tx, e)

    p.attr(replica, "_desired", obey)


@plant("rule 2", "inv_only_eligible_join")
def drained_replicas_join(p: Patch) -> None:
    """The table says that a DRAINING replica may join."""
    p.item(members._ADMIN_JOINS, states.Admin.DRAINING, (True, True))


@plant("rule 2", "inv_participants_frozen")
def participants_follow_restarts(p: Patch) -> None:
    """A participant that comes back as a new life takes its old place in the open update."""
    old = members.hello

    def hello(tx, e):
        u, said = tx.state.open, e.replica
        if u is not None and said.replica_id in u.parts and u.phase is not Phase.ABORTING:
            tx.put_part(u, replace(u.parts[said.replica_id], incarnation=said.incarnation))
        old(tx, e)

    p.attr(members, "hello", hello)


@plant("rule 3", "inv_in_place_last")
def in_place_starts_at_once(p: Patch) -> None:
    """In-place participants are armed before the staged ones are prepared."""
    p.attr(desired, "gate_open", lambda u: True)


@plant("rule 4", "inv_armed_first")
def bytes_before_armed(p: Patch) -> None:
    """UpdateWeights answers once every rank has called, whoever is armed."""

    def maybe_armed(tx, u):
        t = tx.state.trainer
        if u.phase is not Phase.TRANSFERRING or t is None:
            return
        done = {c.seq for c in u.calls if len(c.ranks) == t.world_size}
        ready = [w for w in u.waiters if w.what == "update" and w.seq in done]
        for w in ready:
            tx.reply(w.call_id, None, u.update_id)
        tx.put_update(replace(u, waiters=tuple(w for w in u.waiters if w not in ready)))

    p.attr(progress, "maybe_armed", maybe_armed)


@plant("rule 4", "inv_armed_first")
def only_the_first_channel_is_waited_for(p: Patch) -> None:
    """UpdateWeights waits for a replica only if the call names the channel of its first worker."""
    old = progress.maybe_armed

    def maybe_armed(tx, u):
        parts = {rid: replace(x, channels=x.channels[:1]) for rid, x in u.parts.items()}
        old(tx, replace(u, parts=parts))
        now = tx.state.open
        tx.put_update(replace(now, parts=u.parts))

    p.attr(progress, "maybe_armed", maybe_armed)


@plant("rule 4", "inv_armed_first")
def only_the_first_channel_is_armed(p: Patch) -> None:
    """A replica is told to arm the buckets of its first worker's channel alone."""
    old = desired._desired_update

    def desired_update(state, r, u, now):
        want = old(state, r, u, now)
        if want is None:
            return None
        first = u.parts[r.replica_id].channels[0]
        calls = tuple(replace(c, ranges=tuple(x for x in c.ranges if x[0] == first)) for c in want.calls)
        return replace(want, calls=calls)

    p.attr(desired, "_desired_update", desired_update)


@plant("rule 5", "inv_vote_is_true")
def only_the_first_channel_is_covered(p: Patch) -> None:
    """A replica is told that everything was called once the channel of its first worker is covered."""
    old = desired._desired_update

    def desired_update(state, r, u, now):
        want = old(state, r, u, now)
        covered = progress.covered(u, u.parts[r.replica_id].channels[0]) if want is not None else False
        return replace(want, all_called=bool(want.calls) and covered) if want is not None else None

    p.attr(desired, "_desired_update", desired_update)


@plant("rule 3", "inv_channels")
def channels_mix_modes(p: Patch) -> None:
    """A channel is bound for all replicas that its transport reaches, whatever modes they take."""
    old = negotiate.bind

    def bind(ranks, replicas, *rest):
        return old(ranks, [replace(r, modes=(Mode.STAGED, Mode.IN_PLACE)) for r in replicas], *rest)

    p.attr(negotiate, "bind", bind)


@plant("rule 5", "inv_vote_is_true")
def votes_before_drained(p: Patch) -> None:
    """A replica that pauses with `wait` votes while requests still run."""
    old = replica._ready_paused

    def ready(tx, mode):
        t = tx.state.taking
        return True if mode is PauseMode.WAIT and t.want.mode is Mode.STAGED and not t.decision else old(tx, mode)

    p.attr(replica, "_ready_paused", ready)


@plant("rule 6", "inv_commit_after_store", ("s.lost", "s.written"))
def unknown_means_written(p: Patch) -> None:
    """A store answer of unknown outcome counts as a decision."""
    old = ending.decision_stored
    p.attr(ending, "decision_stored", lambda tx, u, e: old(tx, u, replace(e, ok=True) if e.ok is None else e))


@plant("rule 6", "inv_decided_once", ("s.slow", "o.abort", "t.abort", "t.takeover"))
def aborts_do_not_wait_in_deciding(p: Patch) -> None:
    """An abort in DECIDING is carried out at once."""
    old = ending.abort

    def abort(tx, u, failure):
        if u.phase is Phase.DECIDING:
            u = tx.put_update(replace(u, phase=Phase.DECIDING))
            tx.put_update(replace(u, phase=Phase.ABORTING, failure=failure, aborting_until=tx.now + 1.0))
            tx.push(u.parts)
            return
        old(tx, u, failure)

    p.attr(ending, "abort", abort)


@plant("rule 7", "inv_vote_binds")
def doubt_means_drop(p: Patch) -> None:
    """A replica that voted and finds its update unmentioned drops it."""
    old = replica._other_update
    p.attr(replica, "_other_update", lambda tx, t, outcome: old(tx, t, outcome or "ABORT"))


@plant("rule 8", "inv_flip")
def one_worker_is_enough(p: Patch) -> None:
    """A replica resumes although not all its workers hold the new version."""
    old = replica._applied

    def applied(tx, e):
        held = e.held
        t = tx.state.taking
        old(tx, replace(e, held=(t.held,) * len(held)))
        tx.set(held=held)

    p.attr(replica, "_applied", applied)


@plant("rule 9", "inv_quiesced")
def aborted_before_drained(p: Patch) -> None:
    """ABORTED is reported as soon as one participant has drained."""

    def maybe_aborted(tx, u):
        if u.phase is Phase.ABORTING and any(x.quiesced or x.gone or x.unquiesced for x in u.parts.values()):
            ending._close(tx, replace(u, phase=Phase.ABORTED))

    p.attr(ending, "maybe_aborted", maybe_aborted)


@plant("rule 10", "inv_generation")
def a_living_holder_loses_the_group(p: Patch) -> None:
    """InitTransfer of another trainer is granted while the holder's lease lives."""
    p.attr(trainers, "holder_lives", lambda tx: False)


@plant("rule 10", "inv_stale_changes_nothing")
def fenced_trainers_go_on(p: Patch) -> None:
    """Calls are not fenced by generation."""
    p.attr(trainers, "fence", lambda tx, generation: None)


@plant("rule 10", "inv_generation")
def answered_before_durable(p: Patch) -> None:
    """InitTransfer answers before the generation is stored."""
    old = trainers._grant

    def grant(tx, e):
        t = old(tx, e)
        tx.put_trainer(replace(t, durable=True))
        return tx.state.trainer

    p.attr(trainers, "_grant", grant)


@plant("rule 10", "inv_rewind")
def rewinding_waits_for_rollouts(p: Patch) -> None:
    """The first publish after a rewind keeps requests in flight."""
    old = starting._options

    def options(tx, e):
        o = old(tx, e)
        return replace(o, pause=PauseMode.KEEP) if tx.state.rewinding else o

    p.attr(starting, "_options", options)


@plant("rule 11", "inv_one_update")
def a_busy_group_begins_another(p: Patch) -> None:
    """StartUpdate does not look whether an update is open."""
    old = starting.start

    def start(tx, e):
        busy = tx.state.open is not None and trainers.fence(tx, e.generation) is None
        if busy and e.request_id not in tx.state.requests:
            starting.begin(tx, e)
        else:
            old(tx, e)

    p.attr(starting, "start", start)


# --- the invariants -------------------------------------------------------------------------------------------------


@plant("committed version only rises", "inv_committed_rises")
def a_restart_forgets_what_is_committed(p: Patch) -> None:
    """A restarted coordinator begins without the committed version."""
    old = group.restarted

    def restarted(stored, frozen, epoch, now):
        return old(replace(stored, committed=NONE_HELD), frozen, epoch, now)

    p.attr(group, "restarted", restarted)


@plant("version never reused", "inv_version_never_reused")
def the_freeze_forgets_its_version(p: Patch) -> None:
    """The store does not keep the version that a freeze minted."""
    old = records._freeze

    def freeze(write, u, known, record):
        changes = old(write, u, known, record)
        return replace(changes, group=known) if changes is not None and changes.group is not None else changes

    p.attr(records, "_freeze", freeze)


@plant("no replica, and no token, mixes versions", "inv_no_mix")
def applies_while_generating(p: Patch) -> None:
    """A staged apply writes live parameters without a pause."""
    old = replica._ready_paused
    p.attr(replica, "_ready_paused", lambda tx, m: True if tx.state.taking.decision == "COMMIT" else old(tx, m))


@plant(
    "a stale epoch, generation or incarnation changes nothing", "inv_stale_changes_nothing", ("r.kill", "r.agent_kill")
)
def beats_of_former_lives_count(p: Patch) -> None:
    """A heartbeat's incarnation is not compared."""
    old = members.beat

    def beat(tx, e):
        r = tx.state.replicas.get(e.agent_id)
        old(tx, replace(e, incarnation=r.incarnation) if r is not None else e)

    p.attr(members, "beat", beat)


@plant("every update ends by its deadline plus one second", "inv_ends_in_time")
def the_prepare_deadline_is_not_enforced(p: Patch) -> None:
    """The coordinator leaves deadlines to the trainer."""
    p.attr(progress, "tick", lambda tx: None)


@plant("every update ends by its deadline plus one second", "inv_ends_in_time")
def a_drain_may_take_for_ever(p: Patch) -> None:
    """An abort waits for a member that cannot drain."""
    old = ending.tick

    def tick(tx):
        u = tx.state.open
        if u is None or u.phase is not Phase.ABORTING:
            old(tx)

    p.attr(ending, "tick", tick)


@plant("one second from detection to abort everywhere", "inv_abort_spreads")
def aborts_are_told_at_the_end(p: Patch) -> None:
    """Participants hear of an abort only once it is over."""
    p.attr(
        desired,
        "_decision",
        lambda u, excluded: (
            "ABORT" if excluded or u.phase is Phase.ABORTED else "COMMIT" if u.phase is Phase.COMMITTED else ""
        ),
    )


@plant("silent stops are detected within TTL + 1 beat", "inv_silence_detected")
def silent_replicas_are_waited_for(p: Patch) -> None:
    """The end of a replica's lease has no consequence."""
    p.attr(members, "tick", lambda tx: None)


@plant("silent stops are detected within TTL + 1 beat", "inv_silence_detected", ("t.stop", "t.kill"))
def silent_trainers_are_waited_for(p: Patch) -> None:
    """The end of a rank's lease has no consequence."""
    p.attr(trainers, "tick", lambda tx: None)


@plant("finish never succeeds short of its manifest", "inv_finish_complete", ("r.corrupt",))
def votes_are_not_compared(p: Patch) -> None:
    """Who votes counts as verified, whatever arrived."""
    old = progress.maybe_decide

    def maybe_decide(tx, u):
        for part in u.active():
            if part.voted and not part.verified:
                u = tx.put_part(u, replace(part, verified=True))
        old(tx, u)

    p.attr(progress, "maybe_decide", maybe_decide)


@plant("finish never succeeds short of its manifest", "inv_finish_complete", ("r.corrupt", "r.corrupt"))
def only_the_first_channel_is_compared(p: Patch) -> None:
    """The receipts of the workers of one channel stand for all of a replica's."""
    old = progress.members_by_channel
    p.attr(progress, "members_by_channel", lambda part: dict(list(old(part).items())[:1]))


@plant(
    "an engine that never got an update is never reported at the trainer's version",
    "inv_held_is_true",
    ("r.agent_kill", "r.engine_restart"),
)
def a_new_life_inherits_its_version(p: Patch) -> None:
    """A replica that comes back as a new life keeps what the old one held."""
    old = members.hello

    def hello(tx, e):
        was = tx.state.replicas.get(e.replica.replica_id)
        old(tx, e)
        now = tx.state.replicas.get(e.replica.replica_id)
        if was is not None and now is not None and was.incarnation != now.incarnation and now.session == e.session:
            tx.put_replica(replace(now, held=was.held, weights=was.weights, reported=True))

    p.attr(members, "hello", hello)


@plant("an engine that never got an update is never reported at the trainer's version", "inv_report_is_true")
def agents_report_what_they_remember(p: Patch) -> None:
    """An agent reports the version that it was told to commit, not what its workers say."""
    old = replica.report_of

    def report_of(state, nbytes=0, running=0):
        r = old(state, nbytes, running)
        t = state.taking
        return replace(r, held=(t.held,) * len(r.held)) if t is not None and t.decision == "COMMIT" else r

    p.attr(replica, "report_of", report_of)


@plant("after any failure a full update works with no restart of the survivors", "inv_heals")
def dirty_replicas_stay_dirty(p: Patch) -> None:
    """A DIRTY replica may not join an update."""
    p.item(members._WEIGHTS_JOINS, Weights.DIRTY, False)


@plant("a decision is made at most once", "inv_decided_once", ("c.rival", "s.slow"))
def the_store_decides_again(p: Patch) -> None:
    """The store takes a decision about an update that was aborted under an older epoch."""
    old = records._decide

    def decide(write, u, known, record, kept):
        if record is not None and record.outcome != records.COMMITTED:
            record = replace(record, outcome=records.OPEN, epoch=write.epoch)
        return old(write, u, known, record, kept)

    def settle(epoch, write, state, g, record, kept=None):
        if write.kind == "decide":
            return decide(write, write.update, g, record, kept)
        return whole(epoch, write, state, g, record, kept)

    whole = records.settle
    from weightplane.controlplane.store import memory

    p.attr(memory, "settle", settle)


@plant("commit is sent only after the store has it", "inv_commit_after_store")
def commit_before_the_store(p: Patch) -> None:
    """Commit is sent while the decision is being written."""
    old = desired._decision
    p.attr(desired, "_decision", lambda u, x: "COMMIT" if u.phase is Phase.DECIDING and not x else old(u, x))
    decide = ending.decide

    def decided(tx, u):
        decide(tx, u)
        tx.push(u.parts)

    p.attr(ending, "decide", decided)


@plant("what was decided is decided for all", "inv_one_outcome", ("c.crash", "c.rival", "r.break"))
def doubt_resolves_to_abort(p: Patch) -> None:
    """A restarted coordinator tells who asks to drop, also what was committed."""
    p.attr(members, "_owes", lambda u, r: False)
    p.attr(desired, "resolve", lambda state, update_id, replica_id: "ABORT")


@plant("after voting a replica neither applies nor drops until told", "inv_vote_binds")
def voters_abort_at_the_deadline(p: Patch) -> None:
    """The deadline drops an update that was voted for."""

    def tick(tx, e):
        t = tx.state.taking
        if t is not None and not t.over and not t.dropping and tx.now >= t.deadline:
            replica._drop(tx, Failure(Reason.DEADLINE, "late", tx.state.replica_id), "")

    p.attr(replica, "_tick", tick)


@plant("PENDING is resolved before joining another update", "inv_pending_first", ("r.slow", "r.partition"))
def pending_replicas_join(p: Patch) -> None:
    """The table says that a PENDING replica may join."""
    p.item(members._WEIGHTS_JOINS, Weights.PENDING, True)


@plant("excluded can never vote", "inv_excluded_never_votes", ("r.kill", "r.stop_all"))
def excluded_replicas_vote(p: Patch) -> None:
    """The vote of a participant still counts when it is excluded."""
    old = progress.exclude

    def exclude(tx, u, replica_id):
        voted = u.parts[replica_id].voted
        old(tx, u, replica_id)
        now = tx.find(u.update_id)
        tx.put_part(now, replace(now.parts[replica_id], voted=voted))

    p.attr(progress, "exclude", exclude)


@plant("excluded can never vote", "inv_excluded_never_votes")
def excluded_replicas_commit(p: Patch) -> None:
    """Who was excluded is told to commit with the others."""
    old = desired._decision
    p.attr(desired, "_decision", lambda u, excluded: old(u, False))


@plant("DIRTY never generates", "inv_dirty_never_generates")
def dirty_is_not_fenced(p: Patch) -> None:
    """A dirty replica gets no pause of its own."""
    old = replica._settle_pauses

    def settle(tx):
        dirty = tx.state.dirty
        tx.set(dirty=False)
        old(tx)
        tx.set(dirty=dirty)

    p.attr(replica, "_settle_pauses", settle)


@plant("pause holders only remove their own", "inv_pause_holders")
def a_resume_removes_every_pause(p: Patch) -> None:
    """A resume by one holder removes the others' pauses, too."""
    old = operators.set_pause

    def set_pause(tx, e):
        old(tx, e)
        if not e.on:
            for rid in e.replica_ids or tuple(tx.state.replicas):
                if rid in tx.state.replicas:
                    tx.put_replica(replace(tx.state.replicas[rid], pauses_wanted={}))

    p.attr(operators, "set_pause", set_pause)


@plant("no replica is routable below the floor", "inv_routable")
def ready_means_routable(p: Patch) -> None:
    """Routable asks for READY and not for the version."""
    old = members.routable

    def routable(state, r, min_version=0):
        live, ready, ok, why = old(state, r, min_version)
        return (live, ready, True, "") if ready else (live, ready, ok, why)

    p.attr(members, "routable", routable)


@plant("apply needs a vote and a decision", "inv_apply_only_when_told")
def votes_apply_at_once(p: Patch) -> None:
    """A replica applies as soon as it is prepared and paused."""
    old = replica._prepared

    def prepared(tx, e):
        old(tx, e)
        t = tx.state.taking
        if t is not None and t.voted and not t.busy:
            tx.take(decision="COMMIT")
            replica._advance(tx)

    p.attr(replica, "_prepared", prepared)


@plant("who waits is answered", "inv_answered")
def stepping_down_in_silence(p: Patch) -> None:
    """A coordinator that steps down forgets who waits."""

    def step_down(tx, message):
        tx.set(stepped_down=True, queue=(), waiters=())
        tx.effects.append(events.StepDown(message))

    p.attr(ending, "step_down", step_down)


@plant("no update onto weights asleep", "inv_sleep_orders", boost=("o.sleep",))
def sleeps_beside_an_update(p: Patch) -> None:
    """Who takes part in an update is put to sleep all the same."""
    p.attr(sleeping, "_takes_part", lambda tx, r: "")


@plant("no update onto weights asleep", "inv_only_eligible_join", boost=("o.sleep",))
def asleep_joins(p: Patch) -> None:
    """Who is ASLEEP may join an update."""
    p.item(members._ADMIN_JOINS, states.Admin.ASLEEP, (True, True))


@plant("no update onto weights asleep", "inv_sleep_alone", boost=("o.sleep", "c.crash"))
def sleeps_in_the_middle(p: Patch) -> None:
    """A replica obeys an order to sleep whatever it is doing."""

    def obey(tx):
        s = tx.state
        order = s.newest.sleep if s.newest is not None else None
        if order is not None and order.order > s.sleep_begun and s.sleep_begun <= s.sleep_done:
            tx.set(sleep_begun=order.order)
            tx.effects.append(replica.Sleep(order))

    p.attr(replica, "_obey_sleep", obey)


@plant("what a sleep dropped is DIRTY until a full update committed", "inv_report_is_true", boost=("o.sleep",))
def dropped_weights_are_clean(p: Patch) -> None:
    """A deep sleep is told as a light one."""

    def done(tx, e):
        tx.set(asleep=e.asleep, held=e.held, sleep_done=e.order, sleep_failure=e.failure)
        tx.report("done")

    p.attr(replica, "_sleep_done", done)


@plant(
    "what a sleep dropped is DIRTY until a full update committed",
    "inv_sleep_orders",
    boost=("o.sleep", "o.wake_weights", "o.wake"),
)
def dropped_weights_are_woken(p: Patch) -> None:
    """Nobody asks what a replica would serve awake."""
    p.attr(sleeping, "_loses", lambda r, left: None)


@plant("no replica is routable while a condition blocks it", "inv_routable", boost=("o.policy",))
def conditions_only_warn(p: Patch) -> None:
    """What a policy asks of conditions is not looked at."""
    p.attr(conditions, "blocked", lambda policy, r: "")


@plant("no replica is routable while it sleeps", "inv_routable", boost=("o.sleep", "o.wake_weights"))
def half_awake_is_routable(p: Patch) -> None:
    """A replica whose cache sleeps says that nobody holds it, and counts as ready."""
    old = replica.report_of

    def report_of(state, *args):
        report = old(state, *args)
        return replace(report, pause_holders=tuple(h for h in report.pause_holders if h != "sleep"))

    p.attr(replica, "report_of", report_of)


@plant("catch-up: verified against the committed digests, never READY before", "inv_catch_up")
def catch_ups_are_not_compared(p: Patch) -> None:
    """What a caught-up replica received counts as verified, whatever it is."""
    old = catching.verified
    p.attr(catching, "verified", lambda tx, e: old(tx, replace(e, failure=None)))


@plant("catch-up: an update goes first", "inv_catch_up")
def catch_ups_begin_beside_updates(p: Patch) -> None:
    """Who is behind is caught up also while an update is open."""
    old = holders.behind
    p.attr(catching, "behind", lambda s, r, now: old(replace(s, open=None), r, now))


@plant("what is committed can be proven after a restart", "inv_proven")
def decisions_are_stored_alone(p: Patch) -> None:
    """The store takes a decision without what proves the version."""
    old = records._decide
    p.attr(records, "_decide", lambda write, u, known, record, kept: old(write, u, known, record, None))


@plant("catch-up: verified against the committed digests, never READY before", "inv_catch_up")
def damaged_digests_count(p: Patch) -> None:
    """A coordinator that restarted catches replicas up although nothing proves what was committed."""
    old = holders.holders
    for module in (holders, catching):
        p.attr(module, "holders", lambda s: old(replace(s, unproven="")))
    tick = catching.tick
    p.attr(catching, "tick", lambda tx: _as_proven(tx, tick))


def _as_proven(tx: Any, tick: Any) -> None:
    why = tx.state.unproven
    tx.set(unproven="")
    tick(tx)
    tx.set(unproven=why)
