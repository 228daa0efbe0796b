"""How much one caller, one connection and one session may ask for. SECURITY.md lists the bounds."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from tests.server.scripted import FAST, Trainer, dial, reason_of, refused, server
from weightplane.controlplane.core.reasons import Reason
from weightplane.controlplane.server import agent_service, coordinator, pacing
from weightplane.controlplane.server.app import ServerConfig
from weightplane.controlplane.server.errors import Refused
from weightplane.controlplane.server.pacing import Pace
from weightplane.controlplane.store.memory import MemoryStore
from weightplane.v1 import agent_pb2 as ag
from weightplane.v1 import agent_pb2_grpc as ag_grpc
from weightplane.v1 import fleet_pb2 as fl
from weightplane.v1 import fleet_pb2_grpc as fl_grpc


@pytest.mark.alone
async def test_a_turn_that_comes_early_waits_and_one_that_would_wait_long_is_refused() -> None:
    pace = Pace(100.0, 10)
    began = time.monotonic()
    for _ in range(10):
        await pace.turn()
    assert time.monotonic() - began < 0.05
    for _ in range(20):
        await pace.turn()
    assert 0.15 <= time.monotonic() - began < 1.0
    with pytest.raises(Refused) as e:
        for _ in range(1000):
            await asyncio.wait_for(pace.turn(patience_s=0.0), 1)
    assert e.value.failure.reason is Reason.LIMIT


@pytest.mark.alone
async def test_a_connection_that_calls_too_often_is_held_back_then_refused_and_no_other_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pacing, "_CALLS_S", 20.0)
    monkeypatch.setattr(pacing, "_CALLS", 20)
    monkeypatch.setattr(pacing, "_PATIENCE_S", 0.5)
    async with server() as running:
        rude, polite = dial(running.address), dial(running.address)
        flood = [fl_grpc.FleetServiceStub(rude).ListGroups(fl.ListGroupsRequest(), timeout=10) for _ in range(200)]
        began = time.monotonic()
        await fl_grpc.FleetServiceStub(polite).ListGroups(fl.ListGroupsRequest(), timeout=5)
        assert time.monotonic() - began < 2
        done: list[Any] = await asyncio.gather(*flood, return_exceptions=True)
        served = [d for d in done if isinstance(d, fl.ListGroupsResponse)]
        assert 20 <= len(served) <= 60
        assert {reason_of(d) for d in done if isinstance(d, grpc.aio.AioRpcError)} == {"LIMIT"}
        await rude.close()
        await polite.close()


async def test_a_burst_within_the_bounds_is_served_whole_and_no_call_of_others_is_cancelled() -> None:
    async with server() as running:
        burst, other = dial(running.address), dial(running.address)
        calls = [fl_grpc.FleetServiceStub(burst).ListGroups(fl.ListGroupsRequest(), timeout=60) for _ in range(3500)]
        theirs = [fl_grpc.FleetServiceStub(other).ListGroups(fl.ListGroupsRequest(), timeout=60) for _ in range(20)]
        done = await asyncio.gather(*calls, *theirs, return_exceptions=True)
        assert [repr(d)[:300] for d in done if not isinstance(d, fl.ListGroupsResponse)] == []
        await burst.close()
        await other.close()


async def test_a_session_that_talks_too_much_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_service, "_MESSAGES_S", 50.0)
    monkeypatch.setattr(agent_service, "_MESSAGES", 10)
    taken: list[int] = []
    beat = agent_service._beat

    def noted(group: Any, hello: ag.Hello, heard: ag.Heartbeat, newest: int) -> int:
        taken.append(heard.sequence)
        return beat(group, hello, heard, newest)

    monkeypatch.setattr(agent_service, "_beat", noted)
    async with server() as running:
        channel = dial(running.address)
        stream = ag_grpc.AgentServiceStub(channel).Session()
        hello = ag.Hello(group="g", agent_id="r", incarnation="i", kind=ag.SESSION_KIND_HEARTBEAT)
        await stream.write(ag.SessionRequest(hello=hello))
        assert isinstance(await stream.read(), ag.SessionResponse)
        for n in range(1, 400):
            await stream.write(ag.SessionRequest(heartbeat=ag.Heartbeat(sequence=n)))
        await asyncio.sleep(1.0)
        assert 10 <= len(taken) <= 120 and taken == sorted(taken)
        stream.cancel()
        await channel.close()


async def test_calls_served_at_once_are_bounded() -> None:
    config = ServerConfig(MemoryStore(), core=FAST, calls=5)
    async with server(config) as running:
        trainer = Trainer(running.address)
        await trainer.fleet.CreateGroup(fl.CreateGroupRequest(request_id="1", group="g"), timeout=5)
        watches = [trainer.fleet.WatchGroup(fl.WatchGroupRequest(group="g")) for _ in range(12)]

        async def first(watch: Any) -> str:
            try:
                await asyncio.wait_for(watch.read(), 2)
            except grpc.aio.AioRpcError as e:
                return e.code().name
            return "OK"

        ends = await asyncio.gather(*(first(w) for w in watches))
        assert ends.count("RESOURCE_EXHAUSTED") >= 6 and 1 <= ends.count("OK") <= 6, ends
        for watch in watches:
            watch.cancel()
        await trainer.channel.close()


async def test_groups_and_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "_MAX_GROUPS", 2)
    async with server() as running:
        trainer = Trainer(running.address)
        for n in range(2):
            await trainer.fleet.CreateGroup(fl.CreateGroupRequest(request_id=f"{n}", group=f"g{n}"), timeout=5)
        third = fl.CreateGroupRequest(request_id="3", group="g3")
        await refused(trainer.fleet.CreateGroup(third, timeout=5), "LIMIT", grpc.StatusCode.RESOURCE_EXHAUSTED)
        big = fl.GetGroupRequest(group="g" * (5 << 20))
        with pytest.raises(grpc.aio.AioRpcError) as e:
            await trainer.fleet.GetGroup(big, timeout=10)
        assert e.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await trainer.channel.close()
