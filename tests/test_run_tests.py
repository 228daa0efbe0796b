"""``make test``'s runner: a failure stays one; where the test passes alone, that is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

STEADY = "def test_steady(): pass\n"
NEVER = "def test_never(): assert False\n"
#: Fails in its first run only; ``{0}`` is part of its name.
ONCE = """
from pathlib import Path

def test_once_{0}():
    seen = Path("seen-{0}")
    first = not seen.exists()
    seen.touch()
    assert not first
"""


def run(folder: Path, jobs: int, files: dict[str, str], *words: str) -> tuple[int, str]:
    """The runner's status and what it printed, over these test files."""
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    plugins = ["-p", "xdist"] if jobs else []
    command = [sys.executable, str(ROOT / "tools" / "run_tests.py"), "--jobs", str(jobs), *plugins, *words]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # loading all takes most of the time
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=100)
    return done.returncode, done.stdout


def unsteady(said: str) -> list[str]:
    """The tests that the runner calls unsteady."""
    return [line[5:] for line in said.splitlines() if line.startswith("==   ")]


def test_all_passed_is_a_pass_and_names_nothing(tmp_path: Path) -> None:
    status, said = run(tmp_path, 2, {"a": STEADY, "b": "import pytest\n@pytest.mark.alone\n" + STEADY})
    assert status == 0 and said.count("1 passed") == 2 and "UNSTEADY" not in said


def test_what_fails_alone_too_fails_the_run(tmp_path: Path) -> None:
    status, said = run(tmp_path, 0, {"a": STEADY + NEVER + ONCE.format("a")})
    assert status == 1 and unsteady(said) == ["test_a.py::test_once_a"]


@pytest.mark.parametrize("jobs", [0, 2])
def test_what_passes_alone_is_named_and_fails_the_run_all_the_same(tmp_path: Path, jobs: int) -> None:
    marked = ONCE.format("b").replace("def test", "import pytest\n@pytest.mark.alone\ndef test")
    status, said = run(tmp_path, jobs, {"a": ONCE.format("a"), "b": marked, "c": STEADY})
    assert status == 1 and sorted(unsteady(said)) == ["test_a.py::test_once_a", "test_b.py::test_once_b"]


def test_many_failures_are_not_taken_for_races(tmp_path: Path) -> None:
    status, said = run(tmp_path, 0, {"a": "".join(ONCE.format(i) for i in range(5))})
    assert status == 1 and "none is looked at again" in said and not unsteady(said)


def test_a_failure_of_an_earlier_run_is_not_run_again(tmp_path: Path) -> None:
    run(tmp_path, 0, {"old": NEVER})
    status, said = run(tmp_path, 0, {"a": ONCE.format("a")}, "test_a.py")
    assert status == 1 and unsteady(said) == ["test_a.py::test_once_a"]


def test_a_file_that_cannot_be_collected_fails_the_run(tmp_path: Path) -> None:
    status, _ = run(tmp_path, 2, {"a": STEADY, "b": "import nothing_of_that_name\n"})
    assert status not in (0, 5)


def test_a_selection_without_a_test_fails_the_run(tmp_path: Path) -> None:
    assert run(tmp_path, 2, {"a": STEADY}, "-k", "no_such_test")[0] == 5
