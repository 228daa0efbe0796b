"""Device memory for transports that read the host's alone: copied to reused slots of pinned memory, ahead of the wire.

A copy runs on a stream of ours; ``begin`` queues it and ``take`` waits for it, so that a lane which begins the next
bucket before it sends this one has the two overlap. One thread at a time: the lane's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from weightplane.controlplane.core.plan import Bucket

__all__ = ["Mirror"]


class _Copy:
    """One bucket on its way: its slot, and on each device the events before and after (none on the CPU)."""

    __slots__ = ("events", "seconds", "slot")

    def __init__(self, slot: torch.Tensor) -> None:
        self.slot = slot
        self.events: list[tuple[Any, Any]] = []
        self.seconds = 0.0


class Mirror:
    """``slots`` blocks of host memory of ``slot_bytes``, made when first used, taken in turn.

    A bucket's host bytes stay as they are until ``slots - 1`` further buckets were begun.
    """

    def __init__(self, slot_bytes: int, slots: int) -> None:
        self.slot_bytes, self.slots = slot_bytes, slots
        self.seconds = 0.0  # that copies took, by the devices' own clocks
        self.nbytes = 0
        self._slots: list[torch.Tensor] = []
        self._next = 0
        self._begun: dict[int, _Copy] = {}
        self._streams: dict[torch.device, Any] = {}

    def reset(self) -> None:
        """A new update: nothing is begun, nothing counted. Waits for copies that nobody took."""
        for copy in self._begun.values():
            self._wait(copy)
        self._begun.clear()
        self.seconds, self.nbytes = 0.0, 0

    def begin(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        """Queue the copy of a bucket's spans, which are complete and must stay as they are until ``take``."""
        if bucket.index in self._begun:
            return
        if len(self._slots) < self.slots:
            self._slots.append(torch.empty(self.slot_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
        copy = self._begun[bucket.index] = _Copy(self._slots[self._next])
        self._next = (self._next + 1) % self.slots
        parts: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        at = 0
        for span in spans:
            parts.setdefault(span.device, []).append((copy.slot[at : at + span.numel()], span))
            at += span.numel()
        for device, pairs in parts.items():
            if device.type == "cuda":
                self._on_device(copy, device, pairs)
            else:
                start = time.monotonic()
                for target, span in pairs:
                    target.copy_(span)
                copy.seconds += time.monotonic() - start

    def _on_device(self, copy: _Copy, device: torch.device, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.device(device), torch.cuda.stream(stream):
            before.record(stream)
            for target, span in pairs:
                target.copy_(span, non_blocking=True)
            after.record(stream)
        copy.events.append((before, after))

    def take(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The bucket's bytes on the host, a span for each of ``spans``; begins the copy if nobody did. Waits for it."""
        self.begin(bucket, spans)
        copy = self._begun.pop(bucket.index)
        self._wait(copy)
        self.nbytes += bucket.nbytes
        return list(torch.split(copy.slot[: bucket.nbytes], [s.numel() for s in spans]))

    def _wait(self, copy: _Copy) -> None:
        for before, after in copy.events:
            after.synchronize()
            copy.seconds += before.elapsed_time(after) / 1e3
        self.seconds += copy.seconds
