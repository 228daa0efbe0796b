"""Several requests at once, none of which keeps anybody waiting who no longer asks."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from weightplane.inference_agent.threads import answer, awaited, detached

__all__ = ["together"]

A = TypeVar("A")
B = TypeVar("B")


def together(work: Callable[[A], B], items: Sequence[A], most: int, name: str) -> list[B]:
    """``[work(i) for i in items]``, at most ``most`` of them at a time, on daemon threads ``name``.

    The first failure, in their order, is raised as soon as it is known, and none is begun after it. An executor would
    wait for those that run: an engine that hangs would hold a failure, a Ctrl-C and the process's end back.
    """
    futures: list[Future[B]] = [Future() for _ in items]
    jobs: queue.SimpleQueue[tuple[Future[B], A]] = queue.SimpleQueue()
    for job in zip(futures, items, strict=True):
        jobs.put(job)

    def run() -> None:
        while True:
            try:
                future, item = jobs.get_nowait()
            except queue.Empty:
                return
            if future.set_running_or_notify_cancel():
                answer(future, partial(work, item))

    for n in range(min(most, len(items))):
        detached(f"{name}-{n}", run)
    try:
        return [awaited(f) for f in futures]
    finally:
        for f in futures:
            f.cancel()
