"""Starts the real command's processes for tests, and ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests import warm

ROOT = Path(__file__).resolve().parents[2]


def weightplane(*args: str, timeout: float = 60, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    command = [sys.executable, "-m", "weightplane.cli", *args]
    merged = {**os.environ, "COLUMNS": "200", **(env or {})}
    run = warm.run if args[:1] in (("publish",), ("parity",), ("inference-agent",)) else subprocess.run  # with torch
    return run(command, cwd=ROOT, env=merged, capture_output=True, text=True, timeout=timeout, check=False)


class Launched:
    """Long-running commands; ``stop`` ends them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *args: str, env: dict[str, str] | None = None) -> dict[str, Any]:
        """Start a command that announces itself; what it announced."""
        path = self.folder / f"{name}.json"
        with (self.folder / f"{name}.log").open("ab") as log:
            popen = subprocess.Popen if args[0] == "controlplane" else warm.Popen  # which does without torch
            self.processes[name] = popen(
                [
                    sys.executable,
                    "-m",
                    "weightplane.cli",
                    *args,
                    "--announce",
                    str(path),
                    "--exit-with",
                    str(os.getpid()),
                ],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        end = time.monotonic() + 60
        while not path.exists():
            assert self.processes[name].poll() is None, self.log(name)
            assert time.monotonic() < end, self.log(name)
            time.sleep(0.02)  # a file that another process writes: nothing to wait on
        facts: dict[str, Any] = json.loads(path.read_text())
        return facts

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
            process.send_signal(signal.SIGCONT)  # a stopped one hears nothing else
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
