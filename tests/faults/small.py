"""Disks and shared memory that are really full: small tmpfs mounts that only one fleet's processes see.

They lie in a mount namespace, which a process that waits for its standard input holds. ``prefix`` starts a command in
it; ``fill`` and ``free`` come from outside.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.process.harness import ROOT

__all__ = ["SmallDisks", "cannot"]

_FILLER = "filler"


@functools.cache
def cannot() -> str:
    """Why no tmpfs can be mounted here; empty if one can."""
    if missing := [c for c in ("unshare", "nsenter", "mount") if shutil.which(c) is None]:
        return f"there is no {', '.join(missing)} here"
    tried = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=1m", "wp", "/mnt"], capture_output=True, text=True
    )
    return "" if tried.returncode == 0 else f"no tmpfs can be mounted in a namespace: {tried.stderr.strip()}"


class SmallDisks:
    """``sizes``: by folder, which is there, the size of the mount in KiB. ``close`` it; it lasts while a process does
    that was started with ``prefix``."""

    def __init__(self, sizes: Mapping[Path, int]) -> None:
        mounts = [f"mount -t tmpfs -o size={kib}k,mode=0700 wp '{path}'" for path, kib in sizes.items()]
        self._holder = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", " && ".join([*mounts, "echo there", "exec cat"])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"there\n":
            self.close()
            raise OSError("the mounts could not be made")
        self.prefix = ("nsenter", "-t", str(self._holder.pid), "-m", "--wd")

    def outside(self, path: Path) -> Path:
        """The same file, as who is not in the namespace finds it."""
        return Path(f"/proc/{self._holder.pid}/root") / path.relative_to("/")

    def fill(self, folder: Path) -> None:
        """Until not a byte more can be written."""
        with (self.outside(folder) / _FILLER).open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as e:
                    if e.errno != errno.ENOSPC:
                        raise
        assert os.statvfs(self.outside(folder)).f_bavail == 0

    def free(self, folder: Path) -> None:
        """Undo ``fill``, however often it was called."""
        (self.outside(folder) / _FILLER).unlink(missing_ok=True)

    def settle(self, store: Path) -> None:
        """Empty a SQLite file's write-ahead log: what lies in it already may be written over without a free byte."""
        code = f"import sqlite3; print(*sqlite3.connect({str(store)!r}).execute('PRAGMA wal_checkpoint(TRUNCATE)'))"
        done = subprocess.run([*self.prefix, sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "(0, 0, 0)", f"the log could not be emptied: {done.stdout}{done.stderr}"

    def close(self) -> None:
        """Let the mounts go with the last process in them."""
        for pipe in (self._holder.stdin, self._holder.stdout):
            if pipe is not None:
                pipe.close()
        self._holder.wait(20)
