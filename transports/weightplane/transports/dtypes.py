"""Tensors as bytes: canonical dtype names, and uint8 views of any tensor that may travel.

What travels is a tensor's *logical* bytes: row-major, whatever its strides, little-endian. Copies are made through
integer views of the same width, so NaN payloads and non-0/1 bool bytes survive. Every function here is pure and may be
called from any thread.
"""

from __future__ import annotations

import sys

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightplane.controlplane.core.manifest import DTYPE_BYTES

__all__ = ["as_bytes", "byte_view", "check_movable", "dtype_of", "flat_bytes", "int_view", "is_row_major", "name_of"]

if sys.byteorder != "little":  # pragma: no cover - no supported machine is
    raise ImportError("weightplane moves little-endian bytes; this machine is big-endian")

_DTYPES: dict[str, torch.dtype] = {n: getattr(torch, n) for n in DTYPE_BYTES if hasattr(torch, n)}
_NAMES: dict[torch.dtype, str] = {d: n for n, d in _DTYPES.items()}
_INTS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def name_of(dtype: torch.dtype) -> str:
    """The canonical name of a dtype that may travel, e.g. ``"bfloat16"``. ``TypeError`` names one that may not."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise TypeError(f"dtype {dtype} cannot travel as bytes; one of {sorted(_DTYPES)}") from None


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a canonical name. ``TypeError`` if it may not travel, or this torch does not have it."""
    try:
        return _DTYPES[name]
    except KeyError:
        why = "this torch does not have it" if name in DTYPE_BYTES else "it cannot travel as bytes"
        raise TypeError(f"dtype {name!r}: {why}; one of {sorted(_DTYPES)}") from None


def check_movable(tensor: torch.Tensor, name: str = "") -> str:
    """Return the canonical dtype name of a tensor whose bytes may travel, else raise ``TypeError`` naming it.

    Refused: quantised, sub-byte (``int1``..``uint7``), sparse and other non-strided layouts, nested, meta, and wrapper
    subclasses (DTensor, torchao: pass the plain local shards).
    """
    label = f"tensor {name!r}" if name else "tensor"
    why = ""
    if tensor.is_quantized:
        why = f"is quantised ({tensor.dtype}): its bytes do not say their scale"
    elif tensor.is_nested:
        why = "is a nested tensor; pass its parts"
    elif tensor.layout is not torch.strided:
        why = f"has layout {tensor.layout}; only strided tensors travel"
    elif tensor.device.type == "meta":
        why = "is on the meta device and has no bytes"
    elif is_traceable_wrapper_subclass(tensor):
        why = f"is a {type(tensor).__name__}, a wrapper around other tensors; pass the plain (local) tensor"
    elif tensor.dtype not in _NAMES:
        why = f"has dtype {tensor.dtype}, which cannot travel as bytes"
    if why:
        raise TypeError(f"{label} {why}")
    return _NAMES[tensor.dtype]


def is_row_major(tensor: torch.Tensor) -> bool:
    """Whether the tensor's logical bytes are its memory as it lies: contiguous, no pending conjugate or negative."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def int_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, any strides, as an integer dtype of the same width (complex128: a trailing pair of int64).

    The tensor must not be conjugated or negated lazily. Copies between two such views move bits, never values.
    """
    size = tensor.element_size()
    if size == 16:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_INTS[size])


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """``byte_view`` without its checks, for a tensor known to be row-major and movable."""
    # Not reshape(-1): one element of a strided view counts as contiguous and keeps a stride that view() refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def byte_view(tensor: torch.Tensor, name: str = "") -> torch.Tensor:
    """A live 1-D uint8 view of a row-major contiguous tensor (0-dim and empty included): writing it writes the tensor.

    ``TypeError`` as ``check_movable``; ``ValueError`` naming the tensor if it is not contiguous.
    """
    check_movable(tensor, name)
    if not is_row_major(tensor):
        raise ValueError(f"tensor {name!r} of shape {list(tensor.shape)} is not contiguous; it has no flat byte view")
    return flat_bytes(tensor.detach())


def as_bytes(tensor: torch.Tensor, name: str = "") -> torch.Tensor:
    """The logical bytes as a contiguous 1-D uint8 tensor on the same device: a view if it can be, else a copy.

    Never mutates ``tensor``; do not write to the result. ``TypeError`` as ``check_movable``.
    """
    check_movable(tensor, name)
    plain = tensor.detach().resolve_conj().resolve_neg()
    if not plain.is_contiguous():
        plain = int_view(plain).contiguous()
    return flat_bytes(plain)
