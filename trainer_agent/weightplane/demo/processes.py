"""The demo's processes: a control plane and some replicas (of vLLM, two processes each), started and ended together."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["ProcessFailed", "Processes"]


_VLLM_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_VLLM_OPTIONS = (
    *("--host", "127.0.0.1", "--tokens-only", "--enforce-eager", "--disable-uvicorn-access-log"),
    *("--dtype", "float32", "--max-model-len", "64", "--max-num-seqs", "256", "--generation-config", "vllm"),
    *("--kv-cache-memory-bytes", str(256 << 20), "--weight-transfer-config", '{"backend": "weightplane"}'),
)


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

    def vllm_replicas(self, address: str, group: str, names: Sequence[str], checkpoint: Path) -> dict[str, str]:
        """Start a stock vLLM server per name, on a core each, and an agent beside each; where each server listens."""
        cores = sorted(os.sched_getaffinity(0))
        urls = {}
        for i, name in enumerate(names):
            port = _free_port()
            urls[name] = f"http://127.0.0.1:{port}"
            env = {"VLLM_CPU_OMP_THREADS_BIND": str(cores[i % len(cores)]), **_VLLM_ENVIRONMENT}
            args = ["--model", str(checkpoint), "--port", str(port), *_VLLM_OPTIONS]
            self._launch(f"vllm-{name}", ["-m", "weightplane.demo.vllm_server", str(os.getpid()), *args], env)
            args = ["inference-agent", "--address", address, "--group", group, "--replica-id", name]
            self._start(name, [*args, "--engine", "vllm", "--engine-option", f"url={urls[name]}"])
        for name in names:
            self._announced(name, 240.0)
        return urls

    def pids(self) -> dict[str, int]:
        """Process ids by name."""
        return {name: process.pid for name, process in self._running.items()}

    def _start(self, name: str, args: list[str]) -> None:
        self._launch(
            name,
            ["-m", "weightplane.cli", *args, *self._launched(name)],
            {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )

    def _launch(self, name: str, args: list[str], env: dict[str, str]) -> None:
        with (self.path / f"{name}.log").open("wb") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, *args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                process_group=0,  # Ctrl-C reaches this process alone, and it ends the others in order
            )

    def _launched(self, name: str) -> list[str]:
        """Options of a child: say when it is ready, and never outlive this process."""
        return ["--announce", str(self.path / f"{name}.json"), "--exit-with", str(os.getpid())]

    def _announced(self, name: str, timeout: float = 120.0) -> dict[str, Any]:
        """What the process said about itself once it was ready."""
        end = time.monotonic() + timeout
        path = self.path / f"{name}.json"
        while not path.exists():
            for other, process in self._running.items():  # one that another waits for counts as well
                if process.poll() is not None:
                    raise ProcessFailed(f"{other} ended with status {process.returncode}:\n{self.log(other)}")
            if time.monotonic() > end:
                said = self.log(name).strip() or "it printed nothing; is the machine busy?"
                raise ProcessFailed(f"{name} was not ready within {timeout:.0f} s:\n{said}")
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
        order = sorted(self._running, key=lambda name: name == "control-plane" or name.startswith("vllm-"))
        # ^ agents first: they say goodbye to the control plane
        for name in order:
            self._running[name].send_signal(signal.SIGTERM)
        for name in order:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running[name].wait(5)
            with contextlib.suppress(ProcessLookupError):  # each leads a group: vLLM's own processes go with it
                os.killpg(self._running[name].pid, signal.SIGKILL)
            self._running[name].wait()
        self._folder.cleanup()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
