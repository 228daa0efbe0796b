"""One case from the last good publish before the fault to the first after it, and everything that is looked at."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from http.client import HTTPException
from signal import SIGCONT
from typing import Any

from tests.faults import judge
from tests.faults.case import Case, Row
from tests.faults.fleet import NAMES, ON_A_CARD, FaultFleet
from tests.faults.judge import Histories
from tests.faults.outside import Outside
from tests.faults.resources import Held, held
from tests.process.harness import eventually
from weightplane.v1 import update_pb2

__all__ = ["OVER", "Runner", "told"]

OVER = {update_pb2.UPDATE_PHASE_ABORTED: "ABORTED", update_pb2.UPDATE_PHASE_COMMITTED: "COMMITTED"}


class Runner:
    """Runs cases on one fleet, one after the other. ``histories`` covers all of them."""

    def __init__(self, fleet: FaultFleet) -> None:
        self.fleet = fleet
        self.histories = Histories(fleet.folder)

    def run(self, case: Case) -> Row:
        """Raises only if the fleet is beyond use; what is wrong otherwise is in the row."""
        f = self.fleet
        row = Row(case.id, case.fault, case.member, case.phase, case.mode, f.transport, f.ranks)
        began = time.monotonic()
        outside = Outside(f, case)
        try:
            outside.before()
            base = f.together()
            wrong = self.updates()
            before, held_before, left_before = f.lives(), self._held(), f.segments()
            self._strike(case, row, outside, wrong)
            victims = {case.member} if case.dies else set()
            if case.member.startswith("trainer") and (case.dies or case.outside == "takeover"):
                f.restart("trainer")  # nobody else can publish; its start is not counted
                victims |= {n for n in f.children if n.startswith("trainer")}
            self._next(case, row, base["version"], wrong)
            if case.dies and case.member in NAMES:
                f.restart(case.member)
            again = f.together()
            wrong += self.updates() + self._members(again) + self._retained(case, again["version"])
            wrong += judge.lives(before, f.lives(), victims)
            kept = {n: h for n, h in held_before.items() if n not in victims}
            wrong += self._resources(kept, left_before)
        finally:
            outside.heal()
            f.disarm()
        row.violations = wrong
        row.wall_s = time.monotonic() - began
        return row

    # --- the fault

    def _strike(self, case: Case, row: Row, outside: Outside, wrong: list[str]) -> None:
        f = self.fleet
        outside.prepare()
        waits = bool(case.outside) and outside.rule is None
        step = f.next()
        idle = case.phase == "idle"
        shared = case.phase == "update" and case.member.startswith("trainer")
        nth = -(-case.nth // f.ranks) if shared else case.nth  # each rank sends its share of the buckets
        if case.phase == "applying" and f.transport in ON_A_CARD:
            nth = 1  # a card copies all tensors of a dtype at once
        if outside.rule is None:
            f.arm(case.member, case.point, nth, "wait" if waits else case.action)
        if idle:
            f.struck(case.member)
            if waits:
                outside.strike()
                f.go_on(case.member)
        began = time.monotonic()
        f.begin_publish(step, mode=case.mode, update_timeout=case.timeout, failure="raise", **case.options)
        if waits and not idle:
            f.struck(case.member)
            outside.strike()
            f.go_on(case.member)
        if case.dies:
            f.children[case.member].died()
            if case.member == "plane":
                f.start_plane()
        goes_on = None
        if case.action == "stop":
            process = f.children[case.member].process
            goes_on = threading.Timer(began + case.timeout + 0.5 - time.monotonic(), process.send_signal, (SIGCONT,))
            goes_on.start()
        answers = f.answers()
        took = time.monotonic() - began
        answer = next((a for a in answers if a is not None), None) if case.dies else answers[0]
        if outside.rule is None and not f.fired(case.member) and not waits:
            wrong.append("the fault never struck")
        if outside.rule is not None and not outside.rule.struck:
            wrong.append("the fault never struck")
        healed = case.outside and outside.rule is None
        if goes_on is not None:
            goes_on.join()
        elif healed:
            outside.heal()
        f.disarm()
        row.outcome = self._outcome(step)
        row.end_s = took
        if (case.member == "plane" and case.dies) or (case.member == "trainer" and case.action == "stop"):
            wrong += judge.ended(case, took, limit=case.timeout + 1.0)  # its own start, or stop, comes on top
        else:
            wrong += judge.ended(case, took)
        wrong += judge.cause(case, row.outcome, answer)
        if answer is not None and answer["ok"]:
            wrong += self._retained(case, 0)
        row.trainer = told(answer)
        if outside.said is not None:
            row.trainer += f"; the other: {told(outside.said)}"
            wrong += self._other(case, outside.said)
        row.router = self._router(wrong)

    def _retained(self, case: Case, version: int) -> list[str]:
        """Who found no room for a copy retains none, and the newest as soon as there is room."""
        if case.outside != "fill:kept":
            return []
        try:
            eventually(lambda: self.fleet.replicas()[case.member].retains == version, "it retains", 5)
        except AssertionError:
            found = self.fleet.replicas()[case.member].retains
            return [f"{case.member} retains version {found}, expected {version}"]
        return []

    def _other(self, case: Case, said: Mapping[str, Any]) -> list[str]:
        if case.outside == "takeover":
            return [] if said["ok"] else [f"who took over could not publish: {said}"]
        if said["ok"] or "trainer-" not in said["text"]:
            return [f"a second trainer is refused by the name of the first; it was told {said}"]
        return []

    def _outcome(self, step: int) -> str:
        """How the coordinator's record says that the update of ``step`` ended; NONE: there was no such update."""

        def look() -> str:
            found = self.fleet.updates()
            if not found:
                return ""
            mine = [u for u in found if u.trainer_step == step]
            if not mine:
                return "NONE"
            return OVER.get(mine[0].phase, "")

        try:
            return eventually(look, "the update is over", 20)
        except AssertionError:
            return "OPEN"

    def _router(self, wrong: list[str]) -> str:
        """What a router is told of each replica now, and what the replica then says itself."""
        seen = []
        wrong += self.updates()
        for name in NAMES:
            said = self.fleet.check(name)
            if said is None:
                seen.append(f"{name}: nobody answers")
                continue
            if not said.routable:
                seen.append(f"{name}: no ({said.reason})")
                continue
            seen.append(f"{name}: yes, version {said.replica.held.version}")
            try:
                status, answer = self.fleet.generate(name)
            except (OSError, HTTPException) as e:
                if self.fleet.children[name].process.poll() is None:
                    wrong.append(f"{name} is routable and does not answer: {type(e).__name__}: {e}")
                continue
            if status != 200:
                wrong.append(f"{name} is routable and answers {status}: {answer}")
                continue
            for completion in answer["completions"]:
                wrong += judge.tokens(name, completion, self.histories.steps)
        return "; ".join(seen)

    # --- afterwards

    def _next(self, case: Case, row: Row, above: int, wrong: list[str]) -> None:
        """Publish at once with whoever is left, as often as it takes within a few seconds; count from now."""
        f = self.fleet
        began = time.monotonic()
        gone = {case.member} if case.dies else set()
        tries: list[Any] = []

        def good() -> bool:
            receipt = f.all_publish(f.next(), update_timeout=8.0)
            tries.append(receipt)
            return receipt is not None and bool(receipt["ok"])

        try:
            eventually(good, "a good publish", 20)
        except AssertionError:
            pass
        left = [n for n in NAMES if n not in gone and (n not in case.left or case.dies)]
        lacks_only = [n for n in left if n != case.member]  # the member itself may need a moment to report
        row.good_s = time.monotonic() - began
        wrong += judge.next_good(tries[-1], lacks_only, above)

    def updates(self) -> list[str]:
        """Take the coordinator's record down, then hold every replica's history against it."""
        wrong = []
        for u in self.fleet.updates():
            if u.phase in OVER:
                wrong += self.histories.record(u.update_id, u.version, u.trainer_step, OVER[u.phase])
        return wrong + self.histories.examine()

    def _members(self, receipt: Mapping[str, Any]) -> list[str]:
        """After a publish that all took: each replica holds the trainer's bytes, says so, and generates with them."""
        f, wrong = self.fleet, []
        expected = f.trainer.ask(do="digests")
        for name in NAMES:
            found = f.digests(name)
            names = {n: found.get(n) for n in expected} if name != "r2" else found
            for tensor, digest in names.items():
                if digest != expected[tensor.rpartition("/")[2]]:
                    wrong.append(f"{name}: {tensor} is not the trainer's after version {receipt['version']}")
            holds = f.holds(name)
            if holds["version"] != receipt["version"] or holds["dirty"]:
                wrong.append(f"{name} says that it holds {holds}, the receipt is of version {receipt['version']}")
            status, answer = f.generate(name)
            if status != 200:
                wrong.append(f"{name} is READY and answers {status}: {answer}")
                continue
            for completion in answer["completions"]:
                wrong += judge.tokens(name, completion, self.histories.steps)
        return wrong

    def _held(self) -> dict[str, Held]:
        return {n: held(c.pid) for n, c in self.fleet.children.items() if c.process.poll() is None}

    def _resources(self, before: Mapping[str, Held], left: list[str]) -> list[str]:
        """What is aborted is closed by threads: it may take a moment."""
        wrong: list[str] = []

        def back() -> bool:
            wrong[:] = judge.resources(before, self._held(), left, self.fleet.segments())
            return not wrong

        try:
            eventually(back, "resources are back at the baseline", 6)
        except AssertionError:
            pass
        return wrong


def told(answer: Mapping[str, Any] | None) -> str:
    """In a line, what a trainer's call said."""
    if answer is None:
        return "nothing: it died"
    if answer["ok"]:
        states = ", ".join(f"{r} {said['state']}" for r, said in sorted(answer["replicas"].items()))
        why = [f"{s['failure']['reason']}" for s in answer["replicas"].values() if s["failure"]]
        return f"a receipt: {states}" + (f" ({', '.join(why)})" if why else "")
    failure = answer.get("failure") or {"reason": "", "member": "", "message": answer["text"]}
    who = f" [{failure['member']}]" if failure["member"] else ""
    return f"{answer['error']} {failure['reason']}{who}: {failure['message']}"[:300]
