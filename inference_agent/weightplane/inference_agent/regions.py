"""Where a worker's regions lie in its own memory, and what is hashed there: host memory by threads, a device's by a few
launches from tables that are made once.

One thread at a time per object.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from weightplane.transports import digest_cuda
from weightplane.transports.digest import digest_bytes, digest_tensor, memory_of
from weightplane.transports.digest_cuda import RegionGroup, grouped
from weightplane.transports.dtypes import flat_bytes, is_row_major

from .engines.base import LocalTensors

if TYPE_CHECKING:
    from .receipts import WorkerPlan

__all__ = ["Arrivals", "RegionMemory"]

_THREADS = 4
_WORTH_THREADS = 32 << 20
_LEAST, _MOST = 256 << 20, 2 << 30  # bytes of a launch: the CPU's part of one overlaps the card's part of the next

#: A region's bytes: a tensor (which keeps them alive), and its memory if it is one piece of host memory.
_Memory = tuple[torch.Tensor, memoryview | None]


class RegionMemory:
    """Every home of every region that a worker receives: found once, read again at each update.

    Two names of one memory are one home. ``tensors`` must stay where they are while this is used.
    """

    def __init__(self, share: WorkerPlan, tensors: LocalTensors) -> None:
        self._share = share
        self._host: dict[int, list[_Memory]] = {}
        self._device: list[tuple[int, torch.Tensor]] = []
        self._several = False  # whether a region has several homes
        for region in share.regions:
            homes = {(h.device, h.data_ptr(), h.shape, h.stride()): h for h in share.homes(region, tensors)}
            self._several = self._several or len(homes) > 1
            for home in homes.values():
                if digest_cuda.on_device(home):
                    self._device.append((region, flat_bytes(home.detach())))
                else:
                    self._host.setdefault(region, []).append(_memory(home))
        self._devices = {flat.device for _, flat in self._device if flat.device.type == "cuda"}
        self._groups = self._grouped(self._device)

    @staticmethod
    def _grouped(items: list[tuple[int, torch.Tensor]]) -> list[RegionGroup]:
        return grouped(items, min(max(sum(flat.numel() for _, flat in items) // 6, _LEAST), _MOST))

    def digests(self, wanted: Collection[int]) -> tuple[dict[int, int], list[tuple[int, int]]]:
        """The digests of the regions ``wanted`` as they are now: of one home each, and (region, digest) of every other
        home. A region without a home has none. Work that this thread queued on the devices is waited for."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        some = self._groups
        if len(wanted) < len(self._share.regions):
            picked = set(wanted)
            some = [part for group in self._groups if (part := group.part(picked)) is not None]
        for group in some:
            group.start()
        found: dict[int, int] = {}
        others: list[tuple[int, int]] = []
        self._hash_host([r for r in wanted if r in self._host], found, others)
        for group in some:
            if not self._several:
                found.update(zip(group.keys, group.values(), strict=True))
                continue
            for region, value in zip(group.keys, group.values(), strict=True):
                if region in found:
                    others.append((region, value))
                else:
                    found[region] = value
        return found, others

    def _hash_host(self, regions: Sequence[int], found: dict[int, int], others: list[tuple[int, int]]) -> None:
        def hash_some(some: Iterable[int]) -> None:
            for r in some:
                for home, view in self._host[r]:
                    value = digest_tensor(home, self._share.name(r)) if view is None else digest_bytes(view)
                    if r in found:
                        others.append((r, value))
                    else:
                        found[r] = value

        threads = min(_THREADS, os.cpu_count() or 1)
        if threads > 1 and sum(self._share.plan.regions[r].nbytes for r in regions) > _WORTH_THREADS:
            with ThreadPoolExecutor(threads, "weightplane-readback") as pool:
                list(pool.map(hash_some, self._evenly(regions, threads)))
        else:
            hash_some(regions)

    def _evenly(self, regions: Sequence[int], parts: int) -> list[list[int]]:
        """Largest first, each to the part that has least."""
        plan = self._share.plan.regions
        out: list[list[int]] = [[] for _ in range(parts)]
        load = [0] * parts
        for i in sorted(regions, key=lambda i: -plan[i].nbytes):
            least = load.index(min(load))
            out[least].append(i)
            load[least] += plan[i].nbytes
        return out


def _memory(home: torch.Tensor) -> _Memory:
    if home.device.type != "cpu" or not is_row_major(home):
        return home, None
    flat = flat_bytes(home.detach())
    return flat, memory_of(flat)


class Arrivals:
    """The regions whose first home is one piece of a device's memory, in launches that can start once their last bucket
    has landed.

    ``flats``: the bytes of the regions it covers. ``closes``: by bucket, the groups that have bytes in it; ``needs``:
    by group, in how many buckets. ``alone``: it covers every region, none has a second home, and no two share a byte:
    what is hashed once a region has landed is what would be read later, if only the transport writes meanwhile.
    """

    def __init__(self, share: WorkerPlan, targets: LocalTensors) -> None:
        here: list[tuple[int, torch.Tensor]] = []
        homes_in_all = 0
        for region in share.regions:
            homes = {(h.device, h.data_ptr(), h.shape, h.stride()): h for h in share.homes(region, targets)}
            homes_in_all += len(homes)
            home = min(homes.values(), key=lambda h: not is_row_major(h), default=None)
            if home is not None and digest_cuda.on_device(home):
                here.append((region, flat_bytes(home.detach())))
        self.groups = grouped(here, _LEAST)
        self.flats = dict(here)
        self.alone = len(here) == homes_in_all == len(share.regions) and _disjoint([flat for _, flat in here])
        self.closes: dict[int, tuple[int, ...]] = {}
        self.needs = [0] * len(self.groups)
        of = {region: g for g, group in enumerate(self.groups) for region in group.keys}
        for bucket in share.buckets:
            groups = dict.fromkeys(of[s.region] for s in bucket.segments if s.region in of)
            self.closes[bucket.index] = tuple(groups)
            for g in groups:
                self.needs[g] += 1

    def sample(self, regions: Collection[int]) -> list[RegionGroup]:
        """Launches for some of the regions."""
        return [part for group in self._large if (part := group.part(regions)) is not None]

    @cached_property
    def _large(self) -> list[RegionGroup]:
        return grouped(self.flats.items(), 1 << 62)


def _disjoint(flats: Sequence[torch.Tensor]) -> bool:
    spans = sorted((t.device.type, t.device.index or 0, t.data_ptr(), t.data_ptr() + t.numel()) for t in flats)
    return all(a[:2] != b[:2] or a[3] <= b[2] for a, b in pairwise(spans))
