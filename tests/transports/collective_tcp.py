"""A card played by the host, with streams that are threads, and a collective library over TCP: for the channel's logic.

Like NCCL it connects only when everybody has come, runs one operation after another on a stream, and waits for a dead
peer for ever, until it is aborted. Unlike NCCL it knows no GPU. ``collective`` and what it is made of run unchanged.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import ClassVar

import torch

from weightplane.transports.base import Capabilities, Probe, TransportError
from weightplane.transports.collective_layout import Tuning
from weightplane.transports.cuda_abi import Batch
from weightplane.transports.cuda_driver import Cuda
from weightplane.transports.digest import memory_of
from weightplane.transports.gather_table import Rows
from weightplane.transports.nccl import NcclTransport

_HELLO = struct.Struct("<iHq")  # rank, port of its own listener, which purpose
_LOOK_S = 0.005


class _Stream:
    def __init__(self) -> None:
        self.work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.queued = self.done = 0
        self.thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self.thread.start()

    def put(self, work: Callable[[], None]) -> None:
        self.queued += 1
        self.work.put(work)

    def _run(self) -> None:
        while (work := self.work.get()) is not None:
            work()
            self.done += 1


class StreamCard(Cuda):
    """See the module's text. ``kernel``: whether the gather kernel "works"."""

    kind = "cpu"

    def __init__(self, *, kernel: bool = True) -> None:
        self.kernel = kernel
        self._numbers = itertools.count(1)
        self._streams: dict[int, _Stream] = {}
        self._flags: dict[int, threading.Event] = {}
        self.tables = 0

    def processors(self, device: int) -> int:
        return 4

    def on(self, device: int) -> AbstractContextManager[None]:
        return nullcontext()

    def gather_problem(self, device: int) -> str:
        return "" if self.kernel else "there is none"

    @property
    def batches(self) -> bool:
        return True

    def new_stream(self) -> int:
        number = next(self._numbers)
        self._streams[number] = _Stream()
        return number

    def drop_stream(self, stream: int) -> None:
        gone = self._streams.pop(stream)
        gone.work.put(None)
        gone.thread.join()

    def current_stream(self, device: int) -> int:
        return 0

    def idle(self, stream: int) -> bool:
        return stream == 0 or self._streams[stream].queued == self._streams[stream].done

    def new_event(self, *, shared: bool = False) -> int:
        return next(self._numbers)

    def record(self, event: int, stream: int) -> None:
        flag = self._flags[event] = threading.Event()
        if stream:
            self._streams[stream].put(flag.set)
        else:
            flag.set()

    def passed(self, event: int) -> bool:
        return self._flags[event].is_set()

    def wait(self, stream: int, event: int) -> None:
        flag = self._flags[event]

        def work() -> None:
            flag.wait()

        self.queue(stream, work)

    def drop_event(self, event: int) -> None:
        del self._flags[event]

    def copy_batch(self, batch: Batch, stream: int) -> None:
        self._copies(list(zip(batch.sources, batch.targets, batch.nbytes, strict=True)), stream)

    copy_each = copy_batch

    def table(self, columns: torch.Tensor, device: int) -> torch.Tensor:
        self.tables += 1
        return columns

    def gather(self, device: int, table: torch.Tensor, rows: Rows, programs: int, stream: int) -> None:
        copies = []
        for unit, first, count in rows.launches:
            for source, target, units in table[:, first : first + count].t().tolist():
                assert source % unit == target % unit == 0 and units > 0
                copies.append((source, target, units * unit))
        self._copies(copies, stream)

    def _copies(self, copies: list[tuple[int, int, int]], stream: int) -> None:
        def work() -> None:
            for source, target, nbytes in copies:
                ctypes.memmove(target, source, nbytes)

        self.queue(stream, work)

    def queue(self, stream: int, work: Callable[[], None]) -> None:
        """Run ``work`` when its turn comes."""
        self._streams[stream].put(work)


