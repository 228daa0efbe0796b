"""The wires that bodies of ``cards`` run over: a transport, and where the two ends' tensors lie.

``host``: everywhere. ``cuda_ipc`` and ``nccl`` run there too, with a card that the host plays; what only a card can
show needs the others. ``same``: both ends on GPU 0, in two processes. ``across``: trainer on GPU 0, replica on GPU 1.
``down``: the replica is on the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.transports.collective_tcp import StreamCard, TcpCollective
from tests.transports.host_card import HostCard, HostCardIpc
from weightplane.transports import registry
from weightplane.transports.base import Transport
from weightplane.transports.ucx_agent import package
from weightplane.v1.transport_pb2 import Rendezvous

__all__ = ["WIRES", "HostNccl", "Wire", "busy_stream", "one_card", "param"]

CARDS = torch.cuda.device_count()


class HostNccl(TcpCollective):
    """``nccl``'s own code over sockets, under its name; every member has a card of its own, as it must."""

    name = "nccl"
    one_card = False  # or all have the same

    def offer(self, member: str) -> Rendezvous:
        self._runtime.uuid = "card" if self.one_card else f"card-{os.getpid()}-{member}"
        return super().offer(member)


@contextmanager
def one_card() -> Iterator[None]:
    """Members that are made here offer one and the same played card."""
    HostNccl.one_card = True
    try:
        yield
    finally:
        HostNccl.one_card = False


_PLAYED: dict[str, Callable[[], Transport]] = {"cuda_ipc": HostCardIpc, "nccl": HostNccl}


@dataclass(frozen=True)
class Wire:
    """``sender`` and ``receiver``: torch's names of the devices."""

    transport: str
    place: str
    sender: str = "cpu"
    receiver: str = "cpu"

    @property
    def id(self) -> str:
        return f"{self.transport}-{self.place}"

    @property
    def on_host(self) -> bool:
        return self.place == "host"

    @property
    def pulls(self) -> bool:
        """Whether receivers read the sender's memory."""
        return self.transport in ("cuda_ipc", "ucx")

    @contextmanager
    def here(self) -> Iterator[None]:
        """This process uses the wire: its played card is registered, its thread's GPU is the current one."""
        before = registry._instances.get(self.transport)
        played = _PLAYED.get(self.transport) if self.on_host else None
        if played is not None:
            registry._instances[self.transport] = played()
        try:
            yield
        finally:
            if played is not None:
                registry._instances.pop(self.transport).shutdown()
                if before is not None:
                    registry._instances[self.transport] = before

    def missing(self) -> str:
        """What this machine lacks for it; empty if nothing."""
        devices = {d for d in (self.sender, self.receiver) if d != "cpu"}
        if len(devices) > CARDS:
            return f"needs {len(devices)} CUDA device{'s' if len(devices) > 1 else ''}, torch sees {CARDS}"
        if self.transport == "ucx" and not package():
            return "NIXL is not installed (tools/test-nixl.txt)"
        if self.transport == "nccl" and not self.on_host:
            from importlib.util import find_spec

            return "" if find_spec("nccl") is not None else "nccl4py is not installed"
        return ""


_ALL = [
    *(Wire(t, "host") for t in ("shm", "grpc", "ucx", "cuda_ipc", "nccl")),
    *(Wire(t, "same", "cuda:0", "cuda:0") for t in ("cuda_ipc", "ucx", "shm")),
    *(Wire(t, "across", "cuda:0", "cuda:1") for t in ("cuda_ipc", "nccl", "ucx")),
    Wire("shm", "down", "cuda:0", "cpu"),
    Wire("nccl", "same", "cuda:0", "cuda:0"),  # which is refused
]
WIRES = {w.id: w for w in _ALL}


def param(wire: Wire, *rest: Any, id: str = "") -> Any:
    """A parameter of a test: on cards it is marked ``gpu``, and skipped with the reason where something is lacking."""
    marks = [] if wire.on_host else [pytest.mark.gpu]
    if why := wire.missing():
        marks.append(pytest.mark.skip(reason=why))
    return pytest.param(wire, *rest, id=id or wire.id, marks=marks)


def busy_stream(cuda: Any, device: int, stream: int, seconds: float) -> None:
    """Whatever is queued on a stream of the product's from now on begins so much later."""

    def idle() -> None:
        import time

        time.sleep(seconds)  # what a kernel would take

    if isinstance(cuda, HostCard):
        cuda._queue(stream, idle)
    elif isinstance(cuda, StreamCard):
        cuda.queue(stream, idle)
    else:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=torch.device("cuda", device))):
            torch.cuda._sleep(int(seconds * 2e9))
