"""Whether the tests that passed are those that were collected: ``python benchmarks/_test_ids.py COLLECTED LOG``.

COLLECTED: the output of ``pytest --collect-only -q``; LOG: that of ``pytest -v``. Exit status 1 if they differ.
"""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from pathlib import Path

__all__ = ["collected_ids", "outcomes", "summary"]

_ID = re.compile(r"^\S+\.py::\S.*$")
_WORDS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
_OUTCOME = re.compile(rf"^(?P<id>\S+\.py::.*?) (?P<word>{_WORDS})\b")
_OF_XDIST = re.compile(rf"^\[gw\d+\] (?:\[ *\d+%\] )?(?P<word>{_WORDS}) (?P<id>\S+\.py::.*?)\s*$")


def collected_ids(text: str) -> set[str]:
    """The ids that ``--collect-only -q`` lists."""
    return {line.strip() for line in text.splitlines() if _ID.match(line) and not line.startswith("ERROR")}


def outcomes(text: str) -> dict[str, str]:
    """What ``-v`` says of each id; a later word (an error at teardown) overrules an earlier one."""
    found = (_OUTCOME.match(line) or _OF_XDIST.match(line) for line in text.splitlines())
    return {m["id"]: m["word"] for m in found if m}


def summary(collected: set[str], ran: dict[str, str]) -> tuple[bool, list[str]]:
    """Whether all collected ids passed and no other ran, and the lines that say so."""
    passed = {i for i, outcome in ran.items() if outcome == "PASSED"}
    good = collected == passed and bool(passed)
    lines = [f"collected {len(collected)}, passed {len(passed)}: {'equal' if good else 'NOT equal, or nothing at all'}"]
    for i in sorted(collected - passed):
        lines.append(f"  {ran.get(i, 'no outcome')}: {i}")
    lines += [f"  passed but not collected: {i}" for i in sorted(passed - collected)]
    return good, lines


def main(collected: str, log: str) -> int:
    """Print the summary, with the date and the cards."""
    from benchmarks._cards import accelerator

    good, lines = summary(collected_ids(Path(collected).read_text()), outcomes(Path(log).read_text()))
    for card in accelerator()["cards"]:
        print(f"{card['name']} {card['uuid']}, driver {card['driver']}")
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, pytest -m gpu")
    print("\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(main(*sys.argv[1:]))
