"""One message stands for all replicas that are alike: it is always the one that each would have got by itself."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.sim import world
from tests.sim.faults import Profile
from tests.sim.run import Run
from weightplane.controlplane.core import desired, events
from weightplane.controlplane.server.bindings import Desired
from weightplane.v1 import agent_pb2


class Differs(AssertionError):
    pass


def watch(monkeypatch: pytest.MonkeyPatch, counts: Counter[str]) -> None:
    """Compare, whenever the simulator's coordinator tells replicas what to do, the two ways to say it."""
    kept: dict[Any, Desired] = {}
    pushed, fresh = world.Coordinator.push, Desired._fresh

    def counted(self: Desired, *args: Any) -> agent_pb2.DesiredReplica | None:
        counts["made"] += 1
        return fresh(self, *args)

    def push(self: Any, e: events.Push) -> None:
        mine = kept.setdefault(self, Desired())
        mine._bindings.clear()  # known by ids, which the simulator gives twice
        for rid in self.state.replicas:
            counts["told"] += 1
            said = mine.message(self.state, rid, 7, self.world.now)
            expected = fresh(Desired(), self.state, rid, 7, self.world.now)
            counts["decided"] += expected is not None and bool(expected.update.decision)
            if said != expected:
                raise Differs(f"{rid}: expected {expected}, found {said}")
        pushed(self, e)

    monkeypatch.setitem(world._EFFECTS, events.Push, push)
    monkeypatch.setattr(Desired, "_fresh", counted)


def go(seeds: range) -> None:
    for seed in seeds:
        Run(seed, Profile(replicas=5, duration=60.0, faults=40)).go()


def test_a_template_says_what_each_replica_would_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    watch(monkeypatch, counts)
    go(range(6))
    assert counts["decided"] > 200 and counts["told"] - counts["made"] > 1000, counts


@pytest.mark.parametrize("lost", ["plans", "pauses_wanted", "committed", "channels"])
def test_a_likeness_that_forgot_something_is_noticed(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    likeness = desired.likeness

    def forgetful(state: Any, rid: str) -> tuple[object, ...] | None:
        found = likeness(state, rid)
        r, u = state.replicas.get(rid), state.open
        part = u.parts.get(rid) if u is not None else None
        of = {
            "plans": u.plans if u is not None else None,
            "pauses_wanted": tuple(sorted(r.pauses_wanted.items())) if r is not None else None,
            "committed": state.committed,
            "channels": part.channels if part is not None else None,
        }
        hidden = of[lost]
        return tuple(None if x is hidden or x == hidden else x for x in found) if found is not None else None

    watch(monkeypatch, Counter())
    monkeypatch.setattr(desired, "likeness", forgetful)
    with pytest.raises(Differs):
        go(range(6))
