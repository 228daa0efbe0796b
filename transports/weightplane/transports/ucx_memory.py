"""Registered memory of ``ucx``: few large regions, each held while it is registered, and never a stale one.

A region is a whole storage on the CPU, and the whole allocation that a storage lies in on a GPU (the caching
allocator's segment): many tensors share one. It holds the storages that were found in it, so their memory cannot be
freed while it is registered; it is deregistered before they are let go of. An address is never trusted alone: memory
counts as registered only where the very storage that is held still lies there.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from typing import Any

import torch

from .storages import unwanted
from .ucx_agent import Agent, Memory, UcxError

__all__ = ["Region", "Regions", "allocation", "check_span", "device_of", "on_device"]


def device_of(device: torch.device) -> tuple[str, int]:
    """NIXL's kind of memory and device index."""
    return ("DRAM", 0) if device.type == "cpu" else ("VRAM", device.index or 0)


def check_span(index: int, span: torch.Tensor) -> None:
    """``ValueError`` for a span that is not contiguous 1-D uint8 on the CPU or a CUDA device."""
    plain = span.dtype == torch.uint8 and span.dim() == 1 and span.is_contiguous()
    if not plain or span.device.type not in ("cpu", "cuda"):
        found = f"{span.dtype} {span.device} {tuple(span.shape)}, strides {span.stride()}"
        raise ValueError(f"span {index}: expected contiguous 1-D uint8 on the CPU or a GPU, found {found}")


class Region:
    """One registered stretch. ``storages`` are held, by the address that each had when it was found."""

    __slots__ = ("address", "device", "id", "kind", "nbytes", "storages")

    def __init__(self, number: int, memory: Memory) -> None:
        self.id = number
        self.kind, self.address, self.nbytes, self.device = memory
        self.storages: dict[int, torch.UntypedStorage] = {}

    @property
    def memory(self) -> Memory:
        """As it is registered."""
        return self.kind, self.address, self.nbytes, self.device

    def valid(self) -> bool:
        """Whether the memory is the same: a storage that is resized in place frees its memory though it is held."""
        return any(s.data_ptr() == address for address, s in self.storages.items())

    def unwanted(self) -> list[int]:
        """Storages that nobody else holds, or that moved; none if that cannot be known."""
        return unwanted(self.storages)


