"""A process that ``warm`` forks is what ``subprocess`` would have started: each test holds for both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm

Kind = type[subprocess.Popen[Any]]
TELLS = """
import json, os, sys
facts = {
    "argv": sys.argv, "cwd": os.getcwd(), "path": sys.path[0], "parent": os.getppid(), "name": __name__,
    "environment": {k: v for k, v in os.environ.items() if k != "LC_CTYPE"}, "group": os.getpgrp() == os.getpid(),
    "session": os.getsid(0) == os.getpid(), "read": sys.stdin.read(),
    "descriptors": sorted(os.listdir("/proc/self/fd")),
}
print(json.dumps(facts))
print("said aside", file=sys.stderr)
"""
BOTH = pytest.mark.parametrize("kind", [warm.Popen, subprocess.Popen], ids=["warm", "cold"])


def told(kind: Kind, options: dict[str, Any]) -> Any:
    command = [sys.executable, "-c", TELLS, "one", "zwei ü"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with kind(command, text=True, **pipes, **options) as process:
        out, err = process.communicate("given")
    assert process.returncode == 0 and err == "said aside\n"
    return json.loads(out)


@pytest.mark.parametrize(
    "more", [{}, {"start_new_session": True}, {"process_group": 0}], ids=["plain", "session", "group"]
)
def test_it_is_given_what_was_asked_for_and_is_our_child(more: dict[str, Any], tmp_path: Path) -> None:
    found = [
        told(kind, {"cwd": tmp_path, "env": {**os.environ, "ONE": "1"}, **more})
        for kind in (warm.Popen, subprocess.Popen)
    ]
    assert found[0] == found[1]
    assert found[0]["parent"] == os.getpid() and found[0]["environment"]["ONE"] == "1" and found[0]["read"] == "given"


def test_it_is_a_fork_that_has_torch_and_none_of_ours() -> None:
    command = [sys.executable, "-c", "import sys; print([m for m in ('torch', 'grpc', 'tests') if m in sys.modules])"]
    for _ in range(2):
        assert warm.run(command, capture_output=True, text=True).stdout == "['torch']\n"


@BOTH
def test_its_end_is_told(kind: Kind) -> None:
    def ends(code: str) -> tuple[int, bytes]:
        with kind([sys.executable, "-c", code], stderr=subprocess.PIPE) as process:
            return process.wait(30), process.stderr.read() if process.stderr is not None else b""

    assert ends("raise SystemExit(7)") == (7, b"")
    assert ends("import os; os.kill(os.getpid(), 9)") == (-9, b"")
    assert ends("import atexit, os, sys; atexit.register(sys.stderr.write, 'last word')") == (0, b"last word")
    status, said = ends("1 / 0")
    assert status == 1 and said.endswith(b"ZeroDivisionError: division by zero\n")


@BOTH
def test_a_signal_reaches_it_as_it_reaches_any(kind: Kind) -> None:
    code = "import time; print('runs', flush=True); time.sleep(60)"
    for number, status in ((signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -9)):
        command = [sys.executable, "-c", code]
        with kind(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "runs\n"
            process.send_signal(number)
            assert process.wait(30) == status


@BOTH
def test_a_module_runs_as_main(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text(
        "import sys\nprint(__name__, sys.argv[1:], sys.argv[0] == __file__, __spec__.name)\n"
    )
    command = [sys.executable, "-m", "told", "a"]
    with kind(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate()[0] == "__main__ ['a'] True told\n"


def test_a_sitecustomize_is_run(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = 1\n")
    done = warm.run(
        [sys.executable, "-c", "print(customized)"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "1\n"


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (["true"], {}),
        ([sys.executable, "-P", "-m", "weightplane.cli"], {}),
        ([sys.executable, "-m", "weightplane.cli"], {"env": {**os.environ, "MALLOC_PERTURB_": "1"}}),
        ([sys.executable, "-m", "weightplane.cli"], {"umask": 0o77}),
    ],
    ids=["another program", "an option of the interpreter", "a variable read before main", "umask"],
)
def test_what_a_fork_cannot_be_is_started_afresh(
    command: list[str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(subprocess.Popen, "_execute_child", lambda self, *given: started.append(self))
    warm.Popen(command, **options).returncode = 0
    assert len(started) == 1
