"""Launching the gather kernel (``gather_kernel``), and whether it works on a card: tried once, held against copies.

Checked in Triton's interpreter on CPU memory, and on H200.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import Any

import torch

from .gather_table import Copies, Rows, cut, rows_of

__all__ = ["gather", "unusable"]

log = logging.getLogger(__name__)

_trying = threading.Lock()
_reasons: dict[torch.device, str] = {}


def unusable(device: torch.device) -> str:
    """Why the kernel does not work on ``device``, with what to do; empty if it does. Any thread.

    The first call for a card compiles the kernel (seconds, once per machine) and tries it. CPU memory: in Triton's
    interpreter alone.
    """
    with _trying:
        if device not in _reasons:
            _reasons[device] = _try(device)
            if _reasons[device] and device.type == "cuda":
                log.warning("many small tensors reach %s by copy engines, at a cost: %s", device, _reasons[device])
        return _reasons[device]


def _try(device: torch.device) -> str:
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "CPU memory is copied by the CPU (the kernel reads it in Triton's interpreter only, for tests)"
    try:
        from . import gather_kernel  # noqa: F401
    except ImportError as e:
        return f"Triton is missing ({e}): pip install triton"
    on = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    try:
        with on:
            right = _right(device)
        return "" if right else f"the kernel copies wrongly on {device}"
    except Exception as e:  # whatever a compiler or a driver raises
        return f"the kernel fails on {device}: {type(e).__name__}: {str(e).splitlines()[0][:300] if str(e) else e!r}"


def _right(device: torch.device) -> bool:
    """Copy stretches that need every unit, and look at what lies between them."""
    size = 150_000 if device.type == "cuda" else 300
    source = (torch.arange(12 * size, dtype=torch.int64) * 131 % 251).to(torch.uint8).to(device)
    target, wanted = torch.zeros_like(source), torch.zeros_like(source)
    some: list[Copies] = []
    for n, (skew, apart) in enumerate([(0, 0), (16, 0), (3, 0), (0, 8), (5, 8), (0, 4), (0, 2), (0, 1), (1, 3)]):
        begin, to, nbytes = n * size + skew, n * size + skew + apart, size - 40 + 3 * n
        wanted[to : to + nbytes] = source[begin : begin + nbytes]
        some.append(cut([(source.data_ptr() + begin, nbytes)], [(target.data_ptr() + to, nbytes)]))
    all_ = Copies(*(torch.cat([getattr(c, f) for c in some]) for f in ("source", "target", "nbytes")))
    rows = rows_of(all_, 4096)
    table = rows.columns.to(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    gather(table, rows, 5)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return torch.equal(target, wanted)


def gather(table: torch.Tensor, rows: Rows, programs: int) -> None:
    """Queue the copies of ``rows``, whose columns lie on the device as ``table``, on torch's current stream there."""
    from . import gather_kernel as k

    kernel: Any = k.gather
    stride = table.stride(0)
    for unit, first, count in rows.launches:
        kernel[(min(programs, count),)](table, first, count, stride, UNIT=unit, BLOCK=k.BLOCK, num_warps=k.WARPS)
