"""The server as a library: ``running = await serve(ServerConfig(store))``. No signal handlers, no global loop."""

from __future__ import annotations

import gc
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc

from weightplane.controlplane.core.model import Config
from weightplane.controlplane.dial import check_port
from weightplane.controlplane.store.base import Store
from weightplane.v1 import agent_pb2_grpc, fleet_pb2_grpc, weight_transfer_pb2_grpc

from .agent_service import AgentService
from .artifacts import Limits
from .calls import Guard
from .coordinator import Coordinator
from .fleet_service import FleetService
from .security import Authoriser, Security
from .transfer_service import TransferService

__all__ = ["CLIENT_OPTIONS", "SERVER_OPTIONS", "Running", "ServerConfig", "serve", "tune_collector"]

log = logging.getLogger("weightplane.controlplane")

_MIB = 1 << 20

#: Both sides ping idle connections, and the server forgives pings at any rate (a client that pings more often than a
#: server allows is sent away with GOAWAY too_many_pings in the middle of a long call).
SERVER_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", 4 * _MIB),
    ("grpc.max_send_message_length", 16 * _MIB),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0),
)
#: For our own clients: what fits the server above.
CLIENT_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", 16 * _MIB),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.enable_retries", 0),
)


def tune_collector() -> None:
    """For a process that serves and does nothing else (a library must not): rarer passes of Python's cycle collector.

    The state is made anew in every step and forms no cycles; by default the collector walks all of it all the same, and
    with a thousand members every fifth barrier or so waits an extra tenth of a second for that.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@dataclass(frozen=True)
class ServerConfig:
    """What a server needs. Port 0 takes a free one; ``Running.address`` names it."""

    store: Store
    address: str = "127.0.0.1:0"
    core: Config = field(default_factory=Config)
    limits: Limits = field(default_factory=Limits)
    security: Security = field(default_factory=Security)


@dataclass(frozen=True)
class Running:
    """A server that serves. ``stop`` is idempotent and bounded."""

    address: str
    coordinator: Coordinator
    stop: Callable[[], Awaitable[None]]
    wait: Callable[[], Awaitable[object]]


async def serve(config: ServerConfig) -> Running:
    """Lead and serve. Raises ``ValueError`` for an unprotected address or an odd port, and what the store raises."""
    check_port(config.address, 0)
    config.security.check(config.address)
    coordinator = Coordinator(config.store, config.core, config.limits)
    server = grpc.aio.server(
        interceptors=[Guard(Authoriser(config.security))], options=SERVER_OPTIONS, maximum_concurrent_rpcs=None
    )
    weight_transfer_pb2_grpc.add_WeightTransferServiceServicer_to_server(TransferService(coordinator), server)
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(FleetService(coordinator), server)
    agent_pb2_grpc.add_AgentServiceServicer_to_server(AgentService(coordinator), server)
    if config.security.tls is not None:
        port = server.add_secure_port(config.address, config.security.tls.credentials())
    else:
        port = server.add_insecure_port(config.address)
    await coordinator.start()
    await server.start()
    host = config.address.rpartition(":")[0]
    address = config.address if config.address.startswith("unix:") else f"{host}:{port}"
    log.info("serving on %s", address)
    stopped = False

    async def stop() -> None:
        nonlocal stopped
        if stopped:
            return
        stopped = True
        await coordinator.stop()
        await server.stop(1.0)

    return Running(address, coordinator, stop, server.wait_for_termination)
