"""A sender of ``cuda_ipc`` in a process of its own, told what to do; its receiver is the test. On a card or the host.

``Place``: where both lie. The tensors are a few odd sizes of one buffer, and some of their own.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.transports.host_card import HostCardIpc, card
from weightplane.controlplane.core.plan import Bucket, Segment
from weightplane.transports.base import ArmToken, ChannelSpec, SendChannel
from weightplane.transports.cuda_ipc import CudaIpcTransport
from weightplane.v1.transport_pb2 import Rendezvous

MEMBER, RECEIVER = "s", "r"
SIZES = (4 << 20, 1, 4096, 300_001, 3, 1 << 20, 70_000)


class Place(NamedTuple):
    """Kind and devices (torch's names) of sender and receiver; what the sender's process sees of the cards."""

    name: str
    sender: str
    receiver: str
    visible: str | None = None

    def transport(self) -> CudaIpcTransport:
        return HostCardIpc() if self.name == "host" else CudaIpcTransport()


def buckets(sizes: tuple[int, ...] = SIZES, each: int = 3) -> list[Bucket]:
    """Buckets of ``each`` tensors."""
    some = [range(i, min(i + each, len(sizes))) for i in range(0, len(sizes), each)]
    return [
        Bucket(n, MEMBER, (RECEIVER,), tuple(Segment(i, 0, sizes[i]) for i in part), sum(sizes[i] for i in part))
        for n, part in enumerate(some)
    ]


def tensors(device: str, sizes: tuple[int, ...] = SIZES) -> list[torch.Tensor]:
    """Every other one lies in one buffer (on the host: in storages of one allocation), the others by themselves."""
    if device == "cpu":
        memory, ends = np.zeros(sum(sizes), np.uint8), list(accumulate(sizes))
        parts = [
            torch.frombuffer(memory, dtype=torch.uint8, offset=e - n, count=n) for n, e in zip(sizes, ends, strict=True)
        ]
        card().arena(memory)
    else:
        parts = list(torch.split(torch.zeros(sum(sizes), dtype=torch.uint8, device=device), list(sizes)))
    return [p if i % 2 else torch.zeros_like(p) for i, p in enumerate(parts)]


def lists(made: list[torch.Tensor], plan: list[Bucket]) -> list[list[torch.Tensor]]:
    """A list of spans for each bucket."""
    return [[made[s.region] for s in b.segments] for b in plan]


def value(seed: int, index: int) -> int:
    """The byte that a tensor is full of."""
    return (seed * 31 + index * 7 + 1) % 256


class Sender:
    """The sender's side; in the child, or in the test's own process."""

    def __init__(self, place: Place) -> None:
        self.place, self.transport = place, place.transport()
        self.plan = buckets()
        self.channel: SendChannel | None = None
        self.renew()

    def renew(self) -> None:
        """Free all memory and take it anew."""
        self.made: list[torch.Tensor] = []
        self.spans: list[list[torch.Tensor]] = []
        if self.place.name != "host":
            torch.cuda.empty_cache()
        self.made = tensors(self.place.sender)
        self.spans = lists(self.made, self.plan)

    def resize(self) -> None:
        """Free memory under the same tensors, and take it anew."""
        kept = []
        for t in self.made[::2]:
            t.untyped_storage().resize_(0)
            # What takes its place must not be taken for it.
            kept.append(torch.full((t.numel() or 1,), 0xEE, dtype=torch.uint8, device=t.device))
            t.untyped_storage().resize_(t.numel())
        self.kept = kept

    def offer(self, member: str) -> bytes:
        return self.transport.offer(member).SerializeToString()

    def open(self, spec: ChannelSpec) -> None:
        self.channel = self.transport.open_sender(spec, MEMBER)

    def fill(self, seed: int, slow: bool = False) -> None:
        """Write the seed's bytes; ``slow``: on a side stream, half a second from now, while this returns at once."""
        if not slow:
            for i, t in enumerate(self.made):
                t.fill_(value(seed, i))
            return
        if self.place.name == "host":
            card().writing = writing = threading.Event()

            def later() -> None:
                time.sleep(0.5)  # what a kernel would take
                self.fill(seed)
                writing.set()

            threading.Thread(target=later, daemon=True).start()
            return
        side = torch.cuda.Stream(self.place.sender)
        side.wait_stream(torch.cuda.current_stream(self.place.sender))
        torch.cuda.set_stream(side)  # from now on this thread's: what it arms and sends is behind it
        torch.cuda._sleep(1_000_000_000)
        self.fill(seed)

    def arm(self, update: str) -> None:
        assert self.channel is not None
        self.channel.arm(ArmToken(update, 1, 1), self.plan, time.monotonic() + 60)

    def send(self, flush: bool = True) -> None:
        assert self.channel is not None
        for bucket, spans in zip(self.plan, self.spans, strict=True):
            self.channel.send(bucket, spans)
        if flush:
            self.channel.flush()

    def flush(self) -> None:
        assert self.channel is not None
        self.channel.flush()

    def release(self) -> None:
        """Let go of all memory between updates, as ``Publisher.release`` does."""
        self.made, self.spans = [], []
        self.flush()

    def regions(self) -> int:
        """Allocations that are exported."""
        return len(self.channel._exporter._regions)  # type: ignore[union-attr]

    def calls(self) -> dict[str, int]:
        return dict(card().calls)

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        self.transport.shutdown()


def _child(pipe: Any, place: Place) -> None:
    if place.visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = place.visible
    if place.name != "host":
        torch.cuda.set_device(place.sender)
    sender: Sender | None = None
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            return
        try:
            sender = sender or Sender(place)
            answer: Any = getattr(sender, name)(*args)
        except Exception as e:
            answer = e
        pipe.send(answer)


class Child:
    """A ``Sender`` elsewhere: call its methods."""

    def __init__(self, place: Place) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=_child, args=(other, place), daemon=True)
        self.process.start()
        other.close()

    def start(self, name: str, *args: Any) -> None:
        """Begin a call."""
        self._pipe.send((name, args))

    def result(self, seconds: float = 60) -> Any:
        """What it gave or raised."""
        assert self._pipe.poll(seconds), "no answer"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def call(self, name: str, *args: Any) -> Any:
        """Call and wait."""
        self.start(name, *args)
        return self.result()

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.join(10)


