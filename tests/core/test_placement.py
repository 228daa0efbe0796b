"""Placements: geometry against brute force, validation by name, ids, shards."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.plan_sim import boxes, elements, manifests, receiver_sets, whole
from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.placement import (
    Piece,
    Placement,
    PlacementError,
    box_numel,
    box_text,
    full_box,
    full_placement,
    intersect,
    placement_problems,
    subtract,
    uncovered,
    validate_placement,
)
from weightplane.controlplane.core.shards import chunk_placement, chunk_range, grid_box

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
M = Manifest.of(
    [
        TensorMeta("embed.weight", "bfloat16", (8, 4)),
        TensorMeta("norm.weight", "float32", (4,)),
        TensorMeta("scale", "float32", ()),
        TensorMeta("empty", "float32", (0, 4)),
        TensorMeta("lm_head.weight", "bfloat16", (8, 4), "embed.weight"),
    ]
)


@settings(deadline=None)
@given(st.data())
def test_intersect_and_subtract_are_those_of_element_sets(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    hit = intersect(a, b)
    both = set(elements(a)) & set(elements(b))
    assert (set() if hit is None else set(elements(hit))) == both
    assert (hit is None) == (not both)
    assert intersect(b, a) == hit
    assert box_numel(a) == len(list(elements(a)))
    if hit is not None:
        parts = [list(elements(p)) for p in subtract(a, hit)]
        assert all(parts), "no empty part"
        assert sorted(e for p in parts for e in p) == sorted(set(elements(a)) - both), "each element once"


def test_boxes_of_zero_dimensions_and_ranks() -> None:
    assert intersect((), ()) == ()
    assert subtract((), ()) == []
    assert box_numel(()) == 1
    assert full_box(()) == ()
    assert box_text(((0, 4), (8, 16))) == "[0:4, 8:16]"
    with pytest.raises(ValueError):
        intersect(((0, 1),), ())


def test_a_full_placement_is_valid_and_ordered() -> None:
    p = full_placement("w", M)
    validate_placement(M, p)
    assert [q.tensor for q in p.pieces] == [0, 1, 2, 3, 4]
    assert p.pieces[2].box == () and p.pieces[3].box == ((0, 0), (0, 4))
    assert uncovered(M, [p]) == []


def test_empty_and_overlapping_boxes_are_fine() -> None:
    pieces = [
        Piece(0, ((8, 8), (0, 4))),  # the share of a rank past the end
        Piece(0, ((0, 0), (0, 0))),
        Piece(0, ((0, 5), (0, 4))),
        Piece(0, ((3, 8), (0, 4))),
        Piece(3, ((0, 0), (1, 2))),
        Piece(4, ((0, 5), (0, 4))),
    ]
    assert placement_problems(M, Placement.of("w", pieces)) == []


@pytest.mark.parametrize(
    ("piece", "found"),
    [
        (Piece(5, ()), ["member 'w/1'", "piece 0", "found entry 5", "5 entries"]),
        (Piece(-1, ()), ["member 'w/1'", "found entry -1"]),
        (Piece(0, ((0, 8),)), ["'embed.weight'", "member 'w/1'", "[0:8] of 1 dimension(s)", "expected 2", "[8, 4]"]),
        (Piece(2, ((0, 1),)), ["'scale'", "[0:1] of 1 dimension(s)", "expected 0"]),
        (Piece(1, ()), ["'norm.weight'", "[] of 0 dimension(s)", "expected 1"]),
        (Piece(0, ((0, 9), (0, 4))), ["'embed.weight'", "member 'w/1'", "[0:9, 0:4]", "shape [8, 4]"]),
        (Piece(0, ((-1, 8), (0, 4))), ["'embed.weight'", "[-1:8, 0:4]"]),
        (Piece(0, ((5, 3), (0, 4))), ["'embed.weight'", "[5:3, 0:4]"]),
        (Piece(0, ((9, 9), (0, 4))), ["'embed.weight'", "[9:9, 0:4]"]),
        (Piece(3, ((0, 1), (0, 4))), ["'empty'", "[0:1, 0:4]", "shape [0, 4]"]),
        (Piece(4, ((0, 8), (0, 5))), ["'lm_head.weight'", "[0:8, 0:5]"]),
    ],
)
def test_each_fault_is_named(piece: Piece, found: list[str]) -> None:
    with pytest.raises(PlacementError) as e:
        validate_placement(M, Placement.of("w/1", [piece]))
    assert len(e.value.problems) == 1
    for text in found:
        assert text in e.value.problems[0]


def test_every_fault_is_collected_and_five_are_shown() -> None:
    bad = [Piece(0, ((0, 9 + k), (0, 4))) for k in range(9)]
    with pytest.raises(PlacementError, match=r"9 problem\(s\).*and 4 more") as e:
        validate_placement(M, Placement.of("w", bad))
    assert len(e.value.problems) == 9


def test_disorder_repeats_and_an_empty_member_are_faults() -> None:
    a, b = Piece(0, ((0, 4), (0, 4))), Piece(0, ((4, 8), (0, 4)))
    assert "twice" in placement_problems(M, Placement("w", (a, a)))[0]
    assert "out of order" in placement_problems(M, Placement("w", (b, a)))[0]
    assert "out of order" in placement_problems(M, Placement("w", (Piece(1, ((0, 4),)), a)))[0]
    assert "empty name" in placement_problems(M, Placement("", (a, b)))[0]
    assert Placement.of("w", [b, a, b]).pieces == (a, b)


def test_the_layout_id_is_the_hash_of_the_documented_text() -> None:
    p = Placement.of("w", [Piece(2, ()), Piece(0, ((0, 4), (0, 4)))])
    assert p.canonical() == b"0 0:4,0:4\n2 \n"
    assert p.layout_id == "l-" + hashlib.sha256(b"0 0:4,0:4\n2 \n").hexdigest()[:32]
    assert Placement.of("another member", p.pieces).layout_id == p.layout_id


@settings(deadline=None)
@given(st.data())
def test_layout_ids_are_equal_only_for_equal_layouts(data: st.DataObject) -> None:
    manifest = data.draw(manifests())
    a, b = (Placement.of("w", (q for p in data.draw(receiver_sets(manifest)) for q in p.pieces)) for _ in range(2))
    assert (a.layout_id == b.layout_id) == (a.pieces == b.pieces)
    assert placement_problems(manifest, a) == []


@settings(deadline=None)
@given(st.data())
def test_uncovered_is_that_of_element_sets(data: st.DataObject) -> None:
    manifest = data.draw(manifests())
    placements = data.draw(receiver_sets(manifest))
    expected = {(i, e) for i, t in enumerate(manifest) if not t.alias_of for e in elements(whole(t.shape))}
    expected -= {(manifest.root(q.tensor), e) for p in placements for q in p.pieces for e in elements(q.box)}
    missing = uncovered(manifest, placements)
    found = [(q.tensor, e) for q in missing for e in elements(q.box)]
    assert sorted(found) == sorted(expected)
    assert missing == sorted(missing, key=lambda q: (q.tensor, q.box))


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_are_torchs(size: int, ranks: int) -> None:
    shares = [chunk_range(size, ranks, r) for r in range(ranks)]
    assert [e for a, b in shares for e in range(a, b)] == list(range(size))
    step = -(-size // ranks)
    full = [b - a for a, b in shares if b > a]
    assert all(n == step for n in full[:-1]), "every share but the last is ceil(size / ranks)"
    assert all(a <= b for a, b in shares) and all(x[1] == y[0] for x, y in pairwise(shares))


def test_known_chunks() -> None:
    assert [chunk_range(10, 4, r) for r in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [chunk_range(5, 4, r) for r in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    for size, ranks, rank in [(4, 2, 2), (4, 2, -1), (4, 0, 0), (-1, 1, 0)]:
        with pytest.raises(ValueError):
            chunk_range(size, ranks, rank)


def test_grid_boxes_nest_and_count_from_the_end() -> None:
    assert grid_box((8, 4), []) == ((0, 8), (0, 4))
    assert grid_box((8, 4), [(-1, 2, 1)]) == ((0, 8), (2, 4))
    assert grid_box((8, 4), [(0, 2, 1), (0, 2, 0)]) == ((4, 6), (0, 4))
    assert grid_box((8, 4), [(0, 4, 3), (1, 3, 2)]) == ((6, 8), (4, 4))
    for dim in (2, -3):
        with pytest.raises(ValueError, match="no dimension"):
            grid_box((8, 4), [(dim, 2, 0)])


@settings(deadline=None)
@given(manifests(), st.integers(1, 5), st.integers(-3, 2))
def test_chunk_placements_cover_everything(manifest: Manifest, ranks: int, dim: int) -> None:
    placements = [chunk_placement(f"r{k}", manifest, k, ranks, dim) for k in range(ranks)]
    for p in placements:
        validate_placement(manifest, p)
    assert uncovered(manifest, placements) == []


def test_a_dimension_per_tensor() -> None:
    p = chunk_placement("w", M, 1, 2, lambda t: None if t.name == "norm.weight" else 1)
    assert [q.box for q in p.pieces] == [((0, 8), (2, 4)), ((0, 4),), (), ((0, 0), (2, 4)), ((0, 8), (2, 4))]
