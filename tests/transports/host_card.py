"""A card played by the host: ``cuda_ipc``'s own code over host memory, which processes read from one another.

A handle names a process and an address; a mapped address stands for both, and copies read through the kernel
(``process_vm_readv``) on a thread of their own, in order, while the caller goes on. What only a card can show is not
shown here: the driver, the kernel's compiled form, rates, what becomes of mappings when their exporter dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch

from weightplane.transports.base import Capabilities, Probe
from weightplane.transports.cuda_abi import Allocation, Batch, CudaError
from weightplane.transports.cuda_driver import Cuda
from weightplane.transports.cuda_facts import Device, Facts
from weightplane.transports.cuda_ipc import CudaIpcTransport
from weightplane.transports.gather_table import Rows

UUID = "host-card"
_SHIFT = 48  # a mapped address: which mapping, and the place in it
_HANDLE = struct.Struct("<qqq40x")


class _Stretch(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


_readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
_readv.restype = ctypes.c_ssize_t


def read(pid: int, source: int, target: int, nbytes: int) -> None:
    """Copy from a process's memory."""
    while nbytes:
        mine, other = _Stretch(target, nbytes), _Stretch(source, nbytes)
        n = int(_readv(pid, ctypes.byref(mine), 1, ctypes.byref(other), 1, 0))
        if n <= 0:
            raise CudaError(f"process {pid}: {os.strerror(ctypes.get_errno())}", 400)
        source, target, nbytes = source + n, target + n, nbytes - n


