"""Who loses a sender says nothing for a moment: the coordinator is about to tell why. Else the innocent are blamed.

Found by the table of kills: the trainer lost one replica and aborted its channel; another replica, which saw only that,
was sometimes heard first, named as the cause, left out of the retry, and counted towards its quarantine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.inference_agent.models import Constant
from tests.trainer_agent.fleet import Fleet, eventually, fleet, hook
from weightplane.inference_agent import operations
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.trainer_agent.attempt import Attempt


def blamed(monkeypatch: pytest.MonkeyPatch, late: Callable[[Fleet], object]) -> tuple[str, int]:
    """Whom the update names when the trainer's own code fails in mid-transfer and its word of it comes after ``late``;
    and how many failures are counted against the replicas."""
    abort = Attempt._abort
    with fleet() as f:

        def aborts(self: Attempt, *words: Any) -> None:
            late(f)
            abort(self, *words)

        monkeypatch.setattr(Attempt, "_abort", aborts)
        for name in ("r0", "r1"):
            f.replica(name, TorchModuleEngine(Constant()))
        publisher = f.publisher(Constant())
        publisher.publish(1)

        def fail(n: int) -> None:
            if n == 20:
                raise RuntimeError("the trainer's own fault")

        with hook("trainer.send.bucket", fail), pytest.raises(RuntimeError, match="own fault"):
            publisher.publish(2)
        state = f.state()
        failure = list(state.history.values())[-1].failure
        return failure.member, sum(r.failures_in_a_row for r in state.replicas.values())


def test_the_cause_is_named_not_who_saw_its_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "_HEARSAY_S", 30.0)
    assert blamed(monkeypatch, lambda _: time.sleep(0.2)) == ("rank/0", 0)


def test_without_the_wait_an_innocent_replica_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted defect."""
    monkeypatch.setattr(operations, "_HEARSAY_S", 0.0)

    def until_one_was_heard(f: Fleet) -> None:
        eventually(lambda: any(r.failures_in_a_row for r in f.state().replicas.values()), what="a replica is blamed")

    member, counted = blamed(monkeypatch, until_one_was_heard)
    assert member in ("r0", "r1") and counted > 0
