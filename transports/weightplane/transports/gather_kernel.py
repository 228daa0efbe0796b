"""The Triton kernel that copies many stretches of memory by a table of addresses (``gather_table.rows_of``).

Imported only when it is launched: it needs Triton. A source may be memory of another GPU, mapped by this one.
"""

# Triton gives its language no types.
# mypy: disable-error-code="no-untyped-call, no-untyped-def, no-redef, untyped-decorator, type-arg"
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOptionalOperand=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["BLOCK", "WARPS", "gather"]

BLOCK, WARPS = 4096, 16  # words of a program's step: 32 KiB in flight for each multiprocessor; 8 warps: 4 % slower


@triton.jit(do_not_specialize=["first", "rows", "stride"])
def gather(table, first, rows, stride, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Copy rows ``[first, first + rows)`` of ``table`` (i64; sources, targets and units ``stride`` apart) in ``UNIT``
    bytes (16: in pairs of 8, whose addresses are multiples of 16)."""
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = table + (first + row)
        source, target, words = tl.load(at), tl.load(at + stride), tl.load(at + 2 * stride)
        if UNIT == 1:
            kind: tl.constexpr = tl.int8
        elif UNIT == 2:
            kind: tl.constexpr = tl.int16
        elif UNIT == 4:
            kind: tl.constexpr = tl.int32
        else:
            kind: tl.constexpr = tl.int64
        here, there = source.to(tl.pointer_type(kind)), target.to(tl.pointer_type(kind))
        if UNIT == 16:
            here, there, words = tl.multiple_of(here, 16), tl.multiple_of(there, 16), words * 2
        whole = words // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):  # without a mask, so that neighbours are moved together
            i = start + tl.arange(0, BLOCK)
            tl.store(there + i, tl.load(here + i))
        i = whole + tl.arange(0, BLOCK)
        tl.store(there + i, tl.load(here + i, mask=i < words), mask=i < words)
