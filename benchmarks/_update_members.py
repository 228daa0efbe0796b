"""The trainer and the replicas of ``updates.py``, each in a process of its own: the product's agents around a module.

``python benchmarks/_update_members.py trainer|replica`` takes commands (see ``_process``).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from benchmarks import _timeline
from benchmarks._limits import CardLimits, HostLimits, fill
from benchmarks._memory import HostPeak
from benchmarks._models import Shape, model
from benchmarks._process import serve
from benchmarks._sampler import Sampler
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.sources import ModuleSource
from weightplane.transports import registry
from weightplane.transports.dtypes import as_bytes, dtype_of
from weightplane.transports.retained import Retainer

#: What a receipt says, in seconds.
PHASES = ("gather", "mirror", "wire", "verify", "decide", "pause", "apply", "total")


def module_of(shapes: Sequence[Shape], device: str) -> nn.Module:
    """A module that holds a tensor list as plain parameters under its names."""
    root = nn.Module()
    for name, dtype, shape in shapes:
        *path, leaf = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        tensor = torch.empty(shape, dtype=dtype_of(dtype), device=device)
        at.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return root


class _Holder:
    """A member with the model in its memory."""

    def start(self, device: str, name: str) -> str:
        """Make the module, of random bytes; returns the UUID of the card."""
        torch.set_num_threads(1)
        self._cuda = device != "cpu"
        if self._cuda:
            torch.cuda.set_device(device)
        self.module = module_of(model(name), device)
        self._flats = [as_bytes(p) for p in self.module.parameters()]
        for seed, flat in enumerate(self._flats):
            fill(flat, seed)
        self.sampler = Sampler()
        self._host_peak = HostPeak()
        return str(torch.cuda.get_device_properties(device).uuid) if self._cuda else ""

    def begin_memory(self) -> None:
        """Watch the peaks from here on."""
        self._host_peak.begin()
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._allocated = torch.cuda.memory_allocated()

    def memory(self) -> dict[str, int]:
        """Bytes beyond what was held at ``begin_memory``, at the peak: of the process, of torch on the card."""
        found = {"host": self._host_peak.extra()}
        if self._cuda:
            found["torch"] = torch.cuda.max_memory_allocated() - self._allocated
        return found


class Trainer(_Holder):
    """Holds a group and publishes."""

    def open(self, address: str, group: str, replicas: int, transport: str, bucket_bytes: int) -> None:
        """Become the group's trainer; returns when its replicas are there."""
        self._publisher = Publisher(
            address, group, ModuleSource(self.module), transport=transport, bucket_bytes=bucket_bytes
        )
        self._publisher.wait_for_replicas(replicas)

    def mark(self, number: int) -> None:
        """Change both ends of every tensor, so that an update's bytes are its own."""
        for flat in self._flats:
            flat[:8] = number % 251
            flat[-8:] = number % 251
        if self._cuda:
            torch.cuda.synchronize()

    def publish(self, step: int, mode: str, verify: str, look: bool = False, **options: Any) -> dict[str, Any]:
        """One update; its receipt, and the seconds that the whole call took. ``look``: note where they go."""
        with self.sampler.look() if look else nullcontext():
            start = time.monotonic()
            receipt = self._publisher.publish(step, mode=mode, verify=verify, **options)
            took = time.monotonic() - start
        said: dict[str, Any] = {phase: getattr(receipt, f"{phase}_s") for phase in PHASES}
        said["modes"] = sorted({r.mode for r in receipt.replicas})
        said["evidence"] = sorted({r.evidence for r in receipt.replicas})
        return {**said, "publish": took, "bytes": receipt.bytes, "retries": receipt.retries}

    def close(self) -> None:
        """Leave the group."""
        self._publisher.close()


class Replica(_Holder):
    """Serves the module; has the limits."""

    host: HostLimits
    card: CardLimits

    def start(self, device: str, name: str) -> str:
        """See ``_Holder``."""
        said = super().start(device, name)
        if self._cuda:
            self.card = CardLimits(device, "cuda:0")
        else:
            tensors = list(self.module.parameters())
            self.host = HostLimits(tensors, self._flats, sum(f.numel() for f in self._flats))
        return said

    def open(
        self, address: str, group: str, replica_id: str, transport: str, staged: bool, retain: bool = False
    ) -> int:
        """Join the group; returns the bytes reserved for staging. ``retain``: keep a copy for those who come late."""
        engine = TorchModuleEngine(self.module, staged=staged)
        if staged and engine.staging_refusal:
            raise RuntimeError(f"no staging: {engine.staging_refusal}")
        self._agent = InferenceAgent(
            address,
            group,
            replica_id,
            engine,
            transports=[transport],
            retain=Retainer() if retain else None,
            labels={"stays": "yes"},
        ).start()
        if not self._agent.wait_live(30):
            raise RuntimeError(f"the agent did not get through to {address}: {self._agent.status().error}")
        return engine.staging_bytes

    def check(self, number: int) -> None:
        """Both ends of every tensor are the update's."""
        ends = torch.cat([part for f in self._flats if f.numel() for part in (f[:1], f[-1:])]).cpu()
        wrong = int((ends != number % 251).sum())
        if wrong:
            raise AssertionError(f"{wrong} of {ends.numel()} ends are not those of update {number}")

    def look(self, begin: bool) -> list[str]:
        """Note where the time goes from ``begin`` to its end; then the table."""
        if begin:
            self._looking = self.sampler.look()
            self._looking.__enter__()
            return []
        self._looking.__exit__(None, None, None)
        return self.sampler.table()

    def close(self) -> None:
        """Leave the group and let go of the staging memory."""
        self._agent.stop()
        self._agent.engine.close()
        del self._agent
        if self._cuda:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    _timeline.install(sys.argv[1])
    serve(Trainer() if sys.argv[1] == "trainer" else Replica())
    registry.shutdown()
