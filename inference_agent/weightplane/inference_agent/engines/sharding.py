"""Engines of several workers: which box of each tensor a worker holds, and bare modules that hold such shares."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from weightplane.controlplane.core.manifest import TensorMeta
from weightplane.controlplane.core.placement import Box, full_box
from weightplane.controlplane.core.shards import grid_box

from .live import collect

__all__ = ["BoxOf", "cut", "shard_module"]

#: The box of a manifest entry that worker w holds.
BoxOf = Callable[[TensorMeta, int], Box]


def cut(workers: int, dim: int | Callable[[TensorMeta], int | None] = 0) -> BoxOf:
    """Worker w of ``workers`` holds the w-th share along ``dim`` (torch's chunks); whole what lacks that dimension."""

    def box(meta: TensorMeta, worker: int) -> Box:
        d = dim if isinstance(dim, int) else dim(meta)
        if d is None or not -len(meta.shape) <= d < len(meta.shape):
            return full_box(meta.shape)
        return grid_box(meta.shape, [(d, workers, worker)])

    return box


def shard_module(module: nn.Module, workers: int, dim: int = 0) -> list[nn.Module]:
    """``workers`` bare modules that hold copies of ``module``'s shares along ``dim``, under the same names.

    For engines cut as ``cut(workers, dim)``. Ties are kept. The shards cannot compute; they hold.
    """
    out: list[nn.Module] = []
    box = cut(workers, dim)
    for w in range(workers):
        root = nn.Module()
        for live in collect(module):
            meta = TensorMeta(live.names[0], live.dtype, tuple(live.tensor.shape))
            index = tuple(slice(a, b) for a, b in box(meta, w))
            share = nn.Parameter(live.tensor[index].clone(), requires_grad=False)
            for name in live.names:
                *path, leaf = name.split(".")
                owner = root
                for part in path:
                    if not hasattr(owner, part):
                        owner.add_module(part, nn.Module())
                    owner = getattr(owner, part)
                owner.register_parameter(leaf, share)
        out.append(root)
    return out
