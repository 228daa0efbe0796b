"""The way past vLLM's loaders: what was recorded of them, as copies from a checkpoint's tensors into live memory.

A ``DirectMap`` is made where every copy was understood (``recording``) and every layer is known to compute from the
tensors that the loaders fill and from nothing made of them (``unfit``). It is trusted once live memory, loaded by vLLM,
was found to be what it says, bit by bit (``worker``: the first full load of a manifest).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.placement import full_box
from weightplane.inference_agent.engines.base import LocalTensors
from weightplane.inference_agent.engines.live import Copies
from weightplane.transports.dtypes import dtype_of, int_view

from .recording import CopyRecorder, Key, Place

__all__ = ["DirectMap", "Indirect", "direct_map"]

log = logging.getLogger("weightplane.vllm")

_PIECE = 64 << 20  # bytes compared at a time


class Indirect(Exception):
    """Why a manifest goes through vLLM's loaders."""


@dataclass(eq=False)
class DirectMap:
    """See the module text. ``elements``: how many it writes. ``in_place_refusal``: why it serves staged updates only.

    ``live``: by manifest index, the live memory of each tensor that goes whole to one place.
    """

    copies: list[tuple[str, int, Place, torch.Tensor]]  # name, manifest index, view of it, live memory
    fills: list[tuple[Key, float, torch.Tensor]]
    homes: list[tuple[nn.Module, Key, torch.Tensor, int]]  # who holds each live tensor, and where it lies
    live: LocalTensors
    in_place_refusal: str
    elements: int
    proven: bool = False
    _ready: tuple[Any, Copies] | None = field(default=None, repr=False)

    def moved(self) -> str:
        """Which live tensor is another, or elsewhere, than when the map was made. Empty: none."""
        for module, key, tensor, at in self.homes:
            if module._parameters.get(key[1]) is not tensor or tensor.data_ptr() != at:
                return ".".join(key)
        return ""

    def copies_from(self, slot: LocalTensors) -> Copies:
        """What an apply from ``slot`` takes; made once for the same slot."""
        if self._ready is None or self._ready[0] is not slot:
            pairs = [(to, place.of(slot[i][0])) for _, i, place, to in self.copies]
            self._ready = (slot, Copies(pairs))
        return self._ready[1]

    def forget_slot(self) -> None:
        """The slot is let go of."""
        self._ready = None

    def differs(self, slot: LocalTensors) -> list[str]:
        """Names whose bits in live memory are not those in ``slot``, and padding that is not as it was filled."""
        wrong = [name for name, i, place, to in self.copies if _differ(place.of(slot[i][0]), to)]
        return [*dict.fromkeys(wrong), *self.unfilled()]

    def fill(self) -> None:
        """Padding as the loaders leave it: a deep sleep may have taken it."""
        with torch.no_grad():
            for _, value, view in self.fills:
                view.fill_(value)

    def unfilled(self) -> list[str]:
        """Padding that is not as the loaders filled it."""
        return [f"{'.'.join(key)} (padding)" for key, value, view in self.fills if not bool((view == value).all())]

    @property
    def cut(self) -> set[str]:
        """Names of which ``live`` has no whole."""
        return {name for name, i, _, _ in self.copies if i not in self.live}


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = int_view(a), int_view(b)
    if not a.dim() or a.numel() * a.element_size() <= _PIECE:
        return not torch.equal(a, b)
    rows = max(1, _PIECE // max(1, a[0].numel() * a.element_size()))
    return any(not torch.equal(a[i : i + rows], b[i : i + rows]) for i in range(0, a.shape[0], rows))


def direct_map(
    model: nn.Module, manifest: Manifest, seen: CopyRecorder, device: torch.device, expected: Mapping[Key, int]
) -> DirectMap:
    """Make it of what a survey saw; ``model`` is live again. ``expected``: elements by target. Raises ``Indirect``."""
    if seen.problem:
        raise Indirect(seen.problem)
    modules = dict(model.named_modules())
    live: dict[Key, torch.Tensor] = {}
    homes = []
    for key in dict.fromkeys([*(c.key for c in seen.copies), *expected]):
        tensor = modules[key[0]]._parameters.get(key[1]) if key[0] in modules else None
        if tensor is None:
            raise Indirect(f"{'.'.join(key)} is no parameter once it is loaded")
        if tuple(tensor.shape) != seen.shapes.get(key):
            raise Indirect(f"{'.'.join(key)} has another shape once it is loaded")
        live[key] = _plain(key, tensor, device)
        homes.append((modules[key[0]], key, tensor, tensor.data_ptr()))
    _check_covered(seen, live, expected)
    whole: dict[int, tuple[torch.Tensor, Any]] = {}
    copies: list[tuple[str, int, Place, torch.Tensor]] = []
    refusal = ""
    times: dict[str, int] = {}
    for c in seen.copies:
        times[c.name] = times.get(c.name, 0) + 1
    for c in seen.copies:
        i = manifest.index[c.name]
        meta = manifest.tensors[i]
        view = c.target.of(live[c.key])
        if view.dtype != dtype_of(meta.dtype):
            raise Indirect(f"{c.name} is {meta.dtype}, {'.'.join(c.key)} is {view.dtype}")
        copies.append((c.name, i, c.source, view))
        size = 1
        for n in meta.shape:
            size *= n
        if times[c.name] == 1 and c.source.offset == 0 and c.source.numel == size and c.source.is_one_piece:
            whole[i] = (view.view(meta.shape), full_box(meta.shape))
        else:
            refusal = refusal or f"{c.name!r} does not go whole to one place"
    fills = [(f.key, f.value, f.target.of(live[f.key])) for f in seen.fills]
    return DirectMap(copies, fills, homes, whole, refusal, sum(c.target.numel for c in seen.copies))


def _plain(key: Key, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    name = ".".join(key)
    plain = tensor.data.as_subclass(torch.Tensor)
    if plain.device.type != device.type or (plain.is_cuda and plain.device != torch.empty(0, device=device).device):
        raise Indirect(f"{name} lies on {plain.device}, the worker's memory on {device}")
    if plain.layout is not torch.strided or not plain.is_contiguous():
        raise Indirect(f"{name} is not one row-major piece of memory")
    return plain


def _check_covered(seen: CopyRecorder, live: Mapping[Key, torch.Tensor], expected: Mapping[Key, int]) -> None:
    """Every element of every target is written once."""
    spans: dict[Key, list[tuple[int, int]]] = {k: [] for k in live}
    copied = dict.fromkeys(live, 0)
    for c in seen.copies:
        copied[c.key] += c.target.numel
    for key, to in [*((c.key, c.target) for c in seen.copies), *((f.key, f.target) for f in seen.fills)]:
        if key not in live:
            raise Indirect(f"{'.'.join(key)} is filled and nothing is copied there")
        if not to.is_one_piece:
            raise Indirect(f"{'.'.join(key)} is written in stripes")
        spans[key].append((to.offset, to.offset + to.numel))
    for key, found in spans.items():
        name, end = ".".join(key), 0
        for start, stop in sorted(found):
            if start != end:
                how = "twice" if start < end else "by nobody"
                raise Indirect(f"{name}: its elements {min(start, end)} to {max(start, end)} are written {how}")
            end = stop
        if end != live[key].numel():
            raise Indirect(f"{name}: {end} of its {live[key].numel()} elements are written")
        if copied[key] != expected.get(key, 0):
            raise Indirect(f"{name}: {copied[key]} elements were followed, its loader wrote {expected.get(key, 0)}")
