"""What ``vllm_gpu.py`` needs of the host, looked at in seconds: entry point, signatures, compiled ops. Prints lines."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

#: Ops by library: what a case would miss, named before it fails.
_OPS = {
    "_C": ("rms_norm", "silu_and_mul", "rotary_embedding", "dynamic_scaled_fp8_quant", "cutlass_scaled_mm"),
    "_C_cache_ops": ("reshape_and_cache_flash",),
    "_moe_C": ("topk_softmax", "moe_align_block_size", "moe_sum"),
}


def told(what: str, look: Callable[[], Any]) -> None:
    """One line: what was found, or what was raised."""
    try:
        print(f"{what}: {look()}", flush=True)
    except Exception as e:
        print(f"{what}: MISSING: {type(e).__name__}: {str(e)[:300]}", flush=True)


def ops(library: str, names: Sequence[str]) -> str:
    """Which of them torch knows."""
    import torch

    have = getattr(torch.ops, library)
    absent = [n for n in names if not hasattr(have, n)]
    return f"lacks {', '.join(absent)}" if absent else "all"


def main() -> None:
    """Look at everything."""
    start = time.monotonic()
    told("python", lambda: sys.version.split()[0])
    told("vllm.general_plugins", lambda: [e.value for e in entry_points(group="vllm.general_plugins")])
    told("vllm", lambda: importlib.import_module("vllm").__version__)
    compat = importlib.import_module("weightplane.inference_agent.vllm_plugin.compat")
    told("a load lacks", lambda: compat.lacks() or "nothing")
    told("fp8 is quantised again in a reload", lambda: compat.requantises("fp8"))
    engine = "weightplane.inference_agent.vllm_plugin.engine"
    told("our engine", lambda: importlib.import_module(engine).WeightplaneTransferEngine.__abstractmethods__ or "whole")
    told("vLLM's kernels", lambda: bool(importlib.import_module("vllm._custom_ops")))
    for library, names in _OPS.items():
        told(f"ops of {library}", lambda library=library, names=names: ops(library, names))  # type: ignore[misc]
    print(f"looked for {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
