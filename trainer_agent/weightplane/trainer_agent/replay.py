"""What a channel sends, worked out once and used again: spans, and tables of what is hashed on a device.

As long as the source's tensors are the memory that they were (``MemoryWatch``: some 0.2 µs a tensor and publish), a
channel is handed the very lists of spans that it got last time, and knows all about them already. A bucket with a
tensor that was replaced, moved or reshaped gets a new list; nothing is ever taken for the same by address alone, since
what is kept here keeps its memory.

That also means: memory of the source that was published stays in use until the next publish finds it replaced, or
until ``forget``. See ``Publisher.release``.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch

from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.plan import Bucket, Plan
from weightplane.transports.base import SendChannel
from weightplane.transports.buckets import SourceSpans, buckets_from
from weightplane.transports.digest_cuda import RegionGroup
from weightplane.transports.identity import LiveSpans, MemoryWatch

from .mirror import Mirror
from .sources import Source

__all__ = ["ChannelReplay", "LiveGroups", "forget", "newest", "of_channel", "watch"]

_KEPT = 2  # plans remembered for each channel
_lock = threading.Lock()
_channels: WeakKeyDictionary[SendChannel, OrderedDict[str, ChannelReplay]] = WeakKeyDictionary()
_watches: WeakKeyDictionary[Source, MemoryWatch] = WeakKeyDictionary()


@dataclass(frozen=True)
class LiveGroups:
    """Digests to be taken of device memory that stays: launches, the regions they cover, and what they were made for.

    ``mine``: the id of each region's digest (``RegionDigests.mine``).
    """

    mine: Mapping[int, int]
    version: int
    groups: Sequence[RegionGroup]
    regions: frozenset[int]

    @property
    def complete(self) -> bool:
        """Whether nothing is left to be hashed bucket by bucket."""
        return len(self.regions) == len(self.mine)


class ChannelReplay:
    """One plan's buckets of one channel. One thread at a time: the channel's."""

    def __init__(self, plan: Plan, manifest: Manifest, member: str) -> None:
        self.plan, self.manifest, self.member = plan, manifest, member
        self.buckets = buckets_from(plan, member)
        self.version = 0  # rises when spans were found anew
        self.live: dict[int, torch.Tensor] = {}  # by region: its bytes, where they lie in the source's own memory
        self.launches: tuple[int, Sequence[RegionGroup]] | None = None  # of all of ``live`` on devices, at a version
        self.groups: LiveGroups | None = None  # see ``hashing.live_groups``
        self.mirror: Mirror | None = None  # where the channel's transport reads host memory alone
        self._spans: dict[int, LiveSpans] = {}  # by bucket
        self._watch: MemoryWatch | None = None
        self._generation = 0

    @cached_property
    def emission(self) -> tuple[Any, ...]:
        """What of the plan says which bytes it sends. Equal in plans that differ in who receives: what was found for
        one, by the index of a region or bucket, serves the other."""
        regions = self.plan.regions
        mine = dict.fromkeys(s.region for b in self.buckets for s in b.segments)
        pieces = tuple((i, r.tensor, r.piece_box, r.box, r.nbytes) for i in mine for r in (regions[i],))
        buckets = tuple((b.index, tuple((s.region, s.offset, s.nbytes) for s in b.segments)) for b in self.buckets)
        return (self.manifest.id, self.member, pieces, buckets)

    def follow(self, former: ChannelReplay) -> bool:
        """Take over what ``former`` had found of the same bytes. False: they are others."""
        if former.emission != self.emission:
            return False
        self.live, self._spans = dict(former.live), dict(former._spans)
        self._watch, self._generation, self.version = former._watch, former._generation, former.version
        return True

    def look(self, source: Source, watch: MemoryWatch) -> None:
        """Find what changed since the last time; ``watch`` has just looked at the source's tensors.

        Raises ``SpanError`` as ``SourceSpans``. Costs nothing if nothing changed.
        """
        if self._watch is watch and self._generation == watch.generation:
            return
        before = self._generation if self._watch is watch else 0
        self._watch, self._generation = watch, 0  # whatever is raised below: start anew
        found = SourceSpans(self.plan, self.manifest, self.member, source.tensor)
        regions, since = self.plan.regions, watch.since
        for bucket in self.buckets:
            new = [r for r in dict.fromkeys(s.region for s in bucket.segments) if since[regions[r].tensor] > before]
            if not new:
                continue
            self._spans.pop(bucket.index, None)
            for region in new:
                flat = found.live(region)
                if flat is None:
                    self.live.pop(region, None)
                else:
                    self.live[region] = flat
            self._cut(bucket)
        self._generation = watch.generation
        self.version += 1

    def _cut(self, bucket: Bucket) -> None:
        spans: list[torch.Tensor] = []
        for s in bucket.segments:
            flat = self.live.get(s.region)
            if flat is None:
                return  # it must be packed: every time
            spans.append(flat if s.nbytes == flat.numel() else flat[s.offset : s.offset + s.nbytes])
        self._spans[bucket.index] = LiveSpans(spans)

    def spans(self, bucket: Bucket) -> LiveSpans | None:
        """The bucket's spans; ``None`` if some of its bytes do not lie in one piece and must be packed."""
        return self._spans.get(bucket.index)


def watch(source: Source) -> MemoryWatch | None:
    """Look at the source's tensors; ``None`` if it makes them anew for each publish. The publishing thread."""
    tensors = source.held()
    if tensors is None:
        return None
    with _lock:
        found = _watches.get(source)
        if found is None:
            found = _watches[source] = MemoryWatch()
    found.look(tensors)
    return found


def of_channel(
    channel: SendChannel, plan: Plan, manifest: Manifest, member: str, former: Iterable[ChannelReplay] = ()
) -> ChannelReplay:
    """What is known of a plan on a channel; it lives as long as the channel does. It begins with what was found of the
    same bytes for another plan, or for one of ``former``, whose channels are closed."""
    with _lock:
        known = _channels.setdefault(channel, OrderedDict())
        found = known.get(plan.id)
        if found is None:
            found = ChannelReplay(plan, manifest, member)
            any(found.follow(f) for f in (*reversed(known.values()), *former))
            known[plan.id] = found
            while len(known) > _KEPT:
                known.popitem(last=False)
        known.move_to_end(plan.id)
        return found


def newest(channels: Iterable[SendChannel]) -> list[ChannelReplay]:
    """What each of these channels sent last."""
    with _lock:
        return [next(reversed(known.values())) for c in channels if (known := _channels.get(c))]


def forget(channels: Iterable[SendChannel]) -> None:
    """Let go of what is known of these channels, and so of the source's memory."""
    with _lock:
        for channel in channels:
            _channels.pop(channel, None)
