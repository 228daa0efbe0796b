"""Two copies through a ring of shared memory by themselves, as a limit: ``_bare_ring.c``, compiled when first needed.

It has the ``shm`` transport's slots and copies, and nothing else of it: what a ring can reach here at best.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks._process import TIMEOUT_S
from weightplane.transports.shm import SLOT_BYTES, SLOTS

__all__ = ["BareRing"]

_SOURCE = Path(__file__).with_suffix(".c")


class BareRing:
    """Both sides of it, in two processes of their own."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @staticmethod
    def missing() -> str:
        """Why it cannot be measured here; empty: it can."""
        return "" if shutil.which("cc") else "no C compiler (cc) is on the PATH"

    def run(self) -> dict[str, float]:
        """From memory of one process to memory of another; raises if it cannot be compiled or does not end well."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="weightplane-bench-")
            self._said("cc", "-O2", "-std=gnu11", "-o", self._program, str(_SOURCE))
        said = self._said(self._program, str(self._nbytes), str(SLOT_BYTES), str(SLOTS))
        start, end, cpu = map(float, said.split())
        return {"start": start, "end": end, "bytes": self._nbytes, "cpu": cpu}

    @property
    def _program(self) -> str:
        assert self._folder is not None
        return str(Path(self._folder.name) / "ring")

    @staticmethod
    def _said(*words: str) -> str:
        run = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if run.returncode:
            raise RuntimeError(f"{words[0]} ended with {run.returncode}: {run.stderr.strip()[:500]}")
        return run.stdout

    def close(self) -> None:
        """Remove the program."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
