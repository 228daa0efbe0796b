"""What a worker offers: host transports too where its weights are on a GPU, and every refusal with its reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from weightplane.inference_agent.engines.base import WorkerDevice
from weightplane.inference_agent.hello import worker_offers
from weightplane.transports import registry
from weightplane.transports.base import Transport
from weightplane.transports.cuda_ipc import CudaIpcTransport
from weightplane.v1.transport_pb2 import NcclRendezvous, Rendezvous


def test_a_gpu_worker_offers_host_transports_and_a_cpu_worker_no_gpu_transport() -> None:
    transports: dict[str, Transport] = {"shm": registry.get("shm"), "cuda_ipc": CudaIpcTransport()}
    offers, why = worker_offers("r/0", WorkerDevice("cuda", "none here"), {"shm": transports["shm"]})
    assert [o.transport for o in offers] == ["shm"] and not why
    offers, why = worker_offers("r/0", WorkerDevice(), transports)
    assert [o.transport for o in offers] == ["shm"] and why == {"cuda_ipc": "does not reach cpu memory"}


def test_what_is_offered_is_the_workers_gpu_and_not_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module on cuda:1 in a thread that never chose a GPU (its own is 0). The card's own test: test_cpp_gpu.py."""
    chosen = [0]

    class Chosen:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            chosen.append(self.index if self.index >= 0 else chosen[-1])

        def __exit__(self, *_: object) -> None:
            chosen.pop()

    class OfTheThread(CudaIpcTransport):
        def offer(self, member: str) -> Rendezvous:
            return Rendezvous(transport="nccl", nccl=NcclRendezvous(device_uuid=f"GPU-{chosen[-1]}"))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=f"GPU-{i}"))
    monkeypatch.setattr(torch.cuda, "device", Chosen)
    for uuid, offered in ("GPU-1", "GPU-1"), ("GPU-2", "GPU-2"), ("unknown here", "GPU-0"):
        offers, _ = worker_offers("r/0", WorkerDevice("cuda", uuid), {"nccl": OfTheThread()})
        assert [o.nccl.device_uuid for o in offers] == [offered]
    assert chosen == [0]
