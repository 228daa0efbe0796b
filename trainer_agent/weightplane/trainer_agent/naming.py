"""Names and dtypes on their way out of a training job: wrapper prefixes, renames, casts, ties.

All of it happens in the source, before a manifest is made and before a byte is hashed, so that nothing after it knows
what the trainer's own names or master dtypes were. Pure; any thread.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from weightplane.controlplane.core.manifest import Manifest, ManifestError, TensorMeta
from weightplane.transports.dtypes import check_movable, name_of

__all__ = [
    "WRAPPERS",
    "CastRule",
    "NameMap",
    "NameRules",
    "SourceError",
    "merge_manifests",
    "storage_key",
]

#: Path components that wrappers (DDP, torch.compile, FSDP, activation checkpointing) put into parameter names.
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

#: New name of a tensor; ``None`` leaves it out. A name that a mapping does not hold stays as it is.
NameMap = Mapping[str, str | None] | Callable[[str], str | None]

#: One dtype for all; or by name pattern (``fnmatch``, first match wins); or a function of name and dtype. Applies to
#: floating-point tensors only; ``None`` keeps the dtype.
CastRule = torch.dtype | Mapping[str, torch.dtype] | Callable[[str, torch.dtype], torch.dtype | None]


class SourceError(ValueError):
    """A source cannot give what it promised; the text names the tensor, what was expected and what was found."""


@dataclass(frozen=True)
class NameRules:
    """How a source's tensors are called and which dtype they travel in.

    ``strip``: path components removed wherever they stand (``"a.module.b"`` becomes ``"a.b"``); ``()`` keeps all names.
    ``rename`` comes after it and ``cast`` sees the new name. Two tensors that end up with one name are refused by the
    manifest. A cast equals ``tensor.to(dtype)``.
    """

    rename: NameMap | None = None
    cast: CastRule | None = None
    strip: Sequence[str] = WRAPPERS
    _strip: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_strip", frozenset(self.strip))

    def name(self, raw: str) -> str | None:
        """The published name of the source's ``raw``; ``None`` if it is left out."""
        parts = raw.split(".")
        kept = ".".join(p for p in parts if p not in self._strip) if self._strip.intersection(parts) else raw
        if self.rename is None:
            return kept
        new = self.rename.get(kept, kept) if isinstance(self.rename, Mapping) else self.rename(kept)
        if new is not None and (not isinstance(new, str) or not new):
            raise SourceError(f"the name map gives {new!r} for tensor {kept!r}: expected a name, or None to drop it")
        return new

    def dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype that a tensor of this published name travels in."""
        if self.cast is None or not dtype.is_floating_point:
            return dtype
        if isinstance(self.cast, torch.dtype):
            return self.cast
        if isinstance(self.cast, Mapping):
            return next((d for pattern, d in self.cast.items() if fnmatch.fnmatchcase(name, pattern)), dtype)
        return self.cast(name, dtype) or dtype


def storage_key(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Equal for two tensors that are the very same bytes; ``None`` if it cannot be told (no storage, or no bytes)."""
    if not tensor.numel() or tensor.device.type == "meta" or tensor.layout is not torch.strided:
        return None
    where = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*where, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())


def meta_of(name: str, tensor: torch.Tensor, rules: NameRules, *, allow_meta: bool = False) -> TensorMeta:
    """The manifest entry of a plain tensor, cast applied. ``TypeError`` names one whose bytes cannot travel."""
    if not (allow_meta and tensor.device.type == "meta"):
        check_movable(tensor, name)
    return TensorMeta(name, name_of(rules.dtype(name, tensor.dtype)), tuple(tensor.shape))


def merge_manifests(parts: Iterable[Manifest], *, replicated: bool = False) -> Manifest:
    """The manifest of a model whose ranks each hold some of the names (expert or pipeline parallelism), in rank order.

    Every rank must compute it from the same parts (exchange them in any way you like). A name that two ranks declare is
    refused, naming both: pipeline stages that number their layers locally would otherwise overwrite each other. With
    ``replicated`` equal entries are one tensor, held by both; unequal ones are still refused.
    """
    merged: dict[str, TensorMeta] = {}
    first: dict[str, int] = {}
    problems: list[str] = []
    for rank, part in enumerate(parts):
        for meta in part:
            known = merged.get(meta.name)
            if known is None:
                merged[meta.name] = meta
                first[meta.name] = rank
            elif known != meta:
                problems.append(
                    f"tensor {meta.name!r}: part {first[meta.name]} declares {known.dtype} {list(known.shape)}, "
                    f"part {rank} {meta.dtype} {list(meta.shape)}"
                )
            elif not replicated:
                problems.append(
                    f"tensor {meta.name!r} is declared by part {first[meta.name]} and by part {rank}: give them "
                    "different names, or pass replicated=True if both hold the same values"
                )
    if problems:
        raise ManifestError(problems)
    return Manifest.of(merged.values())