class HostCard(Cuda):
    """See the module's text. ``calls`` counts what the driver was asked."""

    kind = "cpu"

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.serials: dict[int, int] = {}  # by base; 1 where nothing is said
        self._arenas: dict[int, int] = {}  # bytes by base
        self.unshareable = False
        self.writing: threading.Event | None = None  # the current stream: what it still writes, until it is set
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._mapped: dict[int, tuple[int, int]] = {}
        self._unmapped: list[int] = []
        self._streams = 0
        self._events: dict[int, Any] = {}
        self._remote: dict[int, tuple[int, int]] = {}
        self._queued: Counter[int] = Counter()
        self._failed: CudaError | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    # --- one device

    def count(self) -> int:
        return 1

    def uuid(self, device: int) -> str:
        return UUID

    def processors(self, device: int) -> int:
        return 4

    def ipc_events(self, device: int) -> bool:
        return True

    def active(self, device: int) -> bool:
        return True

    def on(self, device: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def gather_problem(self, device: int) -> str:
        return ""

    @property
    def batches(self) -> bool:
        return True

    # --- memory

    def arena(self, memory: np.ndarray[Any, Any]) -> None:
        """An allocation that several storages share, as long as it lives: its addresses are others' afterwards."""
        base = memory.ctypes.data
        self._arenas[base] = memory.nbytes
        weakref.finalize(memory, self._arenas.pop, base)

    def allocation(self, address: int, nbytes: int) -> Allocation:
        self.calls["allocation"] += 1
        arenas = list(self._arenas.items())
        base, size = next(((b, n) for b, n in arenas if b <= address < b + n), (address, nbytes))
        return Allocation(base, size, self.serial(base))

    def serial(self, address: int) -> int:
        return self.serials.get(address, 1)

    def shareable(self, address: int) -> bool:
        return not self.unshareable

    def handle_of(self, base: int) -> bytes:
        self.calls["export"] += 1
        return _HANDLE.pack(os.getpid(), base, self.serial(base))

    def open(self, handle: bytes) -> int:
        self.calls["open"] += 1
        pid, base, _ = _HANDLE.unpack(handle)
        number = self._unmapped.pop() if self._unmapped else len(self._mapped) + 1
        self._mapped[number] = pid, base
        return number << _SHIFT

    def close(self, address: int) -> None:
        self.calls["close"] += 1
        del self._mapped[address >> _SHIFT]
        self._unmapped.append(address >> _SHIFT)

    @property
    def mapped(self) -> int:
        """Mappings that are open."""
        return len(self._mapped)

    def segments(self) -> frozenset[int]:
        return frozenset()

    # --- streams and events

    def new_stream(self) -> int:
        self._streams += 1
        return self._streams

    def drop_stream(self, stream: int) -> None:
        assert self.idle(stream)

    def current_stream(self, device: int) -> int:
        return 0

    def idle(self, stream: int) -> bool:
        if stream == 0:
            return self.writing is None or self.writing.is_set()
        self._raise()
        return not self._queued[stream]

    def synchronize(self, stream: int) -> None:
        done = threading.Event()
        self._queue(stream, done.set)
        done.wait()
        self._raise()

    def new_event(self, *, shared: bool = False) -> int:
        made = ctypes.c_uint8(1)
        self._events[ctypes.addressof(made)] = made
        return ctypes.addressof(made)

    def event_handle(self, event: int) -> bytes:
        return _HANDLE.pack(os.getpid(), event, 0)

    def open_event(self, handle: bytes) -> int:
        pid, address, _ = _HANDLE.unpack(handle)
        with self._lock:
            number = -1 - len(self._remote)
            self._remote[number] = pid, address
        return number

    def record(self, event: int, stream: int) -> None:
        flag = self._events[event]
        flag.value = 0
        if stream == 0:
            writing = self.writing
            assert writing is not None
            threading.Thread(target=_after, args=(writing, flag), daemon=True).start()
        else:
            self._queue(stream, lambda: setattr(flag, "value", 1))

    def passed(self, event: int) -> bool:
        self._raise()
        if event > 0:
            return bool(self._events[event].value)
        found = ctypes.c_uint8()
        pid, address = self._remote[event]
        read(pid, address, ctypes.addressof(found), 1)
        return bool(found.value)

    def wait(self, stream: int, event: int) -> None:
        flag = self._events[event]
        pause = threading.Event()

        def work() -> None:
            while not flag.value:
                pause.wait(0.001)

        self._queue(stream, work)

    def drop_event(self, event: int) -> None:
        if event > 0:
            del self._events[event]

    # --- copies

    def copy_batch(self, batch: Batch, stream: int) -> None:
        self.calls["batches"] += 1
        self._copies(list(zip(batch.sources, batch.targets, batch.nbytes, strict=True)), stream)

    def table(self, columns: torch.Tensor, device: int) -> torch.Tensor:
        self.calls["tables"] += 1
        return columns

    def settle_tables(self, device: int) -> None:
        return None

    def gather(self, device: int, table: torch.Tensor, rows: Rows, programs: int, stream: int) -> None:
        self.calls["kernels"] += 1
        copies = []
        for unit, first, count in rows.launches:
            for source, target, units in table[:, first : first + count].t().tolist():
                assert source % unit == target % unit == 0 and units > 0
                copies.append((source, target, units * unit))
        self._copies(copies, stream)

    def _copies(self, copies: list[tuple[int, int, int]], stream: int) -> None:
        def work() -> None:
            for source, target, nbytes in copies:
                pid, base = self._mapped.get(source >> _SHIFT, (os.getpid(), 0))
                read(pid, base + (source & ((1 << _SHIFT) - 1)), target, nbytes)

        self._queue(stream, work)

    def _queue(self, stream: int, work: Callable[[], None]) -> None:
        with self._lock:
            self._queued[stream] += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="card", daemon=True)
                self._thread.start()

        def run() -> None:
            try:
                work()
            except CudaError as e:
                self._failed = e
            finally:
                with self._lock:
                    self._queued[stream] -= 1

        self._work.put(run)

    def _run(self) -> None:
        while True:
            self._work.get()()

    def _raise(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed


def _after(writing: threading.Event, flag: Any) -> None:
    writing.wait()
    flag.value = 1


_card: list[HostCard] = []


def card() -> HostCard:
    """This process's card."""
    if not _card:
        _card.append(HostCard())
    return _card[0]


class HostCardIpc(CudaIpcTransport):
    """``cuda_ipc`` on the played card: its tensors are the host's."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cpu"}), one_to_many=True, one_sided=True, cross_host=False, buffered=False
    )
    part_bytes = 2 << 20

    def probe(self) -> Probe:
        return Probe(True)

    def cuda(self) -> HostCard:
        return card()

    def facts(self, *, deep: bool) -> Facts:
        return Facts(torch_cuda="13.0", devices=(Device(UUID, 0),), complete=True)
