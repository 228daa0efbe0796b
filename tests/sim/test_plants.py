"""Every planted bug is found, and by the assertion that is named for it. Writes ``docs/planted-bugs.md``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.invariants import Violation
from tests.sim.plants import PLANTS, Plant, planted
from tests.sim.run import Run

TABLE = Path(__file__).parents[2] / "docs" / "planted-bugs.md"
FOUND: dict[str, tuple[int, int]] = {}
HEAD = """# Planted bugs

Each row is a bug planted in the product (`tests/sim/plants.py`) that the simulator must find, by the assertion named
(`tests/sim/invariants.py`). Written by `tests/sim/test_plants.py`; do not edit.

| what it breaks | the bug | found by | seed | after steps |
|---|---|---|---|---|
"""


def find(plant: Plant) -> tuple[Violation, int, int]:
    """The first violation, its seed, and the steps it took."""
    for seed in [plant.hint, *(s for s in range(200) if s != plant.hint)]:
        with planted(plant):
            run = Run(seed, boost=plant.boost)
            try:
                run.go()
            except Violation as v:
                return v, seed, run.w.steps
    raise AssertionError(f"{plant.name}: not found")


@pytest.mark.parametrize("plant", PLANTS, ids=lambda p: p.name)
def test_is_found_by_the_assertion_named_for_it(plant: Plant) -> None:
    v, seed, steps = find(plant)
    assert v.name == plant.found_by, f"another assertion fails: {v}"
    FOUND[plant.name] = (seed, steps)


def test_every_rule_has_a_planted_bug() -> None:
    assert {f"rule {n}" for n in range(1, 12)} <= {p.covers for p in PLANTS}


def test_the_table_says_what_was_found() -> None:
    if len(FOUND) < len(PLANTS):
        pytest.skip("only part of the plants ran")
    rows = [
        f"| {p.covers} | `{p.name}`: {p.what} | `{p.found_by}` | {FOUND[p.name][0]} | {FOUND[p.name][1]} |"
        for p in PLANTS
    ]
    text = HEAD + "\n".join(rows) + "\n"
    if not TABLE.exists() or TABLE.read_text() != text:
        TABLE.write_text(text)
