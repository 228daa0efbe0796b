"""Where a trainer of any language is put to the test: a real control plane and real replicas in this process. They note
every call and every data stream, and lose answers or stand still where a rule asks for it. The trainer is a command."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch
from safetensors.torch import save_file

from tests import warm
from tests.cli.blank_engine import blank_module
from tests.inference_agent.server import Server, eventually, server
from weightplane.controlplane import failpoints
from weightplane.controlplane.server import agent_service
from weightplane.controlplane.server.transfer_service import TransferService
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.transports.grpc_data_port import GrpcReceiveChannel
from weightplane.v1 import transport_pb2 as tp
from weightplane.v1 import weight_transfer_pb2 as wt
from weightplane.v1 import weight_transfer_pb2_grpc as wt_grpc

__all__ = ["RIVAL", "Call", "Client", "Stage", "staged"]

RIVAL = "rival"
_UNARY = [m.name for m in wt.DESCRIPTOR.services_by_name["WeightTransferService"].methods if not m.server_streaming]


@dataclass
class Call:
    """One call that the trainer made; seconds on the monotonic clock."""

    name: str
    request: Any
    began: float
    deadline: float | None
    ended: float = 0.0
    failed: str = ""


@dataclass
class Stream:
    """One data stream of the trainer's."""

    began: float
    ended: float = 0.0


@dataclass(frozen=True)
class Client:
    """A command that takes --address, --group, --file, --step and --takeover, and ends with 0 once it committed."""

    command: Sequence[str]

    def start(self, stage: Stage, *more: str) -> subprocess.Popen[str]:
        where = ["--address", stage.plane.address, "--group", "g", "--file", str(stage.file), "--step", "1"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return warm.Popen([*self.command, *where, *more], **pipes)

    def publish(self, stage: Stage, *more: str, seconds: float = 60) -> tuple[int, str]:
        """Run it to its end: (exit status, what it said)."""
        return ended(self.start(stage, *more), seconds)


def ended(process: subprocess.Popen[str], seconds: float) -> tuple[int, str]:
    """Wait for a client; one that does not end in time is killed, and that is a failure."""
    try:
        said = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        said = process.communicate()[0]
        raise AssertionError(f"it did not end within {seconds:g} s: {said[-500:]}") from None
    return process.returncode, said


@dataclass
class Stage:
    """``calls`` and ``streams`` are in order. ``lose``: of which methods an answer is lost, and how often. ``before``:
    what happens before a method's first call is served."""

    plane: Server
    file: Path
    values: dict[str, torch.Tensor]
    stack: ExitStack
    calls: list[Call] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    leases: list[float] = field(default_factory=list)
    lose: dict[str, int] = field(default_factory=dict)
    before: dict[str, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    engines: dict[str, TorchModuleEngine] = field(default_factory=dict)
    go_on: threading.Event = field(default_factory=threading.Event)

    def join(self, name: str) -> None:
        """One more replica; returns once the control plane has heard of it."""
        self.engines[name] = engine = TorchModuleEngine(blank_module(str(self.file)))
        agent = InferenceAgent(self.plane.address, "g", name, engine)
        self.stack.callback(agent.stop)
        agent.start()
        state = self.plane.state
        eventually(lambda: name in state().replicas and state().replicas[name].reported, what=f"{name} is here")

    def holds(self, name: str) -> bool:
        """Whether a replica's live tensors are the file's, bit by bit."""
        live = dict(self.engines[name].modules[0].state_dict())
        return live.keys() == self.values.keys() and all(torch.equal(live[k], v) for k, v in self.values.items())

    def named(self, name: str) -> list[Call]:
        """The trainer's calls of a method, a rival's left out."""
        return [c for c in self.calls if c.name == name and getattr(c.request, "trainer_id", "") != RIVAL]

    def stand_still(self, point: str, nth: int = 1) -> None:
        """The replica waits there, until ``go_on``."""

        def hook(name: str, n: int) -> None:
            if name == point and n == nth:
                self.go_on.wait(20)

        failpoints.set_hook(hook)

    @contextmanager
    def stub(self) -> Iterator[wt_grpc.WeightTransferServiceStub]:
        """Calls of our own."""
        with grpc.insecure_channel(self.plane.address) as channel:
            yield wt_grpc.WeightTransferServiceStub(channel)

    def rival(self, stub: wt_grpc.WeightTransferServiceStub, takeover: bool) -> wt.InitTransferResponse:
        """Another trainer asks for the group."""
        request = wt.InitTransferRequest(
            request_id=uuid.uuid4().hex,
            group="g",
            trainer_id=RIVAL,
            incarnation=RIVAL,
            world_size=1,
            takeover=takeover,
            host_id="h",
            offers=[tp.Rendezvous(transport="grpc", grpc=tp.GrpcRendezvous())],
        )
        return stub.InitTransfer(request, timeout=10)


@contextmanager
def staged(folder: Path, replicas: int = 1) -> Iterator[Stage]:
    """A stage with a model of 9 MB; everything as it was afterwards."""
    values = {"big": torch.arange(2_250_000, dtype=torch.float32), "small": torch.tensor([1.5, -2.5])}
    save_file(values, folder / "model.safetensors")
    with ExitStack() as stack:
        stage = Stage(None, folder / "model.safetensors", values, stack)  # type: ignore[arg-type]
        stack.enter_context(_noted(stage))
        stack.callback(failpoints.set_hook, None)
        stage.plane = stack.enter_context(server())
        for n in range(replicas):
            stage.join(f"r{n}")
        stack.callback(stage.go_on.set)
        yield stage


@contextmanager
def _noted(stage: Stage) -> Iterator[None]:
    inner: dict[str, Any] = {name: getattr(TransferService, name) for name in (*_UNARY, "WatchUpdate")}
    serve, session = GrpcReceiveChannel.serve, agent_service._open_rank

    def unary(name: str) -> Any:
        async def call(self: Any, request: Any, context: Any) -> Any:
            left = context.time_remaining()
            made = Call(name, request, time.monotonic(), left)
            stage.calls.append(made)
            if name in stage.before:
                await stage.before.pop(name)()
            try:
                answer = await inner[name](self, request, context)
            except BaseException as e:
                made.failed = str(e) or type(e).__name__
                raise
            finally:
                made.ended = time.monotonic()
            if stage.lose.get(name, 0) > 0:
                stage.lose[name] -= 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke (as the test has it)")
            return answer

        return call

    async def watch(self: Any, request: Any, context: Any) -> None:
        if request.generation:
            stage.leases.append(time.monotonic())
        await inner["WatchUpdate"](self, request, context)

    def stream(self: Any, *args: Any) -> Any:
        made = Stream(time.monotonic())
        stage.streams.append(made)
        try:
            yield from serve(self, *args)
        finally:
            made.ended = time.monotonic()

    async def open_rank(*args: Any) -> Any:
        stage.leases.append(time.monotonic())
        return await session(*args)

    for name in _UNARY:
        setattr(TransferService, name, unary(name))
    agent_service._open_rank = open_rank  # type: ignore[assignment]
    TransferService.WatchUpdate = watch  # type: ignore[method-assign]
    GrpcReceiveChannel.serve = stream  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for name, method in inner.items():
            setattr(TransferService, name, method)
        GrpcReceiveChannel.serve = serve  # type: ignore[method-assign]
        agent_service._open_rank = session


async def in_thread(work: Callable[[], None]) -> None:
    """For ``before``: what blocks, off the server's loop."""
    await asyncio.to_thread(work)
