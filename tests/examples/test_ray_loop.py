"""The Ray example runs as it stands: the Publisher in a Ray actor, publishing under rollouts that never stop."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MARK = "WEIGHTPLANE_TEST_RUN"


def alive(mark: str) -> dict[int, str]:
    """Processes that inherited the mark."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            pass  # it ended, or is a zombie
    return found


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (it is in the extra 'dev')")
def test_the_ray_example_publishes_under_load_and_leaves_nothing_behind(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "TMPDIR": "/tmp", "HOME": str(tmp_path)}
    command = [sys.executable, str(ROOT / "examples" / "ray_loop.py")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said

    found = re.search(r"committed (\[.*\]), sampled (\[.*\]); outputs by lag in versions (\{.*\})", done.stdout)
    assert found, said
    committed, sampled, lags = (ast.literal_eval(group) for group in found.groups())
    assert committed == list(range(1, 21))
    assert set(sampled) <= {0, *committed} and len(sampled) > 10
    # Two at most: an output was begun after the sample before it, which was taken after the commit of the one before.
    assert set(lags) <= {0, 1, 2} and lags.get(0) and lags.get(1) and sum(lags.values()) == 20 * 2 * 8

    found = re.search(r"(\d+) of (\d+) outputs went on across a publish", done.stdout)
    assert found and 10 <= int(found[1]) <= 2 * 20, said
    found = re.search(r"(\d+) of (\d+) passes mixed; reward (\S+) -> (\S+)", done.stdout)
    assert found and int(found[1]) == 0 and int(found[2]) >= 20 * 2 * 8 * 16, said
    assert float(found[4]) > 0.6 > float(found[3]), said

    end = time.monotonic() + 15
    while alive(mark) and time.monotonic() < end:
        time.sleep(0.2)
    assert not alive(mark)
    assert not list(tmp_path.iterdir()), "Ray wrote into the home folder"
