"""Memory on a worker's card in which tensors land on their way to vLLM's loaders.

Transports remember the memory that they wrote to, and keep it: so tensors in place land in the same few pieces at each
update, and vLLM's thread takes a copy of each. Two pieces of a bucket's size are used in turn, and one more for tensors
that are larger than a bucket. For the data thread only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weightplane.controlplane.core.manifest import Manifest
from weightplane.inference_agent.receipts import WorkerPlan
from weightplane.transports.dtypes import dtype_of

from .stream import Stream

__all__ = ["Landing"]

_ALIGN = 256
_TURNS = 2
_LARGE = _TURNS  # the piece for tensors that come in several buckets


class Landing:
    """See the module text. One update at a time; ``begin`` with each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: dict[int, torch.Tensor] = {}
        self._sizes: dict[int, int] = {}
        self._turn = 0
        self._until: dict[int, int] = {}  # by piece: how many tensors must have been copied before it is used again
        self._large_open = -1

    def begin(self, share: WorkerPlan) -> None:
        """A new update, with a stream of its own: nothing of an earlier one is waited for."""
        plan, tensors = share.plan, share.manifest.tensors
        room = max((b.nbytes + _ALIGN * len(b.segments) for b in share.buckets), default=0)
        cut = {plan.regions[s.region].tensor for cuts in share.cuts.values() for s in cuts}
        self._sizes = {**dict.fromkeys(range(_TURNS), room), _LARGE: max((tensors[i].nbytes for i in cut), default=0)}
        self._until.clear()
        self._turn, self._large_open = 0, -1

    def place(
        self, manifest: Manifest, roots: Sequence[int], here: Mapping[int, int], stream: Stream
    ) -> dict[int, torch.Tensor]:
        """A tensor for each of ``roots``, which begin in one bucket. ``here``: how many of its bytes come in it."""
        whole = [i for i in roots if here[i] == manifest.tensors[i].nbytes]
        offsets, end = {}, 0
        for i in whole:
            offsets[i] = end
            end += -(-manifest.tensors[i].nbytes // _ALIGN) * _ALIGN
        found = {}
        if whole:
            self._turn = (self._turn + 1) % _TURNS
            piece = self._piece(self._turn, end, stream)
            for i in whole:
                found[i] = _cut(piece, offsets[i], manifest, i)
        for i in roots:
            if i in found:
                continue
            t = manifest.tensors[i]
            if self._large_open < 0:
                self._large_open = i
                found[i] = _cut(self._piece(_LARGE, t.nbytes, stream), 0, manifest, i)
            else:  # two at once
                found[i] = torch.empty(t.shape, dtype=dtype_of(t.dtype), device=self._device)
        return found

    def given(self, count: int, roots: Sequence[int]) -> None:
        """The tensors of ``roots``, whole now, are among the first ``count`` that the stream was given."""
        self._until[self._turn] = count
        if self._large_open in roots:
            self._until[_LARGE] = count
            self._large_open = -1

    def _piece(self, n: int, nbytes: int, stream: Stream) -> torch.Tensor:
        stream.wait_copied(self._until.get(n, 0))
        piece = self._pieces.get(n)
        if piece is None or piece.numel() < nbytes:
            self._pieces.pop(n, None)
            size = max(nbytes, self._sizes.get(n, 0))
            piece = self._pieces[n] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return piece


def _cut(piece: torch.Tensor, start: int, manifest: Manifest, i: int) -> torch.Tensor:
    t = manifest.tensors[i]
    return piece[start : start + t.nbytes].view(dtype_of(t.dtype)).view(t.shape)
