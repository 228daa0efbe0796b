"""Which layers of vLLM compute from what their loaders fill, and from nothing that is made of it after loading.

Looked up in the sources of the releases that ran (``compat.RUN``): a layer whose method is not listed here, or a
release that never ran, goes through vLLM's loaders.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import vllm
from torch import nn
from torch.nn import functional
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.v1.attention.backend import AttentionImplBase

from . import compat

__all__ = ["unfit"]

#: Their ``process_weights_after_loading`` does nothing on a GPU of NVIDIA's. On CPU: see ``_packed``.
_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


def unfit(model: nn.Module, device: torch.device, loaded: Iterable[str]) -> str:
    """Why live tensors of ``model`` must not be written past its loaders; empty: they may. ``loaded``: the modules that
    loaders fill."""
    if compat.note(str(vllm.__version__)):
        return f"vLLM {vllm.__version__} was not run with this release of weightplane"
    if device.type not in ("cpu", "cuda") or torch.version.hip is not None:
        return f"its kernels on {device.type} were not looked into"
    filled = set(loaded)
    for name, layer in model.named_modules():
        why = _unfit_layer(layer, device)
        if not why and name in filled:
            kept = [n for n, v in vars(layer).items() if isinstance(v, torch.Tensor)]
            why = f"keeps a tensor {kept[0]!r} beside its parameters" if kept else ""
        if why:
            return f"{name or type(model).__name__} ({type(layer).__name__}) {why}"
    return ""


def _unfit_layer(layer: nn.Module, device: torch.device) -> str:
    if compat.is_deferred_attention(layer):
        return _unfit_attention(layer)
    method = getattr(layer, "quant_method", None)
    if method is not None:
        if type(method) not in _PLAIN:
            return f"has {type(method).__name__}, which may make other weights of what is loaded"
        return "computes from a packed copy of its weight" if device.type == "cpu" and _packed(layer) else ""
    if callable(getattr(layer, "process_weights_after_loading", None)):
        return "makes something of its weights after loading"
    return ""


def _packed(layer: nn.Module) -> bool:
    """On CPU vLLM computes from what a closure holds, unless it fell back to torch's ``linear``, which holds nothing.

    An embedding that is no output layer has such a closure too, and does not use it: it counts as packed all the same.
    """
    linear: Any = getattr(layer, "cpu_linear", None)
    if linear is functional.linear:
        return False
    return linear is None or bool(linear.__closure__) or bool(linear.__defaults__)


def _unfit_attention(layer: nn.Module) -> str:
    if type(layer) is not Attention:
        return "makes something of its weights after loading"
    if getattr(layer, "quant_method", None) is not None:
        return "has scales of a quantised key-value cache"
    implementation: Any = getattr(layer, "impl", None)
    step = getattr(type(implementation), "process_weights_after_loading", None)
    if step is AttentionImplBase.process_weights_after_loading:
        return ""  # does nothing
    if getattr(implementation, "_sinks_source", implementation) is None:
        return ""  # FlashInfer: it copies attention sinks, and this layer has none
    return f"has {type(implementation).__name__}, which makes something of its weights after loading"
