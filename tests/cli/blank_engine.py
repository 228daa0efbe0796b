"""An engine that is born with zeros in the shapes of a safetensors checkpoint; ``dump`` gets its live bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.serve import Served
from weightplane.trainer_agent.sources_safetensors import SafetensorsSource
from weightplane.transports.dtypes import as_bytes, dtype_of


def blank_module(path: str) -> nn.Module:
    """Zeros under the checkpoint's names."""
    root = nn.Module()
    for meta in SafetensorsSource(path).manifest():
        *parents, leaf = meta.name.split(".")
        at = root
        for part in parents:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at._modules[part]  # type: ignore[assignment]
        zeros = torch.zeros(meta.shape, dtype=dtype_of(meta.dtype))
        if zeros.is_floating_point():
            at.register_parameter(leaf, nn.Parameter(zeros, requires_grad=False))
        else:
            at.register_buffer(leaf, zeros)
    return root


def make(path: str, dump: str = "", staged: bool = True, device: str = "cpu") -> Served:
    """``dump``: after each update every live tensor's bytes are written there, one file per name."""

    def write(module: nn.Module) -> None:
        folder = Path(dump)
        folder.mkdir(parents=True, exist_ok=True)
        for name, tensor in module.state_dict().items():
            (folder / name).write_bytes(bytes(as_bytes(tensor).tolist()) if tensor.numel() < 64 else _raw(tensor))

    def generator(prompts: Sequence[Sequence[int]], **options: Any) -> Any:
        raise ValueError("a blank engine generates nothing")

    engine = TorchModuleEngine(blank_module(path).to(device), staged=staged, hooks=[write] if dump else [])
    return Served(engine, generator)


def _raw(tensor: torch.Tensor) -> bytes:
    return as_bytes(tensor).numpy().tobytes()
