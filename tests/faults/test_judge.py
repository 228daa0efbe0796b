"""What the judge says is worth something: each check finds a planted defect, and passes what is in order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults import judge
from tests.faults.case import Case
from tests.faults.cases import CASES
from tests.faults.fleet import FaultFleet
from tests.faults.judge import Histories
from tests.faults.resources import Held
from tests.faults.run import Runner
from tests.process.coded import BASE

KILL = Case("SIGKILL", "r1", "update", "kill", "ABORTED", ("MEMBER_LOST",), ("r1",), timeout=4.0)
COMMITS = Case("SIGKILL", "r1", "decided", "kill", "COMMITTED", left=("r1",))
LOST = {"reason": "MEMBER_LOST", "member": "r1/0", "message": "it died"}


def failed(**failure: str) -> dict[str, Any]:
    return {"ok": False, "error": "UpdateFailed", "text": "", "failure": {**LOST, **failure}}


def receipt(*ready: str, version: int = 7, failure: Any = LOST) -> dict[str, Any]:
    said = {
        r: {"state": "READY" if r in ready else "PENDING", "failure": None if r in ready else failure}
        for r in ("r0", "r1", "r2")
    }
    return {"ok": True, "committed": True, "version": version, "ready": list(ready), "replicas": said}


def test_an_end_later_than_the_deadline_and_a_second() -> None:
    assert judge.ended(KILL, 4.9) == []
    assert judge.ended(KILL, 5.1)


def test_an_update_that_ended_otherwise() -> None:
    assert judge.cause(KILL, "ABORTED", failed()) == []
    assert judge.cause(KILL, "COMMITTED", failed())
    assert judge.cause(KILL, "OPEN", failed())


@pytest.mark.parametrize("wrong", [{"reason": "DEADLINE"}, {"member": "r0"}, {"member": ""}])
def test_a_cause_that_is_not_the_cause(wrong: dict[str, str]) -> None:
    assert judge.cause(KILL, "ABORTED", failed(**wrong))


def test_a_failure_without_a_reason_and_a_trainer_that_died_of_it() -> None:
    assert judge.cause(KILL, "ABORTED", {"ok": False, "error": "KeyError", "text": "'x'"})
    assert judge.cause(KILL, "ABORTED", None)


def test_a_receipt_that_lacks_an_innocent_or_says_no_reason() -> None:
    assert judge.cause(COMMITS, "COMMITTED", receipt("r0", "r2")) == []
    assert judge.cause(COMMITS, "COMMITTED", receipt("r0"))
    assert judge.cause(COMMITS, "COMMITTED", receipt("r0", "r2", failure=None))
    assert judge.cause(COMMITS, "COMMITTED", failed()), "an update that commits was reported as failed"


def test_a_next_publish_that_fails_lacks_a_survivor_or_does_not_rise() -> None:
    assert judge.next_good(receipt("r0", "r2"), ["r0", "r2"], 6) == []
    assert judge.next_good(failed(), ["r0"], 6)
    assert judge.next_good(receipt("r0"), ["r0", "r2"], 6)
    assert judge.next_good(receipt("r0", "r2"), ["r0", "r2"], 7)


def test_a_survivor_that_was_restarted() -> None:
    before = {"r0": (10, 500), "r1": (11, 501)}
    assert judge.lives(before, {"r0": (10, 500), "r1": (12, 900)}, {"r1"}) == []
    assert judge.lives(before, {"r0": (10, 900), "r1": (11, 501)}, {"r1"}), "its pid was used again"
    assert judge.lives(before, {"r1": (11, 501)}, {"r1"})


@pytest.mark.parametrize("grown", [Held(99, 10, 1000), Held(20, 99, 1000), Held(20, 10, 999_000)])
def test_a_survivor_that_holds_more_than_before(grown: Held) -> None:
    base = Held(20, 10, 1000)
    assert judge.resources({"r0": base}, {"r0": base}, ["a"], ["b"]) == []
    assert judge.resources({"r0": base}, {"r0": grown}, [], [])


def test_a_segment_that_is_left() -> None:
    assert judge.resources({}, {}, ["a"], ["a", "b"])


def completion(tokens: list[int], version: int = 3, spread: float = 0.0) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "logprobs": [spread] * len(tokens),
        "spans": [{"start": 0, "stop": len(tokens), "version": version}],
    }


def test_tokens_that_are_mixed_of_another_version_or_of_none_committed() -> None:
    assert judge.tokens("r0", completion([5 * BASE] * 3), {3: 5}) == []
    assert judge.tokens("r0", completion([5 * BASE, 6 * BASE]), {3: 5})
    assert judge.tokens("r0", completion([5 * BASE], spread=-1.0), {3: 5})
    assert judge.tokens("r0", completion([5 * BASE], version=4), {3: 5})


class Written:
    """A history as a replica writes it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "r0.history"
        self.histories = Histories(folder)
        self.histories.record("u-1", 1, 10, "COMMITTED")
        self.histories.record("u-2", 2, 20, "COMMITTED")
        self.histories.record("u-3", 3, 30, "ABORTED")

    def add(self, event: str, update_id: str, life: str = "a", **more: Any) -> None:
        line = {"event": event, "update_id": update_id, "life": life, "pid": 1, **more}
        with self.path.open("a") as out:
            out.write(json.dumps(line) + "\n")

    def took(self, n: int, step: int = 0, live: tuple[float, ...] = (), life: str = "a", begins: bool = True) -> None:
        step = step or 10 * n
        if begins:
            self.add("begin", f"u-{n}", life)
        self.add("commit", f"u-{n}", life, version=n, step=step, live=list(live or (float(step),)))

    @property
    def wrong(self) -> list[str]:
        return self.histories.examine()


