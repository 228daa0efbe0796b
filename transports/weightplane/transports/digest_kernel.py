"""The Triton kernels of ``digest_cuda``: XXH3_64 of ``wpd1`` leaves that lie anywhere in one device's memory.

Imported by ``digest_cuda`` alone, and only when it hashes: it needs Triton. XXH3 keeps eight 64-bit accumulators and
scrambles them after each block of 16 stripes of 64 bytes. A program takes ``LEAVES`` leaves, a thread of it one pair
of accumulators of one leaf: its 16 loads of a block are independent, and nothing passes between threads until the end.

All arithmetic is modulo 2**64. Lengths are multiples of 1024 here (``wpd1`` pads with zeros), so XXH3's last stripe
is a block's sixteenth, under a key of its own, and that block is not scrambled.
"""

# Triton gives its language no types.
# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator, type-arg"
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOptionalOperand=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["KEYS", "any_leaves", "whole_leaves"]

_SECRET = bytes.fromhex(  # XXH3's default secret
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def _u64(at: int) -> int:
    return int.from_bytes(_SECRET[at : at + 8], "little")


_P32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_P64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_LAST, _SCRAMBLE, _MERGE, _START = tl.constexpr(128), tl.constexpr(136), tl.constexpr(144), tl.constexpr(152)
_PRIME32, _PRIME64 = tl.constexpr(_P32[0]), tl.constexpr(_P64[0])
_AVALANCHE = tl.constexpr(0x165667919E3779F9)

#: What the kernels read as ``keys`` (u64 each): 16 stripes' keys, the last stripe's, scrambling, merging, the start.
KEYS = (
    *(_u64(8 * (stripe + lane)) for stripe in range(16) for lane in range(8)),
    *(_u64(121 + 8 * lane) for lane in range(8)),
    *(_u64(128 + 8 * lane) for lane in range(8)),
    *(_u64(11 + 8 * lane) for lane in range(8)),
    *(_P32[2], _P64[0], _P64[1], _P64[2], _P64[3], _P32[1], _P64[4], _P32[0]),
)


@triton.jit
def _add(even, odd, word0, word1, key):
    """One stripe: a lane's product goes to its own accumulator, its word to the neighbour's. ``key``: where it lies."""
    mixed0, mixed1 = word0 ^ tl.load(key), word1 ^ tl.load(key + 1)
    even += word1 + (mixed0 & 0xFFFFFFFF) * (mixed0 >> 32)
    odd += word0 + (mixed1 & 0xFFFFFFFF) * (mixed1 >> 32)
    return even, odd


@triton.jit
def _scramble(acc, key):
    return ((acc ^ (acc >> 47)) ^ tl.load(key)) * _PRIME32


@triton.jit
def _fold(a, b):
    return (a * b) ^ tl.umulhi(a, b)


@triton.jit
def _merge(even, odd, nbytes, key):
    """Eight accumulators to the hash. ``nbytes``: the padded length of each leaf, u64."""
    mixed = _fold(even ^ tl.load(key + _MERGE), odd ^ tl.load(key + _MERGE + 1))
    h = nbytes * _PRIME64 + tl.sum(mixed, axis=1)
    h = (h ^ (h >> 37)) * _AVALANCHE
    return h ^ (h >> 32)


@triton.jit(do_not_specialize=["count"])
def whole_leaves(addresses, slots, count, keys, out, LEAVES: tl.constexpr):
    """Hash ``count`` leaves of 131072 bytes at 16-byte aligned ``addresses`` (i64); leaf i to ``out[slots[i]]``."""
    row = tl.program_id(0) * LEAVES + tl.arange(0, LEAVES)
    here = row < count
    # Rows past the end repeat row 0 and store nothing, so that no load in the loop needs a mask.
    address = tl.load(addresses + tl.where(here, row, 0))
    start = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16)  # so that a pair of words is one load
    lane = 2 * tl.arange(0, 4)[None, :, None] + tl.arange(0, 2)[None, None, :]
    at = start[:, None, None] + lane
    key = keys + 2 * tl.arange(0, 4)[None, :]
    even = tl.load(key + _START) + tl.zeros((LEAVES, 4), tl.uint64)
    odd = tl.load(key + _START + 1) + tl.zeros((LEAVES, 4), tl.uint64)
    for block in range(127):
        for stripe in tl.static_range(16):
            word0, word1 = tl.split(tl.load(at + (block * 128 + stripe * 8)))
            even, odd = _add(even, odd, word0, word1, key + stripe * 8)
        even, odd = _scramble(even, key + _SCRAMBLE), _scramble(odd, key + _SCRAMBLE + 1)
    for stripe in tl.static_range(16):
        word0, word1 = tl.split(tl.load(at + (127 * 128 + stripe * 8)))
        even, odd = _add(even, odd, word0, word1, key + (stripe * 8 if stripe < 15 else _LAST))
    hashes = _merge(even, odd, tl.full((LEAVES,), 131072, tl.uint64), key)
    tl.store(out + tl.load(slots + row, mask=here, other=0), hashes, mask=here)


