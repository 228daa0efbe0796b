"""The model that trainer, a ``torch_module`` replica and a real vLLM share in ``tests.faults.vllm``: tiny Qwen2
checkpoints, A in odd steps and B in even ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from tests.vllm.models import make_model
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.serve import Served

__all__ = ["FOLDERS", "Alternating", "at", "checkpoints", "make"]

#: Where the two lie: ``A`` and ``B`` of this folder.
FOLDERS = "WEIGHTPLANE_TEST_CHECKPOINTS"


def at(step: int) -> str:
    """Which checkpoint a step publishes."""
    return "A" if step % 2 else "B"


def checkpoints(folder: Path) -> dict[str, Path]:
    """Make both; other seeds than in ``tests/vllm``, where they are made anew in each session, are not needed."""
    return {name: make_model(folder / name, seed) for seed, name in enumerate("AB")}


def _model(name: str) -> Any:
    from transformers import AutoModelForCausalLM  # type: ignore[import-not-found, unused-ignore]

    return AutoModelForCausalLM.from_pretrained(Path(os.environ[FOLDERS]) / name, dtype=torch.float32).eval()


class Alternating(torch.nn.Module):
    """The trainer's: its tensors have a checkpoint's names. ``fill`` as of ``tests.process.coded.Coded``."""

    def __init__(self) -> None:
        super().__init__()
        of = {name: _model(name) for name in "AB"}
        self._of = {name: {k: v.clone() for k, v in m.state_dict().items()} for name, m in of.items()}
        for name, child in of["A"].named_children():
            self.add_module(name, child)

    def fill(self, step: int) -> None:
        with torch.no_grad():
            for name, tensor in self.state_dict().items():
                tensor.copy_(self._of[at(step)][name])


def make() -> Served:
    """``--engine tests.faults.vllm_model:make``: it serves digests, and no tokens."""
    torch.set_num_threads(1)

    def generate(*_: Any, **__: Any) -> list[Any]:
        raise NotImplementedError("its digests are compared, not what it generates")

    return Served(TorchModuleEngine(_model("A")), generate)
