"""Where a process spends its time, by looking at all its threads many times a second: the profile beside a figure."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Sampler"]

_EVERY_S = 0.0005
_IDLE = 0.99  # a place seen in nearly all looks is a thread that has nothing to do


class Sampler:
    """``look`` around what is to be explained, as often as wanted; then ``table``."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self._looks = 0

    @contextmanager
    def look(self) -> Iterator[None]:
        """While inside, a thread looks at the others' stacks."""
        over = threading.Event()
        thread = threading.Thread(target=self._run, args=(over,), name="bench-sampler", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def table(self, rows: int = 25) -> list[str]:
        """The places most often seen since the last table: share of looks, thread, line. One that waits inside the
        standard library is shown with the line of ours that waits (``inner <- ours``)."""
        looks, seen = max(1, self._looks), self._seen.most_common(rows)
        self._seen, self._looks = Counter(), 0
        return [f"{n / looks:6.1%}  {where}" for where, n in seen if n / looks < _IDLE]

    def _run(self, over: threading.Event) -> None:
        me = threading.get_ident()
        while not over.is_set():
            names = {t.ident: t.name for t in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                if ident != me:
                    self._seen[f"{names.get(ident, '?')}: {_where(frame)}"] += 1
            self._looks += 1
            time.sleep(_EVERY_S)


def _where(frame: FrameType) -> str:
    """The innermost line, and the first of ours around it if that is the standard library's."""
    inner = _line(frame)
    at: FrameType | None = frame
    while at is not None and not ("weightplane" in at.f_code.co_filename or "benchmarks" in at.f_code.co_filename):
        at = at.f_back
    return inner if at is None or at is frame else f"{inner} <- {_line(at)}"


def _line(frame: FrameType) -> str:
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {name}"
