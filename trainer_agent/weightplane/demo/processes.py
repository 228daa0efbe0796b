"""The demo's processes: one control plane and some replicas, started, awaited and ended together."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["ProcessFailed", "Processes"]


class ProcessFailed(RuntimeError):
    """A process ended, or did not come up in time; the text holds the end of its log."""


class Processes:
    """A context: on leaving it every process is asked to end (SIGTERM), and killed if it does not within 5 s.

    Logs and the store lie in a temporary folder that goes too.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="weightplane-demo-")
        self.path = Path(self._folder.name)
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def control_plane(self) -> str:
        """Start one; its address."""
        store = f"sqlite:{self.path / 'weightplane.db'}"
        self._start("control-plane", ["controlplane", "--listen", "127.0.0.1:0", "--store", store])
        return str(self._announced("control-plane")["address"])

    def replicas(self, address: str, group: str, names: Sequence[str], options: Sequence[str]) -> dict[str, str]:
        """Start replicas of the demo's engine; where each one generates."""
        for name in names:
            args = ["inference-agent", "--address", address, "--group", group, "--replica-id", name]
            self._start(
                name, [*args, "--engine", "weightplane.demo.engine:make", "--generate", "127.0.0.1:0", *options]
            )
        return {name: str(self._announced(name)["generate"]) for name in names}

    def pids(self) -> dict[str, int]:
        """Process ids by name."""
        return {name: process.pid for name, process in self._running.items()}

    def _start(self, name: str, args: list[str]) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with (self.path / f"{name}.log").open("wb") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-m", "weightplane.cli", *args, *self._launched(name)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,  # Ctrl-C reaches this process alone, and it ends the others in order
            )

    def _launched(self, name: str) -> list[str]:
        """Options of a child: say when it is ready, and never outlive this process."""
        return ["--announce", str(self.path / f"{name}.json"), "--exit-with", str(os.getpid())]

    def _announced(self, name: str, timeout: float = 60.0) -> dict[str, Any]:
        """What the process said about itself once it was ready."""
        end = time.monotonic() + timeout
        path = self.path / f"{name}.json"
        while not path.exists():
            code = self._running[name].poll()
            if code is not None or time.monotonic() > end:
                what = f"ended with status {code}" if code is not None else f"was not ready within {timeout:.0f} s"
                raise ProcessFailed(f"{name} {what}:\n{self.log(name)}")
            time.sleep(0.02)
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return facts

    def log(self, name: str) -> str:
        """The end of a process's log."""
        return (self.path / f"{name}.log").read_bytes()[-4000:].decode(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        order = sorted(self._running, key=lambda name: name == "control-plane")  # replicas say goodbye to it
        for name in order:
            self._running[name].send_signal(signal.SIGTERM)
        for name in order:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running[name].wait(5)
            if self._running[name].poll() is None:
                self._running[name].kill()
                self._running[name].wait()
        self._folder.cleanup()
