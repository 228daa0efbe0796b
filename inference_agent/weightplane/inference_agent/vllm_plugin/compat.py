"""What differs between releases of vLLM, found by looking at what is there, and what of it cannot be updated.

No version is refused for its number: one that was never run is warned about, and what a release lacks is refused by
name. Imports neither vLLM nor torch until it is asked about them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "DRAFT",
    "RUN",
    "Handed",
    "draft",
    "handed",
    "is_deferred_attention",
    "lacks",
    "load_numel",
    "note",
    "refusals",
    "requantises",
    "worker_class",
]

#: Releases that ran, and where. All others are judged by their signatures (``tests/vllm/test_compat.py``).
RUN: Mapping[str, str] = {"0.32": "CPU", "0.26": "GPU"}

_RELOAD = "vllm.model_executor.model_loader.reload."
#: What a load uses of vLLM's, beyond what every engine of vLLM's uses; ``a|b``: one of them.
_USED: Mapping[str, Sequence[str]] = {
    _RELOAD + "layerwise": (
        "initialize_layerwise_reload",
        "finalize_layerwise_reload",
        "get_layerwise_info",
        "is_deferred_attention_layer|Attention",
        "_place_kernel_tensors",
        "_get_original_loader",
        "LOADING_LAYERS",
    ),
    _RELOAD + "meta": ("CopyCounter", "get_numel_loaded", "to_meta_tensor"),
    _RELOAD + "utils": ("get_layer_tensors",),
}
#: Ways to quantise at loading that vLLM's layerwise reload goes through again.
_REQUANTISED = ("fp8",)
#: Ways to speculate that have no weights.
_WEIGHTLESS = ("ngram", "[ngram]", "ngram_gpu", "suffix")
#: The setting of a draft model, in ``refusals``: it alone may be declared frozen.
DRAFT = "speculative_config"


def note(version: str) -> str:
    """What to warn of a release; empty if it ran."""
    if ".".join(version.split(".")[:2]) in RUN:
        return ""
    ran = ", ".join(f"{v} ({where})" for v, where in RUN.items())
    return (
        f"vLLM {version} was not run with this release of weightplane (run: {ran}): try updates before you rely on it"
    )


def lacks() -> list[str]:
    """What a load needs and this vLLM has not got, by full name."""
    absent = []
    for module, names in _USED.items():
        try:
            found = importlib.import_module(module)
        except ImportError:
            absent.append(module)
        else:
            absent += [f"{module}.{n}" for n in names if not any(hasattr(found, a) for a in n.split("|"))]
    return absent


def is_deferred_attention(layer: Any) -> bool:
    """Whether vLLM processes a layer after all others. Until 0.26 it names the classes where it is asked."""
    layerwise = importlib.import_module(_RELOAD + "layerwise")
    asked = getattr(layerwise, "is_deferred_attention_layer", None)
    if asked is not None:
        return bool(asked(layer))
    kinds = (getattr(layerwise, n, None) for n in ("Attention", "MLAAttention"))
    return isinstance(layer, tuple(k for k in kinds if k is not None))


def load_numel(tensor: Any) -> int:
    """Elements of a parameter that a checkpoint fills. 0.26 knows of no padding there."""
    utils = importlib.import_module(_RELOAD + "utils")
    asked = getattr(utils, "get_tensor_load_numel", None)
    return int(tensor.numel() if asked is None else asked(tensor))


@dataclass(frozen=True)
class Handed:
    """What vLLM makes an engine with. ``model`` is None where the release hands it over with each update only."""

    vllm_config: Any
    parallel_config: Any
    model_config: Any
    device: Any
    model: Any


def handed(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], current: Any) -> Handed:
    """Sort what came by the names of the base class's ``__init__``. ``current``: vLLM's current config, or None.

    ``TypeError`` names what cannot be found.
    """
    given = signature.bind(None, *args, **kwargs).arguments
    config = given.get("vllm_config") or current
    if config is None:
        raise TypeError(
            f"weightplane: this vLLM makes its weight transfer engines with ({', '.join(list(given)[1:])}), and has no "
            f"current config: vllm_config is not to be had"
        )
    device = given.get("device")
    return Handed(
        config,
        given.get("parallel_config") or config.parallel_config,
        given.get("model_config") or config.model_config,
        config.device_config.device if device is None else device,
        given.get("model"),
    )


def worker_class(parallel_config: Any) -> type | None:
    """The class of this vLLM's workers, which its config names once it is made."""
    module, _, name = str(getattr(parallel_config, "worker_cls", "")).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name) if module else None
    except (ImportError, AttributeError):
        found = None
    return found if isinstance(found, type) else None


def requantises(method: str) -> bool:
    """Whether this vLLM's reload quantises again as it did at its start: its ``method`` waits until a layer is whole.

    ``fp8`` is the one looked into (0.26, on a GPU: ``benchmarks/vllm_gpu.py`` holds it against a fresh engine's).
    """
    if method not in _REQUANTISED:
        return False
    try:
        online = importlib.import_module("vllm.model_executor.layers.quantization.online.fp8")
    except ImportError:
        return False
    return hasattr(online, "initialize_online_processing")


def draft(vllm_config: Any) -> str:
    """How vLLM speculates, if with a model of its own; else empty."""
    speculative = getattr(vllm_config, "speculative_config", None)
    method = getattr(speculative, "method", None) or "draft_model"
    return "" if speculative is None or method in _WEIGHTLESS else str(method)


def refusals(vllm_config: Any, device: str = "cpu") -> list[tuple[str, str]]:
    """(setting, why it cannot be updated and what to do): found before the first byte of every update.

    ``device``: the kind that the weights lie on.
    """
    found = []
    if method := draft(vllm_config):
        text = (
            f"speculative_config: vLLM drafts with a model of its own ({method}), whose weights would "
            f"stay as they are: start vLLM without speculative_config, or with method ngram or suffix, or declare that "
            f"they are to stay (--engine-option frozen_draft=true)"
        )
        found.append((DRAFT, text))
    quantised = getattr(vllm_config, "quant_config", None)
    kind = getattr(vllm_config.model_config, "quantization", None) or type(quantised).__name__
    again = device == "cuda" and requantises(kind)
    if quantised is not None and not _in_checkpoint(vllm_config.model_config) and not again:
        text = (
            f"quantization: vLLM quantises the weights as it loads them ({kind}), which was not run with weightplane: "
            f"start vLLM without --quantization, or with a checkpoint that is quantised already"
        )
        found.append(("quantization", text))
    return found


def _in_checkpoint(model_config: Any) -> bool:
    """Whether the checkpoint itself says that it is quantised."""
    hf = getattr(model_config, "hf_config", None)
    parts = (hf, getattr(hf, "text_config", None))
    return any(getattr(c, n, None) is not None for c in parts for n in ("quantization_config", "compression_config"))
