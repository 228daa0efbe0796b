"""What a worker can prove: bytes landed and digests per planned region, as they came or read back from live tensors.

One ``Ledger`` per worker and update, used by one thread at a time.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import torch

from weightplane.controlplane.core.manifest import DTYPE_BYTES, Manifest
from weightplane.controlplane.core.model import Evidence, Verify
from weightplane.controlplane.core.placement import Box
from weightplane.controlplane.core.plan import Bucket, Plan
from weightplane.controlplane.core.verify import sampled_regions
from weightplane.transports.buckets import SinkSpans
from weightplane.transports.digest import Digest, digest_bytes, digest_spans, digest_tensor, memory_of
from weightplane.transports.dtypes import flat_bytes, is_row_major
from weightplane.v1 import update_pb2

from . import codec
from .engines.base import EngineError, LocalTensors

__all__ = ["Ledger", "Memory", "Sink", "WorkerPlan", "receipt_pages"]

_PAGE_DIGESTS = 100_000
_THREADS = 4
_WORTH_THREADS = 32 << 20

#: A region's bytes: a tensor (which keeps them alive), and its memory if it is one piece of host memory.
Memory = tuple[torch.Tensor, memoryview | None]


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

    def memory(self, region: int, tensors: LocalTensors) -> list[Memory]:
        """The bytes of every view that holds the region: where they lie in one piece of host memory, as they lie."""
        return [_memory(home) for home in self.homes(region, tensors)]

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


def _memory(home: torch.Tensor) -> Memory:
    if home.device.type != "cpu" or not is_row_major(home):
        return home, None
    flat = flat_bytes(home.detach())
    return flat, memory_of(flat)


def _digest(m: Memory, name: str) -> int:
    return digest_bytes(m[1]) if m[1] is not None else digest_tensor(m[0], name)


class Sink:
    """Where one worker's bytes go. What a bucket's spans are is found once and replayed while the targets stay.

    A bucket all of whose spans are the targets' own memory needs no scattering and is handed out again as it is;
    any other goes through ``SinkSpans`` each time. One thread; every ``spans`` is followed by its ``complete``.
    """

    def __init__(self, share: WorkerPlan, targets: LocalTensors) -> None:
        self._share, self._targets = share, targets
        self._sink = SinkSpans(share.plan, share.manifest, share.member, targets)
        self._direct: dict[int, tuple[list[torch.Tensor], list[memoryview | None]] | None] = {}

    def spans(self, bucket: Bucket) -> tuple[list[torch.Tensor], Sequence[memoryview | None]]:
        """The bucket's spans, and their memory where it is host memory that stays."""
        known = self._direct.get(bucket.index)
        if known is not None:
            return known
        spans = self._sink.spans(bucket)
        if bucket.index not in self._direct:
            direct = all(self._is_direct(r) for r in {s.region for s in bucket.segments})
            on_host = [memory_of(s, writable=True) if s.device.type == "cpu" else None for s in spans] if direct else []
            self._direct[bucket.index] = (spans, on_host) if direct else None
        return spans, [None] * len(spans)

    def complete(self, bucket: Bucket) -> None:
        """The spans are filled: scatter what is not direct."""
        if self._direct.get(bucket.index) is None:
            self._sink.complete(bucket)

    def _is_direct(self, region: int) -> bool:
        homes = list(self._share.homes(region, self._targets))
        return is_row_major(homes[0]) and len({(h.data_ptr(), h.stride()) for h in homes}) == 1


