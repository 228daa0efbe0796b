"""Run seeds, and shrink what fails: ``python -m tests.sim.run --seed N --trace``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from random import Random
from typing import Any

from weightplane.controlplane.core import events, holders, model
from weightplane.controlplane.core.states import Admin, Mode, PauseMode, Weights

from .agent import Agent
from .faults import Fault, Profile, draw
from .invariants import Violation, inv_heals
from .trainer import Trainer
from .world import CONDITION, World

#: What the workers of a replica offer: mostly all the same, often each its own.
OFFERS = (("shm", "grpc"), ("shm", "grpc"), ("grpc",), ("ucx", "grpc"))
MODES = ((Mode.STAGED,), (Mode.STAGED,), (Mode.IN_PLACE,), (Mode.STAGED, Mode.IN_PLACE))


def profile_of(seed: int) -> Profile:
    """The shape of a seed's run: mostly three to five replicas, some fifty."""
    rng = Random(f"{seed}/profile")
    n = rng.choices((1, 2, 3, 4, 5, 8, 12, 50), (3, 6, 30, 25, 20, 6, 4, 4))[0]
    big = n >= 12
    return Profile(
        replicas=n,
        workers=rng.choice((1, 2, 2, 3)) if not big else rng.choice((1, 1, 2)) if n < 50 else 1,
        trainers=rng.choice((1, 1, 1, 2)),
        duration=15.0 if n == 50 else 30.0 if big else rng.choice((25.0, 45.0, 70.0)),
        loss=rng.choice((0.0, 0.01, 0.04)),
        dup=rng.choice((0.0, 0.02, 0.1)),
        faults=rng.choice((0, 15, 30, 60, 100)),
    )


def build(seed: int, profile: Profile, trace: bool = False) -> World:
    """A world with its members, without faults."""
    rng = Random(f"{seed}/build")
    w = World(seed, profile, trace)
    for i in range(profile.replicas):
        offers = (rng.choice(OFFERS),) * profile.workers
        if rng.random() < 0.5:
            offers = tuple(rng.choice(OFFERS) for _ in range(profile.workers))
        w.agents[f"r{i}"] = Agent(w, f"r{i}", rng.choice(MODES), offers)
    for i in range(profile.trainers):
        Trainer(w, f"t{i}", rng.choice((1, 1, 2, 4)), 0.2 + 6.0 * i)
    return w


