"""What a worker offers: host transports too where its weights are on a GPU, and every refusal with its reason."""

from __future__ import annotations

from weightplane.inference_agent.hello import worker_offers
from weightplane.transports import registry
from weightplane.transports.base import Transport
from weightplane.transports.cuda_ipc import CudaIpcTransport


def test_a_gpu_worker_offers_host_transports_and_a_cpu_worker_no_gpu_transport() -> None:
    transports: dict[str, Transport] = {"shm": registry.get("shm"), "cuda_ipc": CudaIpcTransport()}
    offers, why = worker_offers("r/0", "cuda", {"shm": transports["shm"]})
    assert [o.transport for o in offers] == ["shm"] and not why
    offers, why = worker_offers("r/0", "cpu", transports)
    assert [o.transport for o in offers] == ["shm"] and why == {"cuda_ipc": "does not reach cpu memory"}
