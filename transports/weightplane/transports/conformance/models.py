"""The kit's models: named lists of awkward tensors, filled with reproducible bit patterns. Equal in every process."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import prod

import torch

from weightplane.controlplane.core.manifest import DTYPE_BYTES, Manifest, TensorMeta
from weightplane.controlplane.core.placement import Box, full_box

from ..dtypes import dtype_of, int_view

__all__ = ["Entry", "box_of", "lacking", "local_tensor", "manifest_of", "model", "scribble"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a model. ``layout``: how it lies in memory (see ``_LAYOUTS``)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: str = "plain"
    alias_of: str = ""


_Make = Callable[[tuple[int, ...], torch.dtype, str], torch.Tensor]


def _transposed(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.empty(shape[::-1], dtype=dtype, device=device).permute(*range(len(shape))[::-1])


def _strided(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    if not shape:
        return torch.empty((), dtype=dtype, device=device)
    return torch.empty((*shape[:-1], shape[-1] * 2), dtype=dtype, device=device)[..., ::2]


def _offset(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    n = prod(shape)
    return torch.empty(n + 3, dtype=dtype, device=device)[3 : n + 3].view(shape)


_LAYOUTS: dict[str, _Make] = {
    "plain": lambda shape, dtype, device: torch.empty(shape, dtype=dtype, device=device),
    "transposed": _transposed,
    "strided": _strided,
    "offset": _offset,
}


def model(name: str, without: Collection[str] = ()) -> list[Entry]:
    """A model by name: ``dtypes``, ``tied``, ``tiny``, ``names``, ``nan``, ``edges:BUCKET``, ``blob:COUNT:BYTES``,
    ``matrix:ROWS:COLS``, ``large``. ``without``: dtypes that its tensors must not have (see ``lacking``)."""
    return [e for e in _model(name) if e.dtype not in without]


def _model(name: str) -> list[Entry]:
    kind, *args = name.split(":")
    numbers = [int(a) for a in args]
    if kind == "dtypes":
        shapes: list[tuple[str, tuple[int, ...]]] = [
            ("plain", (7, 5)),
            ("plain", ()),
            ("plain", (0, 3)),
            ("transposed", (6, 9)),
            ("strided", (4, 3, 5)),
            ("offset", (33,)),
            ("transposed", (1, 1)),
        ]
        return [Entry(f"{d}.{i}", d, s, how) for i, (how, s) in enumerate(shapes) for d in DTYPE_BYTES]
    if kind == "tied":
        return [
            Entry("embed", "bfloat16", (64, 32), "transposed"),
            Entry("norm", "float32", (32,)),
            Entry("head", "bfloat16", (64, 32), "plain", "embed"),
        ]
    if kind == "tiny":
        dtypes = ("float32", "bfloat16", "uint8", "int64")
        return [Entry(f"layers.{i}.bias", dtypes[i % 4], (1 + i % 16,)) for i in range(10_000)]
    if kind == "names":
        odd = [
            "weight",
            "a b",
            "层.权重",
            "😀" * 40,
            "e\u0301",
            "\u202eabc",
            "x" * 2000,
            "a/b\\c:d;e",
            "\x00\x01\n",
            "'\"%s{}",
        ]
        return [Entry(n, "float16", (5, 3)) for n in odd]
    if kind == "nan":
        return [Entry(f"nan.{d}", d, (64,)) for d in DTYPE_BYTES if "float" in d or "complex" in d]
    if kind == "edges":
        sizes = {"minus one": numbers[0] - 1, "equal": numbers[0], "plus one": numbers[0] + 1, "four": 4 * numbers[0]}
        return [Entry(f"edge {k}", "uint8", (n,)) for k, n in sizes.items()] + [Entry("tail", "float32", (3,))]
    if kind == "blob":
        return [Entry(f"blob.{i}", "uint8", (numbers[1],)) for i in range(numbers[0])]
    if kind == "matrix":
        shape = (numbers[0], numbers[1])
        return [
            Entry("up", "bfloat16", shape),
            Entry("down", "float32", shape, "transposed"),
            Entry("scale", "float32", ()),
        ]
    if kind == "large":
        return [Entry("large", "uint8", ((1 << 31) + 4097,))]
    raise ValueError(f"no model {name!r}")


def manifest_of(entries: list[Entry]) -> Manifest:
    """The manifest of a model."""
    return Manifest.of(TensorMeta(e.name, e.dtype, e.shape, e.alias_of) for e in entries)


def box_of(entry: Entry, part: str) -> Box:
    """The box a member holds of an entry: ``full``, ``rows:I/N`` or ``cols:I/N`` (whole where there is no such cut)."""
    box = full_box(entry.shape)
    if part == "full":
        return box
    how, _, which = part.partition(":")
    i, n = (int(x) for x in which.split("/"))
    dim = 0 if how == "rows" else 1
    if len(box) <= dim or entry.shape[dim] % n:
        return box
    step = entry.shape[dim] // n
    return tuple((i * step, (i + 1) * step) if d == dim else side for d, side in enumerate(box))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers, lazily, so that copies move bits."""
    return int_view(tensor)


def _pattern(entry: Entry, seed: int) -> torch.Tensor:
    """The entry's whole value for a seed, contiguous. Aliases have their root's value."""
    rng = torch.Generator().manual_seed(seed * 1_000_003 + sum((entry.alias_of or entry.name).encode("utf-8")))
    n = prod(entry.shape) * DTYPE_BYTES[entry.dtype]
    raw = torch.empty(n, dtype=torch.uint8)
    raw[: n // 8 * 8].view(torch.int64).random_(generator=rng)
    raw[n // 8 * 8 :].random_(0, 256, generator=rng)
    if entry.name.startswith("nan."):
        raw.bitwise_or_(torch.tensor([0x81, 0x7F], dtype=torch.uint8).repeat(n // 2 + 1)[:n])  # exponents all ones
    return raw.view(dtype_of(entry.dtype)).view(entry.shape)


def local_tensor(entry: Entry, box: Box, layout: str = "", device: str = "cpu") -> torch.Tensor:
    """An uninitialised tensor for a box of an entry, lying as the entry says, or as ``layout`` does."""
    shape = tuple(stop - start for start, stop in box)
    return _LAYOUTS[layout or entry.layout](shape, dtype_of(entry.dtype), device)


def lacking(device: str) -> dict[str, str]:
    """Dtypes whose tensors torch cannot hold, fill and read on a device, and what it says."""
    found = {}
    for name in DTYPE_BYTES:
        entry = Entry(name, name, (3, 2))
        try:
            tensor = local_tensor(entry, full_box(entry.shape), device=device)
            scribble(entry, full_box(entry.shape), tensor, -1)
            int_view(tensor).cpu()
        except Exception as e:
            found[name] = f"{type(e).__name__}: {str(e)[:200]}"
    return found


def scribble(entry: Entry, box: Box, tensor: torch.Tensor, seed: int) -> None:
    """Fill a local tensor with the seed's value of that box (seed -1: every byte 0xA5), bit by bit."""
    if seed < 0:
        blank = torch.full((tensor.numel() * tensor.element_size(),), 0xA5, dtype=torch.uint8)
        _bits(tensor).copy_(_bits(blank.view(tensor.dtype).view(tensor.shape)))
        return
    value = _pattern(entry, seed)
    _bits(tensor).copy_(_bits(value[tuple(slice(start, stop) for start, stop in box)] if box else value))
