"""A model whose every token says which weights its forward pass read, and an engine's factory around it.

Version k fills every element of every tensor with k. One pass reads elements of all tensors, with a break in the
middle, and answers ``sum(prime weight * element)``: the weights add up to ``BASE``, a prime, so the sum is ``BASE * k``
if all are k, and never a multiple of BASE if two versions less than BASE apart are mixed. Beside it, as the token's
"logprob", stands minus the spread over *every* element: 0.0 if all were equal.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weightplane.inference_agent.engines.base import Engine, RequestAborted
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.serve import Served

BASE = 1009
LAYERS, SIZE = 8, 8192
_PLACES = (0, SIZE // 2, -1)
_N = LAYERS * len(_PLACES)
_WEIGHTS = [i + 1 for i in range(_N - 1)]
_WEIGHTS.append(BASE - sum(_WEIGHTS))
assert _WEIGHTS[-1] > 0


class Coded(nn.Module):
    """Eight tensors of 32 KiB, on the device that ``WEIGHTPLANE_TEST_DEVICE`` names; by default the CPU."""

    def __init__(self) -> None:
        super().__init__()
        device = os.environ.get("WEIGHTPLANE_TEST_DEVICE", "cpu")
        blank = (torch.zeros(SIZE, device=device) for _ in range(LAYERS))
        self.layers = nn.ParameterList(nn.Parameter(t, requires_grad=False) for t in blank)

    def fill(self, k: int) -> None:
        with torch.no_grad():
            for p in self.layers:
                p.fill_(float(k))

    def token(self, pause_s: float) -> tuple[int, float]:
        """(the token, minus the spread): half of the tensors are read after a break of ``pause_s``."""
        read: list[float] = []
        low, high = [], []
        for i, p in enumerate(self.layers):
            if i == LAYERS // 2 and pause_s:
                time.sleep(pause_s)
            read += [float(p[j]) for j in _PLACES]
            least, most = torch.aminmax(p)
            low.append(float(least))
            high.append(float(most))
        return int(sum(w * v for w, v in zip(_WEIGHTS, read, strict=True))), min(low) - max(high)


def step_of(token: int) -> int | None:
    """The step that a token encodes; None: its pass read a mix."""
    step, rest = divmod(token, BASE)
    return step if not rest else None


@dataclass
class Output:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tags: list[Any] = field(default_factory=list)
    finished: bool = False


def generator_of(model: Coded, pause_s: float) -> Callable[..., list[Output]]:
    def generate(
        prompts: Sequence[Sequence[int]], *, max_new_tokens: int, temperature: float, seed: int, gate: Any
    ) -> list[Output]:
        outputs = []
        for _ in prompts:
            out = Output()
            outputs.append(out)
            try:
                for _ in range(max_new_tokens):
                    with gate() as tag:
                        token, logprob = model.token(pause_s)
                    out.tokens.append(token)
                    out.logprobs.append(logprob)
                    out.tags.append(tag)
                out.finished = True
            except RequestAborted:
                break
        return outputs

    return generate


def serve(engine: Callable[[Coded], Engine], pause_s: float) -> Served:
    torch.set_num_threads(1)
    model = Coded().eval()
    return Served(engine(model), generator_of(model, pause_s))


def make(pause_s: float = 0.001) -> Served:
    """``--engine tests.process.coded:make``."""
    return serve(TorchModuleEngine, pause_s)
