"""Waiting for a GPU by looking: rarely while the end is far, often when it is near, never with the GIL held."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

__all__ = ["Pace"]

_CHECK_S: Final = 0.002  # seconds between two calls of ``check``
_NEAR_S: Final = 0.0001  # before the expected end, and a while after it: look all the time
_LATE_S: Final = 0.0005
_FIRST: Final = 5e-13  # seconds a byte until more is known: looking too early costs little


class Pace:
    """How long copies take, learnt from those before. One thread.

    A sleep or a call of the driver gives the GIL away; in a process whose other threads compute in Python it comes back
    up to 5 ms later. So the first sleep is as long as the copy is expected to take.
    """

    def __init__(self) -> None:
        self._seconds_a_byte = _FIRST

    @property
    def rate(self) -> float:
        """Bytes a second, as far as is known."""
        return 1 / self._seconds_a_byte

    def until(self, done: Callable[[], bool], nbytes: float, check: Callable[[], None]) -> None:
        """Return once ``done()``. ``nbytes`` of copying are waited for (0: for something else).

        ``check`` is called every few milliseconds and may raise.
        """
        start = looked = time.monotonic()
        end = start + nbytes * self._seconds_a_byte
        first = True
        while not done():
            first = False
            now = time.monotonic()
            if now - looked >= _CHECK_S:
                looked = now
                check()
            left = end - now
            if left > _NEAR_S:
                time.sleep(min(left - _NEAR_S, _CHECK_S))
            elif left > -_LATE_S:
                time.sleep(0)
            else:
                time.sleep(min(-left / 32, 0.001))
        if nbytes and not first:  # it was not there at once: this is what it took
            took = max(time.monotonic() - start, 1e-6)
            self._seconds_a_byte += (took / nbytes - self._seconds_a_byte) / 4
