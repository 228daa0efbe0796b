"""How fast this host copies memory in pieces, as transports of one host do, beside one copy of it all."""

from __future__ import annotations

import ctypes
import mmap
import time

__all__ = ["TUNABLE", "advice", "measure"]

#: What makes the C library copy pieces as it copies what is larger than the caches. 256 KiB: half a slot of ``shm``.
TUNABLE = "GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=0x40000"
_PIECE, _WHOLE, _ROUNDS = 512 << 10, 256 << 20, 3
_SLOW = 0.75


def measure() -> tuple[float, float]:
    """(pieces, whole) in GB/s: 256 MiB in pieces of 512 KiB, and in one copy; the best of three. Takes half a second
    and 512 MiB. Raises ``OSError`` where there is no such memory."""
    with mmap.mmap(-1, _WHOLE) as a, mmap.mmap(-1, _WHOLE) as b:
        source, target = (ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in (a, b))
        ctypes.memset(source, 1, _WHOLE)
        ctypes.memset(target, 1, _WHOLE)
        return _rate(target, source, _PIECE), _rate(target, source, _WHOLE)


def _rate(target: int, source: int, piece: int) -> float:
    best = 0.0
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for at in range(0, _WHOLE, piece):
            ctypes.memmove(target + at, source + at, piece)
        best = max(best, _WHOLE / (time.perf_counter() - began) / 1e9)
    return best


def advice(pieces: float, whole: float) -> str:
    """What was measured, and what to set if pieces are much slower: the C library then takes the caches to be larger
    than they are, as those of a virtual machine's host can seem to be."""
    found = f"{pieces:.1f} GB/s in pieces of 512 KiB, {whole:.1f} GB/s in one"
    if pieces >= _SLOW * whole:
        return found
    return f"{found}: shm is faster with {TUNABLE} in the environment of trainers and replicas"
