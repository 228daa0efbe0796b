"""``docs/faults.md`` is what a whole run found: a trial of a few cases leaves it as it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults import chaos, report
from tests.faults.case import Row


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> str:
    """``make chaos ARGS=words`` where no case takes any time; what the page says then."""
    found = folder / "chaos.json"
    monkeypatch.setattr(chaos.Chaos, "fleet", lambda self, wire, ranks, small, cases: None)
    monkeypatch.setattr(sys, "argv", ["chaos", "--json", str(found), "--logs", str(folder / "logs"), *words])
    assert chaos.main() == 0
    page = folder / "faults.md"
    page.write_text("as published")
    others = [str(folder / name) for name in ("vllm", "card", "soak")]
    monkeypatch.setattr(sys, "argv", ["report", str(found), *others, str(page)])
    report.main()
    return page.read_text()


def test_a_whole_run_is_published_and_a_part_of_one_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path).startswith("# Faults")
    assert run(monkeypatch, tmp_path, "--minutes", "2").startswith("# Faults"), "none was left out"
    for part in ("--only r1-update", "--wires shm"):
        assert run(monkeypatch, tmp_path, *part.split()) == "as published"
        assert f"a part alone ({part})" in capsys.readouterr().out
        assert run(monkeypatch, tmp_path, *part.split(), "--merge").startswith("# Faults"), "it was added to the rest"


def test_a_short_soak_is_not_published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    soak: dict[str, Any] = {"part": "50 publishes"}
    (tmp_path / "soak").write_text(json.dumps(soak))
    page = run(monkeypatch, tmp_path)
    assert page.startswith("# Faults") and "## Soak" not in page


def test_what_has_no_new_result_stays_as_it_was_published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = run(monkeypatch, tmp_path)
    out, soak = tmp_path / "faults.md", tmp_path / "soak"
    machine = json.loads((tmp_path / "chaos.json").read_text())["machine"]
    about = {"machine": machine, "date": "2026-12-01", "commit": "abc", "summary": "2 publishes"}
    soak.write_text(json.dumps(about))
    monkeypatch.setattr(
        sys, "argv", ["report", *(str(tmp_path / n) for n in ("gone", "gone", "gone")), str(soak), str(out)]
    )
    report.main()
    again = out.read_text()
    assert "`2 publishes`" in again and again.index("## Soak") < again.index("## Matrix")
    begin, end = again.index("## Soak"), again.index("## Matrix")
    assert again[:begin] + again[end:] == page


def test_what_a_card_showed_has_a_part_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "`cuda_ipc` needs a card, and has not been run" in run(monkeypatch, tmp_path)
    card = json.loads((tmp_path / "chaos.json").read_text())
    row = Row("c", "SIGKILL", "r1", "update", "staged", "cuda_ipc", 1, "ABORTED", "told", "asked")
    (tmp_path / "card").write_text(json.dumps({**card, "part": "--wires cuda_ipc", "rows": [row.as_json()]}))
    page = run(monkeypatch, tmp_path)
    assert (
        "**1 faults, 0 violations**" in page and "| SIGKILL | r1 | update | staged | cuda_ipc | 1 | ABORTED |" in page
    )
    assert "has not been run" not in page


def test_fleets_get_a_folder_that_is_the_same_from_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[Path] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chaos.Chaos, "fleet", lambda self, *_: given.append(self.folder))
    monkeypatch.setattr(sys, "argv", ["chaos", "--json", "chaos.json", "--logs", "logs"])  # as by default: relative
    assert chaos.main() == 0
    assert given and {*given} == {tmp_path / "logs"}
