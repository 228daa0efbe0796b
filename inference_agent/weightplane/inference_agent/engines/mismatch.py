"""How a manifest and an engine disagree, in words a person can act on. Pure; any thread."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from weightplane.controlplane.core.placement import Placement
from weightplane.controlplane.core.reasons import Failure, Reason

__all__ = ["Description", "Problem", "ProblemKind", "nearest", "plain_name"]

_SHOWN = 5
_MOST_TEXT = 960  # bytes: a refused call's details have room for 1024
_CANDIDATES = 500
#: What training libraries wrap names in.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.", "module.", "model.")


class ProblemKind(StrEnum):
    """How one tensor does not fit."""

    MISSING = "missing"
    EXTRA = "extra"
    SHAPE = "mis-shaped"
    DTYPE = "mis-typed"
    DUPLICATE = "duplicate"
    LAYOUT = "unwritable"


@dataclass(frozen=True, slots=True)
class Problem:
    """One tensor that does not fit. ``text`` is a sentence that names it."""

    kind: ProblemKind
    name: str
    text: str


@dataclass(frozen=True)
class Description:
    """What an engine holds of a manifest.

    ``placements``: one per worker, in order (meaningful without problems). ``ignored``: manifest names that the engine
    was told to leave out; ``kept``: engine names that no update brings and that stay as they are, by its own list.
    """

    placements: tuple[Placement, ...]
    problems: tuple[Problem, ...] = ()
    ignored: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)

    def failure(self, member: str) -> Failure | None:
        """The refusal (MANIFEST_MISMATCH), counted by kind with up to five of each, in turn, as many as there is room
        for in what a trainer is told, and how many more there are. ``None`` if all fits."""
        if not self.problems:
            return None
        counts = {k: [p for p in self.problems if p.kind is k] for k in ProblemKind}
        head = ", ".join(f"{len(ps)} {k.value}" for k, ps in counts.items() if ps)
        in_turn = [ps[i] for i in range(_SHOWN) for ps in counts.values() if i < len(ps)]
        message, left = f"the manifest does not fit the engine: {head}.", len(self.problems)
        for p in in_turn:
            more = f" {p.text}."
            if left < len(self.problems) and len((message + more).encode()) > _MOST_TEXT:
                break
            message, left = message + more, left - 1
        if left:
            message += f" And {left} more."
        names = tuple(dict.fromkeys(p.name for p in in_turn))
        total = len({p.name for p in self.problems})
        return Failure(Reason.MANIFEST_MISMATCH, message, member, tensors=names[:_SHOWN], tensor_count=total)


def plain_name(name: str) -> str:
    """``name`` without the prefixes that wrappers put anywhere into it (and without a leading ``model.``)."""
    for wrapper in _WRAPPERS[:3]:
        name = name.replace(wrapper, "")
    for prefix in _WRAPPERS[3:]:
        name = name.removeprefix(prefix)
    return name


def nearest(names: Sequence[str], others: Iterable[str]) -> dict[str, str]:
    """For each of ``names`` (a few) the most similar of ``others``, where one is similar enough."""
    pool = list(others)
    by_plain = {plain_name(o): o for o in reversed(pool)}
    out: dict[str, str] = {}
    for name in names:
        hit = by_plain.get(plain_name(name))
        if hit is None:
            close = difflib.get_close_matches(name, pool[:_CANDIDATES], n=1)
            hit = close[0] if close else None
        if hit is not None:
            out[name] = hit
    return out
