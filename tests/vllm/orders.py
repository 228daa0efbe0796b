"""Orders of an operator to one replica, by the control plane's own calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import grpc

from weightplane.controlplane.dial import Dial
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc

__all__ = ["Orders", "why"]

ASLEEP, ACTIVE = fleet_pb2.ADMIN_STATE_ASLEEP, fleet_pb2.ADMIN_STATE_ACTIVE


class Orders:
    """To replica ``rid`` of ``group``. Each raises ``grpc.RpcError`` where it is refused."""

    def __init__(self, address: str, group: str, rid: str = "a") -> None:
        self.dial, self.group, self.rid = Dial(address), group, rid

    @contextmanager
    def _fleet(self) -> Iterator[fleet_pb2_grpc.FleetServiceStub]:
        with self.dial.channel() as channel:
            yield fleet_pb2_grpc.FleetServiceStub(channel)

    def sleep(self, level: int) -> fleet_pb2.ReplicaInfo:
        request = fleet_pb2.SleepReplicaRequest(
            request_id=uuid4().hex, group=self.group, replica_id=self.rid, level=level
        )
        with self._fleet() as fleet:
            return fleet.SleepReplica(request, timeout=60).replica

    def wake(self, *tags: str) -> fleet_pb2.ReplicaInfo:
        request = fleet_pb2.WakeReplicaRequest(request_id=uuid4().hex, group=self.group, replica_id=self.rid, tags=tags)
        with self._fleet() as fleet:
            return fleet.WakeReplica(request, timeout=60).replica

    @contextmanager
    def paused(self) -> Iterator[None]:
        """By an operator."""
        pause = fleet_pb2.PauseGenerationRequest(request_id=uuid4().hex, group=self.group)
        resume = fleet_pb2.ResumeGenerationRequest(request_id=uuid4().hex, group=self.group)
        with self._fleet() as fleet:
            fleet.PauseGeneration(pause, timeout=60)
            try:
                yield
            finally:
                fleet.ResumeGeneration(resume, timeout=60)


def why(error: BaseException) -> str:
    """What a refusal says."""
    assert isinstance(error, grpc.RpcError)
    return str(error.details())
