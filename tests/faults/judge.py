"""The judge: it looks at what each member wrote down or holds, never only at what the coordinator believes.

Each check takes plain evidence and returns what is wrong, in words; ``test_judge.py`` shows that each finds a defect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.case import Case
from tests.faults.resources import Held
from tests.process.coded import BASE

__all__ = ["Histories", "cause", "ended", "lives", "next_good", "resources", "tokens"]

#: Descriptors and threads that may come and go by themselves: connections that gRPC keeps for a while, its pollers.
SLACK = Held(descriptors=6, threads=6, anonymous_kib=40 << 10)
LATE_S = 1.0


def ended(case: Case, took: float, limit: float | None = None) -> list[str]:
    """By its deadline plus one second."""
    most = (case.timeout if limit is None else limit) + LATE_S
    return [] if took <= most else [f"the publish ended after {took:.2f} s, later than {most:.2f} s"]


def cause(case: Case, outcome: str, answer: Mapping[str, Any] | None) -> list[str]:
    """The outcome is one that was expected, and the trainer was told why and by whom, or of whom it lacks."""
    wrong = [] if outcome in case.outcome.split("|") else [f"the update is {outcome}, expected {case.outcome}"]
    if answer is None:
        return wrong if case.dies else [*wrong, "the trainer died"]
    if answer["ok"]:
        if not answer["committed"]:
            return [*wrong, f"a receipt of what was not committed: {answer}"]
        for replica, said in answer["replicas"].items():
            ready = replica in answer["ready"]
            if replica in case.left and not ready and said["failure"] is None:
                wrong.append(f"{replica} is {said['state']} and nobody says why")
            if replica not in case.left and not ready:
                wrong.append(f"{replica} is {said['state']}: {said['failure']}")
        return wrong
    failure = answer.get("failure")
    if failure is None and case.member == "trainer" and case.action == "raise" and answer["error"] == "FailpointError":
        return wrong  # what the caller's own code raises comes back as it is
    if failure is None:
        return [*wrong, f"the publish failed without a reason: {answer}"]
    if case.reasons and failure["reason"] not in case.reasons:
        wrong.append(f"reason {failure['reason']}, expected one of {case.reasons}: {failure['message']}")
    who = failure["member"].partition("/")[0]
    if case.blamed and who not in case.blamed:
        wrong.append(f"blamed {failure['member']!r}, expected one of {case.blamed}: {failure}")
    if not case.reasons and case.outcome == "COMMITTED":
        wrong.append(f"the publish failed: {failure}")
    return wrong


def next_good(receipt: Mapping[str, Any] | None, left: Sequence[str], above: int) -> list[str]:
    """The next publish, by those who are left and not restarted."""
    if receipt is None or not receipt["ok"]:
        return [f"the next publish failed: {receipt}"]
    wrong = [f"the next publish lacks {r}: {receipt}" for r in left if r not in receipt["ready"]]
    if receipt["version"] <= above:
        wrong.append(f"version {receipt['version']} after {above}")
    return wrong


def lives(before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]], victims: set[str]) -> list[str]:
    """No survivor is another process than before."""
    return [
        f"{n} was restarted or died: {life} -> {after.get(n)}"
        for n, life in before.items()
        if n not in victims and after.get(n) != life
    ]


def resources(
    before: Mapping[str, Held], after: Mapping[str, Held], left_before: Sequence[str], left: Sequence[str]
) -> list[str]:
    """Survivors hold what they held, and no more lies in shared memory."""
    wrong = []
    for name, b in before.items():
        a = after.get(name)
        if a is None:
            continue
        for what in ("descriptors", "threads", "anonymous_kib"):
            grown = getattr(a, what) - getattr(b, what)
            if grown > getattr(SLACK, what):
                wrong.append(f"{name}: {what} {getattr(b, what)} -> {getattr(a, what)}")
    if len(left) > len(left_before):
        wrong.append(f"shared memory: {sorted(set(left) - set(left_before))} beside {list(left_before)}")
    return wrong


def tokens(replica: str, answer: Mapping[str, Any], committed: Mapping[int, int]) -> list[str]:
    """One completion: every token is of the version that it is said to be of, and that one was committed."""
    wrong = []
    for spread in answer["logprobs"]:
        if spread != 0.0:
            wrong.append(f"{replica}: a pass read a mix: spread {spread}")
    for span in answer["spans"]:
        step = committed.get(span["version"])
        if step is None:
            wrong.append(f"{replica}: generated at version {span['version']}, which was never committed")
            continue
        for token in answer["tokens"][span["start"] : span["stop"]]:
            if token != step * BASE:
                wrong.append(f"{replica}: token {token} is not of version {span['version']} (step {step})")
    return wrong


@dataclass
class Histories:
    """Every replica's own history, read as it grows, against what was committed by the record."""

    folder: Path
    committed: dict[str, tuple[int, int]] = field(default_factory=dict)  # update_id -> version, trainer_step
    undone: dict[str, str] = field(default_factory=dict)  # update_id -> how it ended otherwise
    _read: dict[str, int] = field(default_factory=dict)
    _newest: dict[tuple[str, str], int] = field(default_factory=dict)
    _begun: set[tuple[str, str, str]] = field(default_factory=set)
    events: int = 0

    @property
    def steps(self) -> dict[int, int]:
        """Committed version -> trainer step."""
        return dict(self.committed.values())

    def record(self, update_id: str, version: int, step: int, phase: str) -> list[str]:
        """What the coordinator, or a trainer's receipt, says of an update. It may not be said otherwise later."""
        wrong = []
        if phase == "COMMITTED":
            if update_id in self.undone:
                wrong.append(f"{update_id} is committed after it was {self.undone[update_id]}")
            if self.committed.setdefault(update_id, (version, step)) != (version, step):
                wrong.append(f"{update_id}: {self.committed[update_id]} became {(version, step)}")
        elif phase == "ABORTED":
            if update_id in self.committed:
                wrong.append(f"{update_id} is {phase} after it was committed")
            self.undone[update_id] = phase
        return wrong

    def examine(self) -> list[str]:
        """Everything that was written since the last time."""
        wrong = []
        for path in sorted(self.folder.glob("*.history")):
            with path.open("rb") as file:
                file.seek(self._read.get(path.name, 0))
                data = file.read()
            whole = data.rpartition(b"\n")[0]
            self._read[path.name] = self._read.get(path.name, 0) + (len(whole) + 1 if whole else 0)
            for line in whole.splitlines():
                self.events += 1
                wrong += self._event(path.stem, json.loads(line))
        return wrong

    def _event(self, replica: str, e: dict[str, Any]) -> list[str]:
        life = (replica, f"{e['pid']} {e['life']}")
        if e["event"] == "begin":
            self._begun.add((*life, e["update_id"]))
        if e["event"] != "commit":
            return []
        where = f"{replica}: {e['update_id']}, version {e['version']}"
        wrong = []
        if (*life, e["update_id"]) not in self._begun:
            wrong.append(f"{where} was committed in a life that did not begin it")
        if e["version"] <= self._newest.get(life, 0):
            wrong.append(f"{where} after version {self._newest[life]}")
        self._newest[life] = e["version"]
        if e["live"] != [float(e["step"])]:
            wrong.append(f"{where}: live memory holds {e['live']}, not {float(e['step'])}")
        known = self.committed.get(e["update_id"])
        if known is None:
            ended = self.undone.get(e["update_id"], "not recorded")
            wrong.append(f"{where} was committed by the replica; the record says {ended}")
        elif known != (e["version"], e["step"]):
            wrong.append(f"{where}, step {e['step']}: the record says {known}")
        return wrong
