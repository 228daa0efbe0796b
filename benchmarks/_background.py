"""Processes that run only where nobody else wants a core, for what would run on other hosts."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["Background"]

_ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/cpu,cpuacct"), Path("/sys/fs/cgroup"))


class Background:
    """A control group with ``cpu.idle`` set, if one can be made here (it takes root): niceness counts only within a
    session where the kernel groups processes by session, and each heartbeat helper has a session of its own. Else
    ``take`` only lowers the class of the process itself. ``how`` says which."""

    def __init__(self, name: str) -> None:
        self._folder: Path | None = None
        self.how = "SCHED_IDLE"
        for root in _ROOTS:
            folder = root / f"weightplane-{name}-{os.getpid()}"
            try:
                folder.mkdir()
                self._folder = folder
                with (folder / "cpu.idle").open("r+") as file:  # not made: the root may be no control group at all
                    file.write("1")
            except OSError:
                self.close()
                continue
            self.how = "cgroup, cpu.idle"
            return

    def take(self, pid: int) -> None:
        """A process, and all that it starts from now on."""
        if self._folder is not None:
            (self._folder / "cgroup.procs").write_text(str(pid))
        else:
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))

    def close(self) -> None:
        """Once they have all ended; a helper outlives its agent by up to a second."""
        if self._folder is not None:
            procs, end = self._folder / "cgroup.procs", time.monotonic() + 5
            while procs.exists() and procs.read_text() and time.monotonic() < end:
                time.sleep(0.05)
            self._folder.rmdir()
        self._folder = None
