"""Many joiners in one process: agents with engines of their own, for ``catch_up.py``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from benchmarks._models import model, model_bytes
from benchmarks._process import serve
from benchmarks._update_members import module_of
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.transports import registry


class Crowd:
    """Takes commands (see ``_process``)."""

    def __init__(self) -> None:
        self._agents: list[InferenceAgent] = []

    def start(self, name: str, count: int) -> None:
        """Make the engines, their memory touched."""
        torch.set_num_threads(1)
        self._engines: list[TorchModuleEngine] = []
        for _ in range(count):
            module = module_of(model(name), "cpu")
            for p in module.parameters():
                p.data.zero_()
            self._engines.append(TorchModuleEngine(module))

    def join(self, address: str, group: str, transport: str, names: list[str]) -> None:
        """One agent of each name, at once."""
        for name, engine in zip(names, self._engines, strict=False):
            self._agents.append(InferenceAgent(address, group, name, engine, transports=[transport]).start())

    def leave(self) -> None:
        """All of them, in good order; new engines take their places, which hold nothing."""
        for i, agent in enumerate(self._agents):
            agent.stop()
            agent.engine.close()
            self._engines[i] = TorchModuleEngine(self._engines[i].modules)
        self._agents = []

    def memcpy(self, name: str) -> float:
        """Seconds of one copy of the model's bytes, the best of three."""
        source, target = (
            torch.ones(model_bytes(name), dtype=torch.uint8),
            torch.zeros(model_bytes(name), dtype=torch.uint8),
        )
        best = 1e9
        for _ in range(3):
            began = time.monotonic()
            target.copy_(source)
            best = min(best, time.monotonic() - began)
        return best


if __name__ == "__main__":
    serve(Crowd())
    registry.shutdown()