@pytest.fixture
def written(tmp_path: Path) -> Written:
    w = Written(tmp_path)
    w.took(1)
    assert w.wrong == []
    return w


def test_a_history_in_order(written: Written) -> None:
    written.took(2)
    assert written.wrong == [] and written.histories.events == 4


def test_a_replica_that_commits_what_was_aborted(written: Written) -> None:
    written.took(3)
    assert "ABORTED" in written.wrong[0]


def test_a_replica_that_commits_what_nobody_recorded(written: Written) -> None:
    written.took(4)
    assert "not recorded" in written.wrong[0]


def test_a_replica_whose_version_falls(written: Written) -> None:
    written.took(2)
    written.took(1)
    assert any("after version 2" in w for w in written.wrong)


def test_live_memory_that_is_mixed_or_of_another_version(written: Written) -> None:
    written.took(2, live=(10.0, 20.0))
    assert "live memory" in written.wrong[0]
    written.took(2, live=(10.0,), life="b")
    assert "live memory" in written.wrong[0]


def test_a_life_that_commits_what_an_earlier_one_began(written: Written) -> None:
    written.add("begin", "u-2")
    written.took(2, life="b", begins=False)
    assert "did not begin it" in written.wrong[0]


def test_a_replica_that_knows_another_step_than_the_record(written: Written) -> None:
    written.took(2, step=21)
    assert any("the record says" in w for w in written.wrong)


def test_a_record_that_changes_its_mind(written: Written) -> None:
    h = written.histories
    assert h.record("u-1", 1, 10, "COMMITTED") == []
    assert h.record("u-1", 1, 10, "ABORTED")
    assert h.record("u-2", 3, 20, "COMMITTED")
    assert h.record("u-3", 3, 30, "COMMITTED")


@pytest.mark.chaos
@pytest.mark.alone
def test_a_whole_fleet_whose_replicas_leak_is_found_out(tmp_path: Path) -> None:
    """Real processes: r0 keeps descriptors, r1 threads, r2 memory, each with every update. A restart behind an agent
    that is planted as harmless, and a fault that never strikes, are found too."""
    defects = {"r0": "leak-descriptors", "r1": "leak-threads", "r2": "leak-memory"}
    with FaultFleet(tmp_path, defects=defects) as f:
        f.launch()
        runner = Runner(f)
        case = next(c for c in CASES if c.outside == "delayed:PutDigests")
        wrong = runner.run(case).violations
        assert {w.split(" ")[0] + " " + w.split(" ")[1] for w in wrong} == {
            "r0: descriptors",
            "r1: threads",
            "r2: anonymous_kib",
        }, wrong
        never = Case("exception", "r1", "update", "raise", "COMMITTED", nth=1000)
        assert "the fault never struck" in runner.run(never).violations
        lies = Case("SIGKILL", "r1", "update", "kill", "COMMITTED", ("DEADLINE",), ("r0",), 20, dies=True)
        found = "; ".join(runner.run(lies).violations)
        assert "expected COMMITTED" in found and "reason" in found and "blamed" in found, found
