"""What a host and its cards do by themselves: the limits that figures are held against. They run in a member's process.

Each method takes one sample and returns ``start`` and ``end`` (``time.monotonic()``, one clock for all processes of a
host) and the ``bytes`` that it moved. Only ``Broadcasts`` involves another process.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._process import TIMEOUT_S
from weightplane.transports.digest import memory_of

__all__ = ["Broadcasts", "CardLimits", "HostLimits", "Sockets", "fill"]

_memmove = ctypes.CDLL(None).memmove  # frees the GIL
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

Sample = dict[str, float]

_BIG = 4 << 30  # a card's copy: long enough that starting it does not tell
_REPEAT = 3
_PINNED = 1 << 30
_BROADCAST = 1 << 30


def fill(flat: torch.Tensor, seed: int) -> None:
    """Random bytes: zeros may move faster than real data."""
    if flat.device.type != "cpu":
        flat.random_(generator=torch.Generator(flat.device).manual_seed(seed))
        return
    block = torch.frombuffer(bytearray(os.urandom(min(flat.numel(), 1 << 20) or 1)), dtype=torch.uint8)
    for at in range(0, flat.numel(), block.numel()):
        part = flat[at : at + block.numel()]
        part.copy_(block[: part.numel()])


class HostLimits:
    """Copies by one thread of this process, into the tensors that the wire fills."""

    def __init__(self, tensors: Sequence[torch.Tensor], flats: Sequence[torch.Tensor], scratch: int) -> None:
        self._tensors, self._flats = tensors, flats
        self._scratch = torch.full((scratch,), 0x5A, dtype=torch.uint8)
        self._others = [t.clone() for t in tensors] if len(tensors) >= 10_000 else []

    def memcpy(self) -> Sample:
        """Copy from scratch into every tensor."""
        base, size, at, total = self._scratch.data_ptr(), self._scratch.numel(), 0, 0
        start = time.monotonic()
        for flat in self._flats:
            done, n = 0, flat.numel()
            while done < n:
                step = min(n - done, size - at)
                _memmove(flat.data_ptr() + done, base + at, step)
                done += step
                at = (at + step) % size
            total += n
        return {"start": start, "end": time.monotonic(), "bytes": total}

    def copies(self) -> Sample:
        """Copy every tensor with ``copy_``."""
        start = time.monotonic()
        for to, source in zip(self._tensors, self._others, strict=True):
            to.copy_(source)
        return {"start": start, "end": time.monotonic(), "bytes": sum(t.nbytes for t in self._tensors)}


class Sockets:
    """Plain TCP over loopback: ``sendall`` → ``recv_into``, a thread for each receiver."""

    def __init__(self, flats: Sequence[torch.Tensor]) -> None:
        self._views = [memory_of(flat, writable=True) for flat in flats]
        self._bytes = sum(map(len, self._views))
        self._sockets: list[socket.socket] = []

    def listen(self) -> int:
        """Listen for the receivers' sockets; returns the port."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        return int(self._listener.getsockname()[1])

    def accept(self, receivers: int) -> None:
        """Take the receivers' connections."""
        self._sockets = [self._listener.accept()[0] for _ in range(receivers)]
        self._listener.close()
        self._tune()

    def connect(self, port: int) -> None:
        """Connect to the sender."""
        self._sockets = [socket.create_connection(("127.0.0.1", port))]
        self._tune()

    def _tune(self) -> None:
        for s in self._sockets:
            s.settimeout(TIMEOUT_S)
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self) -> Sample:
        """Send every tensor to every receiver."""
        start = time.monotonic()
        threads = [threading.Thread(target=self._send, args=(s,)) for s in self._sockets[1:]]
        for thread in threads:
            thread.start()
        self._send(self._sockets[0])
        for thread in threads:
            thread.join()
        return {"start": start, "end": start, "bytes": self._bytes}

    def _send(self, sock: socket.socket) -> None:
        for view in self._views:
            sock.sendall(view)

    def receive(self) -> Sample:
        """Receive every tensor."""
        start = time.monotonic()
        (sock,) = self._sockets
        for view in self._views:
            at, n = 0, len(view)
            while at < n:
                got = sock.recv_into(view[at:])
                if not got:
                    raise ConnectionError("the sender hung up")
                at += got
        return {"start": start, "end": time.monotonic(), "bytes": self._bytes}

    def close(self) -> None:
        """Close the sockets and let go of the tensors."""
        for sock in self._sockets:
            sock.close()
        self._sockets, self._views = [], []


