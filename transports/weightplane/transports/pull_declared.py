"""What one sender has told a receiver that pulls: its regions, where each bucket's bytes lie, which may be read now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from weightplane.controlplane.core.plan import Bucket
from weightplane.v1.transport_pb2 import PullBucket, PullReady, PullTable

from .base import TransportError
from .pull_abc import Entry, Importer

if TYPE_CHECKING:
    import torch

__all__ = ["Declared"]

_MOST = 1_000_000  # chunks, regions or buckets that one sender may declare


class Declared:
    """See the module. One thread at a time. ``foul`` makes the error for a sender that breaks the protocol."""

    def __init__(self, member: str, importer: Importer, foul: Callable[[str], TransportError]) -> None:
        self._member, self._importer, self._foul = member, importer, foul
        self.entries: dict[int, tuple[int, Entry]] = {}  # by bucket, with the version of the list
        self.regions: set[int] = set()
        self.ready: dict[int, int] = {}  # buckets that may be read, with the version that is meant
        self._chunks = 0
        self._fitting: dict[int, tuple[Entry, Sequence[torch.Tensor]]] = {}  # of each bucket's bytes

    def rearm(self) -> None:
        """Another update: nothing may be read yet."""
        self.ready.clear()

    def take_ready(self, ready: PullReady) -> None:
        """A bucket may be read."""
        if len(self.ready) > _MOST:
            raise self._foul(f"declared more than {_MOST} buckets ready")
        self.ready[ready.bucket] = ready.version

    def take_table(self, table: PullTable, reading: bool) -> None:
        """Regions come and go, and lists of chunks. ``reading``: the importer is in ``pull`` now."""
        new = [r.id for r in table.regions]
        if len(set(new)) != len(new) or not self.regions.isdisjoint(new):
            raise self._foul("declared a region twice")
        if len(self.regions) + len(new) > _MOST:
            raise self._foul(f"declared more than {_MOST} regions")
        if new:
            self._importer.map(self._member, table.regions)
            self.regions.update(new)
        if gone := self.regions.intersection(table.gone):
            if reading:
                raise self._foul("took memory back that is being read")
            self.regions -= gone
            for index in [i for i, (_, e) in self.entries.items() if not gone.isdisjoint(e.regions)]:
                self._chunks -= len(self.entries.pop(index)[1].sizes)
            self._importer.unmap(self._member, gone)
        for part in table.buckets:
            self._take_chunks(part)

    def _take_chunks(self, part: PullBucket) -> None:
        made = Entry(tuple(part.regions), tuple(part.offsets), tuple(part.sizes))
        version, old = self.entries.get(part.bucket, (0, None))
        if not len(made.regions) == len(made.offsets) == len(made.sizes) or not all(made.sizes):
            raise self._foul(f"declared chunks of bucket {part.bucket} that make no sense")
        if not self.regions.issuperset(made.regions):
            raise self._foul(f"declared chunks of bucket {part.bucket} in a region that it has not declared")
        if old is not None and version == part.version:  # a long list goes on
            made = Entry(old.regions + made.regions, old.offsets + made.offsets, old.sizes + made.sizes)
        self._chunks += len(made.sizes) - (len(old.sizes) if old is not None else 0)
        self.entries[part.bucket] = (part.version, made)
        if self._chunks > _MOST or len(self.entries) > _MOST:
            raise self._foul(f"declared more than {_MOST} chunks")

    def check_size(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        """Raise ``TransportError`` unless the spans hold the bucket's bytes."""
        known = self._fitting.get(bucket.index)
        if known is not None and known[1] is spans:  # looked at before
            return
        found = sum(span.numel() for span in spans)
        if found != bucket.nbytes:
            text = f"bucket {bucket.index} has {bucket.nbytes} bytes, its spans {found}"
            raise TransportError(text, bucket=bucket.index)

    def entry_of(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> Entry:
        """Where a ready bucket's bytes lie; spans (checked before) and entry fit it."""
        version, entry = self.entries.get(bucket.index, (0, None))
        known = self._fitting.get(bucket.index)
        if known is not None and known[0] is entry and known[1] is spans and version == self.ready[bucket.index]:
            return known[0]
        if entry is None or version != self.ready[bucket.index] or sum(entry.sizes) != bucket.nbytes:
            raise self._foul(f"declared bucket {bucket.index} ready, but not where its bytes lie")
        self._fitting[bucket.index] = entry, spans
        return entry

    def lose(self) -> None:
        """The sender has ended: what it declared is not read any more."""
        self.ready.clear()
        self.entries.clear()
        self._fitting.clear()
        self._chunks = 0
        regions, self.regions = self.regions, set()
        self._importer.quiet()
        self._importer.unmap(self._member, regions)
