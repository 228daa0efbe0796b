"""What an engine says of itself is told only where the coordinator would take it: else its session would end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest

from weightplane.controlplane.core.model import Condition, Declaration
from weightplane.controlplane.core.states import CachePolicy, PauseMode
from weightplane.controlplane.server import convert
from weightplane.inference_agent import auditing, codec
from weightplane.inference_agent.auditing import Auditor
from weightplane.v1 import agent_pb2

DECLARED = Declaration({}, CachePolicy.CLEAR, PauseMode.KEEP)


def told(*found: Condition) -> tuple[Condition, ...]:
    """What goes out of what an engine found, as the coordinator reads it."""

    class Engine:
        def conditions(self, declared: Declaration) -> tuple[Condition, ...]:
            return found

    said: queue.SimpleQueue[Sequence[Condition]] = queue.SimpleQueue()
    auditor = Auditor(cast(Any, Engine()), said.put)
    auditor.judge(DECLARED)
    message = codec.conditions_message(said.get(timeout=10))
    auditor.stop()
    assert message.ByteSize() < 60 << 10
    return convert.conditions(agent_pb2.Hello(agent_id="r0", incarnation="i"), message).conditions


@pytest.mark.parametrize(
    "strange",
    [
        [Condition("A", "True", "x", ""), Condition("A", "False", "x", "")],
        [Condition("A", "Maybe", "x", "")],
        [Condition("A", "true", "x", "")],
        [Condition("", "True", "x", "")],
        [Condition("A" * 65, "True", "x", "")],
        [Condition("é" * 40, "True", "x", "")],
        [Condition("A", "True", "r" * 65, "")],
        [Condition("A\n", "True", "x", "")],
        [Condition("A", "True", "x\x1b", "")],
        [Condition("A", "True", "x", "", "--flag\n")],
        [Condition("\ud800", "True", "x", "")],
        [Condition(f"C{i}", "True", "x", "") for i in range(41)],
    ],
)
def test_conditions_that_would_be_refused_are_not_told_but_that_they_could_not_be_judged(
    strange: list[Condition],
) -> None:
    [audit] = told(*strange)
    assert (audit.type, audit.status, audit.reason) == ("Audit", "Unknown", "Failed")
    assert "ValueError: condition" in audit.message


def test_the_longest_that_may_be_told_fit_in_a_message(caplog: pytest.LogCaptureFixture) -> None:
    whole = [Condition(f"{i:064}", "False", "r" * 64, "m" * 10_000, "s" * 10_000) for i in range(40)]
    assert len(told(*whole)) == 40
    [one] = told(Condition("A", "False", "x", "not \ud800 text\x1b"))
    assert one.message.startswith("not ? text")
    assert "not ? text" in caplog.text and len(caplog.text.encode()) < 41 * 1500, "what is logged is what is told"


def test_an_engine_that_could_not_be_asked_is_asked_again_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a blocking condition a replica would stay unready for the sake of one timeout as it joined."""
    monkeypatch.setattr(auditing, "_AGAIN_S", 0.01)
    asked: list[int] = []

    class Engine:
        def conditions(self, declared: Declaration) -> tuple[Condition, ...]:
            asked.append(1)
            if len(asked) < 4:
                raise TimeoutError("no answer")
            return (Condition("Audit", "True", "Judged", ""), Condition("A", "True", "x", ""))

    said: queue.SimpleQueue[Sequence[Condition]] = queue.SimpleQueue()
    Auditor(cast(Any, Engine()), said.put).judge(DECLARED)
    first, then = said.get(timeout=10), said.get(timeout=10)
    assert [(c.type, c.status) for c in first] == [("Audit", "Unknown")] and first[0].message.endswith("no answer")
    assert [(c.type, c.status) for c in then] == [("Audit", "True"), ("A", "True")], "three failures are told once"
    assert len(asked) == 4 and said.empty()


@pytest.mark.parametrize("end", ["another declaration", "the life's end"])
def test_what_is_no_longer_wanted_is_not_asked_again(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditing, "_AGAIN_S", 3600.0)

    class Engine:
        def conditions(self, declared: Declaration) -> tuple[Condition, ...]:
            if declared is DECLARED:
                raise TimeoutError("no answer")
            return (Condition("Audit", "True", "Judged", ""),)

    said: queue.SimpleQueue[Sequence[Condition]] = queue.SimpleQueue()
    auditor, before = Auditor(cast(Any, Engine()), said.put), set(threading.enumerate())
    auditor.judge(DECLARED)
    said.get(timeout=10)
    waiting = set(threading.enumerate()) - before
    if end == "the life's end":
        auditor.stop()
    else:
        auditor.judge(Declaration({}, CachePolicy.KEEP, PauseMode.KEEP))
    for thread in waiting:
        thread.join(10)
    assert len(waiting) == 1 and not any(t.is_alive() for t in waiting)
