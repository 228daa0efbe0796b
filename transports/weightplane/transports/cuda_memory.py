"""A sender's GPU memory as regions that receivers can map: one for each allocation, never a stale one.

A region is a whole allocation of the driver (a segment of torch's allocator), of which many tensors are part: it is
exported once, and mapped once by each receiver. It holds the storages that were found in it. While a storage that is
held lies where it lay, torch has neither given its memory to anybody else nor the segment back. Memory that torch's
allocator did not make may be freed under a tensor: of that the driver is asked each time whether it is the same
allocation still.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

import torch

from . import cuda_own
from .base import TransportError
from .cuda_driver import Allocation, Cuda, CudaError
from .cuda_facts import cannot_export, gather
from .storages import unwanted

__all__ = ["Region", "Regions"]


class Region:
    """One exported allocation. ``storages`` are held, by the address that each had when it was found.

    ``generation`` counts the allocations that have begun at its base. ``owned``: it is a segment of torch's allocator.
    """

    __slots__ = ("allocation", "device", "generation", "handle", "id", "owned", "storages")

    def __init__(
        self, number: int, device: int, allocation: Allocation, handle: bytes, generation: int, owned: bool
    ) -> None:
        self.id, self.device, self.allocation = number, device, allocation
        self.handle, self.generation, self.owned = handle, generation, owned
        self.storages: dict[int, torch.UntypedStorage] = {}

    def unwanted(self) -> list[int]:
        """Storages that nobody else holds, or that moved; none if that cannot be known."""
        return unwanted(self.storages)


class Regions:
    """The regions of one channel. One thread."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._ids = itertools.count(1)
        self._by_id: dict[int, Region] = {}
        self._by_storage: dict[tuple[int, int], Region] = {}  # device, address of a storage
        self._by_base: dict[tuple[int, int], Region] = {}
        self._generations: dict[tuple[int, int], int] = {}
        self._segments: frozenset[int] = frozenset()
        self._dead: set[int] = set()
        self.changes = 0  # rises when what a region holds changes

    def __getitem__(self, region: int) -> Region:
        return self._by_id[region]

    def __contains__(self, region: int) -> bool:
        return region in self._by_id

    def __len__(self) -> int:
        return len(self._by_id)

    def cover(self, spans: Sequence[torch.Tensor]) -> Iterator[tuple[Region, int, int]]:
        """Region, offset and bytes of each span that has any; exports what is not yet.

        ``ValueError`` names a span that is no contiguous 1-D uint8 of a GPU; ``TransportError`` one whose memory cannot
        be shared, and says why.
        """
        checked: set[int] = set()
        last: tuple[Region, int, int, int] | None = None  # and device, begin, end of the storage of the span before
        for i, span in enumerate(spans):
            self._check(i, span)
            n = span.numel()
            if not n:
                continue
            at, device = span.data_ptr(), span.device.index or 0
            if last is None or last[1] != device or not last[2] <= at < last[3]:
                storage = span.untyped_storage()
                region = self._region(i, device, storage, checked)
                last = (region, device, storage.data_ptr(), storage.data_ptr() + storage.nbytes())
            yield last[0], at - last[0].allocation.base, n

    def _check(self, index: int, span: torch.Tensor) -> None:
        plain = span.dtype == torch.uint8 and span.dim() == 1 and span.is_contiguous()
        if not plain or span.device.type != self._cuda.kind:
            found = f"{span.dtype} {span.device} {tuple(span.shape)}, strides {span.stride()}"
            raise ValueError(f"span {index}: expected contiguous 1-D uint8 of a GPU, found {found}")

    def _region(self, index: int, device: int, storage: torch.UntypedStorage, checked: set[int]) -> Region:
        address, nbytes = storage.data_ptr(), storage.nbytes()
        region = self._by_storage.get((device, address))
        if region is not None:
            held = region.storages.get(address)
            if held is not None and held._cdata == storage._cdata and self._same(region, checked):
                return region
        what = f"span {index} ({nbytes} bytes at {address:#x} of GPU {device})"
        with self._cuda.on(device):
            found = self._cuda.allocation(address, nbytes)
            if address < found.base or address + nbytes > found.base + found.nbytes:
                raise TransportError(f"{what} cannot be shared by CUDA IPC: {_why()}")
            region = self._by_base.get((device, found.base))
            if region is None or not self._same(region, checked) or region.allocation != found:
                if region is not None:
                    self._drop(region)  # its memory was freed under it
                region = self._export(what, device, found)
                checked.add(region.id)
        region.storages[address] = storage
        self._by_storage[device, address] = region
        self.changes += 1
        return region

    def _same(self, region: Region, checked: set[int]) -> bool:
        """Whether the driver has the allocation still; asked once a list of spans."""
        if region.id not in checked:
            if not self.intact(region):
                self._drop(region)
                return False
            checked.add(region.id)
        return region.id in self._by_id

    def intact(self, region: Region) -> bool:
        """Whether the allocation is still the one that was exported."""
        with self._cuda.on(region.device):
            return self._cuda.serial(region.allocation.base) == region.allocation.serial

    def _export(self, what: str, device: int, found: Allocation) -> Region:
        if not self._cuda.shareable(found.base):
            raise TransportError(f"{what} cannot be shared by CUDA IPC: {_why()}")
        try:
            handle = self._cuda.handle_of(found.base)
        except CudaError as e:
            raise TransportError(f"{what} cannot be shared by CUDA IPC: {e}. Perhaps {_why()}") from e
        if found.base not in self._segments:
            self._segments = self._cuda.segments()
        place = device, found.base
        generation = self._generations[place] = self._generations.get(place, 0) + 1
        region = Region(next(self._ids), device, found, handle, generation, found.base in self._segments)
        self._by_id[region.id] = self._by_base[place] = region
        cuda_own.show_memory(handle, device, found.base)
        return region

    def settle(self, keep: Collection[int]) -> set[int]:
        """Let go of memory that nobody else holds, but not of ``keep``; the ids of all regions gone since the last."""
        for region in list(self._by_id.values()):
            if region.id in keep and (region.owned or self.intact(region)):
                continue
            unwanted = region.unwanted()
            if len(unwanted) == len(region.storages):
                self._drop(region)
                continue
            for address in unwanted:  # the allocation stays as long as one of its storages does
                del region.storages[address]
                self._by_storage.pop((region.device, address), None)
                self.changes += 1
        gone, self._dead = self._dead, set()
        return gone

    def close(self) -> None:
        """Let go of everything."""
        for region in list(self._by_id.values()):
            self._drop(region)

    def _drop(self, region: Region) -> None:
        if self._by_id.pop(region.id, None) is None:
            return
        self.changes += 1
        self._dead.add(region.id)
        place = region.device, region.allocation.base
        if self._by_base.get(place) is region:
            del self._by_base[place]
        for address in region.storages:
            if self._by_storage.get((region.device, address)) is region:
                del self._by_storage[region.device, address]
        region.storages.clear()
        cuda_own.hide_memory(region.handle)


def _why() -> str:
    """What makes memory that cannot be shared."""
    return cannot_export(gather(deep=False)) or (
        "it lies in memory that cuMemCreate or a memory pool made (expandable_segments, a plugged-in allocator, memory "
        "that sleeps and wakes): keep the trainer's weights in torch's native allocator, or use nccl or ucx"
    )
