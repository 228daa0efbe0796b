"""``docs/planted-bugs.md``: which assertion finds each planted bug. Written anew by ``python -m tests.sim.table``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.sim.data import DATA_PLANTS
from tests.sim.invariants import Violation
from tests.sim.plants import PLANTS, Plant, planted
from tests.sim.run import Run

__all__ = ["AGAIN", "TABLE", "find", "text"]

TABLE = Path(__file__).parents[2] / "docs" / "planted-bugs.md"
_OTHERS = 10
AGAIN = "look at what changed, then write it anew with `.venv/bin/python -m tests.sim.table`"
HEAD = """# Planted bugs

Each row is a bug planted in the product that the simulator (`tests/sim/plants.py`) must find, by the assertion named
(`tests/sim/invariants.py`). `tests/sim/test_plants.py` finds them in every run of the tests and fails if this page
says otherwise; `.venv/bin/python -m tests.sim.table` writes it. Do not edit.

| what it breaks | the bug | found by |
|---|---|---|
"""
DATA = """
The simulator moves no bytes. These are planted in the data path (`tests/sim/data.py`) and found by a real publish:

| what it breaks | the bug | found by |
|---|---|---|
"""


def find(plant: Plant) -> tuple[Violation, int]:
    """The first run that breaks the assertion named for the bug, and its seed.

    A bug may break another one first in some runs: so many as ``_OTHERS`` are passed over, and then the first counts.
    """
    others: list[tuple[Violation, int]] = []
    for seed in [plant.hint, *(s for s in range(200) if s != plant.hint)]:
        with planted(plant):
            try:
                Run(seed, boost=plant.boost).go()
            except Violation as v:
                if v.name == plant.found_by:
                    return v, seed
                others.append((v, seed))
                if len(others) > _OTHERS:
                    break
    if not others:
        raise AssertionError(f"{plant.name}: not found")
    return others[0]


def text(found: Mapping[str, str]) -> str:
    """The page, given the assertion that found each plant of the simulator's. (The seed may differ from run to run.)"""
    rows = [f"| {p.covers} | `{p.name}`: {p.what} | `{found[p.name]}` |\n" for p in PLANTS]
    data = [f"| {p.covers} | `{p.name}`: {p.what} | `{p.found_by}` |\n" for p in DATA_PLANTS]
    return HEAD + "".join(rows) + DATA + "".join(data)


def main() -> None:
    """Find them all, half a minute, and write the page."""
    TABLE.write_text(text({p.name: find(p)[0].name for p in PLANTS}), encoding="utf-8")
    print(f"{TABLE}: {len(PLANTS) + len(DATA_PLANTS)} planted bugs")


if __name__ == "__main__":
    main()
