"""Whether every port still serves those that it is for."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

import grpc

from tests.security.target import KEY, WORKER_TOKEN
from tests.server.scripted import Replica, Trainer
from weightplane.v1 import fleet_pb2, transport_pb2

GROUP = "after"
_WAIT_S = 20.0


async def prepare(address: str) -> None:
    """Make the group that is used afterwards: by then there may be as many as are allowed."""
    trainer = Trainer(address, GROUP)
    await trainer.fleet.CreateGroup(fleet_pb2.CreateGroupRequest(request_id="after", group=GROUP), timeout=10)
    await trainer.channel.close()


async def check(where: dict[str, str]) -> list[str]:
    """What does not serve any more."""
    from tests.security.fuzz import opened, prove, standing

    async def pull(port: str) -> None:
        reader, writer = await opened(where[port])
        await prove(reader, writer)
        writer.close()

    wrong = []
    checks: dict[str, Any] = {
        "plane": publish(where["plane"]),
        "probes": asyncio.to_thread(alive, where["probes"]),
        "gateway": asyncio.to_thread(groups, where["gateway"]),
        "data": stream(where["data"]),
        "pull": pull("pull"),
        "pull_tcp": pull("pull_tcp"),
        "generate": asyncio.to_thread(version, where["generate"]),
        "worker": worker(where["worker"]),
    }
    for name, work in checks.items():
        task = asyncio.ensure_future(work)
        await asyncio.wait([task], timeout=_WAIT_S)
        if not task.done():
            wrong.append(f"{name} serves nobody afterwards: no end within {_WAIT_S} s:\n{standing(task)}")
            task.cancel()
        elif error := task.exception():
            wrong.append(f"{name} serves nobody afterwards: {type(error).__name__}: {error}")
    return wrong


async def publish(address: str) -> None:
    replica = await Replica(address, "r0", GROUP).start()
    trainer = Trainer(address, GROUP)
    try:
        await trainer.init()
        await trainer.put_manifest()
        update = await trainer.publish()
        assert update.version >= 1
    finally:
        await replica.kill()
        await trainer.channel.close()


async def stream(address: str) -> None:
    """The receiver answers an opening with the bytes that it has."""
    opening = transport_pb2.TransferOpen(
        channel_id="c", update_id="u", epoch=1, generation=1, sender="rank/0", receiver="r0/0"
    )
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.stream_stream("/weightplane.v1.TensorService/Transfer")(
            metadata=(("weightplane-channel-key-bin", KEY),), timeout=10
        )
        await call.write(transport_pb2.TransferRequest(open=opening).SerializeToString())
        answer = transport_pb2.TransferResponse.FromString(await call.read())
        assert answer.bucket == -1
        call.cancel()


def version(address: str) -> None:
    with urllib.request.urlopen(f"http://{address}/version", timeout=10) as answer:
        assert "held" in json.load(answer)


def alive(address: str) -> None:
    with urllib.request.urlopen(f"http://{address}/livez", timeout=10) as answer:
        assert json.load(answer)["ok"]


def groups(address: str) -> None:
    url = f"http://{address}/weightplane.v1.FleetService/ListGroups"
    asked = urllib.request.Request(url, b"{}", {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        assert json.load(answer)["groups"]


async def worker(path: str) -> None:
    from weightplane.inference_agent.vllm_plugin.wire import PROTOCOL as SPOKEN
    from weightplane.inference_agent.vllm_plugin.wire import Hello, State

    hello = Hello(SPOKEN, WORKER_TOKEN, 0, 1, "life", 1, "cpu", "", "0", "m", "", "", State())
    reader, writer = await asyncio.open_unix_connection(path)
    data = json.dumps({"tell": "hello", **hello.json()}).encode()
    writer.write(len(data).to_bytes(4, "big") + data)
    size = int.from_bytes(await reader.readexactly(4), "big")
    assert json.loads(await reader.readexactly(size)) == {"do": "welcome"}
    writer.close()
