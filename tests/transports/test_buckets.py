"""Spans of buckets: every planned byte leaves the right place and lands in the right place, and nothing else moves."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping
from math import prod

import pytest
import torch

from weightplane.controlplane.core.manifest import DTYPE_BYTES, Manifest, TensorMeta
from weightplane.controlplane.core.placement import Box, Piece, Placement, full_box, full_placement
from weightplane.controlplane.core.plan import Plan
from weightplane.controlplane.core.planner import make_plan
from weightplane.transports.buckets import (
    Local,
    Locals,
    PieceDigests,
    SinkSpans,
    SourceSpans,
    SpanError,
    buckets_from,
    buckets_to,
)
from weightplane.transports.digest import digest_tensor
from weightplane.transports.dtypes import as_bytes, dtype_of


def noise(seed: int, dtype: str, *shape: int) -> torch.Tensor:
    """Random bit patterns of a dtype."""
    rng = torch.Generator().manual_seed(seed)
    n = prod(shape) * DTYPE_BYTES[dtype]
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=rng).view(dtype_of(dtype)).view(shape)


def run(plan: Plan, manifest: Manifest, sources: Mapping[str, Locals], sinks: Mapping[str, Locals]) -> None:
    """Move every bucket in plan order by copying spans to spans."""
    src = {m: SourceSpans(plan, manifest, m, t) for m, t in sources.items()}
    dst = {m: SinkSpans(plan, manifest, m, t) for m, t in sinks.items()}
    for bucket in plan.buckets:
        out = src[bucket.sender].spans(bucket)
        assert sum(s.numel() for s in out) == bucket.nbytes
        flat = torch.cat(out)
        for member in bucket.receivers:
            spans = dst[member].spans(bucket)
            assert all(s.dtype == torch.uint8 and s.dim() == 1 and s.is_contiguous() for s in spans)
            for span, part in zip(spans, flat.split([s.numel() for s in spans]), strict=True):
                span.copy_(part)
            dst[member].complete(bucket)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(as_bytes(a), as_bytes(b))


@pytest.mark.parametrize("bucket_bytes", [1, 3, 64, 100, 4096])
@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32", "int64", "complex64", "complex128", "float8_e5m2"])
def test_strides_meet_cuts(dtype: str, bucket_bytes: int) -> None:
    values = {i: noise(i, dtype, 4, 5, 3).transpose(0, i % 2).contiguous() for i in range(2)}
    manifest = Manifest.of(TensorMeta(f"t{i}", dtype, tuple(v.shape)) for i, v in values.items())
    plan = make_plan(manifest, [full_placement("s", manifest)], [full_placement("r", manifest)], bucket_bytes)
    make = [
        lambda t: t.clone(),
        lambda t: t.transpose(0, 2).clone().transpose(0, 2),
        lambda t: t.repeat(1, 2, 1)[:, : t.shape[1]],
    ]
    for left, right in itertools.product(make, make):
        source = {i: left(v) for i, v in values.items()}
        sink = {i: right(torch.zeros_like(v)) for i, v in values.items()}
        before = {i: digest_tensor(t) for i, t in source.items()}
        run(
            plan,
            manifest,
            {"s": {i: (t, full_box(tuple(t.shape))) for i, t in source.items()}},
            {"r": {i: (t, full_box(tuple(t.shape))) for i, t in sink.items()}},
        )
        assert all(equal(sink[i], source[i]) for i in values)
        assert {i: digest_tensor(t) for i, t in source.items()} == before


def test_contiguous_spans_are_the_memory_itself() -> None:
    manifest = Manifest.of([TensorMeta("a", "float32", (8, 4)), TensorMeta("b", "int8", ())])
    plan = make_plan(manifest, [full_placement("s", manifest)], [full_placement("r", manifest)], 48)
    a, b = torch.zeros(8, 4), torch.zeros((), dtype=torch.int8)
    locals_: dict[int, Local] = {0: (a, full_box((8, 4))), 1: (b, ())}
    for spans in (SourceSpans(plan, manifest, "s", locals_), SinkSpans(plan, manifest, "r", locals_)):
        seen = [s for bucket in plan.buckets for s in spans.spans(bucket)]
        inside = [a.data_ptr() <= s.data_ptr() < a.data_ptr() + 128 or s.data_ptr() == b.data_ptr() for s in seen]
        assert all(inside)


def test_scratch_stays_below_a_bucket() -> None:
    manifest = Manifest.of([TensorMeta("w", "float32", (256, 256))])
    plan = make_plan(manifest, [full_placement("s", manifest)], [full_placement("r", manifest)], 10_000)
    t = torch.randn(256, 256).t()
    source = SourceSpans(plan, manifest, "s", {0: (t, full_box((256, 256)))})
    pointers = set()
    for bucket in plan.buckets:
        for span in source.spans(bucket):
            assert span.untyped_storage().nbytes() <= 10_000 + 16
            pointers.add(span.untyped_storage().data_ptr())
    assert len(pointers) == 1, "scratch is reused"
    kept = SourceSpans(plan, manifest, "s", {0: (t, full_box((256, 256)))}, keep=True)
    spans = [s for bucket in plan.buckets for s in kept.spans(bucket)]
    assert torch.equal(torch.cat(spans), as_bytes(t)), "with keep, earlier spans stay"


def test_tied_names_and_tied_storages() -> None:
    manifest = Manifest.of(
        [
            TensorMeta("embed", "float32", (6, 4)),
            TensorMeta("x", "int8", (5,)),
            TensorMeta("head", "float32", (6, 4), "embed"),
        ]
    )
    plan = make_plan(manifest, [full_placement("s", manifest)], [full_placement("r", manifest)], 40)
    value, box = noise(1, "float32", 6, 4), full_box((6, 4))
    x = (noise(2, "int8", 5), full_box((5,)))
    separate = torch.zeros(4, 6).t()
    for embed, head in (
        (torch.zeros(6, 4), torch.zeros(6, 4)),
        (torch.zeros(4, 6).t(), separate),
        (separate, separate),
    ):
        run(plan, manifest, {"s": {0: (value, box), 1: x}}, {"r": {0: (embed, box), 1: x, 2: (head, box)}})
        assert equal(embed, value) and equal(head, value)
        embed.zero_()
        head.zero_()
    only_head = Placement.of("r", [Piece(2, box)])
    plan = make_plan(manifest, [full_placement("s", manifest)], [only_head], 40)
    head = torch.zeros(6, 4)
    run(plan, manifest, {"s": {0: (value, box), 1: x}}, {"r": {2: (head, box)}})
    assert equal(head, value), "a receiver that holds only the alias gets it"


def cut(parts: int, dim: int, shape: tuple[int, ...], i: int) -> Box:
    step = shape[dim] // parts
    return tuple((i * step, (i + 1) * step) if d == dim else (0, n) for d, n in enumerate(shape))


@pytest.mark.parametrize("bucket_bytes", [7, 64, 1 << 20])
@pytest.mark.parametrize(("send_dim", "recv_dim"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_four_quarters_to_two_halves(send_dim: int, recv_dim: int, bucket_bytes: int) -> None:
    shape = (8, 12)
    manifest = Manifest.of([TensorMeta("w", "bfloat16", shape), TensorMeta("v", "float32", shape)])
    whole = [noise(1, "bfloat16", *shape), noise(2, "float32", *shape)]

    def local(box: Box, i: int) -> torch.Tensor:
        return whole[i][tuple(slice(a, b) for a, b in box)].clone()

    def half(k: int, i: int) -> Local:
        box = cut(2, recv_dim, shape, k)
        return torch.zeros_like(local(box, i)), box

    quarters = [cut(4, send_dim, shape, k) for k in range(4)]
    src = {f"s{k}": {i: (local(box, i), box) for i in (0, 1)} for k, box in enumerate(quarters)}
    dst = {f"r{k}": {i: half(k, i) for i in (0, 1)} for k in range(2)}
    place = [
        [Placement.of(m, [Piece(i, box) for i, (_, box) in t.items()]) for m, t in side.items()] for side in (src, dst)
    ]
    plan = make_plan(manifest, place[0], place[1], bucket_bytes)
    run(plan, manifest, src, dst)
    for held in dst.values():
        for i, (tensor, box) in held.items():
            assert equal(tensor, local(box, i))


def test_several_boxes_of_one_entry_and_a_callable() -> None:
    manifest = Manifest.of([TensorMeta("qkv", "int16", (12, 4))])
    boxes: list[Box] = [((0, 2), (0, 4)), ((6, 8), (0, 4))]
    whole = noise(3, "int16", 12, 4)
    asked: list[int] = []

    def source(index: int) -> Local:
        asked.append(index)
        return whole, full_box((12, 4))

    targets = [(torch.zeros(2, 4, dtype=torch.int16), b) for b in boxes]
    plan = make_plan(
        manifest, [full_placement("s", manifest)], [Placement.of("r", [Piece(0, b) for b in boxes])], 1 << 20
    )
    run(plan, manifest, {"s": source}, {"r": {0: targets}})
    for tensor, box in targets:
        assert equal(tensor, whole[box[0][0] : box[0][1]])
    assert set(asked) == {0}


def test_a_source_that_was_replaced_or_shows_other_memory_is_looked_at_anew() -> None:
    manifest = Manifest.of([TensorMeta("w", "float32", (4, 4))])
    plan = make_plan(manifest, [full_placement("s", manifest)], [full_placement("r", manifest)], 64)
    box, bucket = full_box((4, 4)), plan.buckets[0]
    parameter = torch.nn.Parameter(torch.randn(4, 4))
    held: dict[int, Local] = {0: (parameter, box)}
    spans = SourceSpans(plan, manifest, "s", held)

    def check() -> None:
        assert torch.equal(torch.cat(spans.spans(bucket)), as_bytes(held[0][0]))

    check()
    check()
    parameter.data = torch.randn(4, 4)
    check()
    parameter.data = parameter.data.t()  # the same memory, read otherwise
    check()
    held[0] = (torch.randn(4, 4), box)
    check()
    held[0] = (torch.zeros(4, 4, dtype=torch.float64), box)
    with pytest.raises(SpanError, match="float64"):
        spans.spans(bucket)


def test_what_does_not_fit_is_named() -> None:
    manifest = Manifest.of([TensorMeta("w", "float32", (4, 4))])
    plan = make_plan(manifest, [full_placement("s", manifest)], [full_placement("r", manifest)], 64)
    box, bucket = full_box((4, 4)), plan.buckets[0]
    for tensors, text in (
        ({}, "nothing"),
        ({0: (torch.zeros(2, 4), ((0, 2), (0, 4)))}, "must send box"),
        ({0: (torch.zeros(4, 4, dtype=torch.float64), box)}, r"expects float32 \[4, 4\].*found float64"),
        ({0: (torch.zeros(2, 8), box)}, r"found float32 \[2, 8\]"),
    ):
        with pytest.raises(SpanError, match=rf"'w'.*{text}"):
            SourceSpans(plan, manifest, "s", tensors).spans(bucket)
    with pytest.raises(SpanError, match=r"'w'.*'r' must receive box"):
        SinkSpans(plan, manifest, "r", {}).spans(bucket)
    with pytest.raises(TypeError, match=r"'w'.*meta"):
        SinkSpans(plan, manifest, "r", {0: (torch.zeros(4, 4, device="meta"), box)}).spans(bucket)
    with pytest.raises(SpanError, match="without spans"):
        SinkSpans(plan, manifest, "r", {0: (torch.zeros(4, 4), box)}).complete(bucket)


def test_targets_made_in_inference_mode_and_parameters() -> None:
    manifest = Manifest.of([TensorMeta("w", "float32", (4, 4))])
    plan = make_plan(manifest, [full_placement("s", manifest)], [full_placement("r", manifest)], 64)
    with torch.inference_mode():
        target = torch.zeros(4, 4).t()
    source = torch.nn.Parameter(torch.randn(4, 4).t())
    run(plan, manifest, {"s": {0: (source, full_box((4, 4)))}}, {"r": {0: (target, full_box((4, 4)))}})
    assert equal(target, source)
    leaf = torch.nn.Parameter(torch.zeros(4, 4).t())
    run(plan, manifest, {"s": {0: (source, full_box((4, 4)))}}, {"r": {0: (leaf, full_box((4, 4)))}})
    assert equal(leaf, source) and leaf.requires_grad and leaf.is_leaf


def test_digests_while_they_pass() -> None:
    rng = random.Random(5)
    shapes = [(rng.randrange(1, 9), rng.randrange(1, 400)) for _ in range(20)]
    manifest = Manifest.of(TensorMeta(f"t{i}", "float32", s) for i, s in enumerate(shapes))
    values = {i: (noise(i, "float32", *s), full_box(s)) for i, s in enumerate(shapes)}
    plan = make_plan(manifest, [full_placement("s", manifest)], [full_placement("r", manifest)], 1000)
    digests = PieceDigests(plan, buckets_from(plan, "s"))
    source = SourceSpans(plan, manifest, "s", values)
    for bucket in source.buckets:
        digests.feed(bucket, source.spans(bucket))
    assert digests.late == ()
    assert digests.values() == {(i, box): digest_tensor(t) for i, (t, box) in values.items()}
    assert buckets_to(plan, "r") == plan.buckets and buckets_to(plan, "s") == ()
    again = PieceDigests(plan, plan.buckets)
    with pytest.raises(SpanError, match="goes on at"):
        for bucket in plan.buckets[1:]:
            again.feed(bucket, source.spans(bucket))
    columns = [Placement.of(f"c{k}", [Piece(0, (((0, shapes[0][0])), (k, k + 1)))]) for k in range(shapes[0][1])]
    split = make_plan(manifest, columns, [Placement.of("r", [Piece(0, full_box(shapes[0]))])], 1000)
    assert PieceDigests(split, split.buckets).late == ((0, full_box(shapes[0])),)


def test_ten_thousand_tiny_tensors_are_fast() -> None:
    manifest = Manifest.of(TensorMeta(f"t{i}", "float32", (16,)) for i in range(10_000))
    plan = make_plan(manifest, [full_placement("s", manifest)], [full_placement("r", manifest)], 1 << 20)
    source = {i: (torch.zeros(16), full_box((16,))) for i in range(10_000)}
    spans, sinks = SourceSpans(plan, manifest, "s", source), SinkSpans(plan, manifest, "r", source)
    start = time.thread_time()
    for bucket in plan.buckets:
        spans.spans(bucket)
        sinks.spans(bucket)
        sinks.complete(bucket)
    assert time.thread_time() - start < 2
