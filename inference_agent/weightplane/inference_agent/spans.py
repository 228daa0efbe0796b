"""Which weights made which tokens: spans from token tags, merged over turns and replicas, and how stale they are.

What is not known stays UNKNOWN: no function here fills a gap with a neighbour's version. Pure; no torch, no grpc calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightplane.v1 import spans_pb2

from .engines.gate import VersionTag

__all__ = [
    "Lag",
    "Span",
    "from_dicts",
    "from_message",
    "lag",
    "merge",
    "spans_of",
    "to_dicts",
    "to_message",
]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``[start, stop)`` of one output, made by one version in one life of one replica.

    ``known`` False: the weights are not known; then the other fields mean nothing and hold their defaults.
    ``version`` 0 and ``trainer_step`` -1: the weights that the engine loaded at its start.
    """

    start: int
    stop: int
    version: int = 0
    trainer_step: int = -1
    lineage: str = ""
    incarnation: str = ""
    known: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"a span covers at least one token: expected 0 <= start < stop, found {self}")
        if not self.known and (self.version, self.trainer_step, self.lineage, self.incarnation) != (0, -1, "", ""):
            raise ValueError(f"an unknown span names no weights, found {self}")

    def at(self, start: int, stop: int) -> Span:
        """The same weights, other tokens."""
        return Span(start, stop, self.version, self.trainer_step, self.lineage, self.incarnation, self.known)

    def same_weights(self, other: Span) -> bool:
        """Whether both were made by the same version in the same life (or are both unknown)."""
        return self.at(0, 1) == other.at(0, 1)


def spans_of(tags: Iterable[VersionTag | None]) -> tuple[Span, ...]:
    """One tag per generated token, in order -> spans. ``None``: that token's weights are not known."""
    made = (
        Span(i, i + 1, known=False)
        if t is None
        else Span(i, i + 1, t.version, t.trainer_step, t.lineage, t.incarnation)
        for i, t in enumerate(tags)
    )
    return _joined(made)


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Adjacent spans of the same weights become one."""
    out: list[Span] = []
    for span in spans:
        if out and out[-1].stop == span.start and out[-1].same_weights(span):
            out[-1] = out[-1].at(out[-1].start, span.stop)
        else:
            out.append(span)
    return tuple(out)


def _covering(spans: Sequence[Span], tokens: int) -> list[Span]:
    """``spans`` cut to ``[0, tokens)``, gaps as unknown. ``ValueError`` if they overlap or run backwards."""
    out: list[Span] = []
    at = 0
    for span in spans:
        if span.start < at:
            raise ValueError(f"spans must be in order and disjoint: {span} begins before {at}")
        if span.start >= tokens:
            break
        if span.start > at:
            out.append(Span(at, span.start, known=False))
        at = min(span.stop, tokens)
        out.append(span.at(span.start, at))
    if at < tokens:
        out.append(Span(at, tokens, known=False))
    return out


def merge(parts: Iterable[tuple[Sequence[Span], int] | tuple[Sequence[Span], int, int]]) -> tuple[Span, ...]:
    """The spans of one trajectory from its parts: turns, or a rollout aborted here and continued there.

    A part is ``(spans, tokens)``: the next ``tokens`` tokens, whose spans count from the part's own first token. A
    third item ``at`` places it at that token of the trajectory: a continuation that generated anew from ``at`` on
    replaces everything from there, and tokens between what is known and ``at`` are unknown. Tokens that a part's spans
    do not cover (say a prompt, or an engine that tells nothing) are unknown.
    """
    out: list[Span] = []
    end = 0
    for part in parts:
        spans, tokens = part[0], part[1]
        at = part[2] if len(part) > 2 else end
        if tokens < 0 or at < 0:
            raise ValueError(f"tokens and at: expected 0 or more, found {tokens} and {at}")
        kept = _covering(out, at) if at else []
        out = [*kept, *(s.at(s.start + at, s.stop + at) for s in _covering(spans, tokens))]
        end = at + tokens
    return _joined(out)


@dataclass(frozen=True, slots=True)
class Lag:
    """How far behind ``current_version`` the known tokens are, in committed versions. -1: no token is known.

    ``unknown_tokens`` are in none of the figures. ``mean`` is per token.
    """

    least: int
    most: int
    mean: float
    known_tokens: int
    unknown_tokens: int


def lag(spans: Iterable[Span], current_version: int, committed: Iterable[int] | None = None) -> Lag:
    """The staleness of an output. ``committed``: versions that were committed; without it every number counts as one.

    (Aborted updates use up numbers, so without ``committed`` the lag is an upper bound.) A version above
    ``current_version`` is a ``ValueError``: it says that the caller's idea of "current" is old.
    """
    steps = None if committed is None else sorted(set(committed))
    total = known = unknown = 0
    least, most = -1, -1
    for span in spans:
        n = span.stop - span.start
        if not span.known:
            unknown += n
            continue
        if span.version > current_version:
            raise ValueError(f"version {span.version} is newer than the current one, {current_version}")
        if steps is None:
            behind = current_version - span.version
        else:
            behind = sum(1 for v in steps if span.version < v <= current_version)
        least = behind if least < 0 else min(least, behind)
        most = max(most, behind)
        total += behind * n
        known += n
    return Lag(least, most, total / known if known else -1.0, known, unknown)


# --- other forms ----------------------------------------------------------------------------------------------------


def to_message(spans: Iterable[Span]) -> spans_pb2.VersionSpans:
    """As the contract says it."""
    message = spans_pb2.VersionSpans()
    for s in spans:
        state = spans_pb2.SPAN_STATE_KNOWN if s.known else spans_pb2.SPAN_STATE_UNKNOWN
        message.spans.add(
            start=s.start,
            stop=s.stop,
            version=s.version,
            trainer_step=s.trainer_step,
            lineage=s.lineage,
            incarnation=s.incarnation,
            state=state,
        )
    return message


def from_message(message: spans_pb2.VersionSpans) -> tuple[Span, ...]:
    """Back. Anything not said to be KNOWN is unknown."""
    return tuple(
        Span(s.start, s.stop, s.version, s.trainer_step, s.lineage, s.incarnation)
        if s.state == spans_pb2.SPAN_STATE_KNOWN
        else Span(s.start, s.stop, known=False)
        for s in message.spans
    )


def to_dicts(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """As JSON-able values, with the contract's field names; ``state`` is KNOWN or UNKNOWN."""
    return [
        {
            "start": s.start,
            "stop": s.stop,
            "version": s.version,
            "trainer_step": s.trainer_step,
            "lineage": s.lineage,
            "incarnation": s.incarnation,
            "state": "KNOWN" if s.known else "UNKNOWN",
        }
        for s in spans
    ]


def from_dicts(rows: Iterable[Mapping[str, Any]]) -> tuple[Span, ...]:
    """Back from ``to_dicts``."""
    return tuple(
        Span(r["start"], r["stop"], r["version"], r["trainer_step"], r["lineage"], r["incarnation"])
        if r["state"] == "KNOWN"
        else Span(r["start"], r["stop"], known=False)
        for r in rows
    )
