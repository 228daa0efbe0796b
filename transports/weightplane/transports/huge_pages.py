"""Puts memory that is read over and over onto huge pages, in the background (Linux 6.1 and later).

A kernel that copies from another process looks up every page of the source: 4 KiB pages halve the speed (measured: 4.5
against 10 GiB/s, memcpy 11). ``MADV_COLLAPSE`` moves what lies there to 2 MiB pages while others go on using it. It
needs no setting of the machine, takes no more memory in the end, and where it fails nothing changes.
``WEIGHTPLANE_HUGE_PAGES=0`` turns it off.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Iterable
from typing import Final

__all__ = ["HUGE", "Collapser", "aligned"]

HUGE: Final = 2 << 20
_STEP: Final = 32 << 20  # bytes of one call; about 20 ms
_GAP: Final = 64 << 10  # memory of one mapping whose parts are this close is taken together
_MADV_COLLAPSE: Final = 25


def aligned(stretches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Whole huge pages inside ``(address, bytes)`` stretches, close ones taken together; steps of a few MiB."""
    joined: list[list[int]] = []
    for address, nbytes in sorted(stretches):
        if joined and address - joined[-1][1] <= _GAP:
            joined[-1][1] = max(joined[-1][1], address + nbytes)
        else:
            joined.append([address, address + nbytes])
    found = []
    for start, end in joined:
        start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
        found += [(at, min(_STEP, end - at)) for at in range(start, end, _STEP)]
    return found


class Collapser:
    """Works off stretches on a thread that lives while there are any. Any thread.

    The memory may be freed meanwhile: whatever then lies there is merely moved to huge pages too.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._off = os.environ.get("WEIGHTPLANE_HUGE_PAGES", "1") == "0"

    def add(self, stretches: Iterable[tuple[int, int]]) -> None:
        """Take ``(address, bytes)`` stretches of memory in use; returns at once."""
        with self._lock:
            if self._off:
                return
            self._queue.extend(aligned(stretches))
            if self._queue and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="weightplane-huge-pages", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Take no more, and wait (a moment) for the step that is under way."""
        with self._lock:
            self._off = True
            self._queue.clear()
            thread = self._thread
        if thread is not None:
            thread.join(2)

    def _run(self) -> None:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return
                address, nbytes = self._queue.popleft()
            madvise(address, nbytes, _MADV_COLLAPSE)  # an older kernel, or memory that cannot be moved: as it was
