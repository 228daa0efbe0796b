"""Several requests at once, none of which keeps anybody waiting who no longer asks."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from weightplane.inference_agent.threads import detached

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
                _answer(future, work, item)

    for n in range(min(most, len(items))):
        detached(f"{name}-{n}", run)
    try:
        return [f.result() for f in futures]
    finally:
        for f in futures:
            f.cancel()


def _answer(future: Future[B], work: Callable[[A], B], item: A) -> None:
    try:
        result = work(item)
    except BaseException as e:
        future.set_exception(e)
    else:
        future.set_result(result)
    finally:
        del future, item  # an error holds the frames that it passed, and is held by the future: it would hold itself
