"""The judge: keeps what is true, and checks every invariant after every step."""

from __future__ import annotations

from typing import Any

from weightplane.controlplane.core import events, model, replica, states
from weightplane.controlplane.core.model import Held
from weightplane.controlplane.core.states import Phase

from . import invariants as inv

TYPES = {t: t.__name__ for t in (*events.Event.__args__,)}


class Judge:
    """One run's judge."""

    def __init__(self, world: Any) -> None:
        self.w = world
        self.minted: dict[int, str] = {}
        self.decided: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.held: dict[str, set[Held]] = {}
        self.seen: dict[Any, float] = {}
        self.stopped: dict[Any, float] = {}
        self.rewinding = False
        self.committed = model.NONE_HELD

    # --- coordinators ---

    def coordinator_began(self, c: Any, aborted: Any) -> None:
        inv.inv_committed_rises(self.committed, c.state.committed, self.decided)
        if self.decided and c.state.committed.version != max(self.decided.values()):
            raise inv.Violation("inv_committed_rises", f"restarted at {c.state.committed}, decided: {self.decided}")
        inv.inv_proven(c.state, c.damaged)
        self.rewinding = c.state.rewinding
        if aborted is not None:
            self.aborted.add(aborted.update_id)

    def coordinator_step(self, c: Any, before: Any, event: Any, after: Any, effects: list[Any]) -> None:
        w = self.w
        u = before.open
        w.visited["group", u.phase if u is not None else "NONE", TYPES[type(event)]] += 1
        self._seen(c, before, event)
        inv.inv_stale_changes_nothing(before, event, after)
        inv.inv_ends_in_time(after, w.now)
        if type(event) is events.Tick:
            inv.inv_silence_detected(after, self.seen, self.stopped, w.now, 0.25)
        if after is before:
            return
        a = after.open
        if after.last_generation != before.last_generation:
            t = before.trainer
            holder = (
                max(
                    (self.seen.get((before.epoch, f"rank/{r}", t.generation), -9.0) for r in range(t.world_size)),
                    default=-9.0,
                )
                if t is not None
                else -9.0
            )
            inv.inv_generation(before, event, after, holder, w.now)
            if event.resume_step is not None and event.resume_step < before.committed_step:
                self.rewinding = True
        inv.inv_one_update(before, event, after, effects)
        if a is not u:
            self._update_changed(c, before, after, u, a)
        if after.catch_ups is not before.catch_ups or a is not u:
            inv.inv_catch_up(before, after, c.receipts)
        if after.committed is not before.committed:
            inv.inv_committed_rises(before.committed, after.committed, self.decided)
            if c is w.leader:
                self.committed = after.committed
        if type(event) is events.SetSleep or type(event) is events.SetAwake:
            inv.inv_sleep_orders(before, event, after)
        if type(event) is events.SetPause or type(event) is events.ReplicaHello:
            inv.inv_pause_holders(before, event, after)
        if after.replicas is not before.replicas or after.committed is not before.committed:
            everyone = after.committed is not before.committed or after.rewinding != before.rewinding
            for rid, r in after.replicas.items():
                if everyone or before.replicas.get(rid) is not r:
                    inv.inv_held_is_true(r, self.held)
                    if c is w.leader:
                        inv.inv_routable(after, r, self, w.now)

    def _seen(self, c: Any, before: Any, e: Any) -> None:
        kind = type(e)
        key: Any = None
        if kind is events.Beat:
            key = (before.epoch, e.agent_id, e.generation if e.agent_id.startswith("rank/") else e.incarnation)
            if e.process is states.Process.STOPPED:
                self.stopped.setdefault(key, self.w.now)
            else:
                self.stopped.pop(key, None)
        elif kind is events.ReplicaHello:
            key = (before.epoch, e.replica.replica_id, e.replica.incarnation)
            self.stopped.pop(key, None)
        elif kind is events.RankHello or kind is events.RankGone:
            key = (before.epoch, f"rank/{e.rank}", e.generation)
            self.stopped.pop(key, None)
        elif kind is events.InitTransfer:
            t = before.trainer
            generation = before.last_generation if e.generation or self._mine(t, e) else before.last_generation + 1
            key = ("init", before.epoch, f"rank/{e.rank}", generation)
            self.stopped.pop(key[1:], None)
            self.seen[key] = max(self.seen.get(key, 0.0), self.w.now + before.config.ttl_s)
            return
        if key is not None:
            self.seen[key] = max(self.seen.get(key, 0.0), self.w.now)

    @staticmethod
    def _mine(t: Any, e: Any) -> bool:
        return t is not None and not t.closed and (t.trainer_id, t.incarnation) == (e.trainer_id, e.incarnation)

    def _update_changed(self, c: Any, before: Any, after: Any, u: Any, a: Any) -> None:
        w = self.w
        if a is not None:
            same = u is not None and u.update_id == a.update_id
            if not same:
                inv.inv_only_eligible_join(after, a, w.now)
                inv.inv_channels(after, a)
                inv.inv_pending_first(after, a, w.agents, self.decided)
                if self.rewinding and c is w.leader and a.options.pause is not states.PauseMode.ABORT:
                    raise inv.Violation("inv_rewind", f"{a.update_id} pauses with {a.options.pause} while rewinding")
            inv.inv_participants_frozen(u if same else None, a)
            inv.inv_excluded_never_votes(after, a)
            if same and a.phase is not u.phase:
                self._phase(c, after, u, a)
        if u is not None and (a is None or a.update_id != u.update_id):
            over = after.history.get(u.update_id)
            if over is not None:
                inv.inv_excluded_never_votes(after, over)
                if over.phase is Phase.ABORTED:
                    self.aborted.add(u.update_id)
                    inv.inv_quiesced(over, w.agents, c is w.leader)
                elif u.phase is Phase.DECIDING or over.phase is not u.phase:
                    self._phase(c, after, u, over)

    def _phase(self, c: Any, after: Any, u: Any, a: Any) -> None:
        w = self.w
        if a.phase is Phase.DECIDING:
            inv.inv_finish_complete(a, c.receipts, after.policy.min_replicas)
        elif a.phase is Phase.COMMITTED:
            w.committed += 1
            if u.phase is not Phase.DECIDING or a.update_id not in self.decided:
                raise inv.Violation("inv_commit_after_store", f"{a.update_id} is COMMITTED from {u.phase}")
        elif a.phase is Phase.ABORTING:
            if u.phase not in inv.BEFORE:
                raise inv.Violation("inv_decided_once", f"{a.update_id} aborts from {u.phase}")
            for p in a.parts.values():
                w.after(1.0, self._spread, c, p.replica_id, p.incarnation, a.update_id, w.now)

    def _spread(self, c: Any, rid: str, incarnation: str, update_id: str, since: float) -> None:
        agent = self.w.agents[rid]
        session = agent.session
        whole = agent.alive and not agent.stopped and agent.disturbed < since - 1.0 and agent.cut_off < since - 1.0
        if whole and agent.incarnation == incarnation and session is not None and session.coord is c and c.alive:
            inv.inv_abort_spreads(agent, update_id, since)

    def replied(self, c: Any, reply: Any, event: Any) -> None:
        if reply.failure is not None:
            return
        if isinstance(event, events.UpdateWeights):
            inv.inv_armed_first(c.state, event, self.w.agents)
        elif isinstance(event, events.FinishUpdate) and event.update_id not in self.decided:
            raise inv.Violation("inv_finish_complete", f"FinishUpdate of {event.update_id} succeeds, undecided")
        elif isinstance(event, events.InitTransfer):
            stored = self.w.disk.groups["g"].record.last_generation if "g" in self.w.disk.groups else 0
            if stored < c.state.last_generation:
                raise inv.Violation("inv_generation", f"generation {c.state.last_generation} answered, {stored} stored")

    def stepped_down(self, c: Any) -> None:
        inv.inv_answered(c)

    def sent(self, c: Any, want: Any) -> None:
        inv.inv_commit_after_store(want, self.decided)
        inv.inv_one_outcome(c.state, want, self.decided)
        inv.inv_excluded_never_applies(c.state, want)
        if want.update is not None:
            u = want.update
            if self.minted.get(u.version) != (u.holds or u).update_id:
                raise inv.Violation("inv_version_never_reused", f"{u.update_id} is sent as {u.version}, not stored")

    def stored(self, c: Any, write: Any, ok: bool | None) -> None:
        if not ok:
            return
        if write.kind == "freeze":
            inv.inv_version_never_reused(write.update.version, write.update.update_id, self.minted)
            self.minted[write.update.version] = write.update.update_id
        elif write.kind == "decide":
            inv.inv_decided_once(write.update.update_id, write.update.version, self.decided, self.aborted)
            self.decided[write.update.update_id] = write.update.version
            if write.update.generation == c.state.last_generation:
                self.rewinding = False

    # --- replicas ---

    def life_began(self, agent: Any) -> None:
        self.held[agent.incarnation] = agent.engine.ever

    def token(self, agent: Any) -> None:
        inv.inv_no_mix(agent)
        inv.inv_fenced(agent)

    def live_write(self, agent: Any) -> None:
        inv.inv_still_when_written(agent)

    def report_sent(self, agent: Any, report: Any) -> None:
        inv.inv_report_is_true(agent, report)

    def bytes_sent(self, u: Any, seq: int, ranges: Any) -> None:
        """Bytes follow only an answered call; ``replied`` judged it."""

    def replica_step(self, agent: Any, before: Any, event: Any, after: Any, effects: list[Any]) -> None:
        self.w.visited["replica", stage_of(before), type(event).__name__] += 1
        inv.inv_stale_desired(before, event, after, effects)
        if after is before and not effects:
            return
        inv.inv_vote_binds(before, event, after, effects)
        inv.inv_one_at_a_time(before, event, after)
        inv.inv_vote_is_true(before, after, agent)
        if effects:
            inv.inv_apply_only_when_told(before, event, effects, self.decided)
            inv.inv_own_pause(after, effects, agent.engine)
            inv.inv_sleep_alone(after, effects)
            leader = self.w.leader
            inv.inv_in_place_last(agent, effects, leader.state if leader is not None else None)
        inv.inv_fenced(agent)


def stage_of(s: replica.ReplicaState) -> str:
    """Where a replica stands, in one word."""
    t = s.taking
    if t is None:
        return "IDLE"
    if t.dropping:
        return "DROPPING"
    if t.voted and t.decision:
        return "COMMITTING"
    return t.stage.name if t.stage else "CHECKING"
