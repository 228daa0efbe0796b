"""The table of ``README.md`` is whole and true: every case once, as the list has it, and every test that it names."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

from tests.cases import (  # noqa: F401 - they register the cases
    cards_distribution,
    cards_memory,
    cards_transport,
    cases_control,
    cases_distribution,
    cases_memory,
    cases_names,
    cases_process,
    cases_tensor,
    cases_transport,
)
from tests.cases.base import CASES
from tests.cases.cards import CARD_CASES
from tests.cases.plants_cards import CARD_PLANTS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HEADING = re.compile(r"^## (.+)$")
ROW = re.compile(r"^\| (\w+) \| (\w+) \| (.+) \|$")
TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def listed() -> dict[str, tuple[str, str, str]]:
    lines = (HERE / "ids.tsv").read_text().splitlines()[1:]
    return {id_: (kind, severity, testable) for id_, kind, severity, testable in (x.split("\t") for x in lines)}


def table() -> list[tuple[str, str, str, str]]:
    """(id, kind, severity, status), in order."""
    out, kind = [], ""
    for line in (HERE / "README.md").read_text().splitlines():
        if heading := HEADING.match(line):
            kind = heading[1].lower()
        elif (row := ROW.match(line)) and row[1] != "id":
            out.append((row[1], kind, row[2], row[3]))
    return out


@cache
def functions(path: str) -> frozenset[str]:
    """Tests that a file defines, or registers as bodies of cases."""
    text = (ROOT / path).read_text()
    found = set(re.findall(r"def (test_\w+)\(", text))
    if path == "tests/cases/test_cases.py":
        found |= {f"test_{c.name}" for c in CASES.values()}
    if path == "tests/cases/test_cards.py":
        found |= {f"test_{c.name}" for c in CARD_CASES.values()}
    if path == "tests/vllm/test_cases_vllm.py":  # it imports a vLLM's tests: read, not imported
        found |= {f"test_{name}" for name in re.findall(r"^@case\ndef (\w+)\(", text, re.MULTILINE)}
    return frozenset(found)


def test_the_list_is_the_one_that_was_collected() -> None:
    assert len(listed()) == 188 and len({kind for kind, _, _ in listed().values()}) == 9


def test_every_case_appears_once_with_its_kind_and_severity() -> None:
    rows = table()
    assert [n for n, count in Counter(r[0] for r in rows).items() if count > 1] == []
    assert {r[0]: (r[1], r[2]) for r in rows} == {i: (kind, severity) for i, (kind, severity, _) in listed().items()}


def test_every_status_is_a_test_or_a_reason() -> None:
    unclear = [
        (id_, status)
        for id_, _, _, status in table()
        if not TEST.match(status) and not re.match(r"(deferred|not applicable|open): \w", status)
    ]
    assert not unclear


#: Of these, what a machine without an accelerator can show is a test by id.
BY_ID = ("control", "process", "memory", "transport", "security")
#: An answer instead of a test, and why; also beside one that shows a part.
REASON = re.compile(r"^(deferred|not applicable|open): \w.{20,}")


def rows_without_a_test_of_their_own(rows: list[tuple[str, str, str, str]]) -> list[str]:
    """Rows that name no test with their id in its name, and give no reason."""
    found = []
    for id_, kind, _, status in rows:
        own = [test for _, test in TEST.findall(status) if id_ in test.split("_")]
        if kind in BY_ID and not own and not REASON.match(status):
            found.append(id_)
    return found


def test_every_row_of_five_kinds_is_a_test_by_its_id_or_a_reason() -> None:
    rows = table()
    assert rows_without_a_test_of_their_own(rows) == []
    able = {i for i, (kind, _, able) in listed().items() if kind in BY_ID and able == "yes"}
    assert {r[0] for r in rows} >= able
    assert [r[0] for r in rows if r[0] in able and not TEST.match(r[3])] == [], "these can be shown here, all of them"
    critical = [r for r in rows if r[1] == "security" and r[2] == "critical"]
    assert [r[0] for r in critical] == ["S01", "S03", "S04", "S05"]
    assert all("planted in `tests/security/test_plants.py::" in r[3] for r in critical)


def test_a_row_without_its_test_would_be_found() -> None:
    rows = table()
    at = next(n for n, r in enumerate(rows) if r[0] == "C28")
    for status in ("`tests/cases/test_more.py::test_C36_the_age`", "it works", "open: no", "deferred:"):
        assert rows_without_a_test_of_their_own([*rows[:at], (*rows[at][:3], status)]) == ["C28"], status


def test_every_test_that_is_named_exists() -> None:
    named = {(id_, path, test) for id_, _, _, status in table() for path, test in TEST.findall(status)}
    missing = [n for n in sorted(named) if not (ROOT / n[1]).exists() or n[2] not in functions(n[1])]
    assert not missing


def test_every_critical_case_that_applies_here_has_a_test_of_its_own_and_a_defect() -> None:
    """Of the kinds that the issue names; those without one are deferred, and say why."""
    ours = ("control", "process", "tensor content", "distribution", "memory", "transport")
    critical = {
        i for i, (kind, severity, able) in listed().items() if (severity, able) == ("critical", "yes") and kind in ours
    }
    status = {id_: text for id_, _, _, text in table()}
    without = {i for i in critical if i not in CASES}
    lies = {"X04", "X08"}  # of a transport: what their tests run on is the defect itself
    assert len(critical) == 51 and without - lies == {"T03"} and lies <= without, without
    assert all(status[i].startswith("deferred: ") for i in without - lies)
    assert all(TEST.match(status[i]) for i in lies)
    assert set(CASES) == critical - without
    assert all(f"test_{c.name}` and planted" in status[i] for i, c in CASES.items())


def test_every_critical_case_that_needs_cards_has_a_test_over_the_wires_and_a_defect() -> None:
    critical = {i for i, (_, severity, able) in listed().items() if severity == "critical" and able != "yes"}
    status = {id_: text for id_, _, _, text in table()}
    assert critical <= CARD_CASES.keys() & CARD_PLANTS.keys()
    for i in critical:
        assert status[i].startswith(f"`tests/cases/test_cards.py::test_{CARD_CASES[i].name}` and planted"), i
