"""Connecting a collective channel in a thread of its own, bounded by the armed deadline, ended by an abort."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from .base import TransportError
from .collective_abc import Communicator

__all__ = ["Connect", "Connection"]

log = logging.getLogger(__name__)

_GRACE_S = 1.0  # seconds after the deadline that its data thread has to say more of it

#: Connects, calling its argument every few milliseconds and letting what that raises pass; by sender.
Connect = Callable[[Callable[[], None]], Mapping[int, Communicator]]


class _Stopped(TransportError):
    """The connecting was given up from outside."""


class Connection:
    """A channel's communicators, by sender. Any thread."""

    def __init__(self, name: str, connect: Connect, live: Callable[[], None]) -> None:
        """``live`` is what communicators check in later calls."""
        self._name, self._connect, self._live = name, connect, live
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = False
        self.deadline = 0.0
        self.done = threading.Event()
        self.communicators: Mapping[int, Communicator] = {}
        self.error: BaseException | None = None

    def start(self, deadline: float) -> None:
        """Begin, unless it has begun; ``deadline`` may be put off later."""
        with self._lock:
            self.deadline = max(self.deadline, deadline)
            if self._thread is None and not self._stop:
                self._thread = threading.Thread(target=self._run, name=f"{self._name}-connect", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        try:
            made = self._connect(self._check)
            with self._lock:
                self.communicators = made
        except _Stopped as e:
            self.error = e
        except BaseException as e:
            self.error = e
            log.debug("%s: %s", self._name, e)
        self.done.set()

    def _check(self) -> None:
        if self._stop:
            raise _Stopped(f"{self._name}: given up while it connected")
        if self.done.is_set():
            self._live()
        elif time.monotonic() >= self.deadline + _GRACE_S:
            raise _Stopped(f"{self._name}: not everybody had come by the deadline")

    def abort(self) -> None:
        """End it all: the connecting, or every communicator (each in a thread, since they may wait for one another).

        Blocks until that is done; a thread that does not end is left behind.
        """
        with self._lock:
            self._stop = True
            thread = self._thread
        if thread is not None:
            thread.join()
        threads = [
            threading.Thread(target=_quietly, args=(c,), name=f"{self._name}-abort", daemon=True)
            for c in self.communicators.values()
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()


def _quietly(communicator: Communicator) -> None:
    try:
        communicator.abort()
    except Exception as e:
        log.warning("a communicator could not be aborted: %s: %s", type(e).__name__, e)
