"""The examples run as they stand, and the README shows the one that it prints."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(name: str, timeout: float = 100) -> str:
    command = [sys.executable, str(ROOT / "examples" / name)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_minimal_example_computes_with_the_published_weights() -> None:
    said = run("minimal.py")
    assert said.strip() == "version 1 on ('replica-a',): computed by version 1, same outputs: True"


def test_the_readme_shows_the_minimal_example() -> None:
    """Whole, as it says: byte for byte."""
    code = (ROOT / "examples" / "minimal.py").read_text(encoding="utf-8")
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert code in shown


def test_the_processes_of_the_readme_run_as_typed(tmp_path: Path) -> None:
    """In a folder that looks like a clone, on a port that nobody else has."""
    if sys.prefix == sys.base_prefix:
        pytest.skip("not run from an environment that could be activated")
    (block,) = re.findall(r"```\n(\. \.venv.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = {**os.environ, "WEIGHTPLANE_LISTEN": address, "WEIGHTPLANE_ADDRESS": address, "COLUMNS": "160"}
    shell = subprocess.Popen(
        ["bash", "-m", "-e", "-c", block + "wait\n"],  # -m: job numbers, as at a terminal
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = shell.communicate(timeout=100)
    finally:
        for process in reversed(_session(shell.pid)):  # none is left, unless the block failed
            os.kill(process, signal.SIGKILL)
    assert shell.returncode == 0, said
    assert "version 1 is committed" in said and re.search(r"2/2 routable", said), said


def _session(leader: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def test_the_transport_of_the_docs_is_one_sitting() -> None:
    code = (ROOT / "examples" / "my_transport.py").read_text(encoding="utf-8").splitlines()
    assert len([line for line in code if line.strip()]) <= 110, "docs/transports.md says about 100 lines"
