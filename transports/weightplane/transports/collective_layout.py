"""How one bucket goes over a collective's wire: pure arithmetic that every member does alike, in any language.

A bucket travels in *steps*, in this order. Its small segments are packed: each begins at a multiple of 16 bytes of a
packed buffer of at most ``Tuning.pack`` bytes; one step moves one such buffer (what does not fit is cut, and goes on in
the next). Then its large segments (``Tuning.large`` bytes or more) go as they are, up to 64 of them in one step: one
group call, so that a library may launch them together, and must see them together everywhere.

A *fence* of 512 bytes precedes the first bucket that one call of ``arm`` has of one sender for one set of receivers: it
says which update the bytes belong to. A receiver that expects another writes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from weightplane.controlplane.core.plan import Bucket

from .base import ArmToken

__all__ = ["FENCE_BYTES", "Large", "Packed", "Part", "Step", "Tuning", "fence", "fence_problem", "steps_of"]

FENCE_BYTES: Final = 512
_LAYOUT: Final = 1  # rises whenever members that differ in this file cannot work together
_ALIGN: Final = 16
_GROUP: Final = 64
_CUT: Final = 1 << 20  # room below which a segment is not cut to fill it


@dataclass(frozen=True, slots=True)
class Tuning:
    """``large``: bytes from which a segment travels unpacked. ``pack``: bytes of a packed buffer, of which there are
    ``slots``. Equal in all members of a channel."""

    large: int = 32 << 20
    pack: int = 192 << 20
    slots: int = 2


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes ``[offset, offset + nbytes)`` of the bucket; ``at``: where they lie in the packed buffer."""

    offset: int
    nbytes: int
    at: int = 0


@dataclass(frozen=True, slots=True)
class Packed:
    """One packed buffer of ``nbytes`` bytes, gaps between its parts included."""

    parts: tuple[Part, ...]
    nbytes: int

    @property
    def payload(self) -> int:
        """Bytes of the bucket in it."""
        return sum(p.nbytes for p in self.parts)


@dataclass(frozen=True, slots=True)
class Large:
    """Stretches of the bucket that travel as they are, in one group."""

    parts: tuple[Part, ...]

    @property
    def payload(self) -> int:
        """Bytes of the bucket in it."""
        return sum(p.nbytes for p in self.parts)


Step = Packed | Large


def steps_of(bucket: Bucket, tuning: Tuning) -> tuple[Step, ...]:
    """The bucket's steps."""
    packed: list[Step] = []
    large: list[Part] = []
    parts: list[Part] = []
    at = offset = 0

    def seal() -> None:
        nonlocal at
        if parts:
            packed.append(Packed(tuple(parts), parts[-1].at + parts[-1].nbytes))
        parts.clear()
        at = 0

    for segment in bucket.segments:
        left = segment.nbytes
        if left >= tuning.large:
            large.append(Part(offset, left))
            offset += left
            continue
        while left:
            room = tuning.pack - at
            n = left if left <= room else room if room >= min(_CUT, tuning.pack) else 0
            if n:
                _append(parts, Part(offset, n, at))
                at += n + -n % _ALIGN
                offset += n
                left -= n
            if left:
                seal()
    seal()
    groups = [Large(tuple(large[i : i + _GROUP])) for i in range(0, len(large), _GROUP)]
    return (*packed, *groups)


def _append(parts: list[Part], new: Part) -> None:
    """Neighbours on both sides are one part."""
    if parts:
        last = parts[-1]
        if last.offset + last.nbytes == new.offset and last.at + last.nbytes == new.at:
            parts[-1] = Part(last.offset, last.nbytes + new.nbytes, last.at)
            return
    parts.append(new)


def fence(channel_id: str, token: ArmToken, buckets: Sequence[Bucket], tuning: Tuning) -> dict[str, int | str]:
    """What precedes ``buckets``: all that one call armed of one sender for one set of receivers."""
    return {
        "layout": _LAYOUT,
        "tuning": f"{tuning.large}/{tuning.pack}/{tuning.slots}",
        "channel": _short(channel_id),
        "update": _short(token.update_id),
        "epoch": token.epoch,
        "generation": token.generation,
        "first": buckets[0].index,
        "buckets": len(buckets),
        "bytes": sum(b.nbytes for b in buckets),
    }


def encoded(said: Mapping[str, int | str]) -> bytes:
    """A fence as it travels: JSON in ASCII, then zeros."""
    raw = json.dumps(said, separators=(",", ":")).encode("ascii")
    if len(raw) > FENCE_BYTES:
        raise AssertionError(f"a fence of {len(raw)} bytes")
    return raw.ljust(FENCE_BYTES, b"\0")


def fence_problem(raw: bytes, expected: Mapping[str, int | str]) -> str:
    """What is wrong with a fence that came, or nothing."""
    try:
        found = json.loads(raw.rstrip(b"\0"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        return "it sends something else than expected (no fence): do all members run the same Weightplane?"
    wrong = [f"{k} {found.get(k)!r}, expected {v!r}" for k, v in expected.items() if found.get(k) != v]
    return f"it sends {'; '.join(wrong)}" if wrong else ""


def _short(text: str) -> str:
    """The text, or as much of it as is telling and a hash of the whole."""
    if text.isascii() and text.isprintable() and len(text) <= 64:
        return text
    plain = "".join(c if c.isascii() and c.isprintable() and c not in '"\\' else "?" for c in text[:24])
    return f"{plain}#{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"
