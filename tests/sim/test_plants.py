"""Every planted bug is found, and by the assertion that is named for it; ``docs/planted-bugs.md`` says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim import table
from tests.sim.data import DATA_PLANTS, publish_once
from tests.sim.invariants import Violation
from tests.sim.plants import PLANTS, Plant, planted
from tests.sim.table import find

FOUND: dict[str, str] = {}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda p: p.name)
def test_is_found_by_the_assertion_named_for_it(plant: Plant) -> None:
    v, _ = find(plant)
    assert v.name == plant.found_by, f"another assertion fails: {v}"
    FOUND[plant.name] = v.name


def test_a_publish_without_a_bug_changes_neither_its_source_nor_what_was_not_sent() -> None:
    for mode in ("staged", "in_place"):
        publish_once(mode)


@pytest.mark.parametrize("plant", DATA_PLANTS, ids=lambda p: p.name)
def test_in_the_data_path_is_found_by_the_assertion_named_for_it(plant: Plant) -> None:
    with planted(plant), pytest.raises(Violation) as found:
        publish_once("staged")
    assert found.value.name == plant.found_by, f"another assertion fails: {found.value}"


def test_every_rule_and_invariant_has_a_planted_bug() -> None:
    covered = {p.covers for p in (*PLANTS, *DATA_PLANTS)}
    assert {f"rule {n}" for n in range(1, 12)} <= covered
    assert {"the source's tensors are never mutated", "unsent tensors and buffers stay bit-identical"} <= covered


def test_the_table_says_what_was_found() -> None:
    if len(FOUND) < len(PLANTS):
        pytest.skip("only part of the plants ran")
    found = table.text(FOUND)
    assert table.TABLE.read_text(encoding="utf-8") == found, (
        f"docs/planted-bugs.md is not what was found: {table.AGAIN}"
    )


def test_a_table_that_drifted_is_refused_with_the_command_that_writes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = tmp_path / "planted-bugs.md"
    old.write_text("# as it was\n")
    monkeypatch.setattr(table, "TABLE", old)
    monkeypatch.setattr("tests.sim.test_plants.FOUND", {p.name: "another" for p in PLANTS})
    with pytest.raises(AssertionError, match=r"python -m tests\.sim\.table"):
        test_the_table_says_what_was_found()
    assert old.read_text() == "# as it was\n"
