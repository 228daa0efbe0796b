"""Who may open a store: whoever holds ``PATH-lock``, a file beside it, by flock. The lock dies with its process.

Never a lock on the SQLite file itself: closing any descriptor of that drops SQLite's own locks. What a process starts
does not inherit the lock (close-on-exec), and a fork lets go of it at once. The file names its holder, for people.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import weakref
from pathlib import Path

from .base import StoreError, StoreHeld

__all__ = ["StoreLock"]

log = logging.getLogger("weightplane.controlplane")

_MOST = 300  # bytes read of a holder's name
_held: weakref.WeakSet[StoreLock] = weakref.WeakSet()


class StoreLock:
    """Held from the moment it is made until ``release``, or the end of the process. Not thread-safe.

    Raises ``StoreHeld``, naming the holder, if another has it, and ``StoreError`` if it cannot be had at all.
    """

    def __init__(self, path: Path) -> None:
        self._path = Path(f"{os.path.realpath(path)}-lock")  # a link to a store is that store
        while True:
            try:
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as e:
                raise _refused(path, e) from e
            _held.add(self)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_there():
                    break
                self._close()  # the one before removed it as it ended
            except OSError as e:
                holder = self._holder()
                self._close()
                if e.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise StoreHeld(f"another control plane{holder} leads on this store") from e
                raise StoreError(
                    f"{path}: its file system has no locks ({e.strerror}), so two could lead: use a local disk"
                ) from e
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except OSError as e:
            log.warning("%s: cannot be written: others will not know who leads: %s", self._path, e)

    def release(self) -> None:
        """Let go, and remove the file if it is ours still. A repeat is no error."""
        if self._fd >= 0 and self._is_there():
            with contextlib.suppress(OSError):  # what stays does no harm: the next holder takes it
                self._path.unlink()
        self._close()

    def _is_there(self) -> bool:
        """Whether the file that we have open is the one that others find."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def _holder(self) -> str:
        text = os.pread(self._fd, _MOST, 0).decode("ascii", "replace").strip()
        return f" ({text})" if text and text.isprintable() else ""

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _refused(path: Path, e: OSError) -> StoreError:
    if e.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return StoreError(f"{path}: cannot be opened for writing ({e.strerror}): check its directory and permissions")
    what = "no space left on the disk" if e.errno == errno.ENOSPC else e.strerror or str(e)
    return StoreError(f"{path}: cannot be created: {what}. Its directory must exist and be ours to write")


def _forked() -> None:
    """In a child that was forked: its copies of the descriptors would keep the locks after the parent's end."""
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_forked)
