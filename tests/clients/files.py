"""Writes safetensors files with nothing but torch: a GPU host need not have the package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from weightplane.transports.dtypes import as_bytes

__all__ = ["save"]

_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
}


def save(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """``path``, written."""
    header, at = {}, 0
    for name, t in tensors.items():
        nbytes = t.numel() * t.element_size()
        header[name] = {"dtype": _DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for t in tensors.values():
            out.write(as_bytes(t.contiguous()).numpy().tobytes())
    return path