class Run:
    """One seed under a schedule of faults."""

    def __init__(
        self,
        seed: int,
        profile: Profile | None = None,
        faults: list[Fault] | None = None,
        trace: bool = False,
        boost: tuple[str, ...] = (),
    ) -> None:
        self.profile = profile or profile_of(seed)
        self.w = build(seed, self.profile, trace)
        names = sorted(self.w.agents), [t.name for t in self.w.trainers]
        self.faults = draw(seed, self.profile, *names, boost) if faults is None else faults
        self.rng = Random(f"{seed}/run")
        for f in self.faults:
            self.w.after(f.at, self.inject, f)

    def go(self) -> World:
        """Everything, then the finale. Raises ``Violation``."""
        w = self.w
        w.run(self.profile.duration)
        self.finale()
        return w

    def inject(self, f: Fault) -> None:
        w = self.w
        if not w.faulty:
            return
        w.say("FAULT", str(f))
        whose, _, what = f.kind.partition(".")
        if whose == "r":
            self._replica(w.agents[f.target], what, f)
        elif whose == "t":
            self._trainer(next(t for t in w.trainers if t.name == f.target), what, f)
        elif whose == "s":
            if what == "slow":
                w.store_slow_until = w.now + f.length
            else:
                w.store_faults.extend([what] * (1 if f.length < 2 else 2))
        elif whose == "c":
            self._coordinator(what, f)
        else:
            self._operator(what, f)

    def _replica(self, a: Agent, what: str, f: Fault) -> None:
        w = self.w
        if what == "partition":
            a.cut_off = a.disturbed = w.now + f.length
            if self.rng.random() < 0.5 and a.session is not None:
                w.after(f.length, a.session.close)
        elif what == "break" and a.session is not None:
            a.session.close()
        elif what == "kill":
            a.die(True, f.length)
        elif what == "agent_kill":
            a.die(False, f.length / 4)
        elif what == "engine_restart":
            a.restart_engine(min(1.0, f.length))
        elif what in ("stop", "stop_all"):
            a.stop(what == "stop_all")
            w.after(f.length, a.cont)
        elif what == "slow":
            a.slow_until = w.now + f.length
            a.disturbed = max(a.disturbed, w.now)
        elif what == "corrupt":
            a.trouble["corrupt"] = 1
        elif what in ("hand_sleep", "hand_wake"):
            a.by_hand(self.rng.choice((1, 2)) if what == "hand_sleep" else 0)
        elif what.startswith("fail_"):
            a.trouble[what.removeprefix("fail_")] = 1
        elif what == "suddenly":
            a.lose_staging()
        elif what == "reread":
            a.feed(a.read_engine())
        elif what == "leave" and a.session is not None:
            a.session.up(events.Leave(a.rid, a.incarnation))

    def _trainer(self, t: Trainer, what: str, f: Fault) -> None:
        w = self.w
        if what == "kill":
            t.die(f.length / 2, takeover=self.rng.random() < 0.5)
        elif what == "partition":
            t.cut_off = w.now + f.length
        elif what == "stop":
            t.stop()
            w.after(f.length, t.cont)
        elif what == "takeover":
            t.begin(True, max(0, t.step - 2) if self.rng.random() < 0.5 else None)
        elif what == "abort" and w.leader is not None and t.generation:
            w.leader.take(events.AbortUpdate("", w.now + 4, t.generation, "", "fault", 0))
        elif what == "close" and w.leader is not None and t.generation:
            w.leader.take(events.CloseTransfer("", t.generation, 0))
            t.generation = 0

    def _coordinator(self, what: str, f: Fault) -> None:
        w = self.w
        c = w.leader
        if c is None:
            return
        if what == "crash":
            w.crash(c, f.length / 3)
            return
        w.say("coord", f"a rival of e{c.state.epoch} takes over")
        w.leader = None
        w.elect()
        for a in w.agents.values():
            if self.rng.random() < 0.5 and a.session is not None:
                a.session.close()
        w.after(f.length, w.crash, c, 0.1)

    def _operator(self, what: str, f: Fault) -> None:
        w = self.w
        if w.leader is None:
            return
        ids = (f.target,) if self.rng.random() < 0.8 else ()
        admin = {
            "drain": Admin.DRAINING,
            "pin": Admin.PINNED,
            "activate": Admin.ACTIVE,
            "quarantine": Admin.QUARANTINED,
        }
        if what in ("pause", "resume"):
            mode = self.rng.choice((PauseMode.KEEP, PauseMode.WAIT, PauseMode.ABORT))
            holder = self.rng.choice(("operator", "trainer"))
            event: Any = events.SetPause("", w.now + 5.0, ids, holder, what == "pause", mode)
        elif what == "abort":
            event = events.AbortUpdate("", w.now + 4.0, 0, "", "operator")
        elif what == "policy":
            timeout = self.rng.choice((8.0, 12.0))
            blocking = self.rng.choice(((), (CONDITION,)))
            event = events.SetPolicy("", model.Policy(update_timeout_s=timeout, min_replicas=1, blocking=blocking))
        elif what == "sleep":
            event = events.SetSleep("", w.now + 5.0, f.target, self.rng.choice((1, 2, 2)))
        elif what in ("wake", "wake_weights"):
            event = events.SetAwake("", w.now + 5.0, f.target, ("weights",) if what == "wake_weights" else ())
        else:
            event = events.SetAdmin("", f.target, admin[what])
        w.call(event, lambda reply: None, lambda: True, 5.0)

    # --- the end ---

    def finale(self) -> None:
        """Faults stop, everything comes back, operators let go: then one full update must reach everybody."""
        w = self.w
        w.say("FINALE", "faults are over")
        w.faulty = False
        w.store_faults.clear()
        w.store_slow_until = -1.0
        for a in w.agents.values():
            a.cut_off = min(a.cut_off, w.now)
            a.slow_until = -1.0
            a.trouble.clear()
            a.cont()
        for t in w.trainers:
            t.cut_off = min(t.cut_off, w.now)
            t.cont()
        for c in w.coords:
            if c.alive and c is not w.leader:
                w.crash(c, 0.1)
        w.run(w.now + 10.0)
        lives = {a.rid: a.incarnation for a in w.agents.values()}
        for holder in ("operator", "trainer"):
            w.call(events.SetPause("", w.now + 5.0, (), holder, False), lambda reply: None, lambda: True, 5.0)
        for rid in w.agents:
            w.call(events.SetAdmin("", rid, Admin.ACTIVE), lambda reply: None, lambda: True, 5.0)
        w.run(w.now + 1.0)
        self._wake(("weights",))
        survivor = w.trainers[0]
        for t in w.trainers[1:]:
            t.alive = False
        survivor.begin(takeover=True, final=True)
        while w.now < self.profile.duration + 120.0 and "FINAL" not in survivor.outcomes:
            w.run(w.now + 0.5)
        inv_heals("FINAL" in survivor.outcomes, "no full update worked within 100 s of the last fault")
        w.run(w.now + 2.0)
        self._wake(())
        self._caught_up()
        leader = w.leader
        assert leader is not None
        for a in w.agents.values():
            r = leader.state.replicas.get(a.rid)
            inv_heals(a.incarnation == lives[a.rid], f"{a.rid} was restarted to heal")
            fine = (
                r is not None
                and r.weights is Weights.READY
                and r.held == leader.state.committed
                and not r.pause_holders
                and not r.asleep
            )
            inv_heals(fine, f"{a.rid} did not get the full update: {r}")
            whole = a.engine.generating and not a.engine.mixed and a.engine.labels[0] == leader.state.committed
            inv_heals(whole, f"{a.rid}'s engine after the full update: {a.engine.labels} {a.engine.paused}")
        for t in w.trainers:
            t.alive = False

    def _caught_up(self) -> None:
        """Who was being caught up while the last update passed is caught up once more, if somebody retains it."""
        w = self.w
        end = w.now + 20.0
        while w.now < end and w.leader is not None:
            s = w.leader.state
            late = [r for r in s.replicas.values() if r.held != s.committed and r.weights is Weights.READY]
            if not s.catch_ups and not (late and holders.holders(s)):
                return
            w.run(w.now + 0.5)

    def _wake(self, tags: tuple[str, ...]) -> None:
        """Everybody who sleeps; repeated while an update or an older order is in the way."""
        w = self.w
        end = w.now + 20.0
        while w.now < end:
            assert w.leader is not None
            known = sorted(w.leader.state.replicas.items())
            asleep = [rid for rid, r in known if "weights" in r.asleep or not tags]
            asleep = [rid for rid in asleep if w.leader.state.replicas[rid].asleep]
            if not asleep:
                return
            for rid in asleep:
                w.call(events.SetAwake("", w.now + 2.0, rid, tags), lambda reply: None, lambda: True, 2.0)
            w.run(w.now + 0.5)


