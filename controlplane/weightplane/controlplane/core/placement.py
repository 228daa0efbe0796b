"""Placements: which slice of which tensor a member holds. A full copy is the trivial placement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from .manifest import Manifest

__all__ = ["Box", "Piece", "Placement", "full_placement"]

#: A hyper-rectangle in a tensor's index space: one ``(start, stop)`` per dimension; ``()`` for a 0-dim tensor.
Box = tuple[tuple[int, int], ...]


def box_numel(box: Box) -> int:
    """Elements inside a box (1 for the 0-dim box)."""
    return prod(stop - start for start, stop in box)


def full_box(shape: tuple[int, ...]) -> Box:
    """The box that is the whole tensor."""
    return tuple((0, d) for d in shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one member holds of one manifest entry: entry index and the box of it, in manifest coordinates."""

    tensor: int
    box: Box


@dataclass(frozen=True)
class Placement:
    """All pieces of one member (a trainer rank, or one worker of a replica), ordered by entry index then box.

    A placement knows no addresses and infers nothing from names.
    """

    member: str
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, member: str, pieces: Iterable[Piece]) -> Placement:
        """Build with the pieces sorted and exact repeats removed."""
        return cls(member, tuple(sorted(set(pieces), key=lambda p: (p.tensor, p.box))))


def full_placement(member: str, manifest: Manifest) -> Placement:
    """Every entry of the manifest, whole."""
    return Placement.of(member, (Piece(i, full_box(t.shape)) for i, t in enumerate(manifest)))
