"""Which host a member is on, as both agents say it: what decides whether a same-host transport can be tried."""

from __future__ import annotations

import os
import socket
from pathlib import Path

__all__ = ["host_id"]


def host_id() -> str:
    """Equal for two processes of one machine and one user that see one ``/dev/shm``, different otherwise.

    Two containers of one machine with a ``/dev/shm`` each count as two hosts. ``WEIGHTPLANE_HOST_ID`` overrides it.
    """
    given = os.environ.get("WEIGHTPLANE_HOST_ID", "")
    if given:
        return given
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = socket.gethostname()
    try:
        stat = os.stat(os.environ.get("WEIGHTPLANE_SHM_DIR", "/dev/shm"))
    except OSError:
        return machine
    return f"{machine}/{stat.st_dev:x}.{stat.st_ino:x}/{os.geteuid()}"
