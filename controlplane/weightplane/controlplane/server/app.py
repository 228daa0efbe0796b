"""The server as a library: ``running = await serve(ServerConfig(store))``. No signal handlers, no global loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from weightplane.controlplane.core.model import Config
from weightplane.controlplane.dial import check_port
from weightplane.controlplane.ports import PortRefused, check_free
from weightplane.controlplane.store.base import Store
from weightplane.v1 import (
    agent_pb2,
    agent_pb2_grpc,
    fleet_pb2,
    fleet_pb2_grpc,
    weight_transfer_pb2,
    weight_transfer_pb2_grpc,
)

from .agent_service import AgentService
from .artifacts import Limits
from .calls import Guard
from .coordinator import Coordinator
from .fleet_service import FleetService
from .health import Health
from .probes import Probes
from .security import Authoriser, Security, is_loopback
from .transfer_service import TransferService

if TYPE_CHECKING:
    from .gateway_listener import Listener

__all__ = ["CLIENT_OPTIONS", "SERVER_OPTIONS", "Running", "ServerConfig", "serve", "tune_collector"]

log = logging.getLogger("weightplane.controlplane")

_MIB = 1 << 20
_LOOK_S = 1.0
_PORT_S = 5.0  # that a leader which ended may keep its port

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
    ("grpc.max_concurrent_streams", 8192),  # of one connection
    # Calls that nobody has begun to serve yet: from 1000 on gRPC ends some by chance, anybody's, with CANCELLED. What
    # bounds them is the number served at once, and each connection's pace.
    ("grpc.server.max_pending_requests", 65_536),
    ("grpc.server.max_pending_requests_hard_limit", 65_536),
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
    """What a server needs. Port 0 takes a free one; ``Running.address`` names it.

    ``calls``: how many it serves at once, open streams among them (two for each replica); more are refused.
    ``probes``: host:port for HTTP (``probes``); ``gateway``: for the contract as JSON (``gateway``); empty: none.
    """

    store: Store
    address: str = "127.0.0.1:0"
    core: Config = field(default_factory=Config)
    limits: Limits = field(default_factory=Limits)
    security: Security = field(default_factory=Security)
    calls: int = 32_768
    probes: str = ""
    gateway: str = ""


@dataclass(frozen=True)
class Running:
    """A server that serves. ``stop`` is idempotent and bounded."""

    address: str
    coordinator: Coordinator
    stop: Callable[[], Awaitable[None]]
    wait: Callable[[], Awaitable[object]]
    probes: str = ""  # HTTP, host:port
    gateway: str = ""  # the same


async def serve(config: ServerConfig) -> Running:
    """Serve, and lead; or stand by while another process leads on the store: calls are UNAVAILABLE then, until
    ``coordinator.led``. Where that one listens on an address of ours, this waits for its end.

    Raises ``ValueError`` for an unprotected address, an odd port or faulty certificates or tokens, what the store
    raises, ``OSError`` if a port is taken, and ``ModuleNotFoundError`` for a gateway without weightplane[gateway]."""
    for address in filter(None, (config.address, config.probes, config.gateway)):
        check_port(address, 0)
        config.security.check(address)
    authoriser = Authoriser(config.security)
    guard = Guard(authoriser)
    credentials = config.security.tls.credentials() if config.security.tls is not None else None
    coordinator = Coordinator(config.store, config.core, config.limits)
    server = grpc.aio.server(interceptors=[guard], options=SERVER_OPTIONS, maximum_concurrent_rpcs=config.calls)
    transfer, fleet, agents = TransferService(coordinator), FleetService(coordinator), AgentService(coordinator)
    weight_transfer_pb2_grpc.add_WeightTransferServiceServicer_to_server(transfer, server)
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(fleet, server)
    agent_pb2_grpc.add_AgentServiceServicer_to_server(agents, server)
    gateway = _gateway(config, guard, authoriser, transfer, fleet, agents) if config.gateway else None

    def listen() -> int:
        if credentials is not None:
            return server.add_secure_port(config.address, credentials)
        return server.add_insecure_port(config.address)

    addresses = [a for a in (config.address, config.probes, config.gateway) if a]
    refused = await asyncio.to_thread(_refused, addresses)
    if refused is not None and not refused.taken:
        raise refused
    port = listen() if refused is None else 0  # before the store is opened: it needs no leader that cannot listen
    coordinator.on_leading = Health(server).leading
    await coordinator.start()
    probes: Probes | None = None
    try:
        if refused is not None:
            await _in_turn(coordinator, refused, addresses)
            port = listen()
        if config.probes:
            probes = Probes(coordinator, config.probes, authoriser, config.security.tls)
        if gateway is not None:
            await gateway.start()
    except BaseException:
        if probes is not None:
            await asyncio.to_thread(probes.close)
        await coordinator.stop()
        raise
    await server.start()
    host = config.address.rpartition(":")[0]
    address = config.address if config.address.startswith("unix:") else f"{host}:{port}"
    log.info("serving on %s", address)
    looking = asyncio.create_task(_look(guard))
    stopped = False

    async def stop() -> None:
        nonlocal stopped
        if stopped:
            return
        stopped = True
        if probes is not None:
            await asyncio.to_thread(probes.close)
        if gateway is not None:
            await gateway.close()
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking
        await coordinator.stop()
        await server.stop(1.0)

    where = probes.address if probes is not None else ""
    http = gateway.address if gateway is not None else ""
    return Running(address, coordinator, stop, server.wait_for_termination, where, http)


def _gateway(
    config: ServerConfig,
    guard: Guard,
    authoriser: Authoriser,
    transfer: TransferService,
    fleet: FleetService,
    agents: AgentService,
) -> Listener:
    """HTTP and JSON for the same servicers. Raises ``ModuleNotFoundError`` without weightplane[gateway]."""
    from .gateway import Gateway
    from .gateway_listener import Listener

    services = (
        (weight_transfer_pb2.DESCRIPTOR.services_by_name["WeightTransferService"], transfer),
        (fleet_pb2.DESCRIPTOR.services_by_name["FleetService"], fleet),
        (agent_pb2.DESCRIPTOR.services_by_name["AgentService"], agents),
    )
    loopback_only = not config.security.identifies and is_loopback(config.gateway)
    app = Gateway(guard, authoriser, services, loopback_only).app
    return Listener(app, config.gateway, config.security.tls)


def _refused(addresses: list[str]) -> PortRefused | None:
    try:
        for address in addresses:
            check_free(address)
    except PortRefused as e:
        return e
    return None


async def _in_turn(coordinator: Coordinator, refused: PortRefused, addresses: list[str]) -> None:
    """Wait until the leader of our store, which has our port, is gone. ``PortRefused`` if it is somebody else's."""
    if coordinator.led.is_set():
        raise refused
    log.warning("%s; this one listens once it leads", refused)
    await coordinator.led.wait()
    loop = asyncio.get_running_loop()
    end = loop.time() + _PORT_S
    while (still := await asyncio.to_thread(_refused, addresses)) is not None:
        if loop.time() > end:
            raise still
        await asyncio.sleep(0.05)


async def _look(guard: Guard) -> None:
    """Notice who may no longer call."""
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            guard.withdraw()
        except Exception:
            log.exception("who may call could not be looked at")
