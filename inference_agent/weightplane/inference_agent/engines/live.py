"""The live tensors of a module: what they are called, which share storage, and how their bytes are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from weightplane.transports.dtypes import check_movable, int_view

__all__ = ["LiveTensor", "bump_version", "collect", "copy_bits", "signature"]


@dataclass(frozen=True, eq=False)
class LiveTensor:
    """One distinct live tensor of one worker, and every name it has there (more than one: tied)."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    dtype: str


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers under every name they have. Non-persistent buffers are nobody's business."""
    yield from module.named_parameters(remove_duplicate=False)
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _key(t: torch.Tensor) -> tuple[object, ...]:
    where: object = t.data_ptr() if t.numel() else id(t)
    return (t.device, where, tuple(t.shape), t.stride(), t.dtype)


def signature(module: nn.Module) -> list[tuple[object, ...]]:
    """What changes when a live tensor moved, came, went, or changed shape, strides or dtype. Cheap."""
    return [(name, id(t), t.data_ptr(), t.shape, t.stride(), t.dtype) for name, t in _named(module)]


def collect(module: nn.Module) -> list[LiveTensor]:
    """The module's live tensors, by first name in module order. ``TypeError`` names one whose bytes cannot travel."""
    names: dict[tuple[object, ...], list[str]] = {}
    tensors: dict[tuple[object, ...], torch.Tensor] = {}
    for name, tensor in _named(module):
        check_movable(tensor, name)
        plain = tensor.detach()
        key = _key(plain)
        names.setdefault(key, []).append(name)
        tensors.setdefault(key, plain)
    return [LiveTensor(tuple(ns), tensors[k], check_movable(tensors[k], ns[0])) for k, ns in names.items()]


def copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bits, not values (bool bytes and NaN payloads survive). Keeps ``data_ptr``; raises the target's version."""
    if target.is_inference():
        with torch.inference_mode():  # such tensors can be written nowhere else
            int_view(target).copy_(int_view(source))
    else:
        with torch.no_grad():
            int_view(target).copy_(int_view(source))


def bump_version(tensors: Iterable[torch.Tensor]) -> None:
    """Tell autograd (and caches keyed on ``_version``) that raw bytes were written."""
    plain = [t for t in tensors if not t.is_inference()]
    if plain:
        torch.autograd.graph.increment_version(plain)
