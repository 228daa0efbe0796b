"""Child processes of a benchmark that carry out commands: JSON lines in, JSON lines out.

The child's script calls ``serve(target)``; a command names one of the target's methods (dots lead into its attributes).
A command that raises is answered with its error, so that one transport's failure does not end the benchmark.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

__all__ = ["TIMEOUT_S", "MemberFailed", "Process", "serve", "tell_all"]

#: How long a command may take at most.
TIMEOUT_S = float(os.environ.get("WEIGHTPLANE_BENCH_TIMEOUT_S", "300"))


class MemberFailed(Exception):
    """A command failed in a child, or the child died or gave no answer in time. The text holds its traceback."""


def serve(target: Any) -> None:
    """The child's loop; returns when the driver hangs up. Adds ``cpu``, its CPU seconds, to what has an ``end`` and no
    ``cpu`` of its own."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints must not disturb the answers
    for line in sys.stdin:
        command = json.loads(line)
        busy = time.process_time()
        try:
            value = attrgetter(command["op"])(target)(**command["args"])
            if isinstance(value, dict) and "end" in value:
                value.setdefault("cpu", time.process_time() - busy)
            answer = {"value": value}
        except Exception:
            answer = {"error": traceback.format_exc()}
        out.write(json.dumps(answer) + "\n")


class Process:
    """One child. ``member`` names it in errors. Commands are answered in order."""

    def __init__(self, member: str, script: Path, words: Sequence[str], env: dict[str, str] | None = None) -> None:
        self.member = member
        self._process = subprocess.Popen(
            [sys.executable, str(script), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(env or {})},
            text=True,
            bufsize=1,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def tell(self, op: str, **args: Any) -> None:
        """Give a command; ``answer`` must follow."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, "args": args}) + "\n")
            self._process.stdin.flush()
        except OSError as e:
            raise MemberFailed(f"{self.member} died before {op}: {e}") from None

    def answer(self, timeout: float = TIMEOUT_S) -> Any:
        """A command's value. Raises ``MemberFailed``."""
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise MemberFailed(f"{self.member} gave no answer within {timeout:.0f} s") from None
        if not line:
            raise MemberFailed(f"{self.member} died (exit status {self._process.wait()}); see above")
        said = json.loads(line)
        if "error" in said:
            raise MemberFailed(f"{self.member}: {said['error'].strip()}")
        return said["value"]

    def call(self, op: str, **args: Any) -> Any:
        """A command and its value."""
        self.tell(op, **args)
        return self.answer()

    def close(self, seconds: float = 10.0) -> None:
        """Hang up, and kill it if it does not end."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(seconds)
        except (OSError, subprocess.TimeoutExpired):
            pass
        self._process.kill()
        self._process.wait()


def tell_all(processes: Sequence[Process], op: str, **args: Any) -> list[Any]:
    """The same command to all at once; their values. The first error of all is raised once all answered."""
    for p in processes:
        p.tell(op, **args)
    values: list[Any] = []
    errors: list[MemberFailed] = []
    for p in processes:
        try:
            # One that failed leaves the others waiting for it: they get a short time to say so too.
            values.append(p.answer(10.0 if errors else TIMEOUT_S))
        except MemberFailed as e:
            errors.append(e)
    if errors:
        raise MemberFailed("\n".join(map(str, errors)))
    return values
