"""Faults that are done from outside while a process waits at a failpoint, and how each is undone."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.case import Case
from tests.faults.fleet import FaultFleet
from tests.faults.relay import KINDS, Rule

__all__ = ["Outside", "TrainerTwo"]


class Outside:
    """Strikes once; ``heal`` puts everything back. ``said``: what another trainer was told."""

    def __init__(self, fleet: FaultFleet, case: Case) -> None:
        self.fleet, self.case = fleet, case
        self.said: dict[str, Any] | None = None
        self._heal: list[Callable[[], None]] = []

    def before(self) -> None:
        """What the publish before the fault must find already."""
        f = self.fleet
        if self.case.outside == "fill:kept":  # memory that it has already is used again: a life that has none
            f.children[self.case.member].kill()
            self._fill(f.kept)
            f.restart(self.case.member)

    def _fill(self, folder: Path) -> None:
        disks = self.fleet.disks
        assert disks is not None, "a fleet whose disks are small"
        disks.fill(folder)
        self._heal.append(lambda: disks.free(folder))

    def _fill_before_the_next_segment(self) -> None:
        """A channel that has its segment uses it again. One that fails is bound and opened anew, by the trainer itself
        as soon as it is idle: it finds no room, and what the publish opens then is the next."""
        f = self.fleet
        f.arm("r1", "replica.arm.before", 1, "raise")
        f.arm("trainer", "trainer.open.before", 1, "wait")
        answer = f.all_publish(f.next(), failure="raise")
        assert answer is not None and not answer["ok"], answer
        f.struck("trainer")
        self._fill(f.shm)
        f.go_on("trainer")

    def prepare(self) -> None:
        """What must be in place before the publish begins."""
        kind, _, method = self.case.outside.partition(":")
        if self.case.outside == "fill:shm":
            self._fill_before_the_next_segment()
        if kind in KINDS:
            relay = self.fleet.relays["trainer" if self.case.member.startswith("trainer") else self.case.member]
            rule = Rule(method, kind, self.case.nth)
            relay.rules.append(rule)
            self._heal.append(lambda: relay.rules.remove(rule))
            self.rule: Rule | None = rule
        else:
            self.rule = None

    def strike(self) -> None:
        kind, _, argument = self.case.outside.partition(":")
        link = self.fleet.links.get("trainer" if self.case.member.startswith("trainer") else self.case.member)
        process = self.fleet.children[self.case.member].process
        if kind == "stop":
            os.kill(process.pid, signal.SIGSTOP)
            self._heal.append(lambda: os.kill(process.pid, signal.SIGCONT))
        elif kind in ("partition", "blackhole", "half_close", "cut"):
            assert link is not None
            getattr(link, kind)()
            self._heal.append(link.heal)
        elif kind == "delay":
            assert link is not None
            link.delay = float(argument)
            self._heal.append(link.heal)
        elif kind == "full":
            before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (int(argument or 0), before[1]))
            self._heal.append(lambda: resource.prlimit(process.pid, resource.RLIMIT_FSIZE, before) and None)
        elif kind == "fill":
            f = self.fleet
            if argument == "disk" and f.disks is not None:
                f.disks.settle(f.store)
            if argument != "kept":
                self._fill({"disk": f.disk, "shm": f.shm}[argument])
        elif kind == "takeover":
            self.said = TrainerTwo(self.fleet, takeover=True).publish(self.fleet.next())
        elif kind == "refused":
            self.said = TrainerTwo(self.fleet, takeover=False).publish(self.fleet.next())
        elif kind not in KINDS:
            raise ValueError(f"no fault {self.case.outside!r}")

    def heal_after(self, seconds: float) -> threading.Timer:
        """Heal at a moment of its own: after the deadline, say. Whoever starts it joins it."""
        timer = threading.Timer(seconds, self.heal)
        timer.daemon = True
        timer.start()
        return timer

    def heal(self) -> None:
        while self._heal:
            self._heal.pop()()


class TrainerTwo:
    """Another trainer of the group, for one publish."""

    def __init__(self, fleet: FaultFleet, takeover: bool) -> None:
        self.child = fleet.second(takeover)

    def publish(self, step: int) -> dict[str, Any]:
        try:
            answer = self.child.publish(step)
            assert answer is not None, self.child.log()
            return answer
        finally:
            self.child.end()
