"""Every process that these tests start: it warms up, waits on standard input for what to be, and lets the test arm it.

``python -m tests.process.launch ARMED``: the first line of standard input is ``{"name": ..., "argv": [...]}``; argv is
a command line of ``weightplane``, or ``trainer ...``. Failpoints are armed while it runs: ``ARMED/<name>.arm`` holds
``{"point", "nth", "action"}``; nth 0 is every hit. An action is one of ``failpoints.perform``, or ``kill:PID`` (another
process), ``wait`` (until the test removes ``<name>.fired``), ``clock:S`` (``time.time`` jumps) or ``restart`` (the
engine, behind its agent: ``tests.faults.engine``). The file becomes ``<name>.fired`` when it strikes. The point
``idle`` is hit all the time where ``WEIGHTPLANE_TEST_IDLE`` is set.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from weightplane.controlplane import failpoints


class Armed:
    """The hook: one rule at a time, from a file."""

    def __init__(self, folder: Path, name: str) -> None:
        self._rule, self._fired = folder / f"{name}.arm", folder / f"{name}.fired"
        self._lock = threading.Lock()
        self._id, self._count = 0, 0

    def __call__(self, point: str, _: int) -> None:
        with self._lock:
            try:
                stat = self._rule.stat()
                rule = json.loads(self._rule.read_text())
            except FileNotFoundError:
                return
            if rule["point"] != point:
                return
            if self._id != stat.st_mtime_ns:
                self._id, self._count = stat.st_mtime_ns, 0
            self._count += 1
            if rule["nth"] == 0:
                self._fired.touch()
            elif self._count != rule["nth"]:
                return
            else:
                self._rule.replace(self._fired)
        verb, _, argument = rule["action"].partition(":")
        if verb == "kill" and argument:
            os.kill(int(argument), signal.SIGKILL)
        elif verb == "wait":
            while self._fired.exists():
                time.sleep(0.005)
        elif verb == "clock":
            jump(float(argument))
        elif verb == "restart":
            from tests.faults.engine import restart

            restart()
        elif verb == "raise":
            raise failpoints.FailpointError(f"{point}, armed by the test")
        else:
            failpoints.perform(rule["action"], point)


def jump(seconds: float) -> None:
    """What Python knows as the wall clock jumps. gRPC compares it with that of its C core, which cannot be
    moved for one process: it goes on seeing the true one."""
    true = SimpleNamespace(**vars(time))
    now = time.time
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "grpc" and getattr(module, "time", None) is time:
            vars(module)["time"] = true
    time.time = lambda: now() + seconds


def idle() -> None:
    """A failpoint for what strikes between updates."""
    while True:
        failpoints.hit("idle")
        time.sleep(0.05)


def main() -> None:
    import torch

    import weightplane.cli.main
    import weightplane.controlplane.server.app
    import weightplane.inference_agent.serve
    import weightplane.trainer_agent.publisher

    torch.set_num_threads(1)
    line = sys.stdin.readline()
    if not line:
        return
    order = json.loads(line)
    failpoints.set_hook(Armed(Path(sys.argv[1]), order["name"]))
    if os.environ.get("WEIGHTPLANE_TEST_IDLE"):
        threading.Thread(target=idle, daemon=True).start()
    argv = order["argv"]
    if argv[0] == "trainer":
        from tests.process import trainer

        trainer.main(argv[1:])
    elif argv[0] == "worker":
        from tests.process.remote import main as worker

        worker(argv[1:])
    else:
        weightplane.cli.main.app(argv, prog_name="weightplane")


if __name__ == "__main__":
    main()
