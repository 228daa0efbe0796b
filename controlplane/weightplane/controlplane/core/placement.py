"""Placements: which slice of which tensor a member holds. A full copy is the trivial placement."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod

from .manifest import Manifest

__all__ = [
    "Box",
    "Piece",
    "Placement",
    "PlacementError",
    "box_numel",
    "box_text",
    "full_box",
    "full_placement",
    "intersect",
    "placement_problems",
    "remove",
    "subtract",
    "uncovered",
    "validate_placement",
]

#: A hyper-rectangle in a tensor's index space: one ``(start, stop)`` per dimension; ``()`` for a 0-dim tensor.
Box = tuple[tuple[int, int], ...]


class PlacementError(ValueError):
    """A placement that does not fit its manifest. ``problems`` names every fault; the text shows the first five."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        shown = "; ".join(problems[:5])
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        super().__init__(f"invalid placement ({len(problems)} problem(s)): {shown}{more}")


def box_numel(box: Box) -> int:
    """Elements inside a box (1 for the 0-dim box)."""
    return prod(stop - start for start, stop in box)


def full_box(shape: tuple[int, ...]) -> Box:
    """The box that is the whole tensor."""
    return tuple((0, d) for d in shape)


def box_text(box: Box) -> str:
    """A box as errors print it, in slice notation: ``[0:4, 8:16]``; ``[]`` for the 0-dim box."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def intersect(a: Box, b: Box) -> Box | None:
    """The box of the elements in both (of equal rank), or ``None`` if there is none. Two 0-dim boxes meet: ``()``."""
    out: list[tuple[int, int]] = []
    for (a0, a1), (b0, b1) in zip(a, b, strict=True):
        start = a0 if a0 > b0 else b0
        stop = a1 if a1 < b1 else b1
        if start >= stop:
            return None
        out.append((start, stop))
    return tuple(out)


def subtract(box: Box, hole: Box) -> list[Box]:
    """Disjoint, non-empty boxes that make up ``box`` without ``hole``, which is not empty and lies inside ``box``."""
    parts: list[Box] = []
    rest = list(box)
    for d, ((start, stop), (h0, h1)) in enumerate(zip(box, hole, strict=True)):
        if start < h0:
            parts.append((*rest[:d], (start, h0), *rest[d + 1 :]))
        if h1 < stop:
            parts.append((*rest[:d], (h1, stop), *rest[d + 1 :]))
        rest[d] = (h0, h1)
    return parts


@dataclass(frozen=True, slots=True)
class Piece:
    """What one member holds of one manifest entry: entry index and the box of it, in manifest coordinates."""

    tensor: int
    box: Box


@dataclass(frozen=True)
class Placement:
    """All pieces of one member (a trainer rank, or one worker of a replica), ordered by entry index then box.

    A placement knows no addresses and infers nothing from names. Pieces may overlap, within one placement and across
    members: equal boxes in two members are replication.
    """

    member: str
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, member: str, pieces: Iterable[Piece]) -> Placement:
        """Build with the pieces sorted and exact repeats removed."""
        return cls(member, tuple(sorted(set(pieces), key=lambda p: (p.tensor, p.box))))

    def canonical(self) -> bytes:
        """The layout as canonical ASCII, one line per piece: ``"3 0:4,8:16\\n"`` is ``[0:4, 8:16]`` of entry 3.

        A piece of a 0-dim tensor is ``"3 \\n"``. The member's name is not part of it.
        """
        lines = [f"{p.tensor} {','.join([f'{a}:{b}' for a, b in p.box])}\n" for p in self.pieces]
        return "".join(lines).encode("ascii")

    @cached_property
    def layout_id(self) -> str:
        """Content hash of the layout, ``"l-"`` and 32 hex digits: SHA-256 of ``canonical()``, cut to 128 bits.

        It covers the pieces, not the member, so that equal workers share one layout: a cache of plans keys on
        ``(member, layout_id)``.
        """
        return "l-" + hashlib.sha256(self.canonical()).hexdigest()[:32]


def full_placement(member: str, manifest: Manifest) -> Placement:
    """Every entry of the manifest, whole."""
    return Placement.of(member, (Piece(i, full_box(t.shape)) for i, t in enumerate(manifest)))


def placement_problems(manifest: Manifest, placement: Placement) -> list[str]:
    """Every way in which ``placement`` does not fit ``manifest``, each naming member, tensor, found and expected.

    Refused: an empty member name, an entry the manifest lacks, a box of another rank than the tensor, a box out of
    bounds or inverted, pieces repeated or out of order (``Placement.of`` orders them). Fine: empty boxes inside the
    bounds, 0-element and 0-dim tensors, overlapping pieces, aliases.
    """
    problems: list[str] = []
    if not placement.member:
        problems.append("the placement's member has an empty name")
    shapes = [t.shape for t in manifest]
    where = f"member {placement.member!r}"
    last: tuple[int, Box] = (-1, ())
    for n, piece in enumerate(placement.pieces):
        i, box = piece.tensor, piece.box
        if not 0 <= i < len(shapes):
            problems.append(
                f"{where}, piece {n}: found entry {i}, expected one of the manifest's {len(shapes)} entries"
            )
            continue
        shape = shapes[i]
        if len(box) != len(shape):
            problems.append(
                f"tensor {manifest.tensors[i].name!r}, {where}: found box {box_text(box)} of {len(box)} dimension(s), "
                f"expected {len(shape)} for shape {list(shape)}"
            )
            continue
        for (start, stop), size in zip(box, shape, strict=True):
            if not 0 <= start <= stop <= size:
                problems.append(
                    f"tensor {manifest.tensors[i].name!r}, {where}: found box {box_text(box)}, "
                    f"expected 0 <= start <= stop <= size in each dimension of shape {list(shape)}"
                )
                break
        if i <= last[0] and (i, box) <= last:
            fault = "twice" if (i, box) == last else "out of order"
            problems.append(
                f"tensor {manifest.tensors[i].name!r}, {where}: found piece {n} {box_text(box)} {fault}, "
                f"expected rising (entry, box); build with Placement.of"
            )
        last = (i, box)
    return problems


def validate_placement(manifest: Manifest, placement: Placement) -> None:
    """Raise ``PlacementError`` with every problem of ``placement_problems``, if there is one."""
    problems = placement_problems(manifest, placement)
    if problems:
        raise PlacementError(problems)


def uncovered(manifest: Manifest, placements: Iterable[Placement]) -> list[Piece]:
    """What of the manifest none of these (valid) placements holds: disjoint, non-empty pieces of roots, in order.

    An alias counts as its root. Ask it whether a trainer's ranks, or the workers of one replica, hold the whole model.
    """
    left: dict[int, list[Box]] = {i: [full_box(t.shape)] for i, t in enumerate(manifest) if not t.alias_of and t.numel}
    for placement in placements:
        for piece in placement.pieces:
            root = manifest.root(piece.tensor)
            if root in left:
                left[root] = remove(left[root], piece.box)
                if not left[root]:
                    del left[root]
    return [Piece(i, box) for i, boxes in left.items() for box in sorted(boxes)]


def remove(fragments: list[Box], box: Box) -> list[Box]:
    """``fragments`` (disjoint boxes) without the elements of ``box``."""
    out: list[Box] = []
    for fragment in fragments:
        hit = intersect(fragment, box)
        if hit is None:
            out.append(fragment)
        else:
            out.extend(subtract(fragment, hit))
    return out
