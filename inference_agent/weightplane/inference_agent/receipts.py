"""What a worker can prove: bytes landed and digests per planned region, as they came or read back from live tensors.

One ``Ledger`` per worker and update, used by one thread at a time.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from weightplane.controlplane.core.manifest import DTYPE_BYTES, Manifest
from weightplane.controlplane.core.placement import Box
from weightplane.controlplane.core.plan import Bucket, Plan, Segment
from weightplane.controlplane.core.states import Evidence, Verify
from weightplane.controlplane.core.verify import sampled_regions
from weightplane.transports.digest import LEAF_BYTES, digest_bytes
from weightplane.transports.digest_cuda import PartDigest, RegionGroup, digest_tensors
from weightplane.v1 import update_pb2

from . import codec
from .engines.base import EngineError, LocalTensors
from .regions import RegionMemory
from .sink import Sink

__all__ = ["Ledger", "RegionMemory", "Sink", "WorkerPlan", "receipt_pages"]

_PAGE_DIGESTS = 100_000


@dataclass(frozen=True)
class WorkerPlan:
    """One worker's share of a plan, worked out once and replayed."""

    plan: Plan
    manifest: Manifest
    member: str

    @cached_property
    def regions(self) -> tuple[int, ...]:
        """Indices of the regions it receives, in plan order: the order of its receipt."""
        return tuple(i for i, r in enumerate(self.plan.regions) if self.member in r.receivers)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets it receives, in plan order."""
        return self.plan.buckets_for(self.member)

    @cached_property
    def _aliases(self) -> dict[int, list[int]]:
        out: dict[int, list[int]] = {}
        for i in range(len(self.manifest)):
            out.setdefault(self.manifest.root(i), []).append(i)
        return out

    @cached_property
    def reception(self) -> str:
        """What of the plan says where its bytes go. Equal in plans that differ in who else receives, or who sends: what
        was made of one share, and asks for regions and buckets by their index, serves the other."""
        regions = [(i, r.tensor, r.piece_box, r.box, r.nbytes) for i in self.regions for r in (self.plan.regions[i],)]
        buckets = [(b.index, [(s.region, s.offset, s.nbytes) for s in b.segments]) for b in self.buckets]
        text = repr((self.plan.manifest_id, regions, buckets))
        return hashlib.sha256(text.encode()).hexdigest()

    def name(self, region: int) -> str:
        """The tensor that a region is of."""
        return self.manifest.tensors[self.plan.regions[region].tensor].name

    def homes(self, region: int, tensors: LocalTensors) -> Iterator[torch.Tensor]:
        """Every view of ``tensors`` that holds the region, under whatever name."""
        r = self.plan.regions[region]
        for entry in self._aliases.get(r.tensor, ()):
            local = tensors.get(entry)
            if local is not None and local[1] == r.piece_box:
                yield _cut(local[0], r.piece_box, r.box)

    @cached_property
    def cuts(self) -> dict[int, tuple[Segment, ...]]:
        """By bucket: the segments that are not whole regions; the order of their buckets matters."""
        regions = self.plan.regions
        return {b.index: tuple(s for s in b.segments if s.nbytes != regions[s.region].nbytes) for b in self.buckets}

    @cached_property
    def nbytes(self) -> int:
        """Payload bytes that it receives."""
        return sum(b.nbytes for b in self.buckets)

    @cached_property
    def elements(self) -> int:
        """Elements that it receives."""
        return sum(self.elements_in(r, self.plan.regions[r].nbytes) for r in self.regions)

    def elements_in(self, region: int, nbytes: int) -> int:
        """Elements in so many bytes of a region."""
        return nbytes // DTYPE_BYTES[self.manifest.tensors[self.plan.regions[region].tensor].dtype]

    def hashed(self, update_id: str, verify: Verify) -> frozenset[int]:
        """The regions whose digests count at this level."""
        if verify is Verify.OFF:
            return frozenset()
        if verify is Verify.SAMPLED:
            return frozenset(self.regions) & frozenset(sampled_regions(update_id, len(self.plan.regions)))
        return frozenset(self.regions)


def _cut(tensor: torch.Tensor, have: Box, want: Box) -> torch.Tensor:
    for dim, ((start, stop), (base, end)) in enumerate(zip(want, have, strict=True)):
        if (start, stop) != (base, end):
            tensor = tensor.narrow(dim, start - base, stop - start)
    return tensor


class Ledger:
    """What one worker got of one update: bytes per region, and their digests as they came (``as_they_come``).

    ``sink``: where the bytes are put. With it, what lands in a device's memory is hashed there, region by region.
    ``untouched``: the sink's targets are live memory that nobody but the transport writes before it is read back; then
    each region may be read back as soon as it is whole, beside the wire, instead of all of them at the end.
    """

    def __init__(
        self,
        share: WorkerPlan,
        update_id: str,
        verify: Verify,
        as_they_come: bool,
        sink: Sink | None = None,
        *,
        untouched: bool = False,
    ) -> None:
        self.share = share
        self._verify = verify
        self._wanted = share.hashed(update_id, verify)
        self._early = untouched and not as_they_come and bool(self._wanted) and sink is not None and sink.arrivals.alone
        self._hash = (as_they_come or self._early) and bool(self._wanted)
        self._fed: set[int] = set()
        self._cut: dict[int, int] = {}  # bytes in place of regions that come in parts
        self._open: dict[int, PartDigest] = {}
        self._digests: dict[int, int] = {}
        self._arrivals = sink.arrivals if sink is not None and self._hash else None
        arrivals = self._arrivals
        self._left = list(arrivals.needs) if arrivals is not None else []
        self._started: list[RegionGroup] = []
        self._all_device = arrivals is not None and len(arrivals.flats) == len(share.regions)

    def feed(self, bucket: Bucket, spans: Sequence[torch.Tensor], memory: Sequence[memoryview | None]) -> None:
        """A bucket is in place: count it and hash what lies in its spans. Each comes once; parts of a region in order.

        Costs next to nothing where nothing is hashed as it comes, or all of it on a device.
        """
        if bucket.index in self._fed:
            raise self._out_of_order(bucket, bucket.segments[0])
        for segment in self.share.cuts[bucket.index]:
            if self._cut.get(segment.region, 0) != segment.offset:
                raise self._out_of_order(bucket, segment)
            self._cut[segment.region] = segment.offset + segment.nbytes
        self._fed.add(bucket.index)
        if not self._hash:
            return
        if self._arrivals is not None and len(self._wanted) == len(self.share.regions):
            for g in self._arrivals.closes[bucket.index]:
                self._left[g] -= 1
                if not self._left[g]:
                    self._arrivals.groups[g].start()
                    self._started.append(self._arrivals.groups[g])
        if not self._all_device:
            self._hash_spans(bucket, spans, memory)

    def _out_of_order(self, bucket: Bucket, segment: Segment) -> EngineError:
        name, size = self.share.name(segment.region), self.share.plan.regions[segment.region].nbytes
        before = self._cut.get(segment.region, size)
        return EngineError(
            f"tensor {name!r}: {before} bytes are in place and bucket {bucket.index} goes on at {segment.offset}",
            [name],
        )

    def _hash_spans(self, bucket: Bucket, spans: Sequence[torch.Tensor], memory: Sequence[memoryview | None]) -> None:
        elsewhere = self._arrivals.flats if self._arrivals is not None else {}
        plan, on_device = self.share.plan, []
        for segment, span, view in zip(bucket.segments, spans, memory, strict=True):
            i, size = segment.region, plan.regions[segment.region].nbytes
            if i not in self._wanted or i in elsewhere:
                continue
            if segment.nbytes == size:
                if view is not None:
                    self._digests[i] = digest_bytes(view)
                else:
                    on_device.append((i, span))
                continue
            if i not in self._open:
                self._open[i] = PartDigest(span.device, size, aligned=plan.bucket_bytes >= LEAF_BYTES)
            self._open[i].update(span)
            if self._open[i].nbytes == size:
                self._digests[i] = self._open.pop(i).value
        if on_device:
            values = digest_tensors([span for _, span in on_device])
            self._digests.update(zip((i for i, _ in on_device), values, strict=True))

    @property
    def digests(self) -> dict[int, int]:
        """By region. Waits for what is being hashed on devices; of regions of which bytes are missing there is none."""
        arrivals = self._arrivals
        if arrivals is not None and len(self._wanted) < len(self.share.regions) and not self.missing():
            self._started, self._arrivals = arrivals.sample(self._wanted), None
            for group in self._started:
                group.start()
        for group in self._started:
            self._digests.update(zip(group.keys, group.values(), strict=True))
        self._started = []
        return self._digests

    @property
    def nbytes(self) -> int:
        """Payload bytes counted."""
        return sum(b.nbytes for b in self.share.buckets if b.index in self._fed)

    @property
    def elements(self) -> int:
        """Elements in place."""
        if len(self._fed) == len(self.share.buckets):
            return self.share.elements
        return sum(self.share.elements_in(r, n) for r, n in self._landed().items())

    def _landed(self) -> dict[int, int]:
        """Bytes in place, by region."""
        out: dict[int, int] = {}
        for bucket in self.share.buckets:
            if bucket.index in self._fed:
                for s in bucket.segments:
                    out[s.region] = out.get(s.region, 0) + s.nbytes
        return out

    def missing(self) -> list[str]:
        """Names of the tensors of which bytes are missing."""
        if len(self._fed) == len(self.share.buckets):
            return []
        regions, landed = self.share.plan.regions, self._landed()
        short = (i for i in self.share.regions if landed.get(i, 0) != regions[i].nbytes)
        return list(dict.fromkeys(self.share.name(i) for i in short))

    def read_back(self, live: RegionMemory) -> None:
        """Take the digests from live memory, under every name; raise ``EngineError`` naming what differs.

        Where digests were taken as the bytes came, live memory must have the same; else the live ones are the record,
        and two homes of one region must agree. Nothing is read again that was read back beside the wire.
        """
        wanted = [i for i in self.share.regions if i in self._wanted]
        known = self.digests
        if self._early and len(known) == len(wanted):
            return
        found, others = live.digests(wanted)
        if not known and len(found) == len(wanted):
            known.update(found)
        wrong = {i for i in wanted if i not in found or known.setdefault(i, found[i]) != found[i]}
        wrong.update(i for i, value in others if known.get(i) != value)
        if wrong:
            names = list(dict.fromkeys(self.share.name(i) for i in sorted(wrong)))
            raise EngineError(
                f"live memory is not what was received, in {len(names)} tensor(s): {', '.join(map(repr, names[:5]))}",
                names,
            )

    def packed(self) -> array[int]:
        """The digests in receipt order; 0 where nothing was asked. Empty when the level is OFF."""
        if self._verify is Verify.OFF:
            return array("Q")
        found = self.digests
        return array("Q", [found.get(i, 0) for i in self.share.regions])


def receipt_pages(
    share: WorkerPlan, update_id: str, evidence: Evidence, bytes_received: int, elements: int, digests: Sequence[int]
) -> list[update_pb2.Receipt]:
    """A worker's receipt as pages; one page when nothing is hashed."""
    total = len(digests)
    return [
        update_pb2.Receipt(
            update_id=update_id,
            member=share.member,
            plan_id=share.plan.id,
            evidence=codec.number(evidence),
            bytes_received=bytes_received,
            elements_written=elements,
            digests=digests[first : first + _PAGE_DIGESTS],
            first=first,
            total=total,
        )
        for first in range(0, max(1, total), _PAGE_DIGESTS)
    ]
