"""Over a link that takes its time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tests.server.scripted import server
from weightplane.controlplane.dial import Dial
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc

_ONE_WAY_S = 0.15  # from Frankfurt to Sydney


@contextlib.asynccontextmanager
async def far(address: str) -> AsyncIterator[str]:
    """Another address of a server, each way ``_ONE_WAY_S`` long."""
    loop = asyncio.get_running_loop()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            loop.call_later(_ONE_WAY_S, writer.write, data)
        loop.call_later(_ONE_WAY_S, writer.close)

    async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = address.rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(carry(reader, back), carry(there, writer))

    relay = await asyncio.start_server(joined, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{relay.sockets[0].getsockname()[1]}"
    finally:
        relay.close()


async def test_the_first_call_arrives_over_a_link_with_a_round_trip_of_300_ms() -> None:
    async with server() as running, far(running.address) as address:
        with Dial(address).channel() as channel:
            request = fleet_pb2.ListGroupsRequest()
            answer = await asyncio.to_thread(fleet_pb2_grpc.FleetServiceStub(channel).ListGroups, request, timeout=10)
    assert answer.groups == []
