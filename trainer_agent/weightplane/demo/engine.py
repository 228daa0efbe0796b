"""The demo's inference engine: the demo's model behind ``torch_module``, generating with ``sampling.generate``."""

from __future__ import annotations

from functools import partial

import torch

from weightplane.demo.config import DemoConfig
from weightplane.demo.model import build_model
from weightplane.demo.sampling import StopGeneration, generate
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.serve import Served

__all__ = ["make"]


def make(seed: int = 1_000_003, staged: bool = True) -> Served:
    """``--engine weightplane.demo.engine:make``: born with weights of its own ``seed``, on one CPU thread."""
    torch.set_num_threads(1)
    model = build_model(DemoConfig().model, seed).eval()
    return Served(TorchModuleEngine(model, staged=staged), partial(generate, model), stop_with=StopGeneration)
