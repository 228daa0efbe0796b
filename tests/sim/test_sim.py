"""The simulator in CI: 200,000 state-changing steps over many fleets, and what they visited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.core.test_refusals import COORDINATOR_PAIRS, DIRECT, REPLICA_PAIRS
from tests.sim.faults import Fault, Profile
from tests.sim.invariants import Violation
from tests.sim.plants import PLANTS, planted
from tests.sim.run import Run, report, shrink

ROOT = Path(__file__).parents[2]
STEPS = 250_000  # of each of two processes


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    """Two processes over even and odd seeds; each ends with what it visited, or with a seed and a shrunk trace."""
    commands = [
        [sys.executable, "-m", "tests.sim.run", "--from", str(i), "--stride", "2", "--steps", str(STEPS), "--json"]
        for i in range(2)
    ]
    processes = [subprocess.Popen(c, cwd=ROOT, stdout=subprocess.PIPE, text=True) for c in commands]
    answers = [p.communicate()[0] for p in processes]
    for p, text in zip(processes, answers, strict=True):
        assert p.returncode == 0, text
    return [json.loads(text.splitlines()[-1]) for text in answers]


@pytest.mark.alone  # two processes of its own
@pytest.mark.timeout(300)
def test_two_hundred_thousand_steps_break_no_invariant(runs: list[dict[str, Any]]) -> None:
    sizes: Counter[str] = Counter()
    for r in runs:
        sizes.update(r["sizes"])
    steps, commits = sum(r["steps"] for r in runs), sum(r["committed"] for r in runs)
    print(f"\n{steps} state-changing steps, {commits} commits, CPU {[round(r['cpu'], 1) for r in runs]} s")
    for n in sorted(sizes, key=int):
        print(f"{n:>3} replicas: {sizes[n]:>3} {'#' * sizes[n]}")
    assert steps >= 200_000 and commits >= 500
    assert max(r["cpu"] for r in runs) < 60
    small = sizes["3"] + sizes["4"] + sizes["5"]
    assert sizes["50"] and small > sum(sizes.values()) / 2


@pytest.mark.alone
def test_every_reachable_pair_was_visited(runs: list[dict[str, Any]]) -> None:
    seen: Counter[tuple[str, str, str]] = Counter()
    for r in runs:
        seen.update({(a, b, c): n for a, b, c, n in r["visited"]})
    rows = [*(("group", *pair) for pair in COORDINATOR_PAIRS), *(("replica", *pair) for pair in REPLICA_PAIRS)]
    missing = [row for row in rows if not seen[row] and row not in DIRECT]
    assert not missing, f"neither visited nor shown refused by a direct test: {missing}"


def test_a_failure_prints_its_seed_and_a_shrunk_trace() -> None:
    plant = next(p for p in PLANTS if p.name == "dirty_is_not_fenced")
    with planted(plant):
        for seed in range(50):
            run = Run(seed)
            try:
                run.go()
            except Violation as v:
                if v.name != plant.found_by:  # in some runs the bug breaks another one first
                    continue
                few = shrink(seed, run.profile, run.faults, v.name, seconds=8.0)
                text = report(seed, v, lines=30)
                break
        else:
            raise AssertionError("not found")
    assert len(few) <= max(3, len(run.faults) // 4)
    lines = text.splitlines()
    assert lines[0].startswith(f"seed {seed}: inv_dirty_never_generates") and lines[1].startswith("faults (")
    assert lines[-1].startswith("inv_dirty_never_generates") and len(lines) > 10


def test_a_seed_gives_the_same_run_again() -> None:
    traces = []
    for _ in range(2):
        run = Run(7, Profile(duration=8.0, faults=6), trace=True)
        run.go()
        traces.append(list(run.w.log or ()))
    assert traces[0] == traces[1]


_TRACES = """
import hashlib
from tests.sim.run import Run
for seed in (1, 2, 18):
    log = Run(seed, trace=True).go().log
    print(seed, hashlib.sha256("\\n".join(log).encode()).hexdigest())
"""


def test_a_seed_gives_the_same_run_in_every_process() -> None:
    """Sets have another order in each: nothing may hang on it, or a seed that CI prints shows nothing elsewhere."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _TRACES],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 3)
    ]
    one, other = (p.communicate(timeout=100)[0] for p in processes)
    assert one == other and one.count("\n") == 3


def test_a_schedule_may_be_given() -> None:
    run = Run(3, Profile(duration=6.0), [Fault(2.0, "c.crash", length=1.0)])
    run.go()
    assert run.w.leader is not None and run.w.leader.state.epoch == 2
