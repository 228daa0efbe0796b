"""Waiting for a GPU by looking: rarely while the end is far, often when it is near, never with the GIL held."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

__all__ = ["Pace"]

_CHECK_S: Final = 0.0003  # seconds between two calls of ``check``: it may begin the next bucket
_SLEEP_S: Final = 0.0005  # at once
_EARLY: Final = 0.75  # of the time that it is expected to take: until then sleep, afterwards look all the time
_NEAR_S: Final = 0.0001  # no sleep is shorter
_LATE_S: Final = 0.0005  # later than that: look less often
_FIRST: Final = 5e-13  # seconds a byte until more is known: looking too early costs little


class Pace:
    """How long copies take, learnt from those before. One thread.

    Every sleep and every look gives the GIL away; where other threads compute in Python it comes back up to 5 ms later.
    So most of the time that a copy is expected to take passes in few sleeps.
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
        expected = nbytes * self._seconds_a_byte
        early = start + _EARLY * expected  # a sleep that lasts too long teaches nothing: so never all of it
        busy = 0.0  # seconds for which it was surely not done
        while not done():
            now = time.monotonic()
            busy = now - start
            if now - looked >= _CHECK_S:
                looked = now
                check()
            left = early - now
            if left > _NEAR_S:
                time.sleep(min(left, _SLEEP_S))
            elif busy < 2 * expected + _LATE_S:
                time.sleep(0)
            else:
                time.sleep(min(busy / 32, 0.001))
        if nbytes:
            self._seconds_a_byte += (max(busy, 1e-6) / nbytes - self._seconds_a_byte) / 4
