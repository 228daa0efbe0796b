"""``wpd1`` digests of regions that lie in a CUDA device's memory: few launches for many regions, one small download.

A Triton kernel hashes the leaves (``digest_kernel``) on a stream of ours; eight bytes a leaf come back, and the outer
hash over them is taken on the CPU (0.9 MB for 15 GB of weights). Nothing here is per tensor and per update: a
``RegionHasher`` and its ``LeafTable`` are built once for memory that stays, then replayed.

Memory must hold its final bytes, complete on the device, when ``launch`` is called (the stream waits for nobody), and
must stay unchanged until ``values`` returned. One thread at a time per object.

Checked in Triton's interpreter on CPU memory; see ``docs/performance.md`` for what ran on a card.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import threading
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import xxhash

from .digest import LEAF_BYTES, Digest, digest_tensor, memory_of
from .dtypes import flat_bytes, is_row_major

__all__ = [
    "LeafTable",
    "Part",
    "PartDigest",
    "RegionGroup",
    "RegionHasher",
    "digest_tensors",
    "grouped",
    "on_device",
    "unusable",
]

log = logging.getLogger(__name__)

#: Bytes that lie in one piece: (region's place in the hasher, offset in the region, address, bytes). A part begins at
#: a multiple of 131072 of its region, and ends at one or at the region's end.
Part = tuple[int, int, int, int]

_LEAVES = 8  # a program's leaves: four threads each, 16-byte loads, no shuffles; other values spill or shuffle
_lock, _trying = threading.Lock(), threading.Lock()
_keys: dict[torch.device, torch.Tensor] = {}
_streams: dict[torch.device, Any] = {}
_reasons: dict[torch.device, str] = {}


def unusable(device: torch.device) -> str:
    """Why memory of ``device`` cannot be hashed there, with what to do; empty if it can. Any thread.

    The first call for a CUDA device compiles the kernels (seconds, once per machine) and holds them against the CPU's
    digests; a card where they fail or differ is hashed by the CPU, and its log says so.
    """
    if device.type not in ("cuda", "cpu"):
        return f"digests of {device.type} memory are taken on the CPU"
    with _trying:
        if device not in _reasons:
            _reasons[device] = _try(device)
            if _reasons[device] and device.type == "cuda":
                log.warning("digests of %s are taken on the CPU, at a cost: %s", device, _reasons[device])
        return _reasons[device]


def _try(device: torch.device) -> str:
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "CPU memory is hashed by the CPU (the kernel reads it in Triton's interpreter only, for tests)"
    try:
        from . import digest_kernel  # noqa: F401
    except ImportError as e:
        return f"Triton is missing ({e}): pip install triton"
    some = (torch.arange(LEAF_BYTES + 64, dtype=torch.int64) * 131 % 251).to(torch.uint8).to(device)
    parts = [some[:LEAF_BYTES], some[3:12]] if device.type == "cuda" else [some[3:12]]
    try:
        found = _digest_flat(device, parts)
    except Exception as e:  # whatever a compiler or a driver raises
        return f"the kernels fail on {device}: {type(e).__name__}: {str(e).splitlines()[0][:300] if str(e) else e!r}"
    return "" if found == [digest_tensor(p) for p in parts] else f"the kernels' digests are wrong on {device}"


def on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes can be hashed where they lie: row-major in the memory of a CUDA device that works."""
    return tensor.device.type == "cuda" and is_row_major(tensor) and not unusable(tensor.device)


class LeafTable:
    """Where leaves lie and where their hashes go, on the device. Build once for memory that stays."""

    def __init__(self, device: torch.device, parts: Sequence[Part], first_slots: Sequence[int]) -> None:
        addresses, nbytes, slots, regions = _rows(parts, first_slots)
        self._device, self.leaves = device, len(addresses)
        whole = (nbytes == LEAF_BYTES) & (addresses % 16 == 0)
        rest = torch.nonzero(~whole).flatten()
        rest = rest[torch.argsort(nbytes[rest], descending=True)]  # a program's leaves are of about one length
        self.whole = tuple(c[whole].to(device) for c in (addresses, slots))
        self.rest = tuple(c[rest].to(device) for c in (addresses, nbytes, slots))
        self._of_rest, of_whole = regions[rest], regions[whole]
        self._order = torch.argsort(of_whole, stable=True)
        self._counts = torch.bincount(of_whole, minlength=len(first_slots))

    def some(self, regions: Sequence[int]) -> LeafTable:
        """The leaves of some regions; costs a hundredth of making their table. For the ``launch`` that comes next."""
        chosen = torch.tensor(regions, dtype=torch.int64)
        wanted = torch.zeros(len(self._counts), dtype=torch.bool)
        wanted[chosen] = True
        counts = self._counts[chosen]
        first = (torch.cumsum(self._counts, 0) - self._counts)[chosen] - (torch.cumsum(counts, 0) - counts)
        places = torch.repeat_interleave(first, counts) + torch.arange(int(counts.sum()))
        picked = self._order[places], torch.nonzero(wanted[self._of_rest]).flatten()
        made = copy.copy(self)
        made.leaves = sum(map(len, picked))
        with _on(self._device):
            made.whole = tuple(c[picked[0].to(self._device)] for c in self.whole)
            made.rest = tuple(c[picked[1].to(self._device)] for c in self.rest)
        return made


