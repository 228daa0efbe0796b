"""Folders that agents leave behind when they are killed: removed by the next one that starts. Linux."""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import stat
from pathlib import Path

__all__ = ["PREFIX", "SOCKET", "sweep"]

log = logging.getLogger("weightplane.inference_agent")

PREFIX, SOCKET = "weightplane-", "agent.sock"
_OURS = re.compile(re.escape(PREFIX) + r"[a-z0-9_]{8}")  # as mkdtemp names them


def sweep(folder: Path, living: Path) -> list[str]:
    """Remove what dead agents of this user left in ``folder``; their names. ``living``: one whose socket is in use.

    A folder of another name, of another user, or with anything but a socket in it that nobody has open stays. What
    cannot be looked at or removed stays, too: it is in nobody's way.
    """
    if not _in_use(living):
        return []  # this system does not tell the living from the dead
    gone = []
    try:
        names = [n for n in os.listdir(folder) if _OURS.fullmatch(n) and n != living.name]
    except OSError as e:
        log.debug("%s was not looked at: %s", folder, e)
        return []
    for name in names:
        try:
            if _removed(folder / name):
                gone.append(name)
        except OSError as e:  # not ours, or somebody else removes it just now
            log.debug("%s stays: %s", folder / name, e)
    if gone:
        log.info("%d folder(s) of agents that were killed removed from %s", len(gone), folder)
    return gone


def _removed(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_uid != os.geteuid() or os.listdir(fd) != [SOCKET]:
            return False
        found = os.stat(SOCKET, dir_fd=fd, follow_symlinks=False)
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid() or _in_use(Path(f"/proc/self/fd/{fd}")):
            return False
        os.unlink(SOCKET, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(path)
    return True


def _in_use(folder: Path) -> bool:
    """Whether a process has its socket bound. A datagram asks: a stream socket answers that it is of another type,
    bound or listening, and its owner is not disturbed; only one that nobody has refuses.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(folder / SOCKET))
        except OSError as e:
            return e.errno != errno.ECONNREFUSED
    return True
