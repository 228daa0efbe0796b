"""Plans: who sends which bytes to whom, in which bucket, in one total order.

A plan is a pure function of the manifest, the placements of a channel's members and the bucket size; equal inputs give
an equal plan with an equal id on every machine, so it is made once, cached and replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

from .placement import Box

__all__ = ["Bucket", "Plan", "PlanError", "Region", "Segment"]


class PlanError(ValueError):
    """The placements cannot be served. ``problems`` names each tensor and member; the text shows the first five."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        shown = "; ".join(problems[:5])
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        super().__init__(f"no plan ({len(problems)} problem(s)): {shown}{more}")


@dataclass(frozen=True, slots=True)
class Region:
    """One box of one tensor that one sender sends to one set of receivers, as packed row-major bytes.

    ``tensor`` is the manifest index of the *root* entry (never an alias). ``piece_box`` is the receiver's piece that
    this region fills in part or whole; ``box`` (inside it) is what travels. A receiver writes the region into every
    piece it holds of that root whose box equals ``piece_box`` (so both names of a tied pair get it). ``nbytes`` is
    the packed size.
    """

    tensor: int
    piece_box: Box
    box: Box
    sender: str
    receivers: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes ``[offset, offset + nbytes)`` of the packed region ``region`` (index into ``Plan.regions``)."""

    region: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """The unit of transfer: segments of one sender for one set of receivers, at most ``bucket_bytes`` in all.

    ``index`` is its place in the plan's one total order. ``nbytes`` is the sum of its segments; no padding.
    """

    index: int
    sender: str
    receivers: tuple[str, ...]
    segments: tuple[Segment, ...]
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """The whole schedule of one channel. ``id`` is ``"p-"`` and 32 hex digits of its content."""

    id: str
    manifest_id: str
    bucket_bytes: int
    regions: tuple[Region, ...]
    buckets: tuple[Bucket, ...]
