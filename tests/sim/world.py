"""Time, the network and the coordinators. One seed gives one run, whatever else happens on the machine."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from weightplane.controlplane.core import desired, events, group, group_state, kept, model, states, update_state
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.store.base import StoreError, StoreUnknown
from weightplane.controlplane.store.memory import Disk, MemoryStore

from .faults import Profile
from .invariants import is_stale
from .judge import Judge

CONFIG = model.Config(update_timeout_s=12.0)
TICK_S = 0.1
PIECES = 3  # of every worker; bucket i of a channel's plan carries piece i


class World:
    """One simulated fleet."""

    def __init__(self, seed: int, profile: Profile, trace: bool = False) -> None:
        self.seed, self.profile = seed, profile
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.count = 0
        self.log: deque[str] | None = deque(maxlen=4000) if trace else None
        self.steps = 0
        self.visited: Counter[tuple[str, str, str]] = Counter()
        self.committed = 0
        self.faulty = True  # random per-message faults; off in the finale
        self.judge = Judge(self)
        self.disk = Disk(cluster_id=f"cluster-{seed}")
        self.net = self.rng("net")
        self.past: deque[Any] = deque(maxlen=400)
        self.sessions = 0
        self.leader: Coordinator | None = None
        self.coords: list[Coordinator] = []
        self.agents: dict[str, Any] = {}
        self.trainers: list[Any] = []
        self.store_slow_until = -1.0
        self.store_faults: list[str] = []
        self.elect()

    def rng(self, name: str) -> Random:
        return Random(f"{self.seed}/{name}")

    def after(self, delay: float, fn: Callable[..., None], *args: Any) -> None:
        self.count += 1
        heapq.heappush(self.heap, (self.now + delay, self.count, fn, args))

    def run(self, until: float) -> None:
        heap = self.heap
        while heap and heap[0][0] <= until:
            self.now, _, fn, args = heapq.heappop(heap)
            fn(*args)
        self.now = until

    def say(self, who: str, text: str) -> None:
        if self.log is not None:
            self.log.append(f"{self.now:9.3f} {who:<14} {text}")

    def latency(self) -> float:
        r = self.net.random()
        return 0.001 + 0.01 * r if r < 0.97 or not self.faulty else 0.001 + 0.4 * self.net.random()

    # --- coordinators ---

    def elect(self) -> None:
        """A coordinator takes over: a new epoch, from what the store holds."""
        c = Coordinator(self, len(self.coords))
        self.coords.append(c)
        self.leader = c
        c.begin()
        for t in self.trainers:
            t.leader_changed()
        for a in self.agents.values():
            if a.session is not None and not a.session.coord.alive:
                a.session.close(lost=True)

    def crash(self, c: Coordinator, down: float) -> None:
        """SIGKILL of a coordinator; ``elect`` follows."""
        if not c.alive:
            return
        self.say("coord", f"e{c.state.epoch} killed")
        c.stop()
        if self.leader is c:
            self.leader = None
            self.after(down, self._succeed)

    def ghost(self, c: Coordinator, event: Any) -> None:
        """Something that was said once is said again much later; the judge knows when it is stale."""
        if type(event) is events.Tick or type(event) is events.CallGone or not self.faulty:
            return
        self.past.append(event)
        if self.net.random() < 0.01:
            old = self.past[int(self.net.random() * len(self.past))]
            if is_stale(c.state, old):
                c.take(replace(old, call_id="ghost") if hasattr(old, "call_id") else old)

    def _succeed(self) -> None:
        if self.leader is None:
            self.elect()

    # --- unary calls ---

    def call(self, event: Any, done: Callable[[Any], None], up: Callable[[], bool], timeout: float) -> None:
        """A unary call: ``done`` gets a Reply, or None where the outcome is unknown. ``up``: is the caller's network
        up. An event without ``call_id`` is answered as soon as it was taken."""
        Unary(self, event, done, up, timeout)


class Unary:
    """One unary call, with loss before and after delivery, and duplication."""

    def __init__(self, world: World, event: Any, done: Any, up: Any, timeout: float) -> None:
        self.world, self.done, self.up = world, done, up
        self.over = False
        self.coord: Coordinator | None = None
        world.count += 1
        self.call_id = f"call{world.count}"
        if hasattr(event, "call_id"):
            event = replace(event, call_id=self.call_id)
        self.event = event
        world.after(timeout, self.expire)
        net, p = world.net, world.profile
        self.lose_reply = world.faulty and net.random() < p.loss
        if world.faulty and net.random() < p.loss:
            world.after(0.05, self.resolve, Reply_LOST)
            return
        world.after(world.latency(), self.deliver)
        if world.faulty and net.random() < p.dup:
            world.after(2 * world.latency() + 0.3 * net.random(), self.deliver)

    def deliver(self) -> None:
        w = self.world
        c = w.leader
        if not self.up() or c is None:
            w.after(0.1, self.resolve, Reply_LOST)
            return
        if self.coord is None:
            self.coord = c
            if hasattr(self.event, "call_id"):
                c.calls[self.call_id] = self
        c.take(self.event)
        if not hasattr(self.event, "call_id"):
            self.answer(events.Reply(self.call_id))

    def answer(self, reply: events.Reply) -> None:
        if self.lose_reply or not self.up():
            return
        self.world.after(self.world.latency(), self.resolve, reply)

    def expire(self) -> None:
        if self.over:
            return
        self.resolve(None)
        c = self.coord
        if c is not None and c.alive and hasattr(self.event, "call_id"):
            c.calls.pop(self.call_id, None)
            c.take(events.CallGone(self.call_id))

    def resolve(self, reply: events.Reply | None) -> None:
        if not self.over:
            self.over = True
            self.done(reply)


#: UNAVAILABLE: the call was not taken, or nobody knows. The client may repeat what is idempotent.
Reply_LOST = events.Reply("", Failure(Reason.INTERNAL, "UNAVAILABLE"))


class Session:
    """One bidi stream of a replica: in order both ways, until it breaks."""

    def __init__(self, world: World, agent: Any, coord: Coordinator) -> None:
        world.sessions += 1
        self.sid = world.sessions
        self.world, self.agent, self.coord = world, agent, coord
        self.open = True
        self.cut = float("inf")  # what arrives later than this is lost
        self.up_at = self.down_at = world.now

    def up(self, event: Any) -> None:
        w = self.world
        if self.open:
            self.up_at = max(self.up_at, w.now + w.latency())
            w.after(self.up_at - w.now, self._arrive, event)

    def _arrive(self, event: Any) -> None:
        w = self.world
        if w.now > self.cut:
            return
        if self.agent.cut_off > w.now:  # a partition: TCP holds it back
            w.after(self.agent.cut_off - w.now + 0.001, self._arrive, event)
            return
        c = self.coord
        if isinstance(event, events.ReplicaHello) and c.alive:
            c.sessions[self.agent.rid] = self
        c.take(event)

    def down(self, event: Any) -> None:
        w = self.world
        if self.open:
            self.down_at = max(self.down_at, w.now + w.latency())
            w.after(self.down_at - w.now, self._down, event)

    def _down(self, event: Any) -> None:
        w = self.world
        if w.now > self.cut or not self.open:
            return
        if self.agent.cut_off > w.now:
            w.after(self.agent.cut_off - w.now + 0.001, self._down, event)
            return
        self.agent.from_session(self, event)

    def close(self, lost: bool = False) -> None:
        """The stream breaks. What is under way upwards may still arrive, up to a moment later."""
        if not self.open:
            return
        self.open = False
        net = self.world.net
        self.cut = self.world.now if lost or net.random() < 0.3 else self.world.now + 0.5 * net.random()
        self.world.after(0.02, self.agent.session_ended, self)


class Coordinator:
    """A process around ``group.step``: it carries out effects as the server does."""

    def __init__(self, world: World, index: int) -> None:
        self.world, self.index = world, index
        self.rng = world.rng(f"coord{index}")
        self.alive = True
        self.calls: dict[str, Unary] = {}
        self.sessions: dict[str, Session] = {}
        self.receipts: dict[tuple[str, str, str], Any] = {}
        self.store = MemoryStore(world.disk)
        self.busy_until = 0.0
        self.writes: list[tuple[events.Write, group_state.GroupState, kept.Kept | None]] = []
        loaded = self.store.open()
        stored = loaded.groups.get("g")
        state = stored.state if stored else group_state.GroupState("g", loaded.cluster_id, loaded.epoch, policy=POLICY)
        state = replace(state, config=CONFIG, epoch=loaded.epoch)
        self.known: dict[str, model.Held] = {}  # by update: what its digests are of, as the trainer gave them
        self.damaged = False
        if stored is not None:
            state = replace(state, unproven=self._recall(stored.kept, state))
        self.state, self.aborted = group.restarted(state, stored.frozen if stored else None, loaded.epoch, world.now)

    def _recall(self, found: kept.Kept | None, state: group_state.GroupState) -> str:
        """Take over what was stored to prove the committed version; now and then the disk has damaged it."""
        if found is not None and self.world.faulty and self.rng.random() < 0.1:
            self.damaged = True
            found = replace(found, digests=(("r-1", b"?"),))
        why = kept.problem(found, state.committed, state.committed_manifest)
        if not why and found is not None and state.committed.version:
            version, update_id = found.digests[0][1].decode().split()
            self.known[found.update_id] = model.Held(int(version), update_id)
        return why

    def begin(self) -> None:
        w = self.world
        w.say("coord", f"e{self.state.epoch} leads")
        w.judge.coordinator_began(self, self.aborted)
        if self.aborted is not None:
            write = events.Write(f"boot{self.state.epoch}", "close", self.state.epoch, self.aborted)
            self.write(write)
        w.after(TICK_S * self.rng.random(), self.tick)

    def stop(self) -> None:
        self.alive = False
        for agent in self.world.agents.values():
            if agent.session is not None and agent.session.coord is self:
                agent.session.close(lost=True)
        for call in list(self.calls.values()):
            self.world.after(0.03, call.resolve, None if self.rng.random() < 0.5 else Reply_LOST)
        self.calls.clear()

    def tick(self) -> None:
        if self.alive:
            self.take(TICK)
            self.world.after(TICK_S, self.tick)

    def take(self, event: Any) -> None:
        if not self.alive:
            return
        w = self.world
        before = self.state
        after, effects, reason = group.step(before, event, w.now)
        self.state = after
        if after is not before:
            w.steps += 1
            u = after.open
            entered = u is not None and (before.open is None or before.open.phase is not u.phase)
            if entered and w.faulty and self.rng.random() < 0.25:
                w.after(0.0, self.take, probe(self.rng, after))
            if w.log is not None and not isinstance(event, events.Beat):
                w.say(f"coord e{after.epoch}", f"{short(event)} -> {reason}")
        w.judge.coordinator_step(self, before, event, after, effects)
        for effect in effects:
            if self.alive:
                _EFFECTS[type(effect)](self, effect)
        self.world.ghost(self, event)

    # --- effects ---

    def reply(self, e: events.Reply) -> None:
        call = self.calls.pop(e.call_id, None)
        self.world.judge.replied(self, e, call.event if call is not None else None)
        if call is not None:
            call.answer(e)

    def push(self, e: events.Push) -> None:
        for rid in e.replica_ids:
            session = self.sessions.get(rid)
            want = desired.desired_replica(self.state, rid, self.world.now)
            if want is not None and session is not None:
                self.world.judge.sent(self, want)
                session.down(want)

    def push_trainers(self, e: events.PushTrainers) -> None:
        for t in self.world.trainers:
            t.told(self)

    def make_plan(self, e: events.MakePlan) -> None:
        if not e.update_id:
            return  # ahead of time: nobody waits for an answer
        missing = [m for m, p in (*e.senders, *e.receivers) if not p]
        failure = Failure(Reason.PLACEMENT_MISMATCH, f"no placement of {missing}") if missing else None
        if self.world.profile.plan_fails and self.world.faulty and self.rng.random() < 0.01:
            failure = Failure(Reason.PLACEMENT_MISMATCH, "the shapes do not fit")
        summary = (
            update_state.PlanSummary(f"plan-{e.update_id}-{e.channel_id}", PIECES, 3000, {}) if not failure else None
        )
        self.later(events.PlanMade(e.update_id, e.channel_id, summary, failure))

    def compare(self, e: events.Compare) -> None:
        self.world.after(0.002 + 0.02 * self.rng.random(), self._compared, e)

    def _compared(self, e: events.Compare) -> None:
        u = self.state.open if self.state.open is not None else self.state.history.get(e.update_id)
        caught = self.state.catch_ups.get(e.replica_id)
        if e.against:
            got = self.receipts.get((e.update_id, e.replica_id, e.incarnation))
            mine = caught is not None and caught.catch_up_id == e.update_id
            known = self.known.get(e.against)
            fine = not mine or (got is not None and known is not None and all_are(got, known))
            failure = None if fine else BAD_DIGEST
        elif u is None or u.update_id != e.update_id:
            failure = None
        else:
            got = self.receipts.get((e.update_id, e.replica_id, e.incarnation))
            asked = [int(m.rpartition("/")[2]) for _, members in e.plans for m in members]
            fine = got is not None and all_are([got[w] for w in asked], u.held)
            failure = None if fine else BAD_DIGEST
        evidence = states.Evidence.RECEIVED if failure is None else states.Evidence.NONE
        self.take(events.Verified(e.update_id, e.replica_id, e.incarnation, evidence, failure))

    def write(self, e: events.Write) -> None:
        u, proof = e.update, None
        if e.kind == "decide" and u is not None:
            self.known[u.update_id] = u.held
            digests = f"{u.version} {u.update_id}".encode()
            proof = kept.Kept(u.update_id, u.options.manifest_id, "FULL", (("r-1", digests),), {})
        self.writes.append((e, self.state, proof))
        if len(self.writes) == 1:
            self._next_write()

    def _next_write(self) -> None:
        w = self.world
        slow = w.now < w.store_slow_until
        fault = w.store_faults.pop(0) if w.store_faults else ""
        delay = self.rng.uniform(1.0, 2.5) if slow else self.rng.uniform(0.001, 0.006)
        w.after(delay, self._land, fault)

    def _land(self, fault: str) -> None:
        """A write reaches the store, also when we died meanwhile: its outcome is decided there."""
        write, state, proof = self.writes.pop(0)
        ok: bool | None = None
        if not self.alive and self.rng.random() < 0.5:
            return
        if fault != "lost":
            try:
                ok = self.store.write("g", write, state, proof)
            except (StoreError, StoreUnknown):
                ok = None
            self.world.judge.stored(self, write, ok)
        if fault in ("lost", "written"):
            ok = None
            self.world.after(0.3 * self.rng.random(), self.take, events.Stored(write.write_id, None))
        else:
            self.take(events.Stored(write.write_id, ok))
        if self.writes and self.alive:
            self._next_write()

    def read_back(self, e: events.ReadBack) -> None:
        w = self.world
        delay = self.rng.uniform(0.3, 2.0) if w.now < w.store_slow_until else self.rng.uniform(0.005, 0.2)
        w.after(delay, self._read, e)

    def _read(self, e: events.ReadBack) -> None:
        if any(w.write_id == e.write_id for w, _, _ in self.writes):
            self.take(events.Stored(e.write_id, None))
            return
        self.take(events.Stored(e.write_id, self.store.read_decision("g", e.update_id)))

    def step_down(self, e: events.StepDown) -> None:
        self.world.judge.stepped_down(self)
        self.world.say("coord", f"e{self.state.epoch} steps down: {e.message}")
        self.world.after(0.01, self.world.crash, self, 0.2)

    def end_session(self, e: events.EndSession) -> None:
        session = self.sessions.get(e.agent_id)
        if session is not None and session.sid == e.session:
            del self.sessions[e.agent_id]
            session.close()
            return
        agent = self.world.agents.get(e.agent_id)
        if agent is not None and agent.session is not None and agent.session.sid == e.session:
            agent.session.close()

    def note(self, e: events.Note) -> None:
        """The log."""

    def later(self, event: Any) -> None:
        slow = self.world.faulty and self.rng.random() < 0.03
        self.world.after(self.rng.uniform(0.3, 3.0) if slow else self.rng.uniform(0.001, 0.03), self.take, event)


def probe(rng: Random, s: group_state.GroupState) -> Any:
    """Something that may happen at any moment, at the moment when an update enters a phase."""
    t, u = s.trainer, s.open
    assert t is not None and u is not None
    r = s.replicas[rng.choice(sorted(u.parts))]
    call = f"probe{rng.random()}"
    soon = u.started_at + 60.0
    many = [
        events.RankHello(call, 1, t.generation, 0),
        events.RankHello(call, 1, t.generation, 0, True),
        events.RankGone(t.generation, 0),
        events.InitTransfer(
            call, soon, call, t.trainer_id, t.incarnation, 0, t.world_size, t.generation, "", b"x" * 32
        ),
        events.WorkerPlacement(r.replica_id, r.incarnation, "m-2", 0, "l-2"),
        events.RankPlacement(t.generation, 0, "m-2", "l-2"),
        events.StartUpdate(call, soon, call, t.generation, "m-1", 1, call),
        events.UpdateWeights(call, soon, t.generation, u.update_id, u.epoch, 0, 99),
        events.FinishUpdate(call, soon, t.generation, u.update_id, u.epoch, 99),
        events.DigestsIn(t.generation, u.update_id, u.epoch, 0, "plan-of-nobody"),
        events.SetPolicy(call, s.policy),
        events.SetPause(call, soon, (r.replica_id,), "operator", False),
        events.SetAdmin(call, r.replica_id, states.Admin.ACTIVE),
        events.SetSleep(call, soon, r.replica_id, rng.choice((1, 2))),
        events.SetAwake(call, soon, r.replica_id, ()),
        events.CallGone(call),
        events.RankReport(t.generation, 0, None),
        events.RankReport(t.generation, 0, None, (("k-of-nobody", BAD_DIGEST),)),
        events.ReplicaHello(r.session, r),
        events.Conditions(r.replica_id, r.incarnation, ()),
        events.PlanMade("u-old", "c-old", None),
        events.Verified("u-old", r.replica_id, r.incarnation, states.Evidence.NONE),
    ]
    rare = [
        events.AbortUpdate(call, soon, 0, u.update_id, "probe"),
        events.AbortUpdate(call, soon, 0, u.update_id, "probe"),
        events.CloseTransfer(call, t.generation, 0),
        events.Leave(r.replica_id, r.incarnation),
    ]
    return rng.choice(many if rng.random() < 0.85 else rare)


POLICY = model.Policy(update_timeout_s=12.0)
CONDITION = "Dtype"  # that replicas tell, and a policy may ask for
TICK = events.Tick()
BAD_DIGEST = Failure(Reason.DIGEST_MISMATCH, "receipts differ from the expected digests")
_EFFECTS: dict[type, Callable[[Coordinator, Any], None]] = {
    events.Reply: Coordinator.reply,
    events.Push: Coordinator.push,
    events.PushTrainers: Coordinator.push_trainers,
    events.MakePlan: Coordinator.make_plan,
    events.Compare: Coordinator.compare,
    events.Write: Coordinator.write,
    events.ReadBack: Coordinator.read_back,
    events.StepDown: Coordinator.step_down,
    events.EndSession: Coordinator.end_session,
    events.Note: Coordinator.note,
}


def all_are(content: Any, held: model.Held) -> bool:
    """Whether every piece of these workers is of one version."""
    return all(piece == held for worker in content for piece in worker)


_SHOWN: tuple[str, ...] = (
    *("replica_id", "update_id", "stage", "armed_seq", "rank", "seq", "generation", "ok", "epoch", "admin", "on"),
    *("level", "tags", "asleep"),
)


def short(event: Any) -> str:
    """An event in few words, for the trace."""
    name = type(event).__name__
    parts = [f"{k}={getattr(event, k)}" for k in _SHOWN if getattr(event, k, None) not in (None, "", ())]
    if name == "Report":
        parts.append(f"held={[h.version for h in event.held]} dirty={event.dirty} pauses={event.pause_holders}")
    if name == "ReplicaHello":
        parts = [event.replica.replica_id, event.replica.incarnation, f"session={event.session}"]
    return f"{name}({', '.join(str(p) for p in parts)})"
