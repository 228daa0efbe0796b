"""A worker goes on by itself: the buckets after one that the agent ordered are received before they are ordered.

Orders come over a socket, one at a time; without this nothing is on the wire meanwhile. What came of a bucket is kept
for its order: that is who is told, of a failure too. For the data thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from weightplane.inference_agent.engines.base import EngineError
from weightplane.inference_agent.transfer import Worker

__all__ = ["AHEAD", "Run"]

log = logging.getLogger("weightplane.vllm")

AHEAD = 4  # buckets beyond the newest that was ordered: an order's way there and back is shorter


class Run:
    """What was armed, in its order. ``submit`` queues on the data thread, behind what else was asked of it;
    ``wanted`` says whether this run is still the one that is armed."""

    def __init__(
        self, worker: Worker, submit: Callable[[Callable[[], None]], object], wanted: Callable[[Run], bool]
    ) -> None:
        self._worker, self._submit, self._wanted = worker, submit, wanted
        self._buckets = tuple(worker.armed_buckets)
        self._at = {b.index: n for n, b in enumerate(self._buckets)}
        self._next = self._until = 0  # the next to receive, and the first that is not to be received yet
        self._failed: Exception | None = None
        self.going = False  # a bucket is received, or will be next, that nobody may have ordered. Any thread

    def order(self, index: int) -> list[int]:
        """Receive a bucket, unless it is there: the indices of those in place from it on. Raises what came of it."""
        at = self._at.get(index)
        if at is None or at > self._next:
            raise EngineError(f"bucket {index} is not armed here, or not the next: its order is out of turn")
        if at == self._next and self._failed is None:
            self._take()
        if at == self._next and self._failed is not None:
            raise self._failed
        self._until = min(at + 1 + AHEAD, len(self._buckets))
        self._go_on()
        return [b.index for b in self._buckets[at : self._next]]

    def _go_on(self) -> None:
        if not self.going and self._failed is None and self._next < self._until:
            self.going = True
            self._submit(self._step)

    def _step(self) -> None:
        try:
            if self._wanted(self) and self._failed is None and self._next < self._until:
                self._take()
                if self._failed is not None:  # its order tells; there may be none any more
                    at, e = self._buckets[self._next].index, self._failed
                    log.info("weightplane: bucket %d, ahead of its order: %s: %s", at, type(e).__name__, e)
        finally:
            self.going = False
        if self._wanted(self):
            self._go_on()

    def _take(self) -> None:
        try:
            if self._next + 1 < len(self._buckets):
                self._worker.ahead(self._buckets[self._next + 1])
            self._worker.take(self._buckets[self._next])
        except Exception as e:
            self._failed = e
        else:
            self._next += 1
