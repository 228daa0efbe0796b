"""The digests a rank owes: one per region that it sends, each distinct (root, box) hashed once, beside the wire."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch

from weightplane.controlplane.core.placement import Box
from weightplane.controlplane.core.plan import Bucket, Plan
from weightplane.transports.digest import Digest, digest_bytes, digest_spans, memory_of

__all__ = ["LaneHasher", "RegionDigests"]

Key = tuple[int, Box]

_QUEUED = 2  # buckets that may wait to be hashed: bounds the scratch that they hold


class RegionDigests:
    """Values by (root, box), filled by one hasher per lane. Lanes hash disjoint keys unless ``share`` is off."""

    def __init__(self, plans: Sequence[Plan], member: str, *, share: bool) -> None:
        self.values: dict[Key, int] = {}
        self._member = member
        self.owners: dict[Key, int] | None = None
        if share and len(plans) > 1:
            self.owners = {}
            for lane, plan in enumerate(plans):
                for r in plan.regions:
                    if r.sender == member:
                        self.owners.setdefault((r.tensor, r.box), lane)

    def of_plan(self, plan: Plan, late: Callable[[Plan, int], int]) -> list[int]:
        """The digests of the regions of ``plan`` that this rank sends, in order; ``late`` hashes what no lane did."""
        out: list[int] = []
        for i, r in enumerate(plan.regions):
            if r.sender == self._member:
                value = self.values.get((r.tensor, r.box))
                if value is None:
                    value = self.values[(r.tensor, r.box)] = late(plan, i)
                out.append(value)
        return out


class LaneHasher:
    """Hashes one lane's buckets in a thread of its own, while the lane sends them.

    ``feed`` hands over a bucket and its spans, which must not change until ``waits_for`` says that it was hashed.
    """

    def __init__(self, lane: int, plan: Plan, digests: RegionDigests) -> None:
        self._lane, self._plan, self._digests = lane, plan, digests
        self._queue: queue.Queue[tuple[Bucket, Sequence[torch.Tensor]] | None] = queue.Queue(_QUEUED)
        self._open: dict[int, Digest] = {}
        self._first: dict[Key, int] = {}  # the region that hashes a key
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"weightplane-hash-{lane}", daemon=True)
        self._thread.start()

    def feed(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        """Take one bucket; blocks while two are waiting, so that at most three are held."""
        self._queue.put((bucket, spans))

    def finish(self) -> None:
        """Wait for all that was fed. Raises what hashing raised."""
        self._queue.put(None)
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self.error is None:
                try:
                    self._hash(*item)
                except BaseException as e:  # raised by ``finish``, in the lane's thread
                    self.error = e

    def _hash(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        owners, values = self._digests.owners, self._digests.values
        for segment, span in zip(bucket.segments, spans, strict=True):
            region = self._plan.regions[segment.region]
            key = (region.tensor, region.box)
            if owners is not None and owners[key] != self._lane:
                continue
            if self._first.setdefault(key, segment.region) != segment.region:
                continue
            if segment.nbytes == region.nbytes:
                on_cpu = span.device.type == "cpu"
                values[key] = digest_bytes(memory_of(span)) if on_cpu else digest_spans([span])
                continue
            digest = self._open.setdefault(segment.region, Digest())
            if digest.nbytes != segment.offset:
                raise RuntimeError(
                    f"bucket {bucket.index}: region {segment.region} goes on at byte {segment.offset}, "
                    f"but was hashed to {digest.nbytes}"
                )
            digest.update(span)
            if digest.nbytes == region.nbytes:
                values[key] = self._open.pop(segment.region).value
