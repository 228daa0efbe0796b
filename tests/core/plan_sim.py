"""Random manifests and placements, and a simulator that moves a plan's bytes with nothing but Python byte arrays.

It shares no code with the planner: it enumerates elements where the planner computes with boxes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from weightplane.controlplane.core.manifest import DTYPE_BYTES, Manifest, TensorMeta
from weightplane.controlplane.core.placement import Box, Piece, Placement
from weightplane.controlplane.core.plan import Plan

Element = tuple[int, ...]


def elements(box: Box) -> Iterator[Element]:
    """Every index in a box, row-major."""
    return itertools.product(*(range(start, stop) for start, stop in box))


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, d) for d in shape)


def item_bytes(manifest: Manifest, i: int) -> int:
    return DTYPE_BYTES[manifest.tensors[i].dtype]


def byte_places(outer: Box, inner: Box, size: int) -> list[int]:
    """Where each byte of packed ``inner`` lies in packed ``outer`` (``inner`` is inside it)."""
    places: list[int] = []
    for element in elements(inner):
        flat = 0
        for x, (start, stop) in zip(element, outer, strict=True):
            flat = flat * (stop - start) + x - start
        places.extend(range(flat * size, (flat + 1) * size))
    return places


def sources(manifest: Manifest, seed: int = 0) -> dict[int, bytes]:
    """Random logical bytes of every root tensor."""
    rng = random.Random(seed)
    return {i: rng.randbytes(t.nbytes) for i, t in enumerate(manifest) if not t.alias_of}


def cut(data: bytes | bytearray, outer: Box, inner: Box, size: int) -> bytes:
    return bytes(data[p] for p in byte_places(outer, inner, size))


def run_plan(manifest: Manifest, senders: Sequence[Placement], receivers: Sequence[Placement], plan: Plan) -> None:
    """Move every byte as the plan says; assert that each receiver's pieces are exactly the source's, written once."""
    data = sources(manifest)
    memory = {  # what each sender really holds, per piece
        p.member: [
            (
                r := manifest.root(q.tensor),
                q.box,
                cut(data[r], whole(manifest.tensors[r].shape), q.box, item_bytes(manifest, r)),
            )
            for q in p.pieces
        ]
        for p in senders
    }
    landed: dict[tuple[str, int, Box], bytearray] = {}
    writes: dict[tuple[str, int, Box], list[int]] = {}
    for p in receivers:
        for q in p.pieces:
            root = manifest.root(q.tensor)
            size = len(list(elements(q.box))) * item_bytes(manifest, root)
            landed[p.member, root, q.box] = bytearray(size)
            writes[p.member, root, q.box] = [0] * size

    for bucket in plan.buckets:
        payload = bytearray()
        for s in bucket.segments:
            region = plan.regions[s.region]
            size = item_bytes(manifest, region.tensor)
            held = next(
                (b, mem)
                for root, b, mem in memory[bucket.sender]
                if root == region.tensor and set(elements(region.box)) <= set(elements(b))
            )
            packed = cut(held[1], held[0], region.box, size)
            assert len(packed) == region.nbytes
            payload += packed[s.offset : s.offset + s.nbytes]
        assert len(payload) == bucket.nbytes
        for receiver in bucket.receivers:
            at = 0
            for s in bucket.segments:
                region = plan.regions[s.region]
                places = byte_places(region.piece_box, region.box, item_bytes(manifest, region.tensor))
                key = (receiver, region.tensor, region.piece_box)
                for place in places[s.offset : s.offset + s.nbytes]:
                    landed[key][place] = payload[at]
                    writes[key][place] += 1
                    at += 1
            assert at == bucket.nbytes

    for p in receivers:
        for q in p.pieces:
            root = manifest.root(q.tensor)
            expected = cut(data[root], whole(manifest.tensors[root].shape), q.box, item_bytes(manifest, root))
            assert landed[p.member, root, q.box] == expected, (p.member, q)
            assert set(writes[p.member, root, q.box]) <= {1}, (p.member, q)


# --- strategies ---------------------------------------------------------------------------------------------------


@st.composite
def manifests(draw: st.DrawFn, max_dim: int = 5) -> Manifest:
    """1 to 5 roots of 0 to 3 dimensions (sizes from 0), and aliases anywhere, also before their root."""
    names = draw(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=7, unique=True))
    roots: list[TensorMeta] = []
    aliases: list[TensorMeta] = []
    for name in names:
        if roots and len(names) > 1 and draw(st.integers(0, 3)) == 0:
            root = draw(st.sampled_from(roots))
            aliases.append(TensorMeta(name, root.dtype, root.shape, root.name))
        else:
            shape = tuple(draw(st.lists(st.integers(0, max_dim), max_size=3)))
            roots.append(TensorMeta(name, draw(st.sampled_from(sorted(DTYPE_BYTES))), shape))
    return Manifest.of(draw(st.permutations(roots + aliases)))


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """The cells of a random grid over a tensor: any cut points, empty cells too."""
    axes: list[list[tuple[int, int]]] = []
    for size in shape:
        points = [0, *sorted(draw(st.lists(st.integers(0, size), max_size=3))), size]
        axes.append(list(itertools.pairwise(points)))
    return list(itertools.product(*axes))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Any box inside a tensor, empty ones too."""
    ends = [sorted(draw(st.tuples(st.integers(0, d), st.integers(0, d)))) for d in shape]
    return tuple((a, b) for a, b in ends)


def names_of(manifest: Manifest, root: int) -> list[int]:
    """Entries that share the root's bytes."""
    return [i for i in range(len(manifest)) if manifest.root(i) == root]


@st.composite
def sender_sets(draw: st.DrawFn, manifest: Manifest) -> list[Placement]:
    """1 to 4 senders that together hold all: a grid per root, each cell in one or more senders, and extra boxes."""
    count = draw(st.integers(1, 4))
    held: list[list[Piece]] = [[] for _ in range(count)]
    for i, t in enumerate(manifest):
        if t.alias_of:
            continue
        known_as = st.sampled_from(names_of(manifest, i))
        for cell in draw(grids(t.shape)):
            for s in draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True)):
                held[s].append(Piece(draw(known_as), cell))
        for s in draw(st.lists(st.integers(0, count - 1), max_size=2)):
            held[s].append(Piece(draw(known_as), draw(boxes(t.shape))))
    return [Placement.of(f"trainer/{s}", pieces) for s, pieces in enumerate(held)]


@st.composite
def receiver_sets(draw: st.DrawFn, manifest: Manifest) -> list[Placement]:
    """0 to 4 receivers of any pieces under any name; some are copies of one another."""
    out: list[Placement] = []
    for r in range(draw(st.integers(0, 4))):
        pieces: list[Piece] = []
        copy = draw(st.booleans())
        if out and copy:
            pieces = list(draw(st.sampled_from(out)).pieces)
        else:
            for i, t in enumerate(manifest):
                kind = draw(st.integers(0, 3))
                if kind == 0:
                    pieces.append(Piece(i, whole(t.shape)))
                elif kind == 1:
                    pieces += [Piece(i, cell) for cell in draw(grids(t.shape)) if draw(st.booleans())]
                elif kind == 2:
                    pieces.append(Piece(i, draw(boxes(t.shape))))
        out.append(Placement.of(f"replica-{r}/worker-0", pieces))
    return out
