"""A replica whose workers are reached by different transports: what is bound, told, asked for and compared."""

from __future__ import annotations

from typing import Any

import grpc

from tests.server.scripted import Replica, Trainer, fleet, refused, server, update_of
from weightplane.v1 import agent_pb2 as ag
from weightplane.v1 import common_pb2 as cm
from weightplane.v1 import fleet_pb2 as fl
from weightplane.v1 import transport_pb2 as tp
from weightplane.v1 import update_pb2 as up

GRPC = tp.Rendezvous(transport="grpc", grpc=tp.GrpcRendezvous(address="127.0.0.1:1"))
SHM = tp.Rendezvous(transport="shm", shm=tp.ShmRendezvous(host_id="h", pid=1))
BOTH = [SHM, GRPC]


async def spread(address: str, rid: str = "r0", **fields: Any) -> Replica:
    """A replica of two workers: the first offers shm and grpc, the second grpc alone, and says why."""
    replica = Replica(address, rid, workers=2, **fields)
    first, second = replica.hello.workers
    first.offers.insert(0, SHM)
    second.refusals.add(transport="shm", reason="no /dev/shm in its container")
    return await replica.start()


async def test_one_update_over_two_channels_of_one_replica_commits_once() -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, _):
        replica = await spread(running.address, "spread")
        answer = await trainer.init(offers=BOTH)
        by = {c.transport: c for c in answer.channels}
        assert [list(by[t].receivers) for t in ("grpc", "shm")] == [["r0/0", "spread/1"], ["spread/0"]]
        u = await trainer.start()
        assert {c.channel_id for c in u.channels} == {c.channel_id for c in answer.channels}
        told = {p.replica_id: list(p.channel_ids) for p in u.participants}
        assert told == {"r0": [by["grpc"].channel_id], "spread": [by["shm"].channel_id, by["grpc"].channel_id]}
        await trainer.weights(u)
        info = await trainer.rest(u)
        assert info.phase == up.UPDATE_PHASE_COMMITTED and info.version == 1
        outcome = next(o for o in info.outcomes if o.replica_id == "spread")
        assert outcome.evidence == cm.EVIDENCE_LIVE and replica.held.version == 1
        channels = next(d.update.channels for d in replica.seen if d.update.calls)
        assert [(c.binding.transport, list(c.workers), set(c.binding.offers)) for c in channels] == [
            ("shm", [0], {"rank/0", "spread/0"}),
            ("grpc", [1], {"rank/0", "spread/1"}),
        ], "each worker's channel, with the senders' offers and its own"
        await replica.kill()


async def test_a_lie_about_one_channel_aborts_all_and_names_the_worker() -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, replicas):
        replica = await spread(running.address, "spread")
        replica.corrupt, replica.liars = {1}, {1}
        await trainer.init(offers=BOTH)
        u = await trainer.start()
        await trainer.weights(u)
        error = await refused(trainer.rest(u), "DIGEST_MISMATCH", grpc.StatusCode.ABORTED)
        assert update_of(error).failure.member == "spread/1"
        assert replicas[0].held.version == replica.held.version == 0
        await replica.kill()


async def test_a_receipt_names_the_plan_of_its_own_worker() -> None:
    async with server() as running:
        replica = await spread(running.address)
        trainer = Trainer(running.address)
        await trainer.init(offers=BOTH)
        await trainer.put_manifest()
        u = await trainer.start()
        plans = {c.channel_id: c.plan_id for c in u.channels}
        first, second = (plans[c] for c in u.participants[0].channel_ids)
        said: dict[str, Any] = {"group": "g", "replica_id": "r0", "incarnation": replica.incarnation, "epoch": u.epoch}
        receipt = up.Receipt(update_id=u.update_id, member="r0/1", plan_id=first, evidence=cm.EVIDENCE_LIVE, total=0)
        error = await refused(
            replica.agent.PutReceipt(ag.PutReceiptRequest(**said, receipt=receipt), timeout=5), "INVALID_ARGUMENT"
        )
        assert second in (error.details() or "")
        await replica.kill()


async def test_operators_see_how_each_worker_is_reached_and_why() -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, _):
        replica = await spread(running.address, "spread")
        everyone = fl.ListReplicasRequest(group="g", transports=True)

        async def told() -> dict[str, list[tuple[list[int], str]]]:
            listed = (await trainer.fleet.ListReplicas(everyone, timeout=5)).replicas
            return {r.replica_id: [(list(c.workers), c.transport) for c in r.transports] for r in listed}

        assert await told() == {"r0": [([0], "grpc")], "spread": []}, "not bound to yet"
        await trainer.init(offers=BOTH)
        assert await told() == {"r0": [([0], "grpc")], "spread": [([0], "shm"), ([1], "grpc")]}
        plain = await trainer.fleet.ListReplicas(fl.ListReplicasRequest(group="g"), timeout=5)
        assert not any(r.transports for r in plain.replicas), "only where it is asked for"
        one = await trainer.fleet.CheckReplica(fl.CheckReplicaRequest(group="g", replica_id="spread"), timeout=5)
        first, second = one.replica.transports
        assert "preference" in first.reason and not first.refusals
        assert [(r.transport, r.reason) for r in second.refusals] == [
            ("shm", "the worker: no /dev/shm in its container"),
            ("ucx", "rank/0: not offered"),
        ]
        await replica.kill()


async def test_a_replica_that_is_partly_out_of_reach_is_absent_and_named_worker_by_worker() -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, _):
        replica = await spread(running.address, "spread")
        answer = await trainer.init(offers=BOTH, transport="shm")
        mine = [c for c in answer.choices if c.replica_id == "spread"]
        assert [(list(c.workers), c.transport, c.channel_id) for c in mine] == [([0], "", ""), ([1], "", "")]
        assert mine[0].reason.startswith("shm would do, but worker 1")
        assert not answer.channels, "a seat of a replica that takes no part is nobody's"
        answer = await trainer.init(offers=[GRPC])
        assert {c.transport for c in answer.choices} == {"grpc"}
        u = await trainer.start()
        assert {p.replica_id for p in u.participants} == {"r0", "spread"}
        await replica.kill()
