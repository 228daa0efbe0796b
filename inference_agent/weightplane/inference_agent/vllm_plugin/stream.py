"""In place: tensors go from the wire to vLLM's loaders as they become whole. No copy of the model is staged.

The *data* thread receives buckets (``StreamWorker.take``) and gives each whole tensor to a ``Stream``; vLLM's *main*
thread sits in one call of ours, takes them from there and loads them. An abort from any thread ends both.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field

import torch

from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.placement import Box, full_box
from weightplane.controlplane.core.plan import Bucket
from weightplane.inference_agent.engines.base import EngineError
from weightplane.inference_agent.receipts import Ledger
from weightplane.inference_agent.transfer import Worker
from weightplane.transports.base import ChannelAborted
from weightplane.transports.buckets import SinkSpans
from weightplane.transports.digest import memory_of
from weightplane.transports.dtypes import dtype_of

__all__ = ["Stream", "StreamWorker", "loaded_names", "window_bytes"]

_WINDOW = 256 << 20

Named = tuple[str, torch.Tensor]


def window_bytes(manifest: Manifest, limit: int | None) -> int:
    """Bytes that may wait for vLLM's loaders. ``EngineError`` where ``limit`` is below the largest tensor."""
    largest = max(manifest, key=lambda t: t.nbytes)
    if limit is not None and largest.nbytes > limit:
        raise EngineError(
            f"tensor {largest.name!r} has {largest.nbytes} bytes and max_host_bytes is {limit}: in place each tensor "
            f"passes through host memory; raise the limit to at least its size",
            [largest.name],
        )
    return min(_WINDOW, limit or _WINDOW)


def loaded_names(manifest: Manifest, taken: Set[str]) -> Callable[[int], list[str]]:
    """By manifest index of a root: the names under which the loaders take its bytes."""
    names: dict[int, list[str]] = {}
    for i, t in enumerate(manifest):
        if t.name in taken:
            names.setdefault(manifest.root(i), []).append(t.name)
    return lambda i: names.get(i, [])


class Stream:
    """Whole tensors on their way to vLLM's loaders: one thread gives, one takes. ``abort`` from any thread.

    ``window``: bytes that may wait here; who gives more waits, a single larger tensor passes alone. ``device``: the
    model's. A tensor given is complete there for every stream; its memory comes back once the takers' stream read it.
    """

    def __init__(self, window: int, device: torch.device | None = None) -> None:
        self.window, self.device = window, device or torch.device("cpu")
        self.lies_on = torch.device("cpu")
        self.taken = 0  # tensors that the loaders were given: from the first on, live memory may hold a mix
        self.deadline = float("inf")
        self._cond = threading.Condition()
        self._queue: deque[Named] = deque()
        self._waiting = 0
        self._entered = self._ended = self._over = False
        self._why = ""

    # --- who gives

    def waits_on(self, device: torch.device) -> None:
        """Where tensors are made: memory that the channel can write."""
        self.lies_on = device

    def wait_entered(self, timeout: float) -> None:
        """Until vLLM's main thread is here. ``EngineError`` if it does not come."""
        with self._cond:
            if not self._cond.wait_for(lambda: self._entered or self._why, timeout):
                raise EngineError(f"vLLM did not begin to load within {timeout:.1f} s: did it pass the call on?")
            if self._why:
                raise ChannelAborted(self._why)

    def give(self, name: str, tensor: torch.Tensor) -> None:
        """Hand over a tensor; waits while the loaders are behind. Raises why nobody takes it any more."""
        size = tensor.numel() * tensor.element_size()
        with self._cond:
            while self._waiting and self._waiting + size > self.window and not (self._why or self._over):
                left = self.deadline - time.monotonic()
                if left <= 0:
                    raise EngineError(f"vLLM's loaders did not take {name!r} before the deadline", [name])
                self._cond.wait(min(left, 3600.0))
            if self._why:
                raise ChannelAborted(self._why)
            if self._over:
                raise EngineError(f"vLLM's loaders take nothing more; {name!r} was given too late", [name])
            self._queue.append((name, tensor))
            self._waiting += size
            self._cond.notify_all()

    def end(self) -> None:
        """Everything was given."""
        with self._cond:
            self._ended = True
            self._cond.notify_all()

    def wait_over(self, timeout: float) -> bool:
        """Until vLLM's main thread has left, if it ever came."""
        with self._cond:
            return self._cond.wait_for(lambda: self._over or not self._entered, timeout)

    # --- any thread

    @property
    def entered(self) -> bool:
        """Whether vLLM's main thread came."""
        return self._entered

    def abort(self, reason: str) -> None:
        """Let both sides leave. The first reason stays."""
        with self._cond:
            self._why = self._why or reason
            self._cond.notify_all()

    # --- vLLM's main thread

    def enter(self) -> bool:
        """Begin to take; False if it was aborted before."""
        with self._cond:
            if self._why:
                return False
            self._entered = True
            self._cond.notify_all()
            return True

    def leave(self) -> None:
        """Nothing is taken any more, and the model is whole or restored."""
        with self._cond:
            self._over = True
            self._queue.clear()
            self._cond.notify_all()

    def __iter__(self) -> Iterator[Named]:
        """What is given, until ``end``. Raises ``ChannelAborted``; at the deadline too, whoever is stuck."""
        while True:
            with self._cond:
                while not (self._queue or self._ended or self._why):
                    left = self.deadline - time.monotonic()
                    if left <= 0:
                        self._why = "the deadline of the update passed while weights were awaited"
                        break
                    self._cond.wait(min(left, 3600.0))
                if self._why:
                    raise ChannelAborted(self._why)
                if not self._queue:
                    return
                name, tensor = self._queue.popleft()
                self._waiting -= tensor.numel() * tensor.element_size()
                self.taken += 1
                self._cond.notify_all()
            if tensor.is_cuda:  # made on the giver's stream: not used again before this one is done with it
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
            yield name, tensor


