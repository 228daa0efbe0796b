"""Whether many tensors are still the memory that they were: what lets spans be found once and used again.

Who keeps spans keeps their memory alive, so it cannot have been freed and allocated anew meanwhile: a tensor that is
now at the same address is the same memory. What may have happened is ``param.data = new``, a module moved to another
device, a tensor replaced by another object: all of that shows in an address, a size or an order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch

__all__ = ["LiveSpans", "MemoryWatch"]

_Tensor: Any = torch.Tensor


class LiveSpans(list[torch.Tensor]):
    """A bucket's spans, all of them views of live memory that stays: this very list is handed out again.

    ``memory``: the same spans as buffers, where they lie on the host (filled in by who hashes them there).
    """

    __slots__ = ("memory",)

    def __init__(self, spans: Sequence[torch.Tensor]) -> None:
        super().__init__(spans)
        self.memory: list[memoryview] | None = None


class MemoryWatch:
    """Tells which of a list of tensors became other memory between two looks. One thread at a time.

    Meant for tensors whose memory somebody keeps between the looks (see the module's text). A tensor counts as the same
    while address, device, bytes and order (row-major or not; lazily conjugated or negated) are; its shape and dtype
    matter no further, and are what a manifest knows. About 0.2 µs a tensor.
    """

    def __init__(self) -> None:
        self.generation = 0  # rises whenever a look finds something else
        self.since: list[int] = []  # by index: the generation since which it is this memory
        self.device_kinds: frozenset[str] = frozenset()  # of the tensors last seen
        self._present: list[bool] = []
        self._states: list[list[Any]] = []
        self._odd: list[int] = []

    def look(self, tensors: Sequence[torch.Tensor | None]) -> int:
        """Compare with the last look. The generation is equal if and only if nothing is new."""
        present = [t is not None for t in tensors]
        held: list[Any] = list(tensors) if all(present) else list(compress(tensors, present))
        if present == self._present and _states(held, self._odd) == self._states:
            return self.generation
        self.generation += 1
        self.device_kinds = frozenset(t.device.type for t in held)
        # Only of these can row-major memory be lazily conjugated or negated.
        self._odd = [i for i, t in enumerate(held) if t.is_complex() or t.numel() == 1]
        before = _rows(self._present, self._states)
        self._present, self._states = present, _states(held, self._odd)
        now = _rows(self._present, self._states)
        old = [*self.since, *[0] * len(present)]
        before += [None] * (len(now) - len(before))
        self.since = [
            old[i] if row == was and old[i] else self.generation
            for i, (row, was) in enumerate(zip(now, before, strict=False))
        ]
        return self.generation


def _states(held: list[Any], odd: list[int]) -> list[list[Any]]:
    """A column for each thing that may change, of all tensors: made by C loops."""
    lazy: list[Any] = [None] * len(held)
    for i in odd:
        lazy[i] = (held[i].is_conj(), held[i].is_neg())
    return [
        list(map(_Tensor.data_ptr, held)),
        list(map(_Tensor.is_contiguous, held)),
        [t.nbytes for t in held],
        list(map(_Tensor.get_device, held)),  # two devices may use one address
        lazy,
    ]


def _rows(present: list[bool], states: list[list[Any]]) -> list[tuple[Any, ...] | None]:
    """The columns turned, by index; ``None`` where there is no tensor."""
    rows = zip(*states, strict=True)
    return [next(rows) if p else None for p in present]