class Regions:
    """The regions of one agent, and of those that ``join`` it. One thread."""

    def __init__(self, agent: Agent) -> None:
        self._agents = [agent]
        self._lost: Callable[[UcxError], None] = _nobody
        self._ids = itertools.count(1)
        self._by_id: dict[int, Region] = {}
        self._by_storage: dict[tuple[str, int, int], Region] = {}  # kind, device, address of a storage
        self._by_memory: dict[Memory, Region] = {}
        self._dead: set[int] = set()

    def __getitem__(self, region: int) -> Region:
        return self._by_id[region]

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Region]:
        return iter(self._by_id.values())

    def cover(self, spans: Sequence[torch.Tensor]) -> list[tuple[Region, int, int]]:
        """Region, offset and bytes of what the spans cover, in order; registers what is not, in one go.

        What follows upon the span before in memory is one stretch with it: each costs UCX some ten microseconds.
        ``ValueError`` names a span that is none; ``UcxError`` if memory cannot be registered.
        """
        found: list[tuple[Region, int, int]] = []
        new: list[Region] = []
        last: tuple[Region, int, int] | None = None  # region, begin and end of the storage of the span before
        try:
            for i, span in enumerate(spans):
                check_span(i, span)
                n = span.numel()
                if not n:
                    continue
                at = span.data_ptr()
                if last is None or not last[1] <= at < last[2]:
                    last = self._region(span, new)
                offset = at - last[0].address
                if found and found[-1][0] is last[0] and found[-1][1] + found[-1][2] == offset:
                    found[-1] = last[0], found[-1][1], found[-1][2] + n
                else:
                    found.append((last[0], offset, n))
            with on_device(spans[0].device if new else None):
                self._register([r.memory for r in new])
        except BaseException:
            for region in new:
                self._forget(region)
            raise
        return found

    def _register(self, memory: Sequence[Memory]) -> None:
        first, *others = self._agents
        first.register(memory)
        for agent in others:
            try:
                agent.register(memory)
            except UcxError as e:
                self._lost(e)

    def join(self, agent: Agent, lost: Callable[[UcxError], None]) -> None:
        """Another agent that has every region from now on. ``UcxError``: it cannot. ``lost``: called when it cannot
        register one that the first has; it must ``leave`` then."""
        agent.register([r.memory for r in self])
        self._agents.append(agent)
        self._lost = lost

    def leave(self, agent: Agent, *, deregister: bool) -> None:
        """An agent that joined goes; ``deregister``: unless it must not be touched any more."""
        self._agents.remove(agent)
        for memory in [r.memory for r in self] if deregister else []:
            with contextlib.suppress(UcxError):
                agent.deregister([memory])

    def _region(self, span: torch.Tensor, new: list[Region]) -> tuple[Region, int, int]:
        storage = span.untyped_storage()
        kind, device = device_of(span.device)
        address = storage.data_ptr()
        bounds = address, address + storage.nbytes()
        region = self._by_storage.get((kind, device, address))
        if region is not None:
            held = region.storages.get(address)
            inside = region.address + region.nbytes >= bounds[1]
            if inside and held is not None and held._cdata == storage._cdata:
                return region, *bounds
            self._drop(region)  # its memory was freed under it
        with on_device(span.device):  # without a context of the calling thread the driver knows no allocation
            memory = allocation(kind, device, address, storage.nbytes())
        region = self._by_memory.get(memory)
        if region is not None and not region.valid():
            self._drop(region)
            region = None
        if region is None:
            region = Region(next(self._ids), memory)
            self._by_id[region.id] = self._by_memory[memory] = region
            new.append(region)
        region.storages[address] = storage
        self._by_storage[kind, device, address] = region
        return region, *bounds

    def valid(self, regions: Collection[int]) -> bool:
        """Whether regions are registered and their memory is what it was."""
        return all(r in self._by_id and self._by_id[r].valid() for r in regions)

    def settle(self, keep: Collection[int]) -> set[int]:
        """Let go of memory that nobody else holds, but not of ``keep``; the ids of all regions gone since the last."""
        for region in list(self._by_id.values()):
            if region.id in keep and region.valid():
                continue
            unwanted = region.unwanted()
            if len(unwanted) == len(region.storages):
                self._drop(region)
                continue
            for address in unwanted:  # the allocation stays as long as one of its storages does
                del region.storages[address]
                self._by_storage.pop((region.kind, region.device, address), None)
        gone, self._dead = self._dead, set()
        return gone

    def close(self) -> None:
        """Deregister everything."""
        for region in list(self._by_id.values()):
            with contextlib.suppress(UcxError):
                self._drop(region)

    def _drop(self, region: Region) -> None:
        self._dead.add(region.id)
        try:
            with contextlib.ExitStack() as every:
                for agent in self._agents:
                    every.callback(agent.deregister, [region.memory])
        finally:
            self._forget(region)

    def _forget(self, region: Region) -> None:
        self._by_id.pop(region.id, None)
        if self._by_memory.get(region.memory) is region:
            del self._by_memory[region.memory]
        for address in region.storages:
            key = region.kind, region.device, address
            if self._by_storage.get(key) is region:
                del self._by_storage[key]
        region.storages.clear()


def _nobody(error: UcxError) -> None:
    raise AssertionError(error)  # no second agent joined


# --- GPU

_bound = threading.local()


def on_device(device: torch.device | None) -> contextlib.AbstractContextManager[object]:
    """Make a GPU, and its context, the calling thread's own in the block: UCX works in the current context."""
    if device is None or device.type != "cuda":
        return contextlib.nullcontext()
    return _on_gpu(device.index or 0)


@contextlib.contextmanager
def _on_gpu(index: int) -> Iterator[None]:
    with torch.cuda.device(index):
        devices: set[int] = _bound.__dict__.setdefault("devices", set())
        if index not in devices:  # a new thread has no context until it has called the runtime
            torch.cuda.current_stream(index).query()
            devices.add(index)
        yield


def allocation(kind: str, device: int, address: int, nbytes: int) -> Memory:
    """What to register for a storage: itself on the CPU, on a GPU the allocation that it lies in (if it is one)."""
    own = kind, address, nbytes, device
    if kind == "DRAM":
        return own
    found = _address_range(address)
    if found is None or found[0] > address or found[0] + found[1] < address + nbytes:
        return own
    return kind, found[0], found[1], device


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _address_range(address: int) -> tuple[int, int] | None:
    """Base and size of the CUDA allocation around an address, from the driver."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    try:
        ask = _driver().cuMemGetAddressRange_v2
    except (OSError, AttributeError):
        return None
    if ask(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)):
        return None
    return base.value, size.value
