"""Copies between byte spans and raw memory, cut anywhere: the inner loop of transports that move bytes by the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from time import monotonic

import torch

__all__ = ["Copier", "SpanCursor"]

_SMALL, _LARGE = 32 << 10, 4 << 20
_SLOW_S = 0.002
_free = ctypes.CDLL(None).memmove
_held = ctypes.PyDLL(None).memmove
for _f in (_free, _held):
    _f.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _f.restype = ctypes.c_void_p


class Copier:
    """``memmove`` that frees the GIL, unless a thread that computes in Python would then keep it for 5 ms a copy.

    Such a thread (an engine that generates while weights arrive) shows as a copy that takes far too long; the next few
    copies of up to 4 MiB (some 0.3 ms) then hold the GIL, and between them the interpreter shares it out fairly. Copies
    below 32 KiB always hold it. One thread.
    """

    __slots__ = ("_held_left",)

    def __init__(self) -> None:
        self._held_left = 0

    @property
    def contended(self) -> bool:
        """Whether giving the GIL up is dear just now."""
        return self._held_left > 0

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy between two addresses."""
        if nbytes < _SMALL:
            _held(target, source, nbytes)
        elif self._held_left and nbytes <= _LARGE:
            self._held_left -= 1
            _held(target, source, nbytes)
        else:
            start = monotonic()
            _free(target, source, nbytes)
            if monotonic() - start > _SLOW_S + nbytes / 1e9:
                self._held_left = 32


class SpanCursor:
    """A place in the bytes of ``spans``, which are contiguous 1-D uint8 CPU tensors and count as one buffer.

    Keeps the spans alive. One thread. ``ValueError`` for a span that is not such a tensor.
    """

    __slots__ = ("_copy", "_index", "_offset", "_parts", "_spans", "nbytes", "position")

    def __init__(self, spans: Sequence[torch.Tensor], copier: Copier | None = None) -> None:
        self._copy = (copier or Copier()).copy
        self._spans = spans
        self._parts: list[tuple[int, int]] = []
        self.nbytes = 0
        for i, span in enumerate(spans):
            if span.dtype != torch.uint8 or span.device.type != "cpu" or span.dim() != 1 or not span.is_contiguous():
                raise ValueError(
                    f"span {i}: expected contiguous 1-D uint8 on the CPU, found {span.dtype} {span.device}"
                )
            n = span.numel()
            if n:
                self._parts.append((span.data_ptr(), n))
                self.nbytes += n
        self._index = self._offset = self.position = 0

    def seek(self, position: int) -> None:
        """Go to a byte position, 0 to ``nbytes``."""
        self._index, self._offset, self.position = 0, position, position
        for end in accumulate(n for _, n in self._parts):
            if position < end:
                return
            self._index += 1
            self._offset = position - end

    def read(self, address: int, nbytes: int) -> None:
        """Copy the next ``nbytes`` of the spans to ``address``."""
        self._move(address, nbytes, False)

    def write(self, address: int, nbytes: int) -> None:
        """Copy ``nbytes`` from ``address`` into the spans."""
        self._move(address, nbytes, True)

    def _move(self, address: int, nbytes: int, into: bool) -> None:
        self.position += nbytes
        parts, index, offset, copy = self._parts, self._index, self._offset, self._copy
        while nbytes:
            pointer, size = parts[index]
            n = size - offset
            if n > nbytes:
                n = nbytes
            if into:
                copy(pointer + offset, address, n)
            else:
                copy(address, pointer + offset, n)
            address += n
            nbytes -= n
            offset += n
            if offset == size:
                index, offset = index + 1, 0
        self._index, self._offset = index, offset
