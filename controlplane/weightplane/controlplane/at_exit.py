"""Threads that hold a gRPC stream end before the interpreter does, also where nobody closed their owner.

As Python ends it stops threads that ask for its lock where they stand. One that stands in gRPC's C++ takes the process
with it ("terminate called without an active exception", status -6): a trainer that had done all its work would then
look as if it had crashed.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable

__all__ = ["end_at_exit"]

_known: list[tuple[int, weakref.WeakMethod[Callable[[], None]]]] = []
_lock = threading.Lock()


def end_at_exit(end: Callable[[], None]) -> None:
    """Call this bound method as the interpreter ends, if its object then lives: idempotent, bounded, and it joins its
    thread. Any thread. A forked child leaves the parent's alone."""
    with _lock:
        if not _known:
            atexit.register(_end)
        _known[:] = [(pid, method) for pid, method in _known if method() is not None]
        _known.append((os.getpid(), weakref.WeakMethod(end)))


def _end() -> None:
    with _lock:
        ends = [method() for pid, method in _known if pid == os.getpid()]
        _known.clear()
    for end in ends:
        if end is not None:
            end()
