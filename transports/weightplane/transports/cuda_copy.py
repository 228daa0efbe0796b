"""Copies into one GPU's memory, prepared once and launched time after time on streams of their own.

``prepare`` makes parts of a bucket (tables on the device for the gather kernel, arrays for the copy engines; see
``gather_table``), ``launch`` queues one: no Python runs per tensor. One thread at a time; the device is made current.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .cuda_driver import Batch, Cuda
from .gather_table import Case, Copies, Rows, divide, parts, rows_of

__all__ = ["Card", "Flight", "Part"]

_STREAMS = 4  # copy engines that one link keeps busy


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What is queued at once: a kernel's table (and where it lies on the device), and a batch for each stream."""

    nbytes: int
    programs: int
    rows: Rows | None
    table: torch.Tensor | None
    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A part that was launched: complete once all its events have passed."""

    nbytes: int
    events: tuple[int, ...]


class Card:
    """Streams and events of ours on a device, made when first needed."""

    def __init__(self, cuda: Cuda, device: int) -> None:
        self.cuda, self.device = cuda, device
        self._streams: list[int] = []
        self._events: list[int] = []
        self._kernel = not cuda.gather_problem(device)

    def prepare(self, copies: Copies, *, colocated: bool, part_bytes: int = 0) -> list[Part]:
        """Parts of ``copies`` in order. ``colocated``: the source is this very device's memory."""
        case = Case(colocated, self.cuda.processors(self.device), self._kernel, self.cuda.batches)
        made = [self._part(c, case) for c in parts(copies, part_bytes or case.part_bytes)]
        self.cuda.settle_tables(self.device)  # our streams do not wait for the one that brought the tables
        return made

    def _part(self, copies: Copies, case: Case) -> Part:
        by_kernel, by_engine = divide(copies, case)
        rows = rows_of(by_kernel) if len(by_kernel) else None
        table = self.cuda.table(rows.columns, self.device) if rows is not None else None
        columns = [c.tolist() for c in (by_engine.target, by_engine.source, by_engine.nbytes)]
        n = min(_STREAMS, len(by_engine))
        batches = tuple(Batch(*(c[i::n] for c in columns)) for i in range(n))
        return Part(copies.total, case.programs, rows, table, batches)

    def launch(self, part: Part) -> Flight:
        """Queue a part; returns at once."""
        with self.cuda.on(self.device):
            while len(self._streams) < _STREAMS:
                self._streams.append(self.cuda.new_stream())
            used = list(self._streams[: len(part.batches)])
            copy = self.cuda.copy_batch if self.cuda.batches else self.cuda.copy_each
            for batch, stream in zip(part.batches, self._streams, strict=False):
                copy(batch, stream)
            if part.rows is not None and part.table is not None:
                # Always the same: side by side two parts end together, and then nothing is queued for a while.
                stream = self._streams[0]
                self.cuda.gather(self.device, part.table, part.rows, part.programs, stream)
                used.append(stream)
            return Flight(part.nbytes, tuple(self._record(s) for s in dict.fromkeys(used)))

    def _record(self, stream: int) -> int:
        event = self._events.pop() if self._events else self.cuda.new_event()
        self.cuda.record(event, stream)
        return event

    def done(self, flight: Flight) -> bool:
        """Whether its bytes are in place, visible to every stream."""
        return all(map(self.cuda.passed, flight.events))

    def recycle(self, flights: Sequence[Flight]) -> None:
        """Their events may be used again."""
        for flight in flights:
            self._events.extend(flight.events)

    def idle(self) -> bool:
        """Whether nothing of ours runs on the device."""
        with self.cuda.on(self.device):
            return all(map(self.cuda.idle, self._streams))

    def close(self) -> None:
        """Free streams and events."""
        with self.cuda.on(self.device):
            while self._events:
                self.cuda.drop_event(self._events.pop())
            while self._streams:
                self.cuda.drop_stream(self._streams.pop())
