"""SIGTERM: a replica leaves, unroutable at once, out of the barrier, and nobody counts it as a failure."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.harness import eventually
from tests.process.load import Ledger
from tests.routing.routed import Routed, clients, example_router
from weightplane.v1 import fleet_pb2, update_pb2

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]


@pytest.fixture
def f(tmp_path: Path) -> Iterator[Routed]:
    with Routed(tmp_path, ("r0", "r1"), ttl_s=15) as made:  # who stands still for a moment is not lost
        made.start_plane()
        for name in made.names:
            made.begin_replica(name)
        for name in made.names:
            made.await_replica(name)
        made.start_trainer().ask(do="wait", count=2)
        yield made


def left(f: Routed) -> bool:
    return f.replicas()["r1"].admin == fleet_pb2.ADMIN_STATE_LEAVING


def test_a_replica_that_leaves_costs_neither_a_request_nor_a_publish(f: Routed) -> None:
    ledger = Ledger()

    def publish(step: int, ready: list[str]) -> None:
        answer = f.trainer.publish(step, failure="raise")
        assert answer is not None and answer["ok"] and sorted(answer["ready"]) == ready, answer
        assert not any(r["failure"] for r in answer["replicas"].values()), answer
        ledger.committed[answer["version"]] = step

    publish(1, ["r0", "r1"])
    with example_router(f.probes, 10) as router, clients("router", router, ledger, 3):
        eventually(lambda: {g.replica for g in ledger.got} == {"r0", "r1"}, "answers of both")
        f.signal("r1", signal.SIGTERM)
        eventually(lambda: left(f), "LEAVING", 5)
        said = f.check("r1", 1)
        assert said is not None and not said.routable
        publish(2, ["r0"])
        assert f.children["r1"].died() == 0
        publish(3, ["r0"])
        have = ledger.seen["answered"]
        eventually(lambda: ledger.seen["answered"] > have + 10, "answers after it left")
    count = ledger.examine()
    assert count["outputs"] == ledger.seen["requests"], f"each request was answered: {dict(ledger.seen)}"
    assert all(u.phase == update_pb2.UPDATE_PHASE_COMMITTED and not u.failure.reason for u in f.updates())


def test_a_replica_that_leaves_while_its_bytes_come_finishes_that_update_first(f: Routed) -> None:
    answer = f.trainer.publish(1)
    assert answer is not None and answer["ok"]
    f.arm("trainer", "shm.send.inside", 20, "stop")
    f.trainer.begin(2, failure="raise")
    eventually(lambda: f.fired("trainer"), "the middle of the bytes")
    f.signal("r1", signal.SIGTERM)
    eventually(lambda: left(f), "LEAVING", 5)
    said = f.check("r1", 1)
    assert said is not None and not said.routable
    f.signal("trainer", signal.SIGCONT)
    answer = f.trainer.heard(30)
    assert answer is not None and answer["ok"] and answer["version"] == 2, answer
    assert "r0" in answer["ready"] and not any(r["failure"] for r in answer["replicas"].values()), answer
    assert f.children["r1"].died() == 0
    answer = f.trainer.publish(3)
    assert answer is not None and answer["ok"] and answer["ready"] == ["r0"], answer


def test_requests_in_flight_are_answered_and_the_process_ends_well(f: Routed) -> None:
    """Three lives end under load: a thread inside torch as the interpreter ends would abort the process."""
    answer = f.trainer.publish(1)
    assert answer is not None and answer["ok"]
    ledger = Ledger({answer["version"]: 1})
    with clients("r1 itself", f.serving["r1"], ledger, 4):
        eventually(lambda: ledger.seen["answered"] > 4, "answers")
        for _ in range(3):
            f.signal("r1", signal.SIGTERM)
            assert f.children["r1"].died() == 0, f.children["r1"].log()
            f.start_replica("r1")
            step = max(ledger.committed.values()) + 1

            def publish(n: int = step) -> bool:
                said = f.trainer.publish(n)
                assert said is not None and said["ok"], said
                ledger.committed[said["version"]] = n
                return "r1" in said["ready"]

            eventually(publish, "it takes an update")
            have = ledger.seen["answered"]
            eventually(lambda n=have: ledger.seen["answered"] > n + 4, "answers")  # type: ignore[misc]
    ledger.examine()
