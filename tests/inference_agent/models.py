"""Modules that hold every awkward kind of tensor."""

from __future__ import annotations

import torch
from torch import nn

from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.inference_agent.engines.live import collect


class Awkward(nn.Module):
    """Tied, transposed, 0-dim, empty, bool, int, fp8, bf16, complex; persistent buffers and not."""

    scratch: torch.Tensor

    def __init__(self, rows: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 4)
        self.head = nn.Linear(4, rows, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)  # persistent float buffers and a 0-dim int64
        self.turned = nn.Parameter(torch.randn(5, 3).t(), requires_grad=False)
        self.strided = nn.Parameter(torch.randn(4, 8)[:, ::2], requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(3.0, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.fp8 = nn.Parameter(torch.zeros(7).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("wide", torch.zeros(2, 3, dtype=torch.complex128))
        self.register_buffer("scratch", torch.arange(4.0) + 0.5, persistent=False)


class Constant(nn.Module):
    """Every element of every tensor is k: a forward pass sees whether it read one version."""

    def __init__(self, layers: int = 8, size: int = 4096) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(size)) for _ in range(layers))

    def forward(self) -> list[float]:
        return [float(p[i].detach()) for p in self.layers for i in (0, -1)]


def manifest_of(module: nn.Module) -> Manifest:
    """What a trainer that holds the same module would send."""
    return Manifest.of(
        TensorMeta(n, live.dtype, tuple(live.tensor.shape), live.names[0] if i else "")
        for live in collect(module)
        for i, n in enumerate(live.names)
    )
