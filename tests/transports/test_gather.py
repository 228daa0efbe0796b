"""Many copies as few pieces of work: the tables, and the kernel that reads them.

Without a card: ``TRITON_INTERPRET=1 pytest tests/transports/test_gather.py`` where Triton is installed.
"""

from __future__ import annotations

import importlib.util
import os
import random
from importlib.metadata import version

import pytest
import torch

from weightplane.transports import gather as gather_module
from weightplane.transports.gather import gather, unusable
from weightplane.transports.gather_table import Case, Copies, Rows, cut, divide, parts, rows_of

CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CARD else torch.device("cpu")


def without() -> str:
    """Why the kernel cannot run here, neither on a card nor in the interpreter."""
    if CARD:
        return ""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return "needs a CUDA device, or Triton and TRITON_INTERPRET=1 for its interpreter"
    if tuple(map(int, version("numpy").split(".")[:2])) >= (2, 4):
        return "the interpreter of Triton 3.6 takes no loop's bounds with NumPy 2.4 or newer: pip install 'numpy<2.4'"
    return ""


kernels = pytest.mark.skipif(bool(without()), reason=without())


def copies(*rows: tuple[int, int, int]) -> Copies:
    table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)
    return Copies(table[:, 0], table[:, 1], table[:, 2])


def listed(c: Copies) -> list[tuple[int, ...]]:
    return [tuple(r) for r in torch.stack((c.source, c.target, c.nbytes), 1).tolist()]


def played(rows: Rows) -> dict[int, int]:
    """Target → source of every byte, as the kernel would move it."""
    found: dict[int, int] = {}
    for unit, first, count in rows.launches:
        for source, target, units in rows.columns[:, first : first + count].t().tolist():
            assert source % unit == target % unit == 0 and units > 0
            for i in range(units * unit):
                assert target + i not in found, "a byte is written twice"
                found[target + i] = source + i
    return found


def wanted(c: Copies) -> dict[int, int]:
    return {t + i: s + i for s, t, n in listed(c) for i in range(n)}


def test_stretches_are_cut_where_either_side_ends_and_joined_where_both_go_on() -> None:
    assert listed(cut([(100, 10), (200, 6)], [(1000, 4), (2000, 12)])) == [
        (100, 1000, 4),
        (104, 2000, 6),
        (200, 2006, 6),
    ]
    assert listed(cut([(100, 10), (110, 6)], [(1000, 4), (1004, 12)])) == [(100, 1000, 16)]
    assert listed(cut([(100, 10), (110, 6)], [(1000, 16)])) == [(100, 1000, 16)]
    assert listed(cut([(100, 3), (500, 0), (300, 2)], [(7, 0), (1000, 5)])) == [(100, 1000, 3), (300, 1003, 2)]
    assert listed(cut([], [(9, 0)])) == []
    apart = [(100, 1000, 10), (110, 1010, 6)]
    assert listed(cut([(100, 10), (110, 6)], [(1000, 16)], {90, 110})) == apart, "neighbours of two allocations"
    assert listed(cut([(100, 16)], [(1000, 10), (1010, 6)], {1010})) == apart
    assert listed(cut([(100, 10), (110, 6)], [(1000, 16)], {100, 1000, 105})) == [(100, 1000, 16)]
    with pytest.raises(ValueError, match="3 bytes for 4"):
        cut([(1, 3)], [(2, 4)])


def test_random_stretches_keep_every_byte_in_its_place() -> None:
    rng = random.Random(7)
    for _ in range(50):
        total = rng.randrange(1, 400)

        def stretches(base: int) -> list[tuple[int, int]]:
            found, left, at = [], total, base  # noqa: B023
            while left:
                n = min(left, rng.randrange(0, 60))
                found.append((at, n))
                at += n + rng.choice((0, 0, 5))
                left -= n
            return found

        a, b = stretches(1_000), stretches(50_000)
        flat_a = [s + i for s, n in a for i in range(n)]
        flat_b = [s + i for s, n in b for i in range(n)]
        made = cut(a, b)
        assert wanted(made) == dict(zip(flat_b, flat_a, strict=True))
        assert played(rows_of(made, 32)) == wanted(made)
        in_parts = list(parts(made, 64))
        assert all(p.total <= 64 for p in in_parts) and all(p.total == 64 for p in in_parts[:-1])
        assert [x for p in in_parts for x in wanted(p).items()] == list(wanted(made).items())