class Pair:
    """A sending child and the receiving side here."""

    def __init__(self, place: Place, child: Child) -> None:
        self.place, self.child = place, child
        self.plan = buckets()
        self.transport = place.transport()
        self.made = tensors(place.receiver)
        self.spans = lists(self.made, self.plan)
        offers = {MEMBER: Rendezvous.FromString(child.call("offer", MEMBER)), RECEIVER: self.transport.offer(RECEIVER)}
        self.spec = ChannelSpec(
            channel_id=f"pair-{os.getpid()}-{time.monotonic_ns()}",
            group="g",
            transport="cuda_ipc",
            key=bytes(range(32)),
            senders=(MEMBER,),
            receivers=(RECEIVER,),
            bucket_bytes=1 << 30,
            offers=offers,
        )
        child.call("open", self.spec)
        self.channel = self.transport.open_receiver(self.spec, RECEIVER)
        self.updates = 0

    @property
    def importer(self) -> Any:
        """The receiving side's own."""
        return self.channel._importer

    def heard(self) -> bool:
        """Whether every bucket that is not received is known to be ready."""
        return len(self.channel._senders.known[MEMBER].declared.ready) == len(self.plan)

    def arm(self) -> None:
        self.updates += 1
        self.child.call("arm", f"u{self.updates}")
        self.channel.arm(ArmToken(f"u{self.updates}", 1, 1), self.plan, time.monotonic() + 60)

    def receive(self, *, ahead: bool = True) -> None:
        for n, (bucket, spans) in enumerate(zip(self.plan, self.spans, strict=True)):
            if ahead and n + 1 < len(self.plan):
                self.channel.ahead(self.plan[n + 1], self.spans[n + 1])
            self.channel.receive(bucket, spans)

    def update(self, seed: int, **how: Any) -> None:
        """One exact update."""
        self.child.call("fill", seed)
        self.arm()
        self.child.start("send")
        self.receive(**how)
        self.child.result()
        self.check(seed)

    def check(self, seed: int) -> None:
        """Every byte is the seed's, as any stream sees it."""
        for i, t in enumerate(self.made):
            assert bool((t == value(seed, i)).all()), f"tensor {i} is not that of seed {seed}"

    def close(self) -> None:
        self.channel.close()
        self.transport.shutdown()


@contextmanager
def paired(place: Place) -> Iterator[Pair]:
    """A pair, and its end."""
    child = Child(place)
    try:
        pair = Pair(place, child)
        try:
            yield pair
        finally:
            pair.close()
        if child.process.is_alive():
            child.call("close")
    finally:
        child.end()
