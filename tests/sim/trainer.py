"""The training job: ranks in lock step, written as a script that waits for batches of calls."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

from weightplane.controlplane.core import desired, events, group_state, holders, model, states, update_state
from weightplane.controlplane.core.model import Held
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import Mode, PauseMode

from .serving import Copies
from .world import PIECES, Reply_LOST, World

__all__ = ["Trainer"]

Script = Generator[Any, Any, Any]


@dataclass
class Publish:
    """What one publish asks for."""

    mode: Mode = Mode.ANY
    pause: PauseMode = PauseMode.DEFAULT
    at_least: int | None = None
    on_busy: str = "REFUSE"
    calls: int = 1
    verify: states.Verify = states.Verify.DEFAULT
    timeout: float = 0.0
    abort_midway: bool = False
    selector: tuple[tuple[str, str], ...] = ()
    exclude: tuple[str, ...] = ()
    digests_late: bool = False
    apart: bool = False  # a call for each channel


class Trainer:
    """One training job. ``life`` rises with every restart; the calls of a former life are forgotten."""

    def __init__(self, world: World, name: str, world_size: int, begin_at: float, takeover: bool = False) -> None:
        self.world, self.name, self.world_size = world, name, world_size
        self.rng = world.rng(f"trainer/{name}")
        self.life = 0
        self.alive = self.stopped = False
        self.cut_off = -1.0
        self.generation = 0
        self.step = 0
        self.uid = 0
        self.outcomes: list[str] = []
        self.fenced = False
        self.final = False
        self.watch = False
        self.last = Held()
        self.backlog: list[tuple[Any, tuple[Any, ...]]] = []
        self.watched: Any = None
        self.copies = Copies(world, name, lambda: self.up() and not self.stopped, self.cannot_serve)
        world.trainers.append(self)
        world.after(begin_at, self.begin, takeover)

    # --- life ---

    def begin(self, takeover: bool, resume: int | None = None, final: bool = False) -> None:
        self.life += 1
        self.alive, self.stopped, self.fenced = True, False, False
        self.generation = 0
        self.final = final
        self.watched = None
        self.watch = self.rng.random() < 0.3
        self.backlog = []
        self.copies.lose()
        self.world.say(self.name, f"life {self.life} begins")
        self.script = self.finale(takeover) if final else self.main(takeover, resume)
        self._advance(self.life, None)
        self.world.after(self.rng.random(), self.beat, self.life)

    def die(self, down: float, takeover: bool) -> None:
        if not self.alive:
            return
        self.world.say(self.name, "killed")
        self.alive = False
        self._watch_ends()
        resume = max(0, self.step - 3) if self.rng.random() < 0.4 else None
        self.world.after(down, self._reborn, self.life, takeover, resume)

    def _reborn(self, life: int, takeover: bool, resume: int | None) -> None:
        if life == self.life and not self.alive:
            if resume is not None:
                self.step = resume
            self.begin(takeover, resume)

    def stop(self) -> None:
        self.stopped = True

    def cont(self) -> None:
        self.stopped = False
        backlog, self.backlog = self.backlog, []
        for fn, args in backlog:
            self.world.after(0.001, fn, *args)

    def up(self) -> bool:
        return self.alive and self.cut_off <= self.world.now

    def beat(self, life: int) -> None:
        if life != self.life or not self.alive:
            return
        self.world.after(1.0, self.beat, life)
        c = self.world.leader
        if self.generation and not self.watch and self.up() and c is not None:
            process = states.Process.STOPPED if self.stopped else states.Process.RUNNING
            for r in range(self.world_size):
                e = events.Beat(f"rank/{r}", self.incarnation, self.generation, 0, process)
                self.world.after(self.world.latency(), self._beat_arrives, c, e)
        elif self.watch and self.cut_off > self.world.now + 1.0:
            self._watch_ends()  # the server's keepalive notices

    def _beat_arrives(self, c: Any, e: events.Beat) -> None:
        c.take(e)

    def _watch_ends(self) -> None:
        if self.watched is not None:
            c, generation = self.watched
            self.watched = None
            for r in range(self.world_size):
                self.world.after(0.02, c.take, events.RankGone(generation, r))
            if self.alive:
                self.world.after(1.0, self._hello_again, self.life)

    @property
    def incarnation(self) -> str:
        return f"{self.name}/{self.life}"

    def retain(self) -> None:
        """Every rank tells of the snapshot it took."""
        for r in range(self.world_size):
            event = events.RankReport(self.generation, r, self.copies.says)
            self.world.call(event, lambda reply: None, self.up, 2.0)

    def cannot_serve(self, catch_up_id: str) -> None:
        failures = ((catch_up_id, Failure(Reason.TRANSPORT, "another version is retained", "rank/0")),)
        event = events.RankReport(self.generation, 0, self.copies.says, failures)
        self.world.call(event, lambda reply: None, self.up, 2.0)

    def told(self, c: Any) -> None:
        state = c.state
        t = state.trainer
        if t is not None and t.generation == self.generation and c is self.world.leader and not self.watch:
            orders = desired.serve_orders(state, "")
            self.world.after(self.world.latency(), self.copies.told, orders)
        if self.generation and c is self.world.leader and t is not None and t.generation > self.generation:
            self.fenced = True

    def leader_changed(self) -> None:
        self.watched = None
        self.world.after(0.1 + 0.3 * self.rng.random(), self._hello_again, self.life)

    def _hello_again(self, life: int) -> None:
        if life == self.life and self.alive and self.generation and not self.fenced:
            self.hello()

    def hello(self) -> None:
        """Sessions of every rank (or its watch streams): outside the script, as they are streams."""
        for r in range(self.world_size):
            event = events.RankHello("", 1000 + r, self.generation, r, self.watch)
            self.world.call(event, lambda reply: None, self.up, 2.0)
        if self.watch and self.world.leader is not None:
            self.watched = (self.world.leader, self.generation)

    # --- the script ---

    def _advance(self, life: int, value: Any) -> None:
        if life != self.life or not self.alive:
            return
        if self.stopped:
            self.backlog.append((self._advance, (life, value)))
            return
        try:
            asked = self.script.send(value)
        except StopIteration:
            return
        if isinstance(asked, float | int):
            self.world.after(asked, self._advance, life, None)
            return
        batch, timeout = asked
        replies: list[Any] = [None] * len(batch)
        left = len(batch)

        def done(i: int, reply: Any) -> None:
            nonlocal left
            replies[i] = reply
            left -= 1
            if left == 0:
                self.world.after(0.001, self._advance, life, replies)

        for i, event in enumerate(batch):
            self.world.call(event, partial(done, i), self.up, timeout)

    def calls(self, make: Any, timeout: float = 4.0, ranks: Any = None) -> Script:
        """One call per rank, repeated while UNAVAILABLE; returns the first failure (or None) of the ranks."""
        todo = list(range(self.world_size) if ranks is None else ranks)
        worst: Any = None
        for _ in range(6):
            replies = yield [make(r) for r in todo], timeout
            again = []
            for r, reply in zip(todo, replies, strict=True):
                if reply is Reply_LOST:
                    again.append(r)
                elif reply is None:
                    worst = worst or "UNKNOWN"
                elif reply.failure is not None:
                    worst = reply.failure if worst is None or worst == "UNKNOWN" else worst
            if not again:
                return worst
            todo = again
            yield 0.1
        return worst or "UNKNOWN"

    def init(self, takeover: bool, resume: int | None, generation: int = 0) -> Script:
        """InitTransfer by every rank, then sessions and placements."""
        w = self.world
        offers = tuple(model.Offer(t) for t in ("shm", "grpc", "ucx"))
        self.uid += 1
        seed = f"{self.name}{self.life}.{self.uid}".encode().ljust(32)[:32]
        failure = yield from self.calls(
            lambda r: events.InitTransfer(
                "",
                w.now + 4.0,
                f"init-{self.uid}-{r}",
                self.name,
                self.incarnation,
                r,
                self.world_size,
                generation,
                f"lineage-{self.incarnation}",
                seed,
                takeover and not generation,
                resume,
                "host-0",
                offers=offers,
            ),
        )
        if failure is not None:
            return failure
        leader = w.leader
        t = leader.state.trainer if leader is not None else None
        if t is None or t.incarnation != self.incarnation:
            return "UNKNOWN"
        fresh = self.generation != t.generation
        self.generation = t.generation
        if fresh:
            self.hello()
        return (yield from self.calls(lambda r: events.RankPlacement(self.generation, r, "m-1", f"l-{self.name}-{r}")))

    def main(self, takeover: bool, resume: int | None) -> Script:
        yield 0.05 + 0.3 * self.rng.random()
        for _ in range(400):
            if not self.generation:
                failure = yield from self.init(takeover, resume)
                if failure is not None:
                    yield 0.3 + self.rng.random()
                    continue
            if self.fenced:
                self.generation = 0
                return  # fenced: stop, and do not re-init by yourself
            self.step += 1
            outcome = yield from self.publish(self.choose())
            self.outcomes.append(outcome)
            self.world.say(self.name, f"publish of step {self.step}: {outcome}")
            if outcome == "COMMITTED":
                takeover, resume = False, None
                if self.copies.keeps and not self.watch and self.last.version:
                    self.copies.take(self.last)
                    self.retain()
            reason = outcome.split(":")[0]
            if reason in ("TRAINER_FENCED",):
                self.fenced = True
            elif reason == "INVALID_ARGUMENT":
                self.generation = 0
            elif reason in ("REBIND_REQUIRED", "NOT_ENOUGH_REPLICAS", "PLACEMENT_MISMATCH", "UNKNOWN"):
                yield 0.2 + 0.5 * self.rng.random()
                yield from self.init(False, None, self.generation)
            elif outcome != "COMMITTED":
                yield 0.2 * self.rng.random()
            yield self.rng.choice((0.0, 0.0, 0.02, 0.1, 0.6))
            if self.rng.random() < 0.01:
                yield from self.calls(lambda r: events.CloseTransfer("", self.generation, r), ranks=[0])
                self.generation = 0

    def choose(self) -> Publish:
        r = self.rng
        small = max(1, len(self.world.agents) - 1)
        return Publish(
            mode=r.choice((Mode.ANY, Mode.STAGED, Mode.IN_PLACE)),
            pause=r.choice((PauseMode.DEFAULT, PauseMode.KEEP, PauseMode.WAIT, PauseMode.ABORT)),
            at_least=r.choice((None, None, 0, 1, small)),
            on_busy=r.choice(("REFUSE", "WAIT", "SUPERSEDE")),
            calls=r.choice((1, 1, 2, 3)),
            verify=r.choice((states.Verify.DEFAULT, states.Verify.DEFAULT, states.Verify.SAMPLED, states.Verify.OFF)),
            timeout=r.choice((0.0, 0.0, 5.0, 2.0)),
            abort_midway=r.random() < 0.04,
            selector=(("zone", "a"),) if r.random() < 0.03 else (),
            exclude=(r.choice(sorted(self.world.agents)),) if r.random() < 0.05 else (),
            digests_late=r.random() < 0.3,
            apart=r.random() < 0.25,
        )

    def publish(self, p: Publish) -> Script:
        """One update, start to finish; "COMMITTED" or what failed."""
        w = self.world
        self.uid += 1
        update_id = f"u-{self.name}-{self.life}-{self.uid}"
        start = events.StartUpdate(
            "",
            w.now + 6.0,
            f"req-{update_id}",
            self.generation,
            "m-1",
            self.step,
            update_id,
            "fp",
            dict(p.selector),
            p.exclude,
            p.at_least,
            p.on_busy,
            p.mode,
            p.pause,
            verify=p.verify,
            update_timeout_s=p.timeout,
        )
        failure = yield from self.calls(lambda r: start, 6.0, [0])
        if failure is not None:
            if failure == "UNKNOWN":
                yield from self.calls(
                    lambda r: events.AbortUpdate("", w.now + 4.0, self.generation, update_id, "unknown start", r),
                    ranks=[0],
                )
            return str(failure)
        leader = w.leader
        u = leader.state.open if leader is not None else None
        if u is None or u.update_id != update_id or not u.plans:
            return "UNKNOWN"
        epoch = u.epoch
        plans = [(c, u.plans[c].plan_id) for c in u.channels]
        failure = yield from self.send(p, u, epoch, plans)
        if failure is None and self.rng.random() < 0.006:
            return "WALKED AWAY"  # the prepare deadline ends it
        if failure is None:
            failure = yield from self.calls(
                lambda r: events.FinishUpdate("", w.now + 14.0, self.generation, update_id, epoch, r), 14.0
            )
            if failure is None:
                self.last = Held(u.version, u.update_id)
                return "COMMITTED"
        if failure == "UNKNOWN" or self.rng.random() < 0.5:
            yield from self.calls(
                lambda r: events.AbortUpdate("", w.now + 4.0, self.generation, update_id, "gave up", r), ranks=[0]
            )
        return str(failure)

    def send(self, p: Publish, u: update_state.Update, epoch: int, plans: list[tuple[str, str]]) -> Script:
        """The calls, the bytes, the digests."""
        w = self.world
        # staged channels first, in calls of their own, where the modes are mixed
        modes = {c: part.mode for part in u.parts.values() for c in part.channels}
        staged = [c for c in u.channels if modes[c] is Mode.STAGED]
        placed = [c for c in u.channels if modes[c] is not Mode.STAGED]
        rounds: list[tuple[tuple[str, int, int], ...]] = []
        for group in (staged, placed) if staged and placed else (list(u.channels),):
            cuts = {1: ((0, PIECES),), 2: ((0, 1), (1, PIECES - 1)), 3: ((0, 1), (1, 1), (2, 1))}[p.calls]
            for together in [[c] for c in group] if p.apart else [group]:
                rounds.extend(tuple((c, first, n) for c in together) for first, n in cuts)
        digests_at = len(rounds) - 1 if p.digests_late and not (staged and placed) else 0
        for seq, ranges in enumerate(rounds, 1):
            if seq - 1 == digests_at and p.verify is not states.Verify.OFF:
                failure = yield from self.digests(u.update_id, epoch, plans)
                if failure is not None:
                    return failure
            if p.abort_midway and seq == len(rounds):
                yield from self.calls(
                    lambda r: events.AbortUpdate("", w.now + 4.0, self.generation, u.update_id, "changed my mind", r),
                    ranks=[0],
                )
                return "ABORTED BY ITSELF"
            declared = () if len(rounds) == 1 and self.rng.random() < 0.5 else ranges
            failure = yield from self.calls(
                lambda r, seq=seq, declared=declared: events.UpdateWeights(
                    "", w.now + 8.0, self.generation, u.update_id, epoch, r, seq, declared
                ),
                8.0,
            )
            if failure is not None:
                return failure
            self.wire(u, seq, ranges)
            yield 0.001
        return None

    def digests(self, update_id: str, epoch: int, plans: list[tuple[str, str]]) -> Script:
        for _, plan in plans:
            failure = yield from self.calls(
                lambda r, plan=plan: events.DigestsIn(self.generation, update_id, epoch, r, plan)
            )
            if failure is not None:
                return failure
        return None

    def wire(self, u: update_state.Update, seq: int, ranges: tuple[tuple[str, int, int], ...]) -> None:
        """The bytes of one call, to every receiver of its channels."""
        w = self.world
        w.judge.bytes_sent(u, seq, ranges)
        for part in u.parts.values():
            agent = w.agents[part.replica_id]
            if not (agent.up() and self.up()):
                continue
            for channel, first, n in ranges:
                for worker in [i for i, c in enumerate(part.channels) if c == channel]:
                    for b in range(first, first + n):
                        tag = Held(u.version, u.update_id)
                        delay = self.rng.uniform(0.001, 0.03)
                        w.after(delay, agent.bytes, u.update_id, seq, b, tag, worker)

    def finale(self, takeover: bool) -> Script:
        """Faults are over: one full update of everything must work."""
        for _ in range(30):
            if not self.generation:
                failure = yield from self.init(takeover, None)
            else:
                failure = yield from self.init(False, None, self.generation)
            if failure is not None:
                if getattr(failure, "reason", None) is Reason.TRAINER_FENCED:
                    self.generation = 0
                self.world.say(self.name, f"final init: {failure}")
                yield 0.5
                continue
            for _ in range(100):
                leader = self.world.leader
                if leader is not None and not left_out(leader.state, self.world.now):
                    break
                yield 0.1
            self.step += 1
            outcome = yield from self.publish(Publish(at_least=0, on_busy="WAIT"))
            self.world.say(self.name, f"final publish: {outcome}")
            if outcome == "COMMITTED":
                self.outcomes.append("FINAL")
                return
            yield 0.5


def left_out(s: group_state.GroupState, now: float) -> bool:
    """Whether an update would go without somebody who is caught up, or will be."""
    could = holders.holders(s)
    return bool(s.catch_ups) or any(holders.waits(s, r, now, could) for r in s.replicas.values())


def reason_of(failure: Any) -> str:
    return failure.reason.value if hasattr(failure, "reason") else str(failure)
