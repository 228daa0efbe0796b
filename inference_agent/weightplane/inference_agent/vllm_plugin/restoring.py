"""Puts a model back together that is in the middle of vLLM's layerwise reload."""

from __future__ import annotations

from torch import nn
from vllm.model_executor.model_loader.reload import layerwise

__all__ = ["restore"]


def restore(model: nn.Module) -> None:
    """Put the live tensors of every layer back that is in the middle of a reload, and forget what was buffered."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
        info.reset()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
    layerwise.LOADING_LAYERS.clear()
