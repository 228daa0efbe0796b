"""Every process that these tests start: it warms up, waits on standard input for what to be, and lets the test arm it.

``python -m tests.process.launch ARMED``: the first line of standard input is ``{"name": ..., "argv": [...]}``; argv is
a command line of ``weightplane``, or ``trainer ...``. Failpoints are armed while it runs: ``ARMED/<name>.arm`` holds
``{"point", "nth", "action"}``; the action is ``kill`` (SIGKILL itself), ``kill:PID`` (another process), ``stop``
(SIGSTOP itself) or ``raise``.
The file becomes ``<name>.fired`` when it strikes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

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
            if self._count != rule["nth"]:
                return
            self._rule.replace(self._fired)
        verb, _, pid = rule["action"].partition(":")
        if verb in ("kill", "stop"):
            os.kill(int(pid) if pid else os.getpid(), signal.SIGKILL if verb == "kill" else signal.SIGSTOP)
        else:
            raise failpoints.FailpointError(f"{point}, armed by the test")


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
