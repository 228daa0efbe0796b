"""A whole small fleet in one process: a real control plane, and replicas with real engines and transports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from tests.inference_agent.server import FAST, Server, eventually
from weightplane.controlplane import failpoints
from weightplane.controlplane.core.model import Config
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.sources import ModuleSource, Source
from weightplane.transports.dtypes import as_bytes

__all__ = ["Fleet", "eventually", "fill", "fleet", "hook", "same"]


class Fleet:
    """A control plane and its replicas; ``publisher`` makes trainers. Everything ends with the ``with`` block."""

    def __init__(self, stack: ExitStack, config: Config = FAST) -> None:
        self.stack = stack
        self.plane = Server(config).start()
        stack.callback(self.plane.close)
        self.engines: dict[str, TorchModuleEngine] = {}
        self.agents: dict[str, InferenceAgent] = {}

    @property
    def address(self) -> str:
        return self.plane.address

    def replica(self, name: str, engine: TorchModuleEngine, **options: Any) -> InferenceAgent:
        agent = InferenceAgent(self.address, "g", name, engine, **options)
        self.stack.callback(agent.stop, leave=False)
        agent.start()
        self.engines[name], self.agents[name] = engine, agent

        def here() -> bool:
            known = self.plane.state().replicas.get(name)
            return known is not None and known.incarnation == agent.incarnation and known.reported

        eventually(here, what=f"{name} is here")
        return agent

    def publisher(self, source: Source | nn.Module, **options: Any) -> Publisher:
        if isinstance(source, nn.Module):
            source = ModuleSource(source)
        options.setdefault("transport", "shm")
        options.setdefault("heartbeat", "stream")
        options.setdefault("bucket_bytes", 4096)
        publisher = Publisher(self.address, "g", source, **options)
        self.stack.callback(publisher.close)
        return publisher

    def state(self) -> Any:
        return self.plane.state()


@contextmanager
def fleet(config: Config = FAST) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(stack, config)


def fill(module: nn.Module, seed: int) -> None:
    """New values in every parameter and persistent buffer, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.dtype == torch.bool or not (tensor.is_floating_point() or tensor.is_complex()):
                tensor.fill_(seed % 2 if tensor.dtype == torch.bool else seed)
            else:
                tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))


def same(engine: TorchModuleEngine, module: nn.Module) -> bool:
    """Whether an engine's live tensors are the module's, bit for bit."""
    live = engine.modules[0].state_dict(keep_vars=True)
    return all(as_bytes(live[k]).equal(as_bytes(v)) for k, v in module.state_dict(keep_vars=True).items())


@contextmanager
def hook(name: str, action: Callable[[int], object]) -> Iterator[threading.Event]:
    """Run ``action(nth)`` whenever the failpoint ``name`` is hit in this process; the event tells that it was."""
    reached = threading.Event()

    def on(hit: str, n: int) -> None:
        if hit == name:
            reached.set()
            action(n)

    failpoints.set_hook(on)
    try:
        yield reached
    finally:
        failpoints.set_hook(None)
