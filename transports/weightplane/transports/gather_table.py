"""How many copies inside device memory become few pieces of work: pure tables, made once and replayed.

A bucket is a list of stretches at its source and a list of stretches at its target. ``cut`` makes *copies* of them
(each side contiguous, neighbours joined), ``parts`` splits those into parts of bounded size, and ``divide`` says which
of a part's copies a gather kernel makes (``rows_of``: its table) and which the copy engines.

Why both: across a link the copy engines reach it with large copies (393 of 392 GB/s with 339 tensors, 379 with 4,608 of
3 MB, on 2 × H200), but each copy costs about a microsecond. Within one GPU the driver copies by a kernel of its own:
on an H200 (2,120 GB/s) ours reaches 2,005 with either list; 2,070 and 2,040 with the large copies left to the driver.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

__all__ = ["CHUNK", "UNITS", "Case", "Copies", "Rows", "cut", "divide", "parts", "rows_of"]

CHUNK: Final = 128 << 10  # bytes of a row of the kernel's table, at most
UNITS: Final = (16, 8, 4, 2, 1)  # what a row is moved in; both its addresses and its size are multiples
ENGINE_COPY: Final = 1 << 20  # a copy of at least this is worth a copy engine's start
LARGE_COPY: Final = 32 << 20  # ... within one GPU, where the driver's own kernel makes it: 2,070 GB/s against 2,005


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies from source to target: int64 columns of one length (addresses, and bytes of at least 1)."""

    source: torch.Tensor
    target: torch.Tensor
    nbytes: torch.Tensor

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total(self) -> int:
        """Bytes of all."""
        return int(self.nbytes.sum())

    def take(self, which: torch.Tensor | slice) -> Copies:
        """Some of them: by mask, by index or by slice."""
        return Copies(self.source[which], self.target[which], self.nbytes[which])


@dataclass(frozen=True, slots=True)
class Case:
    """What decides how copies are made. ``colocated``: source and target are memory of one GPU. ``processors``: its
    multiprocessors. ``kernel`` and ``batch``: whether the gather kernel and batched copies work here."""

    colocated: bool
    processors: int
    kernel: bool = True
    batch: bool = True

    @property
    def programs(self) -> int:
        """Programs of the kernel: each multiprocessor has one where its own memory bounds it; 64 fill a link."""
        return self.processors if self.colocated else min(64, self.processors)

    @property
    def part_bytes(self) -> int:
        """Bytes of a part: some milliseconds of a fast link, so that its ends weigh little."""
        return 2 << 30 if self.colocated else 512 << 20


def cut(
    sources: Sequence[tuple[int, int]], targets: Sequence[tuple[int, int]], borders: Collection[int] = ()
) -> Copies:
    """The copies that bring ``sources`` to ``targets``: (address, bytes) each, in order. ``ValueError``: unequal sizes.

    Stretches without bytes are passed over; what is contiguous on both sides is one copy, unless it went over one of
    ``borders``: addresses where an allocation begins. Two may well be neighbours, and a driver copies within one only.
    """
    a, b = _column(sources), _column(targets)
    ends_a, ends_b = torch.cumsum(a[:, 1], 0), torch.cumsum(b[:, 1], 0)
    total = int(ends_a[-1]) if len(a) else 0
    if total != (int(ends_b[-1]) if len(b) else 0):
        raise ValueError(f"{total} bytes for {int(ends_b[-1]) if len(b) else 0}")
    ends = torch.unique(torch.cat((ends_a, ends_b)))  # sorted
    starts = torch.cat((ends.new_zeros(1), ends))[: len(ends)]
    source, target = _at(a, ends_a, starts), _at(b, ends_b, starts)
    return _joined(Copies(source, target, ends - starts), torch.tensor(sorted(borders), dtype=torch.int64))


def _column(stretches: Sequence[tuple[int, int]]) -> torch.Tensor:
    table = torch.tensor(stretches, dtype=torch.int64).reshape(-1, 2)
    return table[table[:, 1] > 0]


