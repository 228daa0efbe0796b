"""What the accelerators of this host are: for the JSON of every figure. Makes no CUDA context."""

from __future__ import annotations

import subprocess
from typing import Any

__all__ = ["accelerator"]

_FIELDS = ("index", "name", "uuid", "memory.total", "driver_version")


def accelerator() -> dict[str, Any]:
    """``cards`` (index, name, uuid, memory_gib, driver), CUDA and NCCL versions, and how the cards are linked."""
    rows = _said("--query-gpu=" + ",".join(_FIELDS), "--format=csv,noheader,nounits").splitlines()
    cards = []
    for row in rows:
        index, name, uuid, memory, driver = (x.strip() for x in row.split(","))
        gib = round(float(memory) / 1024, 1)
        cards.append({"index": int(index), "name": name, "uuid": uuid, "memory_gib": gib, "driver": driver})
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""
    return {"cards": cards, "cuda": torch.version.cuda or "", "nccl": nccl, "links": _said("topo", "-m")}


def _said(*words: str) -> str:
    try:
        return subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