@triton.jit
def _word(base, shift, skew, size, offset):
    """The 8 bytes at ``offset`` of a leaf of ``size`` bytes that begins ``skew`` bytes after the word ``base``.

    Bytes past the end are 0. Only aligned words that hold a byte of the leaf are read.
    """
    left = size - offset
    at = base + offset // 8
    word = tl.load(at, mask=left > 0, other=0) >> shift
    more = tl.load(at + 1, mask=(skew > 0) & (left > 8 - skew), other=0)
    word |= tl.where(skew > 0, more << ((64 - shift) & 63), 0)
    cut = (8 * tl.minimum(tl.maximum(left, 1), 7)).to(tl.uint64)
    part = word & (((word * 0 + 1) << cut) - 1)
    return tl.where(left >= 8, word, tl.where(left > 0, part, 0))


@triton.jit(do_not_specialize=["count"])
def any_leaves(addresses, sizes, slots, count, keys, out, LEAVES: tl.constexpr):
    """Hash ``count`` leaves of 1 to 131072 bytes (``sizes``, i64) at any address, zero-padded to 1024; as above."""
    row = tl.program_id(0) * LEAVES + tl.arange(0, LEAVES)
    here = row < count
    address = tl.load(addresses + row, mask=here, other=0)
    size = tl.load(sizes + row, mask=here, other=0)[:, None]
    blocks = (size + 1023) // 1024
    skew = (address & 7)[:, None]
    base = (address - (address & 7)).to(tl.pointer_type(tl.uint64))[:, None]
    shift = (skew * 8).to(tl.uint64)
    pair = tl.arange(0, 4)[None, :]
    key = keys + 2 * pair
    even = tl.load(key + _START) + tl.zeros((LEAVES, 4), tl.uint64)
    odd = tl.load(key + _START + 1) + tl.zeros((LEAVES, 4), tl.uint64)
    most = tl.max(tl.max(blocks, axis=1), axis=0)
    block = 0
    while block < most:
        ends = block == blocks - 1
        new_even, new_odd = even, odd
        for stripe in tl.static_range(16):
            offset = block * 1024 + stripe * 64 + pair * 16
            word0, word1 = _word(base, shift, skew, size, offset), _word(base, shift, skew, size, offset + 8)
            at = key + stripe * 8
            if stripe == 15:
                at = tl.where(ends, key + _LAST, at)
            new_even, new_odd = _add(new_even, new_odd, word0, word1, at)
        new_even = tl.where(ends, new_even, _scramble(new_even, key + _SCRAMBLE))
        new_odd = tl.where(ends, new_odd, _scramble(new_odd, key + _SCRAMBLE + 1))
        even, odd = tl.where(block < blocks, new_even, even), tl.where(block < blocks, new_odd, odd)
        block += 1
    hashes = _merge(even, odd, tl.max(blocks * 1024, axis=1).to(tl.uint64), key)
    tl.store(out + tl.load(slots + row, mask=here, other=0), hashes, mask=here)
