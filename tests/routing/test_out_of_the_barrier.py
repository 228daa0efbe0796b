"""Who is pinned, leaving, or not selected takes no part: not in the barrier, not in ALL, not in the committed floor."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from tests.server.scripted import FAST, Replica, Trainer, fleet, refused, server, until
from weightplane.controlplane.core.states import Admin, Weights
from weightplane.controlplane.server.app import Running, ServerConfig
from weightplane.controlplane.store.memory import MemoryStore
from weightplane.v1 import agent_pb2 as ag
from weightplane.v1 import fleet_pb2 as fl
from weightplane.v1 import update_pb2 as up


@asynccontextmanager
async def probed(replicas: int) -> AsyncIterator[tuple[Running, Trainer, list[Replica]]]:
    config = ServerConfig(MemoryStore(), core=FAST, probes="127.0.0.1:0")
    async with server(config) as running, fleet(running.address, replicas) as (trainer, members):
        yield running, trainer, members


async def routable(running: Running, floor: int | None = None, replica: str = "") -> tuple[bool, dict[str, Any]]:
    path = "/groups/g" + (f"/replicas/{replica}" if replica else "") + "/routable"
    query = "" if floor is None else f"?min_version={floor}"

    def ask() -> tuple[bool, dict[str, Any]]:
        try:
            with urllib.request.urlopen(f"http://{running.probes}{path}{query}", timeout=10) as answer:
                return True, json.load(answer)
        except urllib.error.HTTPError as e:
            return False, json.load(e)

    return await asyncio.to_thread(ask)


async def rest(trainer: Trainer, started: Any) -> up.UpdateInfo:
    """What follows a StartUpdate."""
    await trainer.weights(started)
    return await trainer.rest(started)


def names(replica: str, request: str) -> dict[str, Any]:
    return {"request_id": request, "group": "g", "replica_id": replica}


async def test_a_pinned_replica_leaves_the_barrier_all_and_the_floor_until_it_is_unpinned() -> None:
    async with probed(3) as (running, trainer, _):
        await trainer.publish()
        await trainer.fleet.PinReplica(fl.PinReplicaRequest(**names("r0", "pin")), timeout=5)
        for version in (2, 3):
            info = await trainer.publish()  # ALL of the participants, of which it is none
            assert info.version == version and sorted(o.replica_id for o in info.outcomes) == ["r1", "r2"]
        started = await trainer.start()
        assert [(a.replica_id, a.reason) for a in started.absent] == [("r0", "it is PINNED")]
        await rest(trainer, started)
        yes, said = await routable(running)
        assert yes and said["version"] == 4 and sorted(said["replicas"]) == ["r1", "r2"]
        assert said["others"] == {"r0": "it holds version 1, below 4"}
        assert (await routable(running, 1, "r0"))[0], "its evaluation goes on at the version it is held at"
        assert not (await routable(running, 2, "r0"))[0]
        await trainer.fleet.UnpinReplica(fl.UnpinReplicaRequest(**names("r0", "unpin")), timeout=5)
        info = await trainer.publish()
        assert len(info.outcomes) == 3 and sorted((await routable(running, 5))[1]["replicas"]) == ["r0", "r1", "r2"]


async def test_pinned_replicas_do_not_count_for_min_replicas() -> None:
    async with probed(2) as (_, trainer, _members):
        await trainer.publish()
        policy = fl.UpdateGroupRequest(request_id="policy", group="g", policy=fl.GroupPolicy(min_replicas=2))
        await trainer.fleet.UpdateGroup(policy, timeout=5)
        assert len((await trainer.publish()).outcomes) == 2
        await trainer.fleet.PinReplica(fl.PinReplicaRequest(**names("r0", "pin")), timeout=5)
        error = await refused(trainer.start(), "NOT_ENOUGH_REPLICAS", grpc.StatusCode.FAILED_PRECONDITION)
        assert "r0: it is PINNED" in (error.details() or "")
        policy = fl.UpdateGroupRequest(request_id="less", group="g", policy=fl.GroupPolicy(min_replicas=1))
        await trainer.fleet.UpdateGroup(policy, timeout=5)
        assert [o.replica_id for o in (await trainer.publish()).outcomes] == ["r1"]


async def test_the_death_of_a_pinned_replica_costs_an_open_update_nothing() -> None:
    async with probed(2) as (_, trainer, replicas):
        await trainer.publish()
        await trainer.fleet.PinReplica(fl.PinReplicaRequest(**names("r0", "pin")), timeout=5)
        started = await trainer.start()
        await replicas[0].kill()
        info = await rest(trainer, started)
        assert info.phase == up.UPDATE_PHASE_COMMITTED and [o.replica_id for o in info.outcomes] == ["r1"]


async def test_who_takes_part_in_an_open_update_is_not_pinned_in_the_middle_of_it() -> None:
    """It would be held at a version that it is about to leave."""
    async with probed(2) as (running, trainer, _):
        await trainer.publish()
        started = await trainer.start()
        await refused(trainer.fleet.PinReplica(fl.PinReplicaRequest(**names("r0", "pin")), timeout=5), "WRONG_PHASE")
        info = await rest(trainer, started)
        assert len(info.outcomes) == 2
        state = running.coordinator.group("g").state
        await until(lambda: state.replicas["r0"].admin is Admin.ACTIVE, "ACTIVE")
        pinned = (await trainer.fleet.PinReplica(fl.PinReplicaRequest(**names("r0", "again")), timeout=5)).replica
        assert pinned.pinned_version == 2


async def test_a_goodbye_is_unroutable_at_once_and_counts_as_no_failure() -> None:
    async with probed(2) as (running, trainer, replicas):
        await trainer.publish()
        replicas[0].say(ag.SessionRequest(goodbye=ag.Goodbye(reason="scaling in")))
        group = running.coordinator.group("g")
        await until(lambda: group.state.replicas["r0"].admin is Admin.LEAVING, "LEAVING")
        assert (await routable(running, 1, "r0")) == (False, {"ok": False, "reason": "it is LEAVING", "version": 1})
        info = await trainer.publish()
        assert [(o.replica_id, o.failure.reason) for o in info.outcomes] == [("r1", 0)]
        gone = group.state.replicas["r0"]
        assert gone.failure is None and not gone.failures_in_a_row and gone.weights is Weights.READY
        assert not info.failure.reason


async def test_who_is_not_selected_is_below_the_floor_until_an_update_takes_it() -> None:
    async with server(ServerConfig(MemoryStore(), core=FAST, probes="127.0.0.1:0")) as running:
        replicas = [Replica(running.address, f"r{i}") for i in range(2)]
        for r, zone in zip(replicas, "ab", strict=True):
            r.hello.labels["zone"] = zone
            await r.start()
        async with fleet(running.address, 0) as (trainer, _):
            assert len((await trainer.publish()).outcomes) == 2
            info = await trainer.publish(replica_selector={"zone": "b"})
            assert [o.replica_id for o in info.outcomes] == ["r1"]
            assert (await routable(running))[1]["others"] == {"r0": "it holds version 1, below 2"}
            assert (await routable(running, 1, "r0"))[0]
            for selector in ({"zone": "c"}, {"zone": "b", "rack": "1"}):
                error = await refused(trainer.start(replica_selector=selector), "NOT_ENOUGH_REPLICAS")
                assert "its labels do not match the selector" in (error.details() or "")
            assert len((await trainer.publish()).outcomes) == 2
            assert sorted((await routable(running))[1]["replicas"]) == ["r0", "r1"]
        for r in replicas:
            await r.kill()
