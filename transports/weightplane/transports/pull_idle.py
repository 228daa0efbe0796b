"""One thread of a process that hears what senders say while a receiver's data thread does nothing.

A sender that frees its memory between updates, or ends, says so on a connection that nobody reads then. Where readers
map the memory of others that matters: it is in use until the last mapping is gone.
"""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable

__all__ = ["IdleEar", "ear"]

log = logging.getLogger(__name__)

_EVENTS = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT


class IdleEar:
    """Calls back, once each time it was asked to, when a descriptor has something to read or has ended. Any thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._lock = threading.Lock()
        self._heard: dict[int, Callable[[], None]] = {}
        threading.Thread(target=self._run, name="weightplane-pull-idle", daemon=True).start()

    def listen(self, fd: int, heard: Callable[[], None]) -> None:
        """Call ``heard`` (short; from the ear's thread) at the next sign of life on ``fd``, present or to come."""
        with self._lock:
            if fd in self._heard:
                self._epoll.modify(fd, _EVENTS)
            else:
                self._epoll.register(fd, _EVENTS)
            self._heard[fd] = heard

    def forget(self, fd: int) -> None:
        """No more; before ``fd`` is closed."""
        with self._lock:
            if self._heard.pop(fd, None) is not None:
                self._epoll.unregister(fd)

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                with self._lock:
                    heard = self._heard.get(fd)
                try:
                    if heard is not None:
                        heard()
                except Exception:  # one channel's trouble is none of the others'
                    log.exception("what a sender said between updates could not be taken")


_ears: list[IdleEar] = []
_making = threading.Lock()


def ear() -> IdleEar:
    """The process's."""
    with _making:
        if not _ears:
            _ears.append(IdleEar())
        return _ears[0]
