"""A bucket's steps over a member's own spans: which tensors go on the wire, and which copies pack or unpack them.

Made once for a list of spans and replayed as long as that very list comes again. Where a member's spans do not hold a
large stretch in one piece, it lends the wire a buffer of its own for it: the others need not know.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from weightplane.controlplane.core.plan import Bucket

from .base import TransportError
from .collective_lanes import Lanes, Slot, Table
from .collective_layout import Packed, Part, Step
from .gather_table import cut

__all__ = ["Program", "Work"]

_Stretches = list[tuple[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One step of one bucket at one member.

    ``tensors`` go on the wire. ``tables`` are copied before (sender) or after it (receiver). ``slot``: the packed
    buffer it uses, if any. ``payload``: its bytes of the bucket.
    """

    tensors: tuple[torch.Tensor, ...]
    tables: tuple[Table, ...]
    slot: Slot | None
    payload: int


class Program:
    """A bucket's work. ``sends``: spans are read, else filled."""

    def __init__(
        self, bucket: Bucket, steps: Sequence[Step], spans: Sequence[torch.Tensor], lanes: Lanes, *, sends: bool
    ) -> None:
        self.bucket, self.spans = bucket, spans
        self._steps, self._lanes, self._sends = steps, lanes, sends
        self._starts = _starts(bucket, spans, lanes.device)
        self._work: dict[tuple[int, Slot | None], Work] = {}

    def work(self, n: int, slot: Slot | None) -> Work:
        """The ``n``-th step's, in that packed buffer (``None`` for a step that is not packed)."""
        known = self._work.get((n, slot))
        if known is None:
            step = self._steps[n]
            if isinstance(step, Packed):
                assert slot is not None
                known = self._packed(step, slot)
            else:
                known = self._large(step.parts)
            self._work[n, slot] = known
        return known

    def _packed(self, step: Packed, slot: Slot) -> Work:
        base = slot.buffer.data_ptr()
        mine = [s for p in step.parts for s in self._stretches(p)]
        table = self._table(mine, [(base + p.at, p.nbytes) for p in step.parts])
        return Work((slot.buffer[: step.nbytes],), (table,), slot, step.payload)

    def _large(self, parts: Sequence[Part]) -> Work:
        tensors: list[torch.Tensor] = []
        tables: list[Table] = []
        for part in parts:
            tensor = self._piece(part)
            if tensor is None:
                tensor = self._lanes.scratch(part.nbytes)
                tables.append(self._table(self._stretches(part), [(tensor.data_ptr(), part.nbytes)]))
            tensors.append(tensor)
        return Work(tuple(tensors), tuple(tables), None, sum(p.nbytes for p in parts))

    def _table(self, mine: _Stretches, wire: _Stretches) -> Table:
        return self._lanes.table(cut(mine, wire) if self._sends else cut(wire, mine))

    def _piece(self, part: Part) -> torch.Tensor | None:
        """The stretch as one view of one span, if it is one."""
        n = bisect_right(self._starts, part.offset) - 1
        begin = part.offset - self._starts[n]
        span = self.spans[n]
        return span[begin : begin + part.nbytes] if begin + part.nbytes <= span.numel() else None

    def _stretches(self, part: Part) -> _Stretches:
        """Where the stretch lies: (address, bytes), in order."""
        n = bisect_right(self._starts, part.offset) - 1
        begin, left = part.offset - self._starts[n], part.nbytes
        found: _Stretches = []
        while left:
            span = self.spans[n]
            size = min(left, span.numel() - begin)
            if size:
                found.append((span.data_ptr() + begin, size))
            left -= size
            n, begin = n + 1, 0
        return found


def _starts(bucket: Bucket, spans: Sequence[torch.Tensor], device: torch.device) -> list[int]:
    """Where each span begins in the bucket. ``TransportError`` names one that cannot be used."""
    for i, span in enumerate(spans):
        if span.dtype != torch.uint8 or span.dim() != 1 or not span.is_contiguous() or span.device != device:
            text = f"bucket {bucket.index}, span {i}: expected contiguous 1-D uint8 on {device}, found {span.dtype} "
            raise TransportError(f"{text}{list(span.shape)} on {span.device}", bucket=bucket.index)
    starts = [0, *accumulate(s.numel() for s in spans)]
    if starts.pop() != bucket.nbytes:
        found = sum(s.numel() for s in spans)
        raise TransportError(f"bucket {bucket.index} has {bucket.nbytes} bytes, its spans {found}", bucket=bucket.index)
    return starts
