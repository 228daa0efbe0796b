"""Placements of the common shardings: full copies are ``full_placement``; these cut dimensions into ranks' shares.

The cut is torch's (``torch.chunk``, FSDP2 and DTensor): every share has ``ceil(size / ranks)`` rows, the last one
fewer, and ranks past the end hold an empty share ``(size, size)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .manifest import Manifest, TensorMeta
from .placement import Box, Piece, Placement, full_box

__all__ = ["chunk_placement", "chunk_range", "grid_box"]


def chunk_range(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """``(start, stop)`` of ``rank``'s share of ``size`` rows cut over ``ranks``. Raises ``ValueError`` off range."""
    if size < 0 or ranks < 1 or not 0 <= rank < ranks:
        raise ValueError(
            f"no share of {size} rows for rank {rank} of {ranks}: expected size >= 0 and 0 <= rank < ranks"
        )
    step = -(-size // ranks)
    return min(rank * step, size), min((rank + 1) * step, size)


def grid_box(shape: tuple[int, ...], cuts: Iterable[tuple[int, int, int]]) -> Box:
    """The box left after each ``(dim, ranks, rank)`` of ``cuts``; cuts of one dimension nest, as in a DTensor.

    A negative ``dim`` counts from the end; one that the shape lacks is a ``ValueError``. No cut is the full box.
    """
    box = list(full_box(shape))
    for dim, ranks, rank in cuts:
        if not -len(shape) <= dim < len(shape):
            raise ValueError(f"shape {list(shape)} has no dimension {dim} to cut")
        start, stop = box[dim]
        a, b = chunk_range(stop - start, ranks, rank)
        box[dim] = (start + a, start + b)
    return tuple(box)


def chunk_placement(
    member: str,
    manifest: Manifest,
    rank: int,
    ranks: int,
    dim: int | Callable[[TensorMeta], int | None] = 0,
) -> Placement:
    """``rank``'s share of every entry cut along ``dim`` over ``ranks``; a tensor without that dimension is held whole.

    ``dim`` may be a function of the entry: the dimension to cut, or ``None`` to hold it whole (tensor parallelism cuts
    some weights by rows, some by columns, and keeps norms). Give an alias the same answer as its root.
    """

    def pieces() -> Iterable[Piece]:
        for i, t in enumerate(manifest):
            d = dim if isinstance(dim, int) else dim(t)
            cut = d is not None and -len(t.shape) <= d < len(t.shape)
            yield Piece(i, grid_box(t.shape, [(d, ranks, rank)] if d is not None and cut else []))

    return Placement.of(member, pieces())
