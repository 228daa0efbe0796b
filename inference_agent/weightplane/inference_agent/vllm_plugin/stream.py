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
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from .landing import Landing

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

    ``window``: bytes that may wait here; who gives more waits, a single larger tensor passes alone. With ``copies``
    who takes gets a copy of each tensor, made on its thread: ``wait_copied`` says when the giver has its memory back;
    there is no window then.
    """

    def __init__(self, window: int) -> None:
        self.window, self.copies = window, False
        self.given = self.copied = 0
        self._read: Any = None  # recorded after the newest copy, where copies are made by a card
        self.taken = 0  # tensors that the loaders were given: from the first on, live memory may hold a mix
        self.deadline = float("inf")
        self._cond = threading.Condition()
        self._queue: deque[Named] = deque()
        self._waiting = 0
        self._entered = self._ended = self._over = False
        self._why = ""

    # --- who gives

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
            while self._is_full(size) and not (self._why or self._over):
                left = self.deadline - time.monotonic()
                if left <= 0:
                    raise EngineError(f"vLLM's loaders did not take {name!r} before the deadline", [name])
                self._cond.wait(min(left, 3600.0))
            if self._why:
                raise ChannelAborted(self._why)
            if self._over:
                raise EngineError(f"vLLM's loaders take nothing more; {name!r} was given too late", [name])
            self._queue.append((name, tensor))
            self.given += 1
            self._waiting += size
            self._cond.notify_all()

    def _is_full(self, size: int) -> bool:
        return bool(self._waiting) and self._waiting + size > self.window and not self.copies

    def wait_copied(self, count: int) -> None:
        """Until the first ``count`` tensors given were copied, on the card too. Raises why that does not come."""
        with self._cond:
            while self.copied < count and not (self._why or self._over):
                left = self.deadline - time.monotonic()
                if left <= 0:
                    raise EngineError("vLLM's loaders did not take what was received before the deadline")
                self._cond.wait(min(left, 3600.0))
            if self._why:
                raise ChannelAborted(self._why)
            read = self._read
        if count and read is not None:
            read.synchronize()

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
            if self.copies:
                tensor = self._copy(tensor)
            yield name, tensor

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.clone()
        read = torch.cuda.Event() if tensor.is_cuda else None  # type: ignore[no-untyped-call]
        if read is not None:
            read.record(torch.cuda.current_stream(tensor.device))
        with self._cond:
            self.copied += 1
            self._read = read
            self._cond.notify_all()
        return made


@dataclass
class StreamWorker(Worker):
    """Receives into memory that is made as tensors begin and let go of as they were handed on."""

    ledger: Ledger
    stream: Stream
    names: Callable[[int], list[str]]  # by manifest index of a root: what the loaders take of its bytes
    landing: Landing | None = field(default=None, kw_only=True)  # where tensors are made; else in fresh host memory
    #: The ledger hashes all, and of these regions the receipt tells (None: of all; empty: it has no digests).
    asked: frozenset[int] | None = field(default=None, kw_only=True)
    _open: dict[int, tuple[torch.Tensor, Box]] = field(default_factory=dict, kw_only=True)
    _left: dict[int, int] = field(default_factory=dict, kw_only=True)

    def take(self, bucket: Bucket) -> None:
        """See ``Worker``."""
        plan, manifest = self.share.plan, self.share.manifest
        roots = list(dict.fromkeys(plan.regions[s.region].tensor for s in bucket.segments))
        begin = [i for i in roots if i not in self._open]
        made = self._make(bucket, begin)
        for i in begin:
            self._open[i] = (made[i], full_box(manifest.tensors[i].shape))
            self._left[i] = manifest.tensors[i].nbytes
        sink = SinkSpans(plan, manifest, self.member, self._open)
        spans = sink.spans(bucket)
        self.channel.receive(bucket, spans)
        sink.complete(bucket)
        self.ledger.feed(bucket, spans, [memory_of(s) if s.device.type == "cpu" else None for s in spans])
        for s in bucket.segments:
            self._left[plan.regions[s.region].tensor] -= s.nbytes
        whole = [i for i in roots if not self._left[i]]
        for i in whole:
            tensor, _ = self._open.pop(i)
            del self._left[i]
            for name in self.names(i):
                self.stream.give(name, tensor)
        if self.landing is not None:
            self.landing.given(self.stream.given, whole)

    def _make(self, bucket: Bucket, begin: list[int]) -> dict[int, torch.Tensor]:
        plan, manifest = self.share.plan, self.share.manifest
        if self.landing is None:
            tensors = manifest.tensors
            return {i: torch.empty(tensors[i].shape, dtype=dtype_of(tensors[i].dtype)) for i in begin}
        here = dict.fromkeys(begin, 0)
        for s in bucket.segments:
            i = plan.regions[s.region].tensor
            if i in here:
                here[i] += s.nbytes
        return self.landing.place(manifest, begin, here, self.stream)

    def finish(self) -> None:
        """Everything came: tensors without elements were in no bucket."""
        for i, t in enumerate(self.share.manifest):
            if 0 in t.shape and self.share.manifest.root(i) == i:
                for name in self.names(i):
                    self.stream.give(name, torch.empty(t.shape, dtype=dtype_of(t.dtype)))
        self.stream.end()

    def missing(self) -> list[str]:
        """See ``Worker``."""
        return self.ledger.missing()

    def elements(self) -> int:
        """See ``Worker``."""
        return self.ledger.elements

    def packed(self) -> list[int]:
        """See ``Worker``."""
        found = list(self.ledger.packed())
        if self.asked is None or not self.asked:
            return found if self.asked is None else []
        return [digest if r in self.asked else 0 for r, digest in zip(self.share.regions, found, strict=True)]
