"""Spans to memory and back, cut anywhere; the GIL is given up only where that is not dear."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from weightplane.transports.span_cursor import Copier, SpanCursor


def test_cut_anywhere_both_ways() -> None:
    rng = random.Random(3)
    sizes = [0, 1, 40_000, 7, 0, 100_000, 3]
    source = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in sizes]
    whole = torch.cat(source)
    for _ in range(20):
        flat, target = torch.zeros_like(whole), [torch.zeros_like(s) for s in source]
        reader, writer = SpanCursor(source), SpanCursor(target)
        assert reader.nbytes == whole.numel()
        while reader.position < reader.nbytes:
            at, n = reader.position, min(rng.choice([1, 5, 33_000, 90_000]), reader.nbytes - reader.position)
            reader.read(flat.data_ptr() + at, n)
            writer.write(flat.data_ptr() + at, n)
        assert torch.equal(flat, whole)
        assert all(torch.equal(a, b) for a, b in zip(source, target, strict=True))
        start = rng.randrange(whole.numel())
        reader.seek(start)
        rest = torch.zeros(whole.numel() - start, dtype=torch.uint8)
        reader.read(rest.data_ptr(), rest.numel())
        assert torch.equal(rest, whole[start:])


@pytest.mark.parametrize(
    "bad", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)[::2]]
)
def test_other_tensors_are_refused(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="span 1"):
        SpanCursor([torch.zeros(1, dtype=torch.uint8), bad])


@pytest.mark.alone
def test_a_computing_thread_is_noticed_and_does_not_starve_the_copy() -> None:
    """Next to a thread that never gives the GIL up by itself, each freed copy costs 5 ms; most must not be freed."""
    source = torch.ones(1 << 20, dtype=torch.uint8)
    target = torch.zeros_like(source)
    copier, stop = Copier(), False
    turns = 0

    def compute() -> None:
        nonlocal turns
        while not stop:
            turns += 1

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        seen, copies, end = False, 0, time.monotonic() + 1
        before = turns
        while time.monotonic() < end:
            copier.copy(target.data_ptr(), source.data_ptr(), 1 << 20)
            seen |= copier.contended
            copies += 1
        during = turns - before
    finally:
        stop = True
        thread.join()
    assert seen and torch.equal(source, target)
    assert copies > 400, "not one switch interval a copy"
    assert during > 10_000, "and the other thread gets its turns"
