"""Plans: who sends which bytes to whom, in which bucket, in one total order.

A plan is a pure function of the manifest, the placements of a channel's members and the bucket size; equal inputs give
an equal plan with an equal id on every machine, so it is made once, cached and replayed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .placement import Box, Piece

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
    """The whole schedule of one channel. ``id`` is ``"p-"`` and 32 hex digits of its content.

    ``make_plan`` builds it. Regions are ordered by (``tensor``, ``piece_box``, ``box``), which is unique; every region
    holds bytes. An id names the schedule, not the inputs: a sender that serves nothing leaves no trace in it.
    """

    id: str
    manifest_id: str
    bucket_bytes: int
    regions: tuple[Region, ...]
    buckets: tuple[Bucket, ...]

    @classmethod
    def of(cls, manifest_id: str, bucket_bytes: int, regions: Iterable[Region], buckets: Iterable[Bucket]) -> Plan:
        """Build with the id of this content."""
        regions, buckets = tuple(regions), tuple(buckets)
        content = _content(manifest_id, bucket_bytes, regions, buckets)
        return cls(_content_id(content), manifest_id, bucket_bytes, regions, buckets)

    @property
    def nbytes(self) -> int:
        """Bytes all senders send, each region once however many receivers it has."""
        return sum(r.nbytes for r in self.regions)

    def buckets_for(self, receiver: str) -> tuple[Bucket, ...]:
        """The buckets that ``receiver`` gets, in plan order."""
        return tuple(b for b in self.buckets if receiver in b.receivers)

    def buckets_from(self, sender: str) -> tuple[Bucket, ...]:
        """The buckets that ``sender`` sends, in plan order."""
        return tuple(b for b in self.buckets if b.sender == sender)

    def pieces_of(self, receiver: str) -> dict[Piece, tuple[int, ...]]:
        """What ``receiver`` gets: each piece (of a root entry), in plan order, with the regions that together fill it.

        Empty pieces are not in it: they get no bytes.
        """
        out: dict[Piece, list[int]] = {}
        for i, r in enumerate(self.regions):
            if receiver in r.receivers:
                out.setdefault(Piece(r.tensor, r.piece_box), []).append(i)
        return {piece: tuple(regions) for piece, regions in out.items()}

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-able values: the content that the id hashes, and the id.

        ``streams``: each ``[sender, [receivers...]]``, as regions first name it. ``regions``: ``[tensor, piece_box,
        box, stream, nbytes]``. ``buckets``: a list of ``[region, offset, nbytes]`` each. What follows from these (a
        bucket's index, stream and size) is left out.
        """
        return {**_content(self.manifest_id, self.bucket_bytes, self.regions, self.buckets), "id": self.id}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """The plan that ``to_dict`` gave, perhaps by way of JSON. ``PlanError`` if the id is not its content's."""
        streams = [(str(sender), tuple(receivers)) for sender, receivers in data["streams"]]
        regions = tuple(
            Region(tensor, _box(piece_box), _box(box), streams[stream][0], streams[stream][1], nbytes)
            for tensor, piece_box, box, stream, nbytes in data["regions"]
        )
        buckets = []
        for index, rows in enumerate(data["buckets"]):
            segments = tuple(Segment(*row) for row in rows)
            first = regions[segments[0].region]
            buckets.append(Bucket(index, first.sender, first.receivers, segments, sum(s.nbytes for s in segments)))
        plan = cls.of(data["manifest_id"], data["bucket_bytes"], regions, buckets)
        if plan.id != data["id"]:
            raise PlanError([f"the plan calls itself {data['id']!r}, its content is {plan.id!r}"])
        return plan


def _box(rows: Iterable[Iterable[int]]) -> Box:
    return tuple((start, stop) for start, stop in rows)


def _content(
    manifest_id: str, bucket_bytes: int, regions: tuple[Region, ...], buckets: tuple[Bucket, ...]
) -> dict[str, Any]:
    """What a plan's id covers; see ``Plan.to_dict``."""
    streams: dict[tuple[str, tuple[str, ...]], int] = {}
    rows = [
        [r.tensor, r.piece_box, r.box, streams.setdefault((r.sender, r.receivers), len(streams)), r.nbytes]
        for r in regions
    ]
    return {
        "manifest_id": manifest_id,
        "bucket_bytes": bucket_bytes,
        "streams": [[sender, list(receivers)] for sender, receivers in streams],
        "regions": rows,
        "buckets": [[[s.region, s.offset, s.nbytes] for s in b.segments] for b in buckets],
    }


def _content_id(content: dict[str, Any]) -> str:
    """SHA-256, cut to 128 bits, of canonical JSON: UTF-8, keys sorted, no spaces, non-ASCII written as itself."""
    text = json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return "p-" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
