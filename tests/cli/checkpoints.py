"""Writes tiny safetensors files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch

from weightplane.transports.dtypes import as_bytes

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A file of the public format: header length, JSON header, the bytes."""
    header: dict[str, object] = {}
    body = b""
    for name, tensor in tensors.items():
        raw = bytes(as_bytes(tensor).tolist())
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        body += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def tiny(path: Path, value: float) -> Path:
    """A two-layer model filled with one value."""
    tensors = {f"layers.{i}.weight": torch.full((8, 8), value) for i in range(2)}
    return write_safetensors(path, {**tensors, "head.bias": torch.full((8,), value, dtype=torch.bfloat16)})