def fails(seed: int, profile: Profile, faults: list[Fault], name: str = "") -> Violation | None:
    """The violation of a run, if it is the one that is looked for."""
    try:
        Run(seed, profile, faults).go()
    except Violation as v:
        return v if not name or v.name == name else None
    return None


def shrink(seed: int, profile: Profile, faults: list[Fault], name: str, seconds: float = 30.0) -> list[Fault]:
    """Delta debugging: a schedule that still breaks the same invariant, and less of it."""
    end = time.monotonic() + seconds
    n = 2
    while len(faults) >= 1 and time.monotonic() < end:
        size = max(1, len(faults) // n)
        for i in range(0, len(faults), size):
            rest = faults[:i] + faults[i + size :]
            if time.monotonic() < end and fails(seed, profile, rest, name) is not None:
                faults, n = rest, max(2, n - 1)
                break
        else:
            if size == 1:
                break
            n = min(len(faults), 2 * n)
    return faults


def report(seed: int, v: Violation, lines: int) -> str:
    """What a person needs of a failed seed: the seed, the least schedule, the last lines of its trace."""
    profile = profile_of(seed)
    run = Run(seed, profile)
    faults = shrink(seed, profile, run.faults, v.name)
    again = Run(seed, profile, faults, trace=True)
    try:
        again.go()
        end = "(the shrunk run passes: shrinking ran out of time)"
    except Violation as shrunk:
        end = str(shrunk)
    log = list(again.w.log or ())[-lines:]
    schedule = "\n".join(f"  {f}" for f in faults) or "  none"
    return f"seed {seed}: {v}\nfaults ({len(faults)} of {len(run.faults)}):\n{schedule}\n" + "\n".join(log) + f"\n{end}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="one seed")
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="go on with seeds until this many state-changing steps")
    parser.add_argument("--seconds", type=float, default=1e9, help="or this long")
    parser.add_argument("--trace", action="store_true", help="print the trace of the seed")
    parser.add_argument("--lines", type=int, default=150, help="of the trace")
    parser.add_argument("--json", action="store_true", help="print what was visited")
    args = parser.parse_args()
    if args.seed is not None and args.trace:
        run = Run(args.seed, trace=True)
        try:
            run.go()
        except Violation as v:
            print(report(args.seed, v, args.lines))
            return 1
        print("\n".join(list(run.w.log or ())[-args.lines :]))
        return 0
    seed = args.first if args.seed is None else args.seed
    began = time.monotonic()
    steps = committed = 0
    visited: Counter[Any] = Counter()
    sizes: Counter[int] = Counter()
    while True:
        run = Run(seed)
        try:
            run.go()
        except Violation as v:
            print(report(seed, v, args.lines))
            return 1
        except Exception as e:
            print(f"seed {seed}: {type(e).__name__}: {e}")
            raise
        steps += run.w.steps
        committed += run.w.committed
        visited.update(run.w.visited)
        sizes[run.profile.replicas] += 1
        seed += args.stride
        if args.seed is not None or steps >= args.steps or time.monotonic() - began > args.seconds:
            break
    seconds = time.monotonic() - began
    if args.json:
        print(
            json.dumps(
                {
                    "steps": steps,
                    "seconds": seconds,
                    "cpu": time.process_time(),
                    "committed": committed,
                    "next": seed,
                    "sizes": dict(sizes),
                    "visited": [[*k, n] for k, n in sorted(visited.items())],
                }
            )
        )
    else:
        print(
            f"{steps} steps, {committed} commits, {sum(sizes.values())} runs, {seconds:.1f} s, {steps / seconds:.0f}/s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