def test_rows_are_bounded_and_as_wide_as_their_addresses_allow() -> None:
    chunk = 512 << 10
    c = copies(
        (1 << 20, 1 << 30, 3 * chunk + 40),
        (16, 32, 4096),
        (5, 10005, 4000),
        (0, 20008, 100),
        (2, 30004, 10),
        (3, 40004, 9),
    )
    rows = rows_of(c, chunk)
    assert [unit for unit, _, _ in rows.launches] == [16, 8, 2, 1]
    wide = rows.columns[2, : rows.launches[0][2]] * 16
    assert int(wide.max()) == chunk and wide.tolist() == sorted(wide.tolist(), reverse=True)
    assert rows.columns.is_contiguous() and len(played(rows)) == c.total
    assert rows_of(copies()).launches == ()


def test_who_copies_what() -> None:
    c = copies((0, 0, 4 << 20), (9 << 20, 9 << 20, 1000), (20 << 20, 20 << 20, 1 << 20), (30 << 20, 30 << 20, 32 << 20))
    across, colocated = Case(False, 132), Case(True, 132)
    assert [len(x) for x in divide(c, across)] == [1, 3]
    assert [len(x) for x in divide(c, colocated)] == [3, 1]
    assert [len(x) for x in divide(c, Case(True, 132, kernel=False))] == [0, 4]
    assert [len(x) for x in divide(c, Case(False, 132, batch=False))] == [4, 0]
    assert [len(x) for x in divide(c, Case(False, 132, kernel=False, batch=False))] == [0, 4]
    assert (across.programs, colocated.programs, Case(False, 40).programs) == (64, 132, 40)


def test_a_large_model_is_cut_in_a_moment() -> None:
    """4,719 tensors of 3 MB: some 28,000 rows."""
    sources = [(1 << 40 | i * 3145728, 3145728) for i in range(4719)]
    targets = [(1 << 41 | i * 4194304, 3145728) for i in range(4719)]
    made = cut(sources, targets)
    assert len(made) == 4719 and made.total == 4719 * 3145728
    assert sum(rows_of(p).columns.shape[1] for p in parts(made, 2 << 30)) >= 4719 * 6


# --- the kernel


@kernels
def test_the_kernel_works_here() -> None:
    assert unusable(DEVICE) == ""


@kernels
@pytest.mark.parametrize("programs", [1, 3, 64])
def test_the_kernel_moves_what_the_table_says_and_nothing_else(programs: int) -> None:
    size = 60_000 if CARD else 900
    generator = torch.Generator().manual_seed(3)
    source = torch.randint(0, 256, (20 * size,), dtype=torch.uint8, generator=generator).to(DEVICE)
    target = torch.full_like(source, 0xA5)
    expected = target.clone()
    stretches = []
    cases = [
        (0, 0, size - 100),
        (0, 0, 16),
        (1, 0, 1),
        (7, 9, size - 64),
        (4, 4, 33),
        (2, 6, 500),
        (0, 16, 15),
        (8, 3, 700),
    ]
    for n, (skew, apart, nbytes) in enumerate(cases):
        begin, to = 2 * n * size + skew, 2 * n * size + skew + apart
        expected[to : to + nbytes] = source[begin : begin + nbytes]
        stretches.append((source.data_ptr() + begin, target.data_ptr() + to, nbytes))
    rows = rows_of(copies(*stretches), 256)
    gather(rows.columns.to(DEVICE), rows, programs)
    assert torch.equal(target, expected)


def test_a_card_on_which_the_kernel_fails_or_errs_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "copied by the CPU" in gather_module._try(torch.device("cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton") is None:
        assert "pip install triton" in gather_module._try(torch.device("cuda", 0))
        return

    def fails(device: torch.device) -> bool:
        raise RuntimeError("no kernel image\nand more")

    monkeypatch.setattr(gather_module, "_right", fails)
    assert "no kernel image" in gather_module._try(torch.device("cpu"))
    monkeypatch.setattr(gather_module, "_right", lambda device: False)
    assert "wrongly" in gather_module._try(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
def test_the_kernel_is_tried_on_its_own_card_whichever_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_module, "_reasons", {})
    with torch.cuda.device(1):
        assert unusable(torch.device("cuda", 0)) == ""
