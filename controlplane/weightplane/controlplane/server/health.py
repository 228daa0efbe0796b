"""gRPC's standard health service: each of our services is SERVING while this coordinator leads.

Open to everybody who reaches the port, without a deadline: load balancers and orchestrators ask it.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

__all__ = ["METHODS", "Health"]

METHODS: Final = frozenset(f"/grpc.health.v1.Health/{name}" for name in ("Check", "Watch", "List"))
_SERVICES: Final = ("", *(f"weightplane.v1.{n}" for n in ("WeightTransferService", "FleetService", "AgentService")))


class Health:
    """Answers for a server; ``leading`` says what to answer. Made and used on its event loop."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._servicer = health.aio.HealthServicer()
        self._says: Any = HealthCheckResponse.NOT_SERVING
        self._told: asyncio.Task[None] | None = None
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def leading(self, leads: bool) -> None:
        """Whether calls are served from now on."""
        self._says = HealthCheckResponse.SERVING if leads else HealthCheckResponse.NOT_SERVING
        if self._told is None or self._told.done():
            self._told = asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        said = None
        while said != self._says:
            said = self._says
            for service in _SERVICES:
                await self._servicer.set(service, said)