@dataclass
class StreamWorker(Worker):
    """Receives into memory that is made as tensors begin and let go of as they were handed on."""

    ledger: Ledger
    stream: Stream
    names: Callable[[int], list[str]]  # by manifest index of a root: what the loaders take of its bytes
    _open: dict[int, tuple[torch.Tensor, Box]] = field(default_factory=dict, kw_only=True)
    _left: dict[int, int] = field(default_factory=dict, kw_only=True)

    def take(self, bucket: Bucket) -> None:
        """See ``Worker``."""
        plan, manifest = self.share.plan, self.share.manifest
        roots = list(dict.fromkeys(plan.regions[s.region].tensor for s in bucket.segments))
        for i in roots:
            if i not in self._open:
                t = manifest.tensors[i]
                tensor = torch.empty(t.shape, dtype=dtype_of(t.dtype), device=self.stream.lies_on)
                self._open[i] = (tensor, full_box(t.shape))
                self._left[i] = tensor.numel() * tensor.element_size()
        sink = SinkSpans(plan, manifest, self.member, self._open)
        spans = sink.spans(bucket)
        self.channel.receive(bucket, spans)
        sink.complete(bucket)
        self.ledger.feed(bucket, spans, [memory_of(s) if s.device.type == "cpu" else None for s in spans])
        for s in bucket.segments:
            self._left[plan.regions[s.region].tensor] -= s.nbytes
        for i in roots:
            if not self._left[i]:
                tensor, _ = self._open.pop(i)
                del self._left[i]
                for name in self.names(i):
                    self.stream.give(name, tensor)

    def finish(self) -> None:
        """Everything came: tensors without elements were in no bucket."""
        for i, t in enumerate(self.share.manifest):
            if 0 in t.shape and self.share.manifest.root(i) == i:
                for name in self.names(i):
                    self.stream.give(name, torch.empty(t.shape, dtype=dtype_of(t.dtype), device=self.stream.lies_on))
        self.stream.end()

    def missing(self) -> list[str]:
        """See ``Worker``."""
        return self.ledger.missing()

    def elements(self) -> int:
        """See ``Worker``."""
        return self.ledger.elements

    def packed(self) -> list[int]:
        """See ``Worker``."""
        return list(self.ledger.packed())
