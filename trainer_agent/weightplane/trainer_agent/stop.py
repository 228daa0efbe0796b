"""One publish's reason to stop, and the one condition on which everything in it waits.

Whoever learns that the publish is over (the watch stream, a sending thread, Ctrl-C, ``close``) calls ``set``; every
wait in it ends at once. Any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Stop", "Stopped"]

_SLICE = 1.0  # seconds: bounds what a lost wake-up could cost


class Stopped(Exception):
    """Raised in a helper thread when its publish is over; the reason is in ``Stop.error``."""


class Stop:
    """See the module's text. The first reason given stays."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[BaseException], object]] = []

    @property
    def error(self) -> BaseException | None:
        """The reason; ``None`` while nothing is wrong."""
        return self._error

    def set(self, error: BaseException) -> bool:
        """Give the reason; False if there is one. Runs the callbacks in this thread, outside the lock."""
        with self._condition:
            if self._error is not None:
                return False
            self._error = error
            callbacks = list(self._callbacks)
            self._condition.notify_all()
        for callback in callbacks:
            callback(error)
        return True

    def on_set(self, callback: Callable[[BaseException], object]) -> None:
        """Call this when a reason is given; now, if there is one."""
        with self._condition:
            error = self._error
            if error is None:
                self._callbacks.append(callback)
        if error is not None:
            callback(error)

    def over(self) -> None:
        """Nothing is left to be stopped: forget who wanted to know of it, and what they hold."""
        with self._condition:
            self._callbacks.clear()

    def poke(self) -> None:
        """Something that a ``wait`` looks at has changed."""
        with self._condition:
            self._condition.notify_all()

    def check(self) -> None:
        """Raise the reason, if there is one."""
        if self._error is not None:
            raise self._error

    def wait(self, ready: Callable[[], bool], deadline: float) -> bool:
        """Wait until ``ready()`` (True), a reason (raised), or ``deadline`` (monotonic; False).

        ``ready`` runs under the lock: keep it short. What it reads is changed before ``poke``.
        """
        with self._condition:
            while True:
                if self._error is not None:
                    raise self._error
                if ready():
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._condition.wait(min(left, _SLICE))
