"""vLLM's ``weight_versions`` of an output as our spans, and the ``cache_salt`` that keeps trajectories apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from weightplane.inference_agent.spans import Span, merge

from ..gate import VersionTag

__all__ = ["BORN", "cache_salt", "spans_of_labels", "version_of_label"]

#: vLLM's label of the weights that it loaded at its start.
BORN = "default"
_MOST_DIGITS = 19  # of an int64


def version_of_label(label: object) -> int | None:
    """The version that a weight label of vLLM names: 0 for what it was started with, None for a label not of ours."""
    if label == BORN:
        return 0
    text = str(label)
    ours = len(text) <= _MOST_DIGITS and text.isascii() and text.isdecimal() and text[0] != "0"
    return int(text) if ours else None


def spans_of_labels(
    labels: Iterable[Any] | None, tokens: int, about: Mapping[int, VersionTag] | None = None
) -> tuple[Span, ...]:
    """The spans of an output of ``tokens`` tokens.

    ``labels``: ``CompletionOutput.weight_versions`` of a finished request, or the same field of
    ``/inference/v1/generate``; ``None`` (vLLM says nothing) makes every token unknown. ``about``: what the caller knows
    of versions, say from its publish receipts; vLLM's label carries the version alone. A label that is not of ours is
    unknown, and so is a token that no label covers.
    """
    spans = []
    for entry in labels or ():
        is_map = isinstance(entry, Mapping)
        label, start, stop = (entry[k] if is_map else getattr(entry, k) for k in ("version", "start", "end"))
        if start == stop:
            continue  # a label under which nothing was made
        version = version_of_label(label)
        if version is None:
            spans.append(Span(start, stop, known=False))
            continue
        tag = (about or {}).get(version, VersionTag(version))
        spans.append(Span(start, stop, version, tag.trainer_step, tag.lineage, tag.incarnation))
    return merge([(spans, tokens)])


def cache_salt(started: int, held: int) -> str:
    """The ``cache_salt`` of a request under the cache policy ``salt``.

    ``started``: the version at the trajectory's start; ``held``: what the replica that is asked held just before the
    request (``/weight_info``). Keys and values of old weights then serve old trajectories only: one that starts at a
    version never meets what an older one computed. The older of the two counts: a replica that has not got the
    trajectory's version yet must not compute under its name, or later trajectories would find old keys there.
    """
    if started < 0 or held < 0:
        raise ValueError(f"versions are 0 or more, found {started} and {held}")
    return str(min(started, held))
