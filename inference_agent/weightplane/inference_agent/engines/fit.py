"""Whether named live tensors fit a manifest: what each worker holds of it, and everything that does not."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import torch

from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.placement import Piece, Placement, box_text, full_box

from .live import LiveTensor
from .mismatch import Description, Problem, ProblemKind, nearest
from .sharding import BoxOf

__all__ = ["fit"]


def fit(
    manifest: Manifest,
    members: Sequence[str],
    workers: Sequence[Sequence[LiveTensor]],
    boxes: BoxOf,
    allow_extra: Sequence[str],
    allow_missing: Sequence[str],
) -> Description:
    """Compare ``workers[w]`` (the live tensors of ``members[w]``) with the manifest. Pure.

    A tensor is brought if the manifest has any of its names; one that no name brings is missing. A manifest name that
    no worker has is extra. The allow-lists are ``fnmatch`` patterns; no list excuses a manifest none of whose names is
    known here.
    """
    if len(members) != len(workers):
        raise ValueError(f"expected {len(workers)} member name(s), found {len(members)}")
    problems: list[Problem] = []
    placements = []
    for w, member in enumerate(members):
        where = f", worker {w}" if len(workers) > 1 else ""
        pieces = [p for live in workers[w] for p in _fit_one(manifest, w, where, live, boxes, problems)]
        placements.append(Placement.of(member, pieces))
    ours = {n for worker in workers for live in worker for n in live.names}
    missing, kept = _unsent(manifest, workers, allow_missing)
    unknown = [t.name for t in manifest if t.name not in ours]
    binds = len(unknown) < len(manifest)  # an update that brings nothing at all is an error whatever the list allows
    ignored = [n for n in unknown if binds and _matches(n, allow_extra)]
    extra = [n for n in unknown if not (binds and _matches(n, allow_extra))]
    for n, hint in _with_hints(missing, extra):
        problems.append(Problem(ProblemKind.MISSING, n, f"the engine has {n!r}, the manifest does not{hint}"))
    for n, hint in _with_hints(extra, missing or sorted(ours)):
        problems.append(Problem(ProblemKind.EXTRA, n, f"the manifest has {n!r}, the engine does not{hint}"))
    return Description(tuple(placements), tuple(problems), tuple(ignored), tuple(kept))


def _fit_one(
    manifest: Manifest, worker: int, where: str, live: LiveTensor, boxes: BoxOf, problems: list[Problem]
) -> list[Piece]:
    pieces: list[Piece] = []
    roots: dict[int, str] = {}
    for name in live.names:
        index = manifest.index.get(name)
        if index is None:
            continue
        meta = manifest.tensors[index]
        box = boxes(meta, worker)
        want, have = tuple(b - a for a, b in box), tuple(live.tensor.shape)
        if meta.dtype != live.dtype:
            text = f"tensor {name!r}{where}: the manifest has {meta.dtype}, the engine {live.dtype}"
            problems.append(Problem(ProblemKind.DTYPE, name, text))
        if want != have:
            cut_to = f", cut to {box_text(box)}" if box != full_box(meta.shape) else ""
            text = f"tensor {name!r}{where}: the manifest has {list(meta.shape)}{cut_to}, the engine {list(have)}"
            problems.append(Problem(ProblemKind.SHAPE, name, text))
        pieces.append(Piece(index, box))
        roots.setdefault(manifest.root(index), name)
    if len(roots) > 1:
        first, second = list(roots.values())[:2]
        text = (
            f"{first!r} and {second!r} are one tensor in the engine (tied), the manifest sends two: "
            f"declare one as alias_of the other"
        )
        problems.append(Problem(ProblemKind.DUPLICATE, second, text))
    if _overlaps_itself(live.tensor):
        text = f"tensor {live.names[0]!r} maps several elements to one address (an expanded tensor)"
        problems.append(Problem(ProblemKind.LAYOUT, live.names[0], text))
    return pieces


def _unsent(
    manifest: Manifest, workers: Sequence[Sequence[LiveTensor]], allowed: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Names of tensors that the manifest brings under no name at all: (missing, kept as the list allows)."""
    missing: dict[str, None] = {}
    kept: dict[str, None] = {}
    for worker in workers:
        for live in worker:
            if not any(n in manifest.index for n in live.names):
                for n in live.names:
                    (kept if _matches(n, allowed) else missing)[n] = None
    return list(missing), list(kept)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, p) for p in patterns)


def _with_hints(names: Sequence[str], others: Sequence[str]) -> list[tuple[str, str]]:
    hints = nearest(names[:5], others)
    return [(n, f" (nearest: {hints[n]!r})" if n in hints else "") for n in names]


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
