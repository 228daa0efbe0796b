"""One replica: the product's state machine in an agent, and a fake engine whose memory can be judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weightplane.controlplane.core import events, model, replica, states
from weightplane.controlplane.core.model import NONE_HELD, SLEEP_TAGS, Held
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import Mode, PauseMode

from .serving import Copies
from .world import CONDITION, PIECES, Session, World, short

__all__ = ["Agent", "Engine"]

BROKEN = Held(-1, "garbage")


class Engine:
    """The processes that hold weights. ``memory`` is what live parameters are; ``labels`` is what workers say.

    ``asleep``: what is released; ``unseen``: it fell asleep or woke up by hand, and its agent has not noticed yet.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.life = 0
        self.alive = False
        self.restart()

    def restart(self) -> None:
        self.life += 1
        self.alive = True
        self.memory = [[NONE_HELD] * PIECES for _ in range(self.workers)]
        self.labels = [NONE_HELD] * self.workers
        self.ever = {NONE_HELD}
        self.paused: set[str] = set()
        self.asleep: tuple[str, ...] = ()
        self.unseen = False

    def sleep(self, level: int) -> None:
        """Level 2 drops what is in memory, as the workers say."""
        self.asleep = SLEEP_TAGS
        self.paused.add("sleep")
        if level == 2:
            self.memory = [[BROKEN] * PIECES for _ in range(self.workers)]
            self.labels = [NONE_HELD] * self.workers

    def wake(self, left: tuple[str, ...]) -> bool:
        """``left`` sleeps on. Whether it obeyed: nothing generates from weights that are lost."""
        if not left and self.mixed:
            return False
        self.asleep = left
        if not left:
            self.paused.discard("sleep")
        return True

    @property
    def generating(self) -> bool:
        return self.alive and not self.paused

    @property
    def mixed(self) -> bool:
        """Whether what is in memory is not exactly what the workers say, or differs between them."""
        first = self.labels[0]
        return any(w != first for w in self.labels) or any(p != first for m in self.memory for p in m)


class Op:
    """One operation of the agent; cancelled, it never ends."""

    def __init__(self, name: str, update_id: str) -> None:
        self.name, self.update_id = name, update_id
        self.cancelled = False
        self.in_part = False  # an apply that reaches the first worker alone