class CardLimits:
    """One card's copies and reads, and its copies from ``peer``, another one's; by torch, of one large buffer each."""

    def __init__(self, device: str, peer: str) -> None:
        self._device, self._peer = torch.device(device), torch.device(peer)
        free = torch.cuda.mem_get_info(self._device)[0]
        n = max(64 << 20, min(_BIG, free // 8))
        self._to = torch.empty(n, dtype=torch.uint8, device=self._device)
        self._near = torch.empty_like(self._to)
        fill(self._near, 1)
        self._far = torch.empty(n, dtype=torch.uint8, device=self._peer) if peer != device else self._near
        if peer != device:
            fill(self._far, 2)
        self._pinned = torch.empty(min(n, _PINNED), dtype=torch.uint8, pin_memory=True)
        fill(self._pinned, 3)

    def _timed(self, nbytes: int, work: Callable[[], Any]) -> Sample:
        for device in {self._device, self._peer}:
            torch.cuda.synchronize(device)
        start = time.monotonic()
        for _ in range(_REPEAT):
            work()
        for device in {self._device, self._peer}:
            torch.cuda.synchronize(device)
        return {"start": start, "end": time.monotonic(), "bytes": _REPEAT * nbytes}

    def peer_copy(self) -> Sample:
        """From the other card."""
        return self._timed(self._to.numel(), lambda: self._to.copy_(self._far, non_blocking=True))

    def same_gpu_copy(self) -> Sample:
        """Within the card."""
        return self._timed(self._to.numel(), lambda: self._to.copy_(self._near, non_blocking=True))

    def read(self) -> Sample:
        """A reduction: every byte is read once, next to nothing is written."""
        words = self._near.view(torch.float32)
        return self._timed(self._near.numel(), words.sum)

    def to_card(self) -> Sample:
        """From pinned host memory."""
        n = self._pinned.numel()
        return self._timed(n, lambda: self._to[:n].copy_(self._pinned, non_blocking=True))

    def to_host(self) -> Sample:
        """To pinned host memory."""
        n = self._pinned.numel()
        return self._timed(n, lambda: self._pinned.copy_(self._near[:n], non_blocking=True))


class Broadcasts:
    """torch.distributed over all members: one large buffer, and a call for each tensor, as a loop over a model does."""

    def __init__(self, device: str, flats: Sequence[torch.Tensor]) -> None:
        self._device, self._flats = torch.device(device), flats
        self._cuda = self._device.type == "cuda"
        self._store: Any = None
        self._big: torch.Tensor | None = None

    def host(self) -> int:
        """Rank 0: be where the others meet; returns the port."""
        self._store = self._meet(0, True)
        return int(self._store.port)

    def _meet(self, port: int, host: bool) -> Any:
        wait = timedelta(seconds=TIMEOUT_S)
        store = dist.TCPStore  # type: ignore[attr-defined]
        return store("127.0.0.1", port, None, host, timeout=wait, wait_for_workers=False)

    def join(self, port: int, rank: int, world: int) -> None:
        """Form the group; returns when all have."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "nccl" if self._cuda else "gloo",
            store=self._store or self._meet(port, False),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=TIMEOUT_S),
            device_id=self._device if self._cuda else None,
        )
        self._rank = rank

    def _timed(self, work: Callable[[], int]) -> Sample:
        if self._cuda:
            torch.cuda.synchronize()
        start = time.monotonic()
        nbytes = work()
        if self._cuda:
            torch.cuda.synchronize()
        # The first rank's end says little: its bytes may still be on their way.
        return {"start": start, "end": time.monotonic() if self._rank else start, "bytes": nbytes}

    def big(self) -> Sample:
        """One buffer of 1 GiB."""
        if self._big is None:
            self._big = torch.empty(_BROADCAST, dtype=torch.uint8, device=self._device)
            fill(self._big, 4)
        buffer = self._big

        def work() -> int:
            dist.broadcast(buffer, 0)
            return buffer.numel()

        return self._timed(work)

    def each(self) -> Sample:
        """Every tensor of the model by a call of its own."""

        def work() -> int:
            for flat in self._flats:
                dist.broadcast(flat, 0)
            return sum(flat.numel() for flat in self._flats)

        return self._timed(work)

    def leave(self) -> None:
        """End the group."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store, self._big, self._flats = None, None, []
