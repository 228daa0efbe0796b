"""What a control plane in this process leaves behind once it has stopped."""

from __future__ import annotations

import gc
import os

import grpc

from tests.inference_agent.server import server
from tests.process.harness import eventually
from weightplane.controlplane.server.thread import ControlPlaneThread
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc


def use(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        fleet_pb2_grpc.FleetServiceStub(channel).ListGroups(fleet_pb2.ListGroupsRequest(), timeout=10)


def once() -> None:
    with server() as plane:
        use(plane.running.address)
    with ControlPlaneThread() as thread:
        use(thread.address)


def test_no_descriptor_stays_open_until_garbage_is_collected() -> None:
    once()  # gRPC's own, of the process
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            once()
        # gRPC closes sockets in threads of its own
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= before, "its descriptors are closed")
    finally:
        gc.enable()
