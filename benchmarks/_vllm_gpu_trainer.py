"""The trainer of ``vllm_gpu.py``, a process of its own: random weights on its GPU, published or sent vLLM's own way.

``python benchmarks/_vllm_gpu_trainer.py`` takes commands (see ``_process``).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from benchmarks import _timeline
from benchmarks._process import serve
from benchmarks._update_members import PHASES, module_of
from benchmarks._vllm_gpu_models import MODELS, to_log
from benchmarks._vllm_gpu_worker import checksum
from weightplane.controlplane import failpoints
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.sources import ModuleSource
from weightplane.transports import registry

__all__ = ["Trainer", "told"]


def told(receipt: Any, took: float) -> dict[str, Any]:
    """A receipt's figures and what became of the replicas."""
    said: dict[str, Any] = {phase: getattr(receipt, f"{phase}_s") for phase in PHASES}
    replicas = [{"state": str(r.state), "mode": str(r.mode), "evidence": str(r.evidence)} for r in receipt.replicas]
    return {**said, "publish": took, "bytes": receipt.bytes, "version": receipt.version, "replicas": replicas}


class Trainer:
    """Holds a model and publishes it."""

    def __init__(self) -> None:
        self._publisher: Publisher | None = None

    def ready(self) -> dict[str, Any]:
        """What is here."""
        return {"torch": torch.__version__, "cards": torch.cuda.device_count(), "transports": list(registry.names())}

    def start(self, model: str, device: str) -> int:
        """Make the tensors; returns their bytes."""
        torch.set_num_threads(1)
        self._device = torch.device(device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self.module = module_of(MODELS[model].tensors(), device)
        self.randomise(0)
        return sum(p.numel() * p.element_size() for p in self.module.parameters())

    def randomise(self, seed: int) -> None:
        """Weights that no other ``seed`` gives."""
        made = torch.Generator(device=self._device).manual_seed(seed)
        with torch.no_grad():
            for p in self.module.parameters():
                p.normal_(0, 0.02, generator=made)
        self._settle()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def checksums(self) -> dict[str, list[int]]:
        """By name."""
        return {n: checksum(p) for n, p in self.module.named_parameters()}

    def save(self, folder: str, seed: int) -> None:
        """A checkpoint of ``seed`` for a fresh engine."""
        from safetensors.torch import save_file  # type: ignore[import-not-found, unused-ignore]

        self.randomise(seed)
        tensors = {n: p.detach().cpu() for n, p in self.module.named_parameters()}
        save_file(tensors, str(Path(folder) / "model.safetensors"), metadata={"format": "pt"})

    # --- ours

    def open(self, address: str, group: str, transport: str, bucket_bytes: int = 0, replicas: int = 1) -> None:
        """Become the group's trainer, whoever was it."""
        self.close()
        self._publisher = Publisher(
            address,
            group,
            ModuleSource(self.module),
            transport=transport,
            bucket_bytes=bucket_bytes,
            takeover=True,
            update_timeout=30.0,
            failure="raise",
        )
        self._publisher.wait_for_replicas(replicas, 20)

    def publish(self, step: int, mode: str, verify: str = "") -> dict[str, Any]:
        """One update."""
        assert self._publisher is not None
        start = time.monotonic()
        receipt = self._publisher.publish(step, mode=mode, verify=verify)
        return told(receipt, time.monotonic() - start)

    def die_at(self, failpoint: str, nth: int, after_s: float) -> None:
        """SIGKILL this process ``after_s`` after the nth hit. In that time the sender stands still there."""

        def hook(name: str, n: int) -> None:
            if name == failpoint and n == nth:
                time.sleep(after_s)
                os.write(2, f"killed at {time.monotonic():.6f}\n".encode())
                os.kill(os.getpid(), 9)

        failpoints.set_hook(hook)

    def close(self) -> None:
        """Leave the group."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def memory(self, reset: bool) -> dict[str, int]:
        """torch's bytes on this card: now and at the peak since the last ``reset``."""
        if self._device.type != "cuda":
            return {}
        said = {"now": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()}
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return said

    # --- vLLM's own

    def warm(self) -> float:
        """Import what ``native_…`` needs, while engines start; seconds."""
        begin = time.monotonic()
        import vllm.distributed.weight_transfer.nccl_engine  # noqa: F401

        return time.monotonic() - begin

    def native_open(self, port: int) -> None:
        """Rank 0 of the group of vLLM's NCCL engine; the engine joins meanwhile."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        where = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
        self._native: Any = NCCLWeightTransferEngine.trainer_init(where)

    def native_metadata(self) -> dict[str, Any]:
        """What the engine must know before it receives."""
        params = dict(self.module.named_parameters())
        dtypes = [str(p.dtype).removeprefix("torch.") for p in params.values()]
        return {"names": list(params), "dtype_names": dtypes, "shapes": [list(p.shape) for p in params.values()]}

    def native_send(self, packed: bool) -> float:
        """Broadcast everything; seconds."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

        start = time.monotonic()
        how = NCCLTrainerSendWeightsArgs(group=self._native, packed=packed)
        NCCLWeightTransferEngine.trainer_send_weights(((n, p.data) for n, p in self.module.named_parameters()), how)
        self._settle()
        return time.monotonic() - start


if __name__ == "__main__":
    to_log()
    _timeline.install("trainer")
    serve(Trainer())
    registry.shutdown()
