"""A real vLLM model in this process, loaded by vLLM's own loader for its CPU kernels, without an engine around it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from weightplane.controlplane.core.manifest import Manifest, TensorMeta

from .fleet import tensors_of
from .models import ENVIRONMENT

__all__ = ["Broken", "RealModel", "real_model"]

LAYERS = 3
DEVICE = torch.device("cpu")


class Broken(RuntimeError):
    """What a source raises in the middle."""


class RealModel:
    """The live model, and what it computes compared with a checkpoint."""

    def __init__(self, vllm_config: Any, model: Any) -> None:
        self.config, self.model = vllm_config, model

    def named(self, folder: Path) -> dict[str, torch.Tensor]:
        """A checkpoint in an order in which ``q`` comes first of each layer."""
        return dict(sorted(tensors_of(folder).items(), key=lambda kv: kv[0].replace("self_attn.q_proj", "aa")))

    def manifest(self, named: dict[str, torch.Tensor]) -> Manifest:
        return Manifest.of([TensorMeta(n, str(t.dtype)[6:], tuple(t.shape)) for n, t in named.items()])

    def survey(self, named: dict[str, torch.Tensor]) -> Any:
        from weightplane.inference_agent.vllm_plugin.surveying import survey

        return survey(self.model, self.manifest(named), DEVICE, False)

    def load(self, named: dict[str, torch.Tensor], breaks_at: str = "") -> int:
        """As a worker does it. ``breaks_at``: the source raises instead of giving that one."""
        from weightplane.inference_agent.vllm_plugin.loading import load

        found = self.survey(named)
        assert not found.problems
        return load(self.model, self.config.model_config, DEVICE, given(named, breaks_at), found)

    def differs(self, named: dict[str, torch.Tensor], layers: range = range(LAYERS)) -> list[str]:
        """The modules whose live kernels do not compute what the checkpoint's weights do."""
        bad = []
        x = {n: torch.randn(3, n, generator=torch.Generator().manual_seed(n)) for n in (128, 256)}
        for i in layers:
            layer, at = self.model.model.layers[i], f"model.layers.{i}."
            for module, parts in (
                (layer.self_attn.qkv_proj, [f"self_attn.{p}_proj" for p in "qkv"]),
                (layer.self_attn.o_proj, ["self_attn.o_proj"]),
                (layer.mlp.gate_up_proj, ["mlp.gate_proj", "mlp.up_proj"]),
                (layer.mlp.down_proj, ["mlp.down_proj"]),
            ):
                w = torch.cat([named[f"{at}{p}.weight"] for p in parts])
                bias = [named[f"{at}{p}.bias"] for p in parts if f"{at}{p}.bias" in named]
                want = x[w.shape[1]] @ w.T + (torch.cat(bias) if bias else 0)
                if not torch.allclose(module(x[w.shape[1]])[0], want, atol=1e-4):
                    bad.append(at + "+".join(parts))
        if layers == range(LAYERS):
            head = self.model.lm_head
            want = x[128] @ named["lm_head.weight"].T
            if not torch.allclose(head.quant_method.apply(head, x[128])[:, : want.shape[1]], want, atol=1e-4):
                bad.append("lm_head")
        return bad

    def tensors(self) -> dict[str, tuple[int, int]]:
        """Which object and which memory each live tensor is."""
        both = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {n: (id(t), 0 if t.is_meta else t.data_ptr()) for n, t in both}

    def half_loaded(self) -> list[str]:
        """Layers that vLLM counts as in the middle of a reload."""
        from vllm.model_executor.model_loader.reload import layerwise

        infos = {n: layerwise.get_layerwise_info(m) for n, m in self.model.named_modules()}
        return [n for n, i in infos.items() if i.can_load() or i.loaded_weights or i.load_numel]


def given(named: dict[str, torch.Tensor], breaks_at: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in named.items():
        if name == breaks_at:
            raise Broken(name)
        yield name, tensor


@contextmanager
def real_model(folder: Path) -> Iterator[RealModel]:
    """Everything global that vLLM makes for it is taken down again: other tests run an ``LLM`` in this process."""
    os.environ.update(ENVIRONMENT)
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.v1.worker.cpu import shm  # noqa: F401  # what a CPU worker does first: no accelerator's cache to empty

    arguments = EngineArgs(
        model=str(folder), dtype="float32", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder.parent}/{uuid4().hex}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        try:
            yield RealModel(config, get_model(vllm_config=config))
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()
