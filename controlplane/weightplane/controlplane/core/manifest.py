"""Manifests: what the tensors of one model are called and look like, in one fixed order.

A manifest is metadata only. Its content hash is its id, so it is sent once and named ever after. An entry may be an
*alias*: a second name for the very same bytes (tied parameters). An alias costs no bytes on any wire.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

__all__ = ["DTYPE_BYTES", "Manifest", "ManifestError", "TensorMeta"]

#: Bytes per stored element of every dtype that may travel. ``float4_e2m1fn_x2`` stores two values in one byte and its
#: shape counts bytes. Sub-byte integers (int1..int7, uint1..uint7) and quantised dtypes are refused by name: torch has
#: neither ``copy_`` nor ``contiguous`` for the first, and the bytes of the second do not say their scale.
DTYPE_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}


class ManifestError(ValueError):
    """A manifest that cannot be used. ``problems`` names every offending tensor; the text shows the first five."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        shown = "; ".join(problems[:5])
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        super().__init__(f"invalid manifest ({len(problems)} problem(s)): {shown}{more}")


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One tensor of a manifest.

    ``shape`` is the full, unsharded shape; ``()`` is a 0-dim tensor of one element. ``alias_of`` is the name of the
    entry whose bytes this one shares, or ``""``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    alias_of: str = ""

    @property
    def numel(self) -> int:
        """Number of elements (1 for a 0-dim tensor)."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Logical bytes, row-major. Raises ``KeyError`` for a dtype that may not travel."""
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """An ordered, validated list of tensors. Immutable and safe to share between threads.

    Raises ``ManifestError`` naming each duplicate name, empty name, unknown dtype, negative dimension, and each alias
    whose target is missing, is itself an alias, or differs in dtype or shape.
    """

    tensors: tuple[TensorMeta, ...]
    index: dict[str, int] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", {})
        problems: list[str] = []
        for i, t in enumerate(self.tensors):
            if t.name in self.index:
                problems.append(f"tensor {t.name!r} is declared twice (entries {self.index[t.name]} and {i})")
            if not t.name:
                problems.append(f"entry {i} has an empty name")
            if t.dtype not in DTYPE_BYTES:
                problems.append(
                    f"tensor {t.name!r} has dtype {t.dtype!r}, which cannot travel; one of {sorted(DTYPE_BYTES)}"
                )
            if any(d < 0 for d in t.shape):
                problems.append(f"tensor {t.name!r} has a negative dimension in shape {list(t.shape)}")
            self.index.setdefault(t.name, i)
        for t in self.tensors:
            if not t.alias_of:
                continue
            target = self.get(t.alias_of)
            if target is None:
                problems.append(f"tensor {t.name!r} is an alias of {t.alias_of!r}, which the manifest does not hold")
            elif target.alias_of:
                problems.append(f"tensor {t.name!r} is an alias of {t.alias_of!r}, itself an alias; name the root")
            elif (target.dtype, target.shape) != (t.dtype, t.shape):
                problems.append(
                    f"tensor {t.name!r} ({t.dtype} {list(t.shape)}) is an alias of {t.alias_of!r} "
                    f"({target.dtype} {list(target.shape)}): an alias shares dtype and shape"
                )
        if problems:
            raise ManifestError(problems)

    @classmethod
    def of(cls, tensors: Iterable[TensorMeta]) -> Manifest:
        """Build from any iterable, in its order."""
        return cls(tuple(tensors))

    def get(self, name: str) -> TensorMeta | None:
        """The entry of that name, or ``None``."""
        i = self.index.get(name)
        return None if i is None else self.tensors[i]

    def root(self, i: int) -> int:
        """Index of the entry whose bytes entry ``i`` shares: itself, or the target of its alias."""
        alias = self.tensors[i].alias_of
        return self.index[alias] if alias else i

    def __iter__(self) -> Iterator[TensorMeta]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes that must travel to a full copy: aliases count nothing."""
        return sum(t.nbytes for t in self.tensors if not t.alias_of)

    @cached_property
    def id(self) -> str:
        """Content hash, ``"m-"`` and 32 hex digits: SHA-256 of the canonical JSON of the entries, cut to 128 bits.

        Canonical JSON: a list of ``[name, dtype, [dims...], alias_of]`` in manifest order, UTF-8, no spaces, non-ASCII
        characters written as themselves. Any language can compute it; ``docs/protocol.md`` has vectors.
        """
        return "m-" + hashlib.sha256(self.canonical()).hexdigest()[:32]

    def canonical(self) -> bytes:
        """What the id hashes."""
        rows = [[t.name, t.dtype, list(t.shape), t.alias_of] for t in self.tensors]
        return json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