class Ledger:
    """What one worker got of one update: bytes per region, and their digests as they came (``as_they_come``)."""

    def __init__(self, share: WorkerPlan, update_id: str, verify: Verify, as_they_come: bool) -> None:
        self.share = share
        self._verify = verify
        self._wanted = share.hashed(update_id, verify)
        self._hash = as_they_come
        self._landed: dict[int, int] = {}
        self._open: dict[int, Digest] = {}
        self.digests: dict[int, int] = {}

    def feed(self, bucket: Bucket, spans: Sequence[torch.Tensor], memory: Sequence[memoryview | None]) -> None:
        """A bucket is in place: count it and hash what lies in its spans. Buckets come once, in plan order."""
        for segment, span, view in zip(bucket.segments, spans, memory, strict=True):
            i, region = segment.region, self.share.plan.regions[segment.region]
            before = self._landed.get(i, 0)
            if before != segment.offset:
                raise EngineError(
                    f"tensor {self.share.name(i)!r}: {before} bytes are in place and bucket {bucket.index} goes on at "
                    f"{segment.offset}",
                    [self.share.name(i)],
                )
            self._landed[i] = before + segment.nbytes
            if not self._hash or i not in self._wanted:
                continue
            if segment.nbytes == region.nbytes:
                self.digests[i] = digest_bytes(view) if view is not None else digest_spans([span])
                continue
            digest = self._open.setdefault(i, Digest())
            digest.update(span if view is None else view)
            if digest.nbytes == region.nbytes:
                self.digests[i] = self._open.pop(i).value

    @property
    def nbytes(self) -> int:
        """Payload bytes counted."""
        return sum(self._landed.values())

    @property
    def elements(self) -> int:
        """Elements of the regions that are whole."""
        plan, manifest = self.share.plan, self.share.manifest
        return sum(n // DTYPE_BYTES[manifest.tensors[plan.regions[i].tensor].dtype] for i, n in self._landed.items())

    def missing(self) -> list[str]:
        """Names of the tensors of which bytes are missing."""
        regions = self.share.plan.regions
        short = (i for i in self.share.regions if self._landed.get(i, 0) != regions[i].nbytes)
        return list(dict.fromkeys(self.share.name(i) for i in short))

    def read_back(self, live: Mapping[int, Sequence[Memory]]) -> None:
        """Take the digests from live memory, under every name; raise ``EngineError`` naming what differs.

        Where digests were taken as the bytes came, live memory must have the same; else the live ones are the record,
        and two homes of one region must agree. ``live``: the memory of each region; hashed by a few threads at once.
        """
        wanted = [i for i in self.share.regions if i in self._wanted]
        found: dict[int, list[int]] = {}

        def hash_some(some: Sequence[int]) -> None:
            for i in some:
                found[i] = [_digest(m, self.share.name(i)) for m in live[i]]

        threads = min(_THREADS, os.cpu_count() or 1)
        if threads > 1 and sum(self.share.plan.regions[i].nbytes for i in wanted) > _WORTH_THREADS:
            with ThreadPoolExecutor(threads, "weightplane-readback") as pool:
                list(pool.map(hash_some, self._evenly(wanted, threads)))
        else:
            hash_some(wanted)
        wrong = [
            self.share.name(i)
            for i in wanted
            if not found[i] or any(d != self.digests.setdefault(i, found[i][0]) for d in found[i])
        ]
        if wrong:
            names = list(dict.fromkeys(wrong))
            raise EngineError(
                f"live memory is not what was received, in {len(names)} tensor(s): {', '.join(map(repr, names[:5]))}",
                names,
            )

    def _evenly(self, regions: Sequence[int], parts: int) -> list[list[int]]:
        """Largest first, each to the part that has least."""
        plan = self.share.plan.regions
        out: list[list[int]] = [[] for _ in range(parts)]
        load = [0] * parts
        for i in sorted(regions, key=lambda i: -plan[i].nbytes):
            least = load.index(min(load))
            out[least].append(i)
            load[least] += plan[i].nbytes
        return out

    def packed(self) -> array[int]:
        """The digests in receipt order; 0 where nothing was asked. Empty when the level is OFF."""
        if self._verify is Verify.OFF:
            return array("Q")
        return array("Q", [self.digests.get(i, 0) for i in self.share.regions])


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
