"""Reserved staging memory: one prefaulted block per worker, cut into one tensor per distinct live tensor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

__all__ = ["Arena", "StagingRefused", "available_bytes", "device_bytes", "staging_room"]

_ALIGN = 64
_LEFT_ALONE = 256 << 20  # of a device's memory: for kernels, tables, and an engine that needs a little more


class StagingRefused(RuntimeError):
    """The staging memory cannot be reserved; the text says why."""


def available_bytes() -> int | None:
    """Host memory that can still be taken, the cgroup's limit included; ``None`` if the system does not say."""
    found: list[int] = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            found.append(int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        return min(found, default=None)
    return min(found, default=None)


def device_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that can still be taken: what is free, and what torch holds in reserve."""
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def staging_room(device: torch.device) -> int:
    """What of a CUDA device's memory an ``Arena`` may take now."""
    return max(0, device_bytes(device) - _LEFT_ALONE)


class Arena:
    """Staging for ``tensors``: ``staged[i]`` is a contiguous tensor of the dtype, shape and device of ``tensors[i]``.

    Every page is touched as it is made, so an update never waits for the kernel. Raises ``StagingRefused``; of a CUDA
    device's memory 256 MiB are left alone.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], limit: int | None = None) -> None:
        self._blocks: dict[torch.device, torch.Tensor] = {}
        sizes: dict[torch.device, int] = {}
        places: list[tuple[torch.device, int, int]] = []
        for t in tensors:
            start, n = sizes.get(t.device, 0), t.numel() * t.element_size()
            places.append((t.device, start, n))
            sizes[t.device] = start + n + (-n % _ALIGN)
        self.nbytes = sum(sizes.values())
        if limit is not None and self.nbytes > limit:
            raise StagingRefused(f"staging needs {self.nbytes} bytes, the limit is {limit}")
        free = available_bytes()
        on_host = sum(n for d, n in sizes.items() if d.type == "cpu")
        if free is not None and on_host > free:
            raise StagingRefused(f"staging needs {on_host} bytes of host memory, {free} are available")
        for device, n in sizes.items():
            if device.type == "cuda":
                _check_device(device, n)
        for device, n in sizes.items():
            try:
                self._blocks[device] = torch.empty(n, dtype=torch.uint8, device=device).fill_(0)
            except (RuntimeError, MemoryError) as e:
                self._blocks.clear()
                raise StagingRefused(f"staging needs {n} bytes on {device}: {str(e).splitlines()[0]}") from e
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        self.staged = [
            self._blocks[d][start : start + n].view(t.dtype).view(t.shape)
            for t, (d, start, n) in zip(tensors, places, strict=True)
        ]


def _check_device(device: torch.device, needed: int) -> None:
    free = device_bytes(device)
    if needed + _LEFT_ALONE > free:
        raise StagingRefused(
            f"staging needs {needed} bytes of {device}, {free} can be taken and {_LEFT_ALONE} are left alone: give the "
            "engine less memory (its KV cache, say), or take updates in place"
        )
