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

__all__ = ["RUN", "Handed", "handed", "lacks", "note", "refusals"]

#: Releases that ran, and where. All others are judged by their signatures (``tests/vllm/test_compat.py``).
RUN: Mapping[str, str] = {"0.32": "CPU"}

_RELOAD = "vllm.model_executor.model_loader.reload."
#: What a load uses of vLLM's, beyond what every engine of vLLM's uses.
_USED: Mapping[str, Sequence[str]] = {
    _RELOAD + "layerwise": (
        "initialize_layerwise_reload",
        "finalize_layerwise_reload",
        "get_layerwise_info",
        "is_deferred_attention_layer",
        "_place_kernel_tensors",
        "_get_original_loader",
        "LOADING_LAYERS",
    ),
    _RELOAD + "meta": ("CopyCounter", "get_numel_loaded", "to_meta_tensor"),
    _RELOAD + "utils": ("get_layer_tensors", "get_tensor_load_numel"),
}
#: Ways to speculate that have no weights.
_WEIGHTLESS = ("ngram", "[ngram]", "ngram_gpu", "suffix")


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
            absent += [f"{module}.{n}" for n in names if not hasattr(found, n)]
    return absent


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


def refusals(vllm_config: Any) -> list[tuple[str, str]]:
    """(setting, why it cannot be updated and what to do): found before the first byte of every update."""
    found = []
    speculative = getattr(vllm_config, "speculative_config", None)
    method = getattr(speculative, "method", None)
    if speculative is not None and method not in _WEIGHTLESS:
        text = (
            f"speculative_config: vLLM drafts with a model of its own ({method or 'draft_model'}), whose weights would "
            f"stay as they are: start vLLM without speculative_config, or with method ngram or suffix"
        )
        found.append(("speculative_config", text))
    quantised = getattr(vllm_config, "quant_config", None)
    if quantised is not None and not _in_checkpoint(vllm_config.model_config):
        kind = getattr(vllm_config.model_config, "quantization", None) or type(quantised).__name__
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