class TcpCommunicator:
    """``collective_abc.Communicator``: rank 0 has a socket to every other, and they to it."""

    def __init__(self, card: StreamCard, stream: int, peers: Mapping[int, socket.socket]) -> None:
        self._card, self._stream, self._peers = card, stream, peers
        self._aborted = threading.Event()
        self._problem = ""
        self.tells = False  # whether it notices a dead peer
        self.groups: list[str] = []

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        if 0 in self._peers:
            self._queue("broadcast", [partial(self._read, 0, t) for t in tensors])
        else:
            self._queue("broadcast", [partial(self._write, p, t) for t in tensors for p in self._peers])

    def exchange(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> None:
        writes = [partial(self._write, p, t) for t, p in sends]
        self._queue("exchange", [*writes, *(partial(self._read, p, t) for t, p in receives)])

    def reduce(self, byte: torch.Tensor) -> None:
        if 0 in self._peers:
            self._queue("reduce", [partial(self._write, 0, byte)])
        else:
            self._queue("reduce", [partial(self._read, p, torch.empty_like(byte)) for p in self._peers])

    def problem(self) -> str:
        return self._problem

    def abort(self) -> None:
        self._aborted.set()
        for peer in self._peers.values():
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        for peer in self._peers.values():
            peer.close()

    def _queue(self, kind: str, parts: Sequence[Callable[[], None]]) -> None:
        if self._aborted.is_set():
            raise TransportError("the communicator was aborted")
        self.groups.append(kind)

        def work() -> None:
            try:
                for part in parts:
                    part()
            except OSError as e:
                if self.tells and not self._aborted.is_set():
                    self._problem = f"remote error: {e}"
                self._aborted.wait()  # as NCCL does

        self._card.queue(self._stream, work)

    def _write(self, peer: int, tensor: torch.Tensor) -> None:
        self._peers[peer].sendall(memory_of(tensor))

    def _read(self, peer: int, tensor: torch.Tensor) -> None:
        view = memory_of(tensor, writable=True)
        while view:
            n = self._peers[peer].recv_into(view)
            if not n:
                raise ConnectionResetError("the peer is gone")
            view = view[n:]


class TcpRuntime:
    """``collective_abc.Runtime``: a unique id names a listener of the process that minted it."""

    def __init__(self, card: StreamCard | None = None) -> None:
        self.card = card or StreamCard()
        self._listeners: dict[bytes, socket.socket] = {}
        self.uuid = f"card-{os.getpid()}"
        self.tells = False
        self.made: list[TcpCommunicator] = []

    def version(self) -> int:
        return 22809

    def device_uuid(self) -> str:
        return self.uuid

    def index_of(self, uuid: str) -> int:
        return 0

    def mint(self) -> bytes:
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        made = struct.pack("<H", listener.getsockname()[1]) + os.urandom(126)
        self._listeners[made] = listener
        return made

    def cuda(self) -> StreamCard:
        return self.card

    def connect(
        self,
        unique_id: bytes,
        rank: int,
        senders: int,
        receivers: int,
        device: int,
        stream: int,
        check: Callable[[], None],
    ) -> Mapping[int, TcpCommunicator]:
        with _sockets() as held:
            ours = self._listeners.pop(unique_id) if rank == 0 else socket.create_server(("127.0.0.1", 0), backlog=64)
            held.append(ours)
            port = struct.unpack("<H", unique_id[:2])[0]
            ports = self._meet(ours, port, rank, senders + receivers, held, check)
            found: dict[int, TcpCommunicator] = {}
            for n in range(senders):
                peers: dict[int, socket.socket] = {}
                if rank == n:
                    for _ in range(receivers):
                        peer, said = _accept(ours, 1, held, check)
                        peers[said[0] - senders + 1] = peer
                elif rank >= senders:
                    peers[0] = _dial(ports[n], _HELLO.pack(rank, 0, 1), held)
                else:
                    continue
                found[n] = TcpCommunicator(self.card, stream, {k: peers[k] for k in sorted(peers)})
                found[n].tells = self.tells
            kept = {s for c in found.values() for s in c._peers.values()}
            for s in kept:
                s.settimeout(None)
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for s in held:
                if s not in kept:
                    s.close()
            self.made.extend(found.values())
            return found

    def _meet(
        self,
        ours: socket.socket,
        port: int,
        rank: int,
        members: int,
        held: list[socket.socket],
        check: Callable[[], None],
    ) -> list[int]:
        """Everybody's port, once everybody has come."""
        mine = ours.getsockname()[1]
        if rank:
            root = _dial(port, _HELLO.pack(rank, mine, 0), held)
            raw = _receive(root, 2 * members, check)
            return list(struct.unpack(f"<{members}H", raw))
        ports = [mine] + [0] * (members - 1)
        came: list[socket.socket] = []
        while len(came) < members - 1:
            peer, said = _accept(ours, 0, held, check)
            came.append(peer)
            ports[said[0]] = said[1]
        for peer in came:
            peer.sendall(struct.pack(f"<{members}H", *ports))
        return ports


@contextmanager
def _sockets() -> Iterator[list[socket.socket]]:
    held: list[socket.socket] = []
    try:
        yield held
    except BaseException:
        for s in held:
            s.close()
        raise


_early: dict[int, list[tuple[socket.socket, tuple[int, int, int]]]] = {}  # by listener: who came for a later purpose


def _accept(
    ours: socket.socket, purpose: int, held: list[socket.socket], check: Callable[[], None]
) -> tuple[socket.socket, tuple[int, int, int]]:
    early = _early.setdefault(ours.getsockname()[1], [])
    ours.settimeout(_LOOK_S)
    while True:
        for n, (peer, said) in enumerate(early):
            if said[2] == purpose:
                del early[n]
                return peer, said
        check()
        try:
            peer, _ = ours.accept()
        except TimeoutError:
            continue
        held.append(peer)
        early.append((peer, _HELLO.unpack(_receive(peer, _HELLO.size, check))))


def _dial(port: int, hello: bytes, held: list[socket.socket]) -> socket.socket:
    try:
        made = socket.create_connection(("127.0.0.1", port), 5)
    except OSError as e:
        raise TransportError(f"nobody at port {port}: {e}") from e
    held.append(made)
    made.sendall(hello)
    return made


def _receive(peer: socket.socket, n: int, check: Callable[[], None]) -> bytes:
    peer.settimeout(_LOOK_S)
    raw = b""
    while len(raw) < n:
        check()
        try:
            part = peer.recv(n - len(raw))
        except TimeoutError:
            continue
        if not part:
            raise TransportError("a member left while all connected")
        raw += part
    return raw


_runtimes: list[TcpRuntime] = []


class TcpCollective(NcclTransport):
    """``nccl``'s own transport and channels on the played card."""

    name: ClassVar[str] = "tcp_collective"
    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cpu"}),
        one_to_many=True,
        one_sided=False,
        cross_host=True,
        buffered=False,
        collective=True,
    )

    def __init__(self, tuning: Tuning | None = None, runtime: TcpRuntime | None = None) -> None:
        super().__init__(tuning or Tuning(large=1 << 20, pack=300_000))
        if not _runtimes:
            _runtimes.append(TcpRuntime())
        self._runtime = runtime or _runtimes[0]

    def runtime(self) -> TcpRuntime:
        return self._runtime

    def probe(self) -> Probe:
        return Probe(True)