def _at(stretches: torch.Tensor, ends: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The address of each place in the stretches' bytes."""
    which = torch.searchsorted(ends, places, right=True)
    return stretches[which, 0] + places - (ends[which] - stretches[which, 1])


def _joined(c: Copies, borders: torch.Tensor) -> Copies:
    if not len(c):
        return c
    follows = (c.source[1:] == (c.source + c.nbytes)[:-1]) & (c.target[1:] == (c.target + c.nbytes)[:-1])
    follows &= ~(torch.isin(c.source[1:], borders) | torch.isin(c.target[1:], borders))
    first = torch.cat((torch.ones(1, dtype=torch.bool), ~follows))
    which = torch.cumsum(first, 0) - 1
    nbytes = torch.zeros(int(which[-1]) + 1, dtype=torch.int64).index_add_(0, which, c.nbytes)
    return Copies(c.source[first], c.target[first], nbytes)


def parts(c: Copies, part_bytes: int) -> Iterator[Copies]:
    """The copies in order, in parts of at most ``part_bytes``; a part begins at a multiple of it."""
    c = _split(c, torch.cumsum(c.nbytes, 0) - c.nbytes, part_bytes)
    starts = torch.cumsum(c.nbytes, 0) - c.nbytes
    counts = torch.bincount(starts // part_bytes).tolist() if len(c) else []
    at = 0
    for n in counts:
        if n:
            yield c.take(slice(at, at + n))
        at += n


def _split(c: Copies, places: torch.Tensor, grain: int) -> Copies:
    """Cut every copy wherever its place (that of its first byte: ``places``) passes a multiple of ``grain``."""
    if not len(c):
        return c
    first, last = places // grain, (places + c.nbytes - 1) // grain
    counts = last - first + 1
    row = torch.repeat_interleave(torch.arange(len(c)), counts)
    nth = torch.arange(len(row)) - (torch.cumsum(counts, 0) - counts)[row]
    begin = torch.clamp((first[row] + nth) * grain - places[row], min=0)
    end = torch.minimum((first[row] + nth + 1) * grain - places[row], c.nbytes[row])
    return Copies(c.source[row] + begin, c.target[row] + begin, end - begin)


def divide(c: Copies, case: Case) -> tuple[Copies, Copies]:
    """(what the gather kernel copies, what the copy engines do)."""
    if not case.kernel:
        return c.take(slice(0, 0)), c
    if not case.batch:
        return c, c.take(slice(0, 0))
    large = c.nbytes >= (LARGE_COPY if case.colocated else ENGINE_COPY)
    return c.take(~large), c.take(large)


@dataclass(frozen=True, slots=True)
class Rows:
    """The kernel's table: int64 columns (source, target, units), and (unit, first row, rows) of each launch."""

    columns: torch.Tensor  # 3 × rows
    launches: tuple[tuple[int, int, int], ...]


def rows_of(c: Copies, chunk: int = CHUNK) -> Rows:
    """The table of ``c``: each row is at most ``chunk`` bytes (a multiple of 16), moved in the widest unit it allows.

    A copy whose addresses differ by a multiple of a unit is moved in it but for the bytes before its first and after
    its last multiple. Rows of a launch are longest first, so that programs end together.
    """
    apart = c.source - c.target
    unit = torch.ones_like(apart)
    for u in reversed(UNITS[:-1]):
        unit = torch.where(apart % u == 0, u, unit)
    head = torch.minimum((unit - c.target % unit) % unit, c.nbytes)
    body = (c.nbytes - head) // unit * unit
    tail = c.nbytes - head - body
    edges = [Copies(c.source + at, c.target + at, n) for at, n in ((head * 0, head), (head + body, tail))]
    rows: dict[int, list[Copies]] = {u: [] for u in UNITS}
    for edge in edges:
        rows[1].append(edge.take(edge.nbytes > 0))
    middle = Copies(c.source + head, c.target + head, body)
    for u in UNITS:
        some = middle.take((unit == u) & (body > 0))
        rows[u].append(_split(some, torch.zeros_like(some.nbytes), chunk))
    columns: list[torch.Tensor] = []
    launches: list[tuple[int, int, int]] = []
    at = 0
    for u, lists in rows.items():
        table = torch.cat([torch.stack((r.source, r.target, r.nbytes // u)) for r in lists], dim=1)
        n = table.shape[1]
        if n:
            columns.append(table[:, torch.argsort(table[2], descending=True, stable=True)])
            launches.append((u, at, n))
            at += n
    return Rows(torch.cat(columns, dim=1).contiguous() if columns else torch.empty(3, 0).long(), tuple(launches))
