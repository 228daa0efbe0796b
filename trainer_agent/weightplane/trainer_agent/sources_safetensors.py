"""Checkpoints in the safetensors format as a source: one file, or a folder of shards with its index.

The format is parsed here (it is a length, a JSON header and the bytes): a file is mapped into memory, nothing is copied
before it is sent, and nothing but the header is trusted or read at opening. Every offset is checked against the file
before a tensor is made of it.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch

from weightplane.controlplane.core.manifest import DTYPE_BYTES, Manifest
from weightplane.transports.dtypes import dtype_of

from .naming import CastRule, NameMap, SourceError
from .sources import NamedTensors

__all__ = ["SafetensorsSource", "open_safetensors"]

#: The format's dtype names, and ours.
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
_HEADER_LIMIT = 100_000_000  # the format's own
_INDEX = "model.safetensors.index.json"


class SafetensorsSource(NamedTensors):
    """The tensors of a ``.safetensors`` file, or of a folder: of the files its index names, or of all there are.

    Names are as they are in the file, in the order of the bytes (of the index's files, sorted, in a folder); the format
    has no ties, so there are no aliases. Prefixes are not stripped unless ``strip`` says so. The files are mapped: they
    must not be cut short while the source lives. Raises ``SourceError`` naming file and tensor for a malformed file, a
    missing shard, or a name that the index and the files disagree on.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        rename: NameMap | None = None,
        cast: CastRule | None = None,
        strip: Iterable[str] = (),
        manifest: Manifest | None = None,
    ) -> None:
        super().__init__(rename=rename, cast=cast, strip=strip, manifest=manifest)
        self.path = Path(path)
        self._loaded = _open(self.path)

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``NamedTensors``."""
        return iter(self._loaded.items())


def _open(path: Path) -> dict[str, torch.Tensor]:
    if path.is_file():
        return open_safetensors(path)
    if not path.is_dir():
        raise SourceError(f"{path} is neither a file nor a folder")
    index = path / _INDEX
    where: dict[str, str] | None = None
    if index.is_file():
        where = _read_index(index)
        files = sorted(set(where.values()))
        missing = [f for f in files if not (path / f).is_file()]
        if missing:
            raise SourceError(f"{index} names {len(missing)} file(s) that {path} lacks: {missing[:5]}")
    else:
        files = sorted(p.name for p in path.glob("*.safetensors"))
        if not files:
            raise SourceError(f"{path} holds no .safetensors file")
    tensors: dict[str, torch.Tensor] = {}
    found: dict[str, str] = {}
    for file in files:
        for name, tensor in open_safetensors(path / file).items():
            if name in found:
                raise SourceError(f"tensor {name!r} is in {found[name]} and in {file}")
            tensors[name], found[name] = tensor, file
    if where is not None and found != where:
        wrong = sorted({k for k in found.keys() | where.keys() if found.get(k) != where.get(k)})
        first = wrong[0]
        raise SourceError(
            f"{index}: {len(wrong)} tensor(s) are not where it says, first {first!r}: "
            f"expected in {where.get(first, 'no file')}, found in {found.get(first, 'no file')}"
        )
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    try:
        data = json.loads(index.read_text("utf-8"))
        where = data["weight_map"]
        ok = isinstance(where, dict) and all(isinstance(v, str) and Path(v).name == v for v in where.values())
    except (ValueError, KeyError, TypeError) as e:
        raise SourceError(f"{index} is not an index of shards: {e!r}") from e
    if not ok:
        raise SourceError(f"{index}: weight_map must give a file name in the same folder for each tensor")
    return {str(k): str(v) for k, v in where.items()}


def open_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of one file by name, in the order of their bytes, mapped from it (private: the file cannot be written).

    Raises ``SourceError`` naming file and tensor.
    """
    with path.open("rb") as f:
        size = f.seek(0, 2)
        f.seek(0)
        head = f.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise SourceError(f"{path}: the header claims {length} bytes of a file of {size}; not a safetensors file")
        try:
            header = json.loads(f.read(length).decode("utf-8"), object_pairs_hook=_unique)
        except ValueError as e:
            raise SourceError(f"{path}: the header is not JSON: {e}") from e
        body = size - 8 - length
        if not isinstance(header, dict):
            raise SourceError(f"{path}: the header is not a JSON object")
        header.pop("__metadata__", None)
        entries = {name: _entry(path, name, entry, body) for name, entry in header.items()}
        mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
    order = sorted(entries.items(), key=lambda item: item[1][2:])
    end = 0
    out: dict[str, torch.Tensor] = {}
    for name, (dtype, shape, start, stop) in order:
        if start != end:
            raise SourceError(f"{path}: tensor {name!r} begins at byte {start}, expected {end}: no gaps or overlaps")
        end = stop
        out[name] = _view(mapped, 8 + length + start, stop - start, dtype, shape)
    if end != body:
        raise SourceError(f"{path}: tensors end at byte {end} of {body}")
    return out


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [k for k, _ in pairs]
        raise ValueError(f"duplicate key {next(k for k in names if names.count(k) > 1)!r}")
    return out


def _entry(path: Path, name: str, entry: Any, body: int) -> tuple[str, tuple[int, ...], int, int]:
    try:
        kind, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, start, stop)
        sane = all(type(n) is int and n >= 0 for n in numbers) and start <= stop <= body
    except (KeyError, TypeError, ValueError) as e:
        raise SourceError(f"{path}: tensor {name!r} has a malformed entry: {e!r}") from e
    if kind not in DTYPES:
        raise SourceError(f"{path}: tensor {name!r} has dtype {kind!r}; known: {sorted(DTYPES)}")
    dtype = DTYPES[kind]
    if not sane or stop - start != prod(shape) * DTYPE_BYTES[dtype]:
        whole = all(type(n) is int and n >= 0 for n in shape)
        expected = f"{prod(shape) * DTYPE_BYTES[dtype]} bytes" if whole else "whole numbers from 0, and bytes"
        raise SourceError(
            f"{path}: tensor {name!r} of {kind} {list(shape)} lies at bytes {start}..{stop} of {body}: "
            f"expected {expected} inside the file"
        )
    return dtype, shape, start, stop


def _view(mapped: mmap.mmap, offset: int, nbytes: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = dtype_of(dtype)
    if not nbytes:
        return torch.empty(shape, dtype=kind)
    flat = torch.frombuffer(mapped, dtype=torch.uint8, count=nbytes, offset=offset)
    if flat.data_ptr() % kind.itemsize:  # an odd header length: legal, if rare
        flat = flat.clone()
    return flat.view(kind).view(shape)