def _rows(parts: Sequence[Part], first_slots: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """(address, bytes, slot, region) of every leaf of ``parts``, as int64 columns."""
    if not parts:
        return (torch.empty(0, dtype=torch.int64),) * 4
    table = torch.tensor([(address, n, first_slots[r] + offset // LEAF_BYTES, r) for r, offset, address, n in parts])
    counts = (table[:, 1] + (LEAF_BYTES - 1)) // LEAF_BYTES
    part = torch.repeat_interleave(torch.arange(len(parts)), counts)
    nth = torch.arange(len(part)) - (torch.cumsum(counts, 0) - counts)[part]
    address, nbytes, slot, region = (table[part, c] for c in range(4))
    return address + nth * LEAF_BYTES, torch.clamp(nbytes - nth * LEAF_BYTES, max=LEAF_BYTES), slot + nth, region


class RegionHasher:
    """The digests of ``sizes`` (bytes of each region), all on one device that is not ``unusable``, time after time.

    ``begin``, then ``launch`` with tables that together hold every leaf once, then ``values``. A leaf that no launch of
    this update covered is an error, never last update's value.
    """

    def __init__(self, device: torch.device, sizes: Sequence[int]) -> None:
        self.device, self.sizes = device, tuple(sizes)
        self._leaves = [-(-n // LEAF_BYTES) for n in sizes]
        self._slots = [0, *accumulate(k + 1 for k in self._leaves)]  # a region's leaves, then its size: what is hashed
        host = torch.zeros(self._slots[-1], dtype=torch.int64)
        if sizes:
            host[torch.tensor(self._slots[1:]) - 1] = torch.tensor(self.sizes)
        self._out = host.to(device) if device.type == "cuda" else host
        self._host = host.pin_memory() if device.type == "cuda" else host
        raw = memory_of(self._host.view(torch.uint8))
        self._raw = [raw[8 * a : 8 * b] for a, b in zip(self._slots, self._slots[1:], strict=False)]
        self._asked: Sequence[int] = range(len(self.sizes))
        self._todo = 0
        self._event: Any = None

    def table(self, parts: Sequence[Part]) -> LeafTable:
        """Prepare ``parts`` for ``launch``. ``ValueError`` names one that cuts a leaf or leaves its region."""
        for region, offset, _, n in parts:
            end = offset + n
            if offset % LEAF_BYTES or not 0 < n <= self.sizes[region] - offset:
                raise ValueError(
                    f"region {region} of {self.sizes[region]} bytes: a part of bytes {offset} to {end} cuts a leaf "
                    f"or leaves the region; expected a start at a multiple of {LEAF_BYTES}"
                )
            if end % LEAF_BYTES and end != self.sizes[region]:
                raise ValueError(f"region {region}: a part ends at byte {end}, inside a leaf")
        return LeafTable(self.device, parts, self._slots)

    def begin(self, regions: Sequence[int] | None = None) -> None:
        """A new update: nothing is hashed yet. ``regions``: only these will be; by default all."""
        self._asked = range(len(self.sizes)) if regions is None else regions
        self._todo, self._event = sum(map(self._leaves.__getitem__, self._asked)), None

    def launch(self, table: LeafTable) -> None:
        """Queue the hashing of a table's leaves; returns at once. After the last one the download is queued as well."""
        from . import digest_kernel as k

        with _on(self.device) as stream:
            keys, out = _keys_on(self.device, k.KEYS), self._out.view(torch.uint64)
            both: Any = ((k.whole_leaves, table.whole), (k.any_leaves, table.rest))
            for kernel, columns in both:
                count = len(columns[0])
                if count:
                    kernel[(-(-count // _LEAVES),)](*columns, count, keys, out, LEAVES=_LEAVES, num_warps=1)
            self._todo -= table.leaves
            if not self._todo:
                self._download(stream)

    def wait(self) -> None:
        """Wait until everything launched so far has read its memory (which may then be written again)."""
        if self.device.type == "cuda":
            with _on(self.device) as stream:
                stream.synchronize()

    def values(self) -> list[int]:
        """The digests of the regions asked for, in their order, waited for. ``RuntimeError`` if not every leaf of them
        was launched since ``begin``."""
        if self._todo:
            raise RuntimeError(f"{self._todo} leaves were not hashed")
        if self._event is None and self.device.type == "cuda":  # empty regions only
            with _on(self.device) as stream:
                self._download(stream)
        if self._event is not None:
            self._event.synchronize()
        return [xxhash.xxh3_64_intdigest(self._raw[r]) for r in self._asked]

    def _download(self, stream: Any) -> None:
        if self.device.type == "cuda":
            self._host.copy_(self._out, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(stream)


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[Any]:
    """Our stream of ``device``, as the current one; nothing for the CPU (the interpreter)."""
    if device.type != "cuda":
        yield None
        return
    with _lock:
        stream = _streams.get(device)
        if stream is None:
            stream = _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield stream


def _keys_on(device: torch.device, keys: Sequence[int]) -> torch.Tensor:
    with _lock:
        if device not in _keys:
            signed = [k - (1 << 64) if k >= 1 << 63 else k for k in keys]
            _keys[device] = torch.tensor(signed, dtype=torch.int64).to(device).view(torch.uint64)
        return _keys[device]


class RegionGroup:
    """Regions that lie in one piece each in one device's memory, which stays: hashed by one launch, time after time.

    ``regions``: (key, its bytes as a contiguous 1-D uint8 tensor), none of them empty; they are kept alive.
    """

    def __init__(self, device: torch.device, regions: Sequence[tuple[int, torch.Tensor]]) -> None:
        self.keys = [key for key, _ in regions]
        self.nbytes = sum(t.numel() for _, t in regions)
        self._memory = [t for _, t in regions]
        self._picked: list[int] | None = None  # of a part: the places of its regions
        self._hasher = RegionHasher(device, [t.numel() for t in self._memory])
        self._table = self._hasher.table([(n, 0, t.data_ptr(), t.numel()) for n, t in enumerate(self._memory)])

    def part(self, keys: Container[int]) -> RegionGroup | None:
        """Its regions of these keys, as a group that is made at next to no cost; ``None`` if it has none. Of a group
        and its parts one is started at a time."""
        picked = [n for n, key in enumerate(self.keys) if key in keys]
        if not picked:
            return None
        made = copy.copy(self)
        made.keys, made._picked = [self.keys[n] for n in picked], picked
        made.nbytes = sum(self._memory[n].numel() for n in picked)
        return made

    def start(self) -> None:
        """Queue the hashing; returns at once. The memory is complete, and stays as it is until ``values``."""
        self._hasher.begin(self._picked)
        self._hasher.launch(self._table if self._picked is None else self._table.some(self._picked))

    def values(self) -> list[int]:
        """The digests, in the order of ``keys``; waits for them."""
        return self._hasher.values()


def grouped(regions: Iterable[tuple[int, torch.Tensor]], group_bytes: int) -> list[RegionGroup]:
    """``regions`` (see ``RegionGroup``) by device and in order, in groups of at least ``group_bytes``.

    One group leaves the card busiest; with several, the CPU's part of one overlaps the card's part of the next.
    """
    by_device: dict[torch.device, list[list[tuple[int, torch.Tensor]]]] = {}
    size: dict[torch.device, int] = {}
    for key, flat in regions:
        groups = by_device.setdefault(flat.device, [])
        if not groups or size[flat.device] >= group_bytes:
            groups.append([])
            size[flat.device] = 0
        groups[-1].append((key, flat))
        size[flat.device] += flat.numel()
    return [RegionGroup(device, group) for device, groups in by_device.items() for group in groups]


class PartDigest:
    """The digest of a region whose bytes pass in parts, in order. One thread.

    ``size``: its bytes. On a device its parts are hashed there if they are cut between leaves (``aligned``).
    """

    def __init__(self, device: torch.device, size: int, *, aligned: bool) -> None:
        self.nbytes = 0
        self._digest, self._hasher = Digest(), None
        if device.type == "cuda" and aligned and not unusable(device):
            self._hasher = RegionHasher(device, [size])
            self._hasher.begin()

    def update(self, part: torch.Tensor) -> None:
        """The next bytes, as a contiguous 1-D uint8 tensor that is complete; it may change afterwards."""
        if self._hasher is not None:
            self._hasher.launch(self._hasher.table([(0, self.nbytes, part.data_ptr(), part.numel())]))
            self._hasher.wait()
        else:
            self._digest.update(part)
        self.nbytes += part.numel()

    @property
    def value(self) -> int:
        """The digest, once all bytes have passed."""
        return self._digest.value if self._hasher is None else self._hasher.values()[0]


def _digest_flat(device: torch.device, flat: Sequence[torch.Tensor]) -> list[int]:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    hasher = RegionHasher(device, [t.numel() for t in flat])
    hasher.begin()
    hasher.launch(hasher.table([(n, 0, t.data_ptr(), t.numel()) for n, t in enumerate(flat) if t.numel()]))
    return hasher.values()


def digest_tensors(tensors: Sequence[torch.Tensor], names: Sequence[str] = ()) -> list[int]:
    """The digest of each tensor: all row-major ones of one CUDA device together, the others one by one on the CPU.

    Work that this thread queued on the tensors' devices is waited for. ``TypeError`` as ``digest.digest_tensor``.
    """
    out = [0] * len(tensors)
    batches: dict[torch.device, list[int]] = {}
    for i, t in enumerate(tensors):
        if on_device(t):
            batches.setdefault(t.device, []).append(i)
        else:
            out[i] = digest_tensor(t, names[i] if names else "")
    for device, batch in batches.items():
        found = _digest_flat(device, [flat_bytes(tensors[i].detach()) for i in batch])
        for i, value in zip(batch, found, strict=True):
            out[i] = value
    return out
