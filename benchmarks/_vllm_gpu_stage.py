"""Who plays in ``vllm_gpu.py``: the control plane, trainers and vLLMs as processes with logs and time limits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks._common import Report
from benchmarks._process import MemberFailed, Process
from benchmarks._vllm_gpu_models import environment

__all__ = ["CaseReport", "NotHere", "Plane", "Stage"]

_HERE = Path(__file__).resolve().parent
_TAIL = 40


class NotHere(Exception):
    """A case cannot run here; the text says why."""


class CaseReport(Report):
    """The figures, and beside them all that each case found."""

    cases: dict[str, dict[str, Any]]

    def document(self) -> dict[str, Any]:
        """See ``Report``."""
        return {**super().document(), "cases": getattr(self, "cases", {})}

    def note(self, case: str, **found: Any) -> None:
        """Keep what a case found, at once."""
        if not hasattr(self, "cases"):
            self.cases = {}
        self.cases.setdefault(case, {}).update(found)
        text = json.dumps(found, default=str)
        print(f"  {case}: {text if len(text) < 900 else text[:900] + ' …'}", flush=True)
        self._save()


class Plane:
    """A control plane in a process of its own."""

    def __init__(self) -> None:
        command = [sys.executable, str(_HERE / "_vllm_gpu_plane.py")]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        if not self.address:
            raise RuntimeError(f"the control plane ended with status {self._process.wait()}")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


class Stage:
    """All processes of a run. Each has a log of its own; one that gives no answer in time is ended and used no more."""

    def __init__(self, report: CaseReport, logs: Path, device: str, seconds: float) -> None:
        self.report, self.logs, self.device = report, logs, device
        self.cuda = device != "cpu"
        self.end = time.monotonic() + seconds
        self.plane = Plane()
        self._processes: dict[str, Process] = {}
        self._gone: dict[str, str] = {}
        self._asked: dict[str, str] = {}
        logs.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        """Seconds until the run must end."""
        return self.end - time.monotonic()

    def engine(self, name: str, kind: str = "llm", cards: str = "0,1") -> None:
        """Start a process for a vLLM; ``cards``: what it sees, its own first."""
        self._start(name, "_vllm_gpu_engine.py", [kind], cards)

    def trainer(self, name: str, cards: str = "0,1") -> None:
        """Start a process for a trainer."""
        self._start(name, "_vllm_gpu_trainer.py", [], cards)

    def _start(self, name: str, script: str, words: list[str], cards: str) -> None:
        env = environment(self.logs / f"{name}.log", self.device, cards)
        self._processes[name] = Process(name, _HERE / script, words, env)

    def pid(self, name: str) -> int:
        """Its process id."""
        return self._processes[name].pid

    def tell(self, name: str, op: str, **args: Any) -> None:
        """Give a command that ``answer`` or ``call`` waits for later."""
        if name not in self._processes:
            raise NotHere(f"{name} was not started: {self._gone.get(name, 'not asked for')}")
        self._processes[name].tell(op, **args)
        self._asked[name] = op

    def answer(self, name: str, timeout: float) -> Any:
        """Of the command given."""
        if name not in self._processes:
            raise NotHere(f"{name} is gone: {self._gone.get(name, 'not asked for')}")
        op = self._asked.pop(name, "?")
        limit = min(timeout, self.left())
        try:
            return self._processes[name].answer(max(0.1, limit))
        except MemberFailed as e:
            if "gave no answer" in str(e) or "died" in str(e):
                self.drop(name, f"{op}: {e}")
            raise MemberFailed(f"{op}: {e}\n{self.tail(name)}") from None

    def call(self, name: str, op: str, timeout: float = 30.0, **args: Any) -> Any:
        """A command and its value."""
        if self._asked.get(name):
            self.answer(name, timeout)
        self.tell(name, op, **args)
        return self.answer(name, timeout)

    def waiting(self, name: str) -> bool:
        """Whether an answer of it is still to come."""
        return name in self._asked

    def alive(self, name: str) -> bool:
        """Whether it was not dropped."""
        return name in self._processes

    def tail(self, name: str) -> str:
        """The end of its log."""
        try:
            lines = (self.logs / f"{name}.log").read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return f"--- {name}.log\n" + "\n".join(line[:400] for line in lines[-_TAIL:])

    def drop(self, name: str, why: str) -> None:
        """End a process and all that it started."""
        process = self._processes.pop(name, None)
        self._gone[name] = why.strip().splitlines()[-1][:300] if why.strip() else "?"
        self._asked.pop(name, None)
        if process is not None:
            below = _descendants(process.pid)
            process.close(0.5)
            for pid in below:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End everything."""
        for name in list(self._processes):
            with contextlib.suppress(Exception):
                self.drop(name, "the run is over")
        self.plane.close()


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, todo = [], [pid]
    while todo:
        for child in parents.get(todo.pop(), ()):
            found.append(child)
            todo.append(child)
    return found
