"""What ``vllm_gpu.py`` looks at inside vLLM's workers: every parameter's checksum, and torch's memory on the card.

``Probe`` is vLLM's ``worker_extension_cls``. The checksums are this benchmark's own, not the digests of the product: a
trainer makes the same of its tensors. With ``WEIGHTPLANE_BENCH_PLAIN`` set, a CPU's linear layers keep plain weights,
as a GPU's do.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["Probe", "checksum", "pieces"]

if "vllm" in sys.modules and os.environ.get("WEIGHTPLANE_TIMELINE"):
    from benchmarks import _timeline

    _timeline.install("worker")

if os.environ.get("WEIGHTPLANE_BENCH_PLAIN") and "vllm" in sys.modules:
    import vllm._custom_ops as custom_ops

    custom_ops._supports_onednn = False

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDTH = 8192


def checksum(tensor: torch.Tensor) -> list[int]:
    """Of the bits, in row-major order; a moved, a changed and a swapped element all change it.

    Elements, their sum as integers, and sums weighted by place: along lines of 8192 and from line to line.
    """
    flat = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()]).flatten()
    whole = flat.numel() // _WIDTH * _WIDTH
    lines = flat[:whole].view(-1, _WIDTH)
    sums = []
    for part in (lines.sum(1, dtype=torch.int64), lines.sum(0, dtype=torch.int64), flat[whole:].to(torch.int64)):
        place = torch.arange(1, part.numel() + 1, device=part.device)
        sums += [part.sum(), (part * (place * 2654435761 % 1000003)).sum()]
    return [flat.numel(), *torch.stack(sums).tolist()]


def pieces(
    name: str, tensor: torch.Tensor, rows: dict[str, list[tuple[str, int]]], first_expert: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """A parameter of vLLM's as the checkpoint's tensors that it is fused of. ``first_expert``: of those here."""
    name = name.replace(".routed_experts.", ".")
    *path, leaf = name.split(".")
    fused = rows.get(path[-1] if path else "")
    if fused is not None and sum(n for _, n in fused) == tensor.shape[0]:
        for (part, _), cut in zip(fused, tensor.split([n for _, n in fused]), strict=True):
            yield ".".join([*path[:-1], part, leaf]), cut
    elif leaf in ("w13_weight", "w2_weight") and tensor.dim() == 3:
        for e, expert in enumerate(tensor, first_expert):
            at = ".".join([*path, str(e)])
            if leaf == "w2_weight":
                yield f"{at}.down_proj.weight", expert
            else:
                half = expert.shape[0] // 2
                yield f"{at}.gate_proj.weight", expert[:half]
                yield f"{at}.up_proj.weight", expert[half:]
    else:
        yield name, tensor


class Probe:
    """Beside vLLM's own worker class; its methods are reached by ``collective_rpc``. Answers are JSON."""

    model_runner: Any
    device: Any
    parallel_config: Any

    def probe_checksums(self, rows: str) -> str:
        """Every parameter with memory, cut back to the checkpoint's tensors; ``""`` counts those without."""
        fused = {k: [(n, int(w)) for n, w in v] for k, v in json.loads(rows).items()}
        rank = int(getattr(self.parallel_config, "data_parallel_rank", 0) or 0)
        found: dict[str, list[int]] = {"": [0]}
        for name, tensor in self.model_runner.get_model().named_parameters():
            if not tensor.numel():
                found[""][0] += 1
                continue
            local = tensor.shape[0] if tensor.dim() == 3 else 0
            for piece, cut in pieces(name, tensor, fused, rank * local):
                found[piece] = checksum(cut)
        return json.dumps(found)

    def probe_live(self) -> str:
        """Parameters and buffers as they lie in the kernels' layout: dtype, shape, strides, checksum."""
        model = self.model_runner.get_model()
        found = {}
        for name, t in (*model.named_parameters(), *model.named_buffers()):
            plain = t.detach().as_strided((t.numel(),), (1,)) if _dense(t) else t
            found[name] = [str(t.dtype), list(t.shape), list(t.stride()), checksum(plain) if t.numel() else []]
        return json.dumps(found)

    def probe_memory(self, reset: bool) -> str:
        """torch's bytes on the worker's card: now, at the peak since the last ``reset``; and what is free there."""
        if self.device.type != "cuda":
            return json.dumps({})
        torch.cuda.synchronize(self.device)
        said = {
            "now": torch.cuda.memory_allocated(self.device),
            "peak": torch.cuda.max_memory_allocated(self.device),
            "reserved": torch.cuda.memory_reserved(self.device),
            "free": torch.cuda.mem_get_info(self.device)[0],
            "uuid": str(torch.cuda.get_device_properties(self.device).uuid),
        }
        if reset:
            torch.cuda.reset_peak_memory_stats(self.device)
        return json.dumps(said)


def _dense(t: torch.Tensor) -> bool:
    """Whether its elements fill one piece of memory, in whatever order."""
    order = sorted(zip(t.stride(), t.shape, strict=True))
    size = 1
    for stride, n in order:
        if n != 1 and stride != size:
            return False
        size *= n
    return t.numel() > 0