class Agent:
    """One replica's agent. All its timers die with its life and wait while it is stopped."""

    pieces = PIECES

    def __init__(self, world: World, rid: str, modes: tuple[Mode, ...], transports: tuple[tuple[str, ...], ...]):
        """``transports``: what each worker offers."""
        self.world, self.rid = world, rid
        self.rng = world.rng(f"agent/{rid}")
        self.modes, self.transports = modes, transports
        self.engine = Engine(len(transports))
        self.life = 0
        self.alive = self.stopped = self.helper_stopped = False
        self.cut_off = -1.0  # partitioned until
        self.trouble: dict[str, int] = {}  # operation -> how many of the next fail
        self.slow_until = -1.0
        self.disturbed = 0.0  # last time that its network or process was not whole
        self.state = replica.ReplicaState(rid, "")
        self.session: Session | None = None
        self.levels = (1, 2) if world.rng(f"sleep/{rid}").random() < 0.85 else ()
        self.copies = Copies(world, rid, self.serves, self.cannot_serve)
        self.judging = world.rng(f"conditions/{rid}")
        self.boot()

    # --- life ---

    def boot(self) -> None:
        """A new life of the agent. It reads from the workers what they hold, fences a mix, lets go of old pauses
        (but of those by order)."""
        self.life += 1
        self.alive, self.stopped, self.helper_stopped = True, False, False
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.engine_life = self.engine.life
        self.incarnation = f"{self.rid}#{self.life}"
        ordered = frozenset(self.engine.paused & {"operator", "trainer"})
        self.state = replica.ReplicaState(
            self.rid,
            self.incarnation,
            workers=self.engine.workers,
            asleep=self.engine.asleep,
            paused=ordered,
            wanted=tuple((holder, PauseMode.KEEP) for holder in sorted(ordered)),
        )
        self.engine.unseen = False
        self.sleeping_until = 0.0
        self.op: Op | None = None
        self.pauses: dict[str, Op] = {}
        self.staging: dict[int, dict[int, Held]] = {}
        self.armed: tuple[str, int, tuple[frozenset[int], ...]] | None = None  # buckets of each worker
        self.armed_for: dict[tuple[str, int], tuple[frozenset[int], ...]] = {}
        self.progress = 0
        self.wrote = False  # bytes of the update that is being taken reached live memory
        self.copies.lose()
        self.engine.paused = set(ordered) | ({"dirty"} if self.engine.mixed else set())
        self.engine.paused |= {"sleep"} if self.engine.asleep else set()
        self.world.judge.life_began(self)
        self.world.say(self.rid, f"boots as {self.incarnation}, engine life {self.engine.life}")
        self.feed(self.read_engine())
        self.dial()
        self.after(0.25 * self.rng.random(), self.tick)
        self.after(self.rng.random(), self.beat)

    def die(self, engine_too: bool, down: float) -> None:
        """SIGKILL; a new life follows."""
        if not self.alive:
            return
        self.world.say(self.rid, "killed" if engine_too else "agent killed")
        self.alive = False
        self.disturbed = self.world.now
        self.cancel_op()
        if self.session is not None:
            self.session.close()
            self.session = None
        if engine_too:
            self.engine.alive = False
        self.world.after(down, self._reborn, self.life, engine_too)

    def _reborn(self, life: int, engine_too: bool) -> None:
        if life == self.life and not self.alive:
            if engine_too:
                self.engine.restart()
            self.boot()

    def restart_engine(self, noticed_in: float) -> None:
        """The engine restarts behind the agent, which notices a moment later and mints a new incarnation."""
        if not self.alive:
            return
        self.world.say(self.rid, "engine restarts behind its agent")
        self.engine.restart()
        self.cancel_op()
        self.disturbed = self.world.now + noticed_in
        self.world.after(noticed_in, self._noticed, self.life)

    def _noticed(self, life: int) -> None:
        if life == self.life and self.alive:
            if self.session is not None:
                self.session.close()
                self.session = None
            self.boot()

    def stop(self, helper_too: bool) -> None:
        if self.alive and not self.stopped:
            self.world.say(self.rid, f"stopped (helper too: {helper_too})")
            self.stopped, self.helper_stopped = True, helper_too
            self.disturbed = self.world.now

    def cont(self) -> None:
        if self.alive and self.stopped:
            self.world.say(self.rid, "continued")
            self.stopped = self.helper_stopped = False
            self.disturbed = self.world.now
            backlog, self.backlog = self.backlog, []
            for fn, args in backlog:
                self.after(0.001, fn, *args)

    def after(self, delay: float, fn: Callable[..., None], *args: Any) -> None:
        self.world.after(delay, self._run, self.life, fn, args)

    def _run(self, life: int, fn: Callable[..., None], args: tuple[Any, ...]) -> None:
        if life != self.life or not self.alive:
            return
        if self.stopped:
            self.backlog.append((fn, args))
        else:
            fn(*args)

    # --- session ---

    def up(self) -> bool:
        return self.alive and self.cut_off <= self.world.now

    def dial(self) -> None:
        w = self.world
        if self.session is not None and self.session.open:
            return
        if w.leader is None or not self.up():
            self.after(0.1 + 0.2 * self.rng.random(), self.dial)
            return
        coord = w.leader
        if w.faulty and self.rng.random() < 0.3:
            coord = next(c for c in w.coords if c.alive)  # an address of yesterday: perhaps a leader that is none
        s = self.session = Session(w, self, coord)
        s.up(events.ReplicaHello(s.sid, self.description()))
        self.feed(self.read_engine())
        self.send_report()
        self.tell_conditions()

    def tell_conditions(self) -> None:
        """How the engine's settings compare with what the group declares: as declared, mostly."""
        if self.session is not None:
            status = self.judging.choices(("True", "False", "Unknown"), (0.8, 0.1, 0.1))[0]
            told = (model.Condition(CONDITION, status, "Judged", "by the simulator"),)
            self.session.up(events.Conditions(self.rid, self.incarnation, told))

    def session_ended(self, session: Session) -> None:
        if session is self.session:
            self.session = None
            self.disturbed = self.world.now
            self.after(0.05 + 0.4 * self.rng.random(), self.dial)

    def from_session(self, session: Session, want: Any) -> None:
        if session is self.session:
            self._run(self.life, self.feed, (replica.Desired(want),))

    def serves(self) -> bool:
        return self.up() and not self.stopped

    def cannot_serve(self, catch_up_id: str) -> None:
        why = Failure(Reason.TRANSPORT, "another version is retained", self.rid)
        self.after(0.001, self.feed, replica.ServeFailed(catch_up_id, why))

    def keep(self) -> None:
        """Retain what the workers hold, or no longer anything."""
        if self.state.taking is None or self.state.taking.over:
            held, whole = self.engine.labels[0], not self.engine.mixed and not self.engine.asleep
            if self.rng.random() < 0.1 or not whole or not held.version or self.engine.life != self.engine_life:
                self.copies.forget()
            else:
                self.copies.take(held)
            self.feed(replica.Kept(self.copies.says))

    def description(self) -> model.Replica:
        workers = tuple(
            model.Worker(i, "host-0", "", tuple(model.Offer(t, b"") for t in offered))
            for i, offered in enumerate(self.transports)
        )
        return model.Replica(
            self.rid,
            self.incarnation,
            workers=workers,
            modes=self.modes,
            pause_modes=(PauseMode.KEEP, PauseMode.WAIT, PauseMode.ABORT),
            cache_policies=(states.CachePolicy.CLEAR, states.CachePolicy.KEEP),
            sleep_levels=self.levels,
        )

    def beat(self) -> None:
        """The helper's heartbeat; a stop of the agent's process does not stop it."""
        self.world.after(1.0, self._beat_again, self.life)
        if self.session is not None and not self.helper_stopped and self.alive:
            process = states.Process.STOPPED if self.stopped else states.Process.RUNNING
            self.session.up(events.Beat(self.rid, self.incarnation, 0, self.progress, process))

    def _beat_again(self, life: int) -> None:
        if life == self.life and self.alive:
            self.beat()

    def tick(self) -> None:
        self.after(0.25, self.tick)
        self.feed(replica.Tick())
        self.look()
        self.token()
        if self.judging.random() < 0.02:
            self.tell_conditions()
        if self.world.faulty and self.copies.rng.random() < 0.01:
            self.feed(replica.Kept(self.copies.says))
            self.cannot_serve("k-of-nobody")

    def token(self) -> None:
        """One forward pass, if generation runs."""
        if self.engine.generating:
            self.world.judge.token(self)

    def send_report(self) -> None:
        if self.session is not None:
            report = replica.report_of(self.state, 0, 0)
            self.world.judge.report_sent(self, report)
            self.session.up(report)

    def read_engine(self) -> replica.EngineHeld:
        return replica.EngineHeld(tuple(self.engine.labels), self.engine.mixed)

    # --- the machine ---

    def feed(self, event: Any) -> None:
        w = self.world
        before = self.state
        after, effects, reason = replica.step(before, event, w.now)
        self.state = after
        if after is not before:
            w.steps += 1
        if w.log is not None and (after is not before or effects):
            what = short(event) if not isinstance(event, replica.Desired) else wanted(event)
            w.say(self.incarnation, f"{what} -> {reason} {[type(x).__name__ for x in effects]}")
        w.judge.replica_step(self, before, event, after, effects)
        if isinstance(event, replica.Desired) and after.newest is event.desired:
            self.copies.told(event.desired.serve)
        for effect in effects:
            self.EFFECTS[type(effect)](self, effect)
        t = after.taking
        if t is not before.taking and t is not None and w.faulty:
            self._probe(t)

    def _probe(self, t: replica.Taking) -> None:
        """Something that may happen at any moment, at the moment when an update gets on."""
        r = self.rng.random()
        if r < 0.02:
            self.after(0.0, lambda: self.feed(self.read_engine()))
        elif r < 0.0225 and t.voted and not t.decision:
            self.after(0.0, self.lose_staging)
        elif r < 0.035:
            self.after(0.0, lambda: self.feed(replica.Kept(self.copies.says if r < 0.03 else None)))
        elif r < 0.045:
            self.after(0.0, self.cannot_serve, "k-of-nobody")
        elif r > 0.995:
            self.after(0.0, self.by_hand, self.rng.choice((1, 2)))
            self.after(0.0, self.look)

    def lose_staging(self) -> None:
        """The engine fails while nothing is asked of it: in doubt, say."""
        t = self.state.taking
        if t is not None and self.op is None:
            self.feed(replica.Failed(t.want.update_id, Failure(Reason.ENGINE, "staging memory was lost", self.rid)))

    def delay(self, low: float, high: float) -> float:
        if self.world.now < self.slow_until:
            return self.rng.uniform(1.0, 6.0)
        return self.rng.uniform(low, high)

    def fails(self, op: str) -> bool:
        if self.trouble.get(op, 0) > 0:
            self.trouble[op] -= 1
            return True
        return False

    def cancel_op(self) -> None:
        if self.op is not None:
            self.op.cancelled = True
            self.op = None
        self.armed = None

    def begin(self, name: str, update_id: str, low: float, high: float, then: Callable[[Op], None]) -> None:
        assert self.op is None, f"{name} while {self.op.name if self.op else ''} runs"
        op = self.op = Op(name, update_id)
        behind = max(0.0, self.sleeping_until - self.world.now)  # one thing at a time
        self.after(behind + self.delay(low, high), self._op, op, then)

    def _op(self, op: Op, then: Callable[[Op], None]) -> None:
        if op.cancelled:
            return
        if self.engine.life != self.engine_life:
            return  # the workers' connections are gone: nothing ends; the agent is about to notice
        if "weights" in self.engine.asleep:
            self.op_failed(op, Failure(Reason.ENGINE, f"{op.name}: its weights are asleep", self.rid))
        elif self.fails(op.name):
            self.op_failed(op, Failure(Reason.ENGINE, f"{op.name} failed", self.rid))
        else:
            then(op)

    def op_failed(self, op: Op, failure: Failure, dirty: bool = False) -> None:
        if op is self.op:
            self.op = None
            self.armed = None
            self.feed(replica.Failed(op.update_id, failure, dirty))

    def report_receipts(self, op: Op, send: Callable[[Any], bool], then: Callable[[Op], None]) -> None:
        """A unary call of the agent, repeated until it is taken or nobody wants it any more."""
        if op.cancelled:
            return
        leader = self.world.leader
        if self.up() and leader is not None and send(leader):
            then(op)
        else:
            self.after(0.2, self.report_receipts, op, send, then)

    # --- effects ---

    def check(self, e: replica.Check) -> None:
        def placed(leader: Any) -> bool:
            for w in range(self.engine.workers):
                leader.take(events.WorkerPlacement(self.rid, self.incarnation, e.manifest_id, w, f"l-{self.rid}-{w}"))
            return bool(leader.alive)

        def done(op: Op) -> None:
            self.op = None
            self.wrote = False
            self.staging = {}
            self.armed_for = {}
            self.feed(replica.Checked(e.update_id))

        self.begin("check", e.update_id, 0.001, 0.02, lambda op: self.report_receipts(op, placed, done))

    def arm(self, e: replica.Arm) -> None:
        t = self.state.taking
        assert t is not None
        call = next(c for c in t.want.calls if c.seq == e.seq)
        channel_of = {w: c.channel_id for c in t.want.channels for w in c.workers}
        buckets = tuple(
            frozenset(b for c, first, n in call.ranges if c == channel_of[w] for b in range(first, first + n))
            for w in range(self.engine.workers)
        )

        def done(op: Op) -> None:
            self.armed = (e.update_id, e.seq, buckets)
            self.armed_for[e.update_id, e.seq] = buckets
            self.feed(replica.Armed(e.update_id, e.seq))
            if not op.cancelled:
                self.maybe_received()

        self.begin("arm", e.update_id, 0.001, 0.02, done)

    def bytes(self, update_id: str, seq: int, bucket: int, tag: Held, worker: int) -> None:
        """A bucket lands on one worker: from the transport's thread, not the agent's."""
        if self.armed is None or self.armed[:2] != (update_id, seq) or self.engine.life != self.engine_life:
            return
        if bucket not in self.armed[2][worker]:
            return  # nobody waits for it there
        op = self.op
        t = self.state.taking
        assert op is not None and t is not None
        if self.fails("wire") or "weights" in self.engine.asleep:
            self.op_failed(op, Failure(Reason.TRANSPORT, "the peer went away", self.rid))
            return
        if self.fails("corrupt"):
            tag = BROKEN
        if t.want.mode is Mode.IN_PLACE:
            self.wrote = True
            self.live_write(worker, bucket, tag)
        self.staging.setdefault(worker, {})[bucket] = tag
        self.progress += 1
        self.maybe_received()

    def maybe_received(self) -> None:
        if self.armed is None:
            return
        update_id, seq, buckets = self.armed
        if all(of_it <= self.staging.get(w, {}).keys() for w, of_it in enumerate(buckets)):
            self.op, self.armed = None, None
            self.feed(replica.Received(update_id, seq))

    def live_write(self, worker: int, piece: int, tag: Held) -> None:
        self.engine.memory[worker][piece] = tag
        self.world.judge.live_write(self)

    def prepare(self, e: replica.Prepare) -> None:
        content = [
            [self.staging.get(w, {}).get(p, NONE_HELD) for p in range(PIECES)] for w in range(self.engine.workers)
        ]

        def deliver(leader: Any) -> bool:
            leader.receipts[(e.update_id, self.rid, self.incarnation)] = content
            return bool(leader.alive)

        def done(op: Op) -> None:
            self.op = None
            self.feed(replica.Prepared(e.update_id))

        self.begin("prepare", e.update_id, 0.001, 0.03, lambda op: self.report_receipts(op, deliver, done))

    def apply(self, e: replica.Apply) -> None:
        t = self.state.taking
        assert t is not None

        def first(op: Op) -> None:
            op.in_part = self.engine.workers > 1 and self.fails("apply-part")
            self._apply(op, 0)

        self.begin("apply", e.update_id, 0.001, 0.01, first)

    def _apply(self, op: Op, worker: int) -> None:
        if op.cancelled or self.engine.life != self.engine_life:
            return
        t = self.state.taking
        assert t is not None
        if "weights" in self.engine.asleep:  # by hand, between two workers
            self.op_failed(op, Failure(Reason.ENGINE, "its weights fell asleep", self.rid), dirty=worker > 0)
            return
        held = t.held
        if t.want.mode is not Mode.IN_PLACE and not (worker and op.in_part):
            for piece in range(PIECES):
                self.live_write(worker, piece, self.staging[worker][piece])
                if piece == 1 and self.fails("apply-half"):
                    self.op_failed(op, Failure(Reason.ENGINE, "apply failed half way", self.rid), dirty=True)
                    return
        if worker + 1 < self.engine.workers or not op.in_part:
            self.engine.labels[worker] = held
        if worker + 1 < self.engine.workers:
            self.after(self.delay(0.001, 0.01), self._apply, op, worker + 1)
            return
        self.op = None
        self.engine.ever.add(held)
        self.feed(replica.Applied(e_id(op), tuple(self.engine.labels)))
        if self.copies.keeps:
            self.after(self.delay(0.001, 0.05), self.keep)

    def drop(self, e: replica.Drop) -> None:
        op = self.op
        if op is not None and self.rng.random() < 0.3 and self.world.faulty:
            self.after(0.001, self._race, op)  # its end was already under way
        else:
            self.cancel_op()
        slow = 0.4 if self.world.faulty and self.rng.random() < 0.1 else 0.05  # so that other things come between
        self.after(self.delay(0.002, slow), self._drained, e.update_id)

    def _race(self, op: Op) -> None:
        if op is self.op and not op.cancelled:
            self.cancel_op()
            ends = {"check": replica.Checked(op.update_id), "prepare": replica.Prepared(op.update_id)}
            self.feed(ends.get(op.name) or replica.Failed(op.update_id, Failure(Reason.TRANSPORT, "aborted")))

    def _drained(self, update_id: str) -> None:
        self.cancel_op()
        if self.engine.life != self.engine_life:
            return
        wrote, self.wrote = self.wrote or any(p == BROKEN for m in self.engine.memory for p in m), False
        self.staging = {}
        self.feed(replica.Drained(update_id, wrote))

    def pause(self, e: replica.Pause) -> None:
        op = self.pauses[e.holder] = Op("pause", "")
        slow = 1.0 if e.mode is PauseMode.WAIT else 0.03
        self.after(self.delay(0.001, slow), self._paused, op, e.holder)

    def _paused(self, op: Op, holder: str) -> None:
        if not op.cancelled and self.engine.life == self.engine_life:
            self.engine.paused.add(holder)
            self.feed(replica.Paused(holder))

    def resume(self, e: replica.Resume) -> None:
        before = self.pauses.pop(e.holder, None)
        if before is not None:
            before.cancelled = True  # after a resume no earlier pause of that holder ends
        self.after(self.delay(0.001, 0.03), self._resumed, e.holder)

    def _resumed(self, holder: str) -> None:
        if self.engine.life == self.engine_life:
            self.engine.paused.discard(holder)
            self.feed(replica.Resumed(holder))
            self.token()

    # --- sleep ---

    def sleep(self, e: replica.Sleep) -> None:
        self.sleeping_until = self.world.now + self.delay(0.001, 0.2)
        self.after(self.sleeping_until - self.world.now, self._slept, e.order)

    def _slept(self, order: model.SleepOrder) -> None:
        """An order to sleep or to wake, whichever brings the engine to what it asks for."""
        engine = self.engine
        if engine.life != self.engine_life:
            return
        now, failure = engine.asleep, None
        if self.fails("sleep"):
            failure = Failure(Reason.ENGINE, "the engine does not obey", self.rid)
        elif set(order.asleep) - set(now):
            if now:
                failure = Failure(Reason.ENGINE, "a part of it sleeps", self.rid)
            else:
                engine.sleep(order.level)
        elif set(now) - set(order.asleep) and not engine.wake(order.asleep):
            failure = Failure(Reason.ENGINE, "its weights are lost", self.rid)
        engine.unseen = False
        self.feed(replica.SleepDone(order.order, engine.asleep, tuple(engine.labels), failure, self.lost()))
        self.token()

    def lost(self) -> Failure | None:
        return Failure(Reason.ENGINE, "its weights were dropped", self.rid) if self.engine.mixed else None

    def by_hand(self, level: int) -> None:
        """Somebody else puts the engine to sleep, or (level 0) wakes it up."""
        engine = self.engine
        before = engine.asleep
        if level and not before:
            engine.sleep(level)
        elif not level and before:
            engine.wake(())
        if engine.asleep != before:
            engine.unseen = True
            self.world.say(self.rid, f"by hand: {engine.asleep} is asleep")

    def look(self) -> None:
        """Sees what was done by hand, unless an order is under way."""
        s, t, engine = self.state, self.state.taking, self.engine
        if s.sleep_begun > s.sleep_done or engine.life != self.engine_life:
            return
        lost = self.lost() if engine.asleep and (t is None or t.over) else None
        if engine.asleep != s.asleep or (lost is not None and not s.dirty):
            engine.unseen = t is not None and not t.over  # what is lost is told once the update is over
            self.feed(replica.SleepDone(0, engine.asleep, tuple(engine.labels), None, lost))

    EFFECTS: dict[type, Callable[[Any, Any], None]] = {
        replica.Check: check,
        replica.Arm: arm,
        replica.Prepare: prepare,
        replica.Apply: apply,
        replica.Drop: drop,
        replica.Pause: pause,
        replica.Resume: resume,
        replica.Sleep: sleep,
        replica.SendReport: lambda self, e: self.send_report(),
    }


def e_id(op: Op) -> str:
    return op.update_id


def wanted(event: replica.Desired) -> str:
    d = event.desired
    u = d.update
    what = (
        f"{u.update_id} calls={len(u.calls)} all={u.all_called} {u.decision or '-'}" if u is not None else "no update"
    )
    order = f" sleep={d.sleep.order}:{d.sleep.level}{list(d.sleep.asleep)}" if d.sleep is not None else ""
    return f"Desired(e{d.epoch} {what} pauses={[h for h, _ in d.pauses]} res={list(d.resolutions)}{order})"
