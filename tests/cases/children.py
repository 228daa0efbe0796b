"""Processes of the process cases: warm while they wait, told what to be, with the case's defect planted in them too.

``python -m tests.cases.children`` reads one JSON line, ``{"role", "plant", "arguments"}``, and becomes it; later lines
are orders. Every answer is a JSON line.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests import warm

ROOT = Path(__file__).resolve().parents[2]
_PLANT = ""


def _path() -> str:
    """Where nothing is installed, the import roots come from it too."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))


def planting(id_: str) -> None:
    """The defect that children started from now on are to have."""
    global _PLANT
    _PLANT = id_


class Child:
    """A process; nothing yet."""

    def __init__(self, module: str = "tests.cases.children") -> None:
        self.process = warm.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _path()},
            text=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.unheard = 0  # orders whose answers nobody has taken
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def tell(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        self.unheard += 1

    def heard(self, timeout: float = 60.0) -> dict[str, Any]:
        """Its next answer. ``EOFError``: it died instead; ``queue.Empty``: it said nothing."""
        line = self._lines.get(timeout=timeout)
        self.unheard -= 1
        if not line:
            raise EOFError(f"the child ended with {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, timeout: float = 60.0, **what: Any) -> dict[str, Any]:
        self.tell(**what)
        return self.heard(timeout)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass


class Pool:
    """Two processes are always getting ready."""

    def __init__(self) -> None:
        self._spare: list[Child] = []
        self._all: list[Child] = []

    def warm(self) -> None:
        while len(self._spare) < 2:
            child = Child()
            self._spare.append(child)
            self._all.append(child)

    def become(self, role: str, **arguments: Any) -> Child:
        """A process in that role, which said that it is ready."""
        self.warm()
        child = self._spare.pop(0)
        self.warm()
        said = child.ask(role=role, plant=_PLANT, arguments=arguments)
        assert said == {"ready": True}, said
        return child

    def close(self) -> None:
        for child in self._all:
            child.close()
        self._all.clear()
        self._spare.clear()


POOL = Pool()


# --- the child's side -----------------------------------------------------------------------------------------------


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def replica(address: str, name: str, fail_at: int = 0, stop_at: int = 0) -> None:
    """A receiver. ``fail_at``: the bucket in the middle of which it raises, until it is told to be calm; ``stop_at``:
    the one in which it says so and stands still."""
    from tests.cases.base import Small
    from weightplane.controlplane import failpoints
    from weightplane.inference_agent.agent import InferenceAgent
    from weightplane.inference_agent.engines.torch_module import TorchModuleEngine

    def broken(hit: str, n: int) -> None:
        if hit == "replica.receive.inside" and n == fail_at:
            raise failpoints.FailpointError(f"the receiver broke in bucket {n}")
        if hit == "replica.receive.inside" and n == stop_at:
            say(inside=n)
            threading.Event().wait()

    if fail_at or stop_at:
        failpoints.set_hook(broken)
    agent = InferenceAgent(address, "g", name, TorchModuleEngine(Small()))
    agent.start()
    agent.wait_live()
    say(ready=True)
    for _ in sys.stdin:
        failpoints.set_hook(None)
        say(calm=True)


def trainer(address: str, name: str) -> None:
    """A trainer. Orders: publish, fork, exit (without a goodbye)."""
    from tests.cases.base import Small
    from weightplane.trainer_agent.publisher import Publisher
    from weightplane.trainer_agent.sources import ModuleSource

    publisher = Publisher(address, "g", ModuleSource(Small(1)), trainer_id=name, transport="shm", bucket_bytes=4096)
    publisher.init()
    say(ready=True)
    for line in sys.stdin:
        order = json.loads(line)["do"]
        if order == "exit":
            os._exit(0)
        try:
            say(child=forked(publisher)) if order == "fork" else say(
                ready=publisher.publish(1, update_timeout=20).ready
            )
        except Exception as e:
            say(error=f"{type(e).__name__}: {e}")


def forked(publisher: Any) -> str:
    """What a forked child is told that uses its parent's publisher; "hung" if nothing."""
    from weightplane.trainer_agent.errors import ForkedProcessError

    pid = os.fork()
    if not pid:
        try:
            publisher.publish(2, update_timeout=20)
        except ForkedProcessError:
            os._exit(7)
        except BaseException:
            os._exit(8)
        os._exit(9)
    end = time.monotonic() + 4
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return {7: "told", 8: "another error", 9: "published"}.get(code, str(code))
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"


def main() -> None:
    import torch

    import tests.cases.plants_transfer  # noqa: F401 - registers
    import weightplane.trainer_agent.publisher  # noqa: F401 - warm
    from tests.cases.plants import planted

    torch.set_num_threads(1)
    line = sys.stdin.readline()
    if not line:
        return
    order = json.loads(line)
    with ExitStack() as stack:
        if order["plant"]:
            stack.enter_context(planted(order["plant"]))
        {"replica": replica, "trainer": trainer}[order["role"]](**order["arguments"])


if __name__ == "__main__":
    main()
