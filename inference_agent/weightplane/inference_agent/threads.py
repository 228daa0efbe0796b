"""Threads that can never keep a process from exiting: daemons, each with a queue, answering with futures."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

__all__ = ["WorkThread", "answer", "awaited", "detached"]

T = TypeVar("T")

_NOTICED_S = 0.25


class WorkThread:
    """Runs what it is given, in order. ``submit`` from any thread; ``stop`` lets it end after what is queued."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue ``work``; its future carries the result or what it raised."""
        future: Future[T] = Future()

        self._queue.put(partial(answer, future, work))
        return future

    def stop(self) -> None:
        """No more work. Does not wait."""
        self._queue.put(None)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # while it waits for more, it holds nothing of what was done


def answer(future: Future[T], work: Callable[[], T]) -> None:
    """Do ``work``; the future carries what it gave or raised."""
    try:
        result = work()
    except BaseException as e:
        future.set_exception(e)
    else:
        future.set_result(result)
    finally:
        del future, work  # an error holds the frames that it passed, and is held by the future: it would hold itself


def awaited(future: Future[T]) -> T:
    """``future.result()``, for a main thread that Ctrl-C is to end.

    A signal that comes after Python last looked for one, and before the wait in the kernel begins, does not wake that
    wait: it is noted, and acted upon only once Python runs again. So it runs again now and then.
    """
    while not future.done():
        wait((future,), _NOTICED_S)
    return future.result()


def detached(name: str, work: Callable[[], None]) -> None:
    """Run ``work`` on a daemon thread of its own."""
    threading.Thread(target=work, name=name, daemon=True).start()
