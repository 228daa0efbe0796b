"""A replica whose two workers are reached by different transports: shm the first, grpc the second.

``python -m tests.trainer_agent.spread ADDRESS NAME``: as a process of its own, until it is killed.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence

import torch
from torch import nn

from weightplane.controlplane.core.plan import Bucket
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.transports.base import ChannelSpec, Transport, TransportError
from weightplane.transports.grpc_data_port import GrpcReceiveChannel
from weightplane.transports.grpc_stream import GrpcTransport
from weightplane.transports.shm import ShmTransport
from weightplane.v1.transport_pb2 import Rendezvous

__all__ = ["LyingGrpc", "Model", "ShmForTheFirst", "spread"]


class Model(nn.Module):
    """Several buckets of 4 KiB; a tied pair among them."""

    def __init__(self, rows: int = 512) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 16)
        self.head = nn.Linear(16, rows, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])


class ShmForTheFirst(ShmTransport):
    """Only the first worker's container has a /dev/shm."""

    def offer(self, member: str) -> Rendezvous:
        if not member.endswith("/0"):
            raise TransportError("no /dev/shm in this worker's container")
        return super().offer(member)


class LyingGrpc(GrpcTransport):
    """While ``lying``, it turns one bit of each bucket that it put in place."""

    lying = False

    def open_receiver(self, spec: ChannelSpec, member: str) -> GrpcReceiveChannel:
        channel = super().open_receiver(spec, member)
        receive = channel.receive

        def lie(bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
            receive(bucket, spans)
            if self.lying:
                spans[0][0] ^= 1

        channel.receive = lie  # type: ignore[method-assign]
        return channel


def spread(grpc: Transport | None = None) -> dict[str, Transport]:
    """The transports of such a replica."""
    return {"shm": ShmForTheFirst(), "grpc": grpc or GrpcTransport()}


if __name__ == "__main__":
    engine = TorchModuleEngine([Model(), Model()])
    agent = InferenceAgent(sys.argv[1], "g", sys.argv[2], engine, transports=spread()).start()
    print(json.dumps({"incarnation": agent.incarnation}), flush=True)
    threading.Event().wait()
