"""What an armed failpoint does, it does there: not a step further on."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

from tests.process.harness import eventually

STOPS = """
import mmap, sys, threading
from weightplane.controlplane import failpoints
with open(sys.argv[1], "r+b") as file:
    steps = mmap.mmap(file.fileno(), 8)
def work():
    failpoints.perform("stop", "here")
    while True:
        steps[0] = 1
threading.Thread(target=work).start()
threading.Event().wait()
"""


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_thread_that_stops_its_process_takes_no_step_more(tmp_path: Path) -> None:
    """A signal to a process may be given to any thread of it: the one at the failpoint would go on meanwhile."""
    steps = tmp_path / "steps"
    for _ in range(5):
        steps.write_bytes(bytes(8))
        with subprocess.Popen([sys.executable, "-c", STOPS, str(steps)]) as process:
            try:
                eventually(partial(_stopped, process.pid), "it is stopped")
                assert steps.read_bytes() == bytes(8)
            finally:
                process.kill()
