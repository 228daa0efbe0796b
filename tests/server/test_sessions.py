"""Sessions: hello, superseding, lives, limits, liveness."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from tests.server.scripted import (
    FAST,
    Replica,
    Trainer,
    _error,
    dial,
    fleet,
    reason_of,
    refused,
    replica_hello,
    server,
    until,
)
from weightplane.controlplane.core.states import Liveness, Weights
from weightplane.controlplane.server.app import ServerConfig
from weightplane.controlplane.server.artifacts import Limits
from weightplane.controlplane.store.memory import MemoryStore
from weightplane.v1 import agent_pb2 as ag
from weightplane.v1 import agent_pb2_grpc as ag_grpc
from weightplane.v1 import common_pb2 as cm
from weightplane.v1 import fleet_pb2 as fl
from weightplane.v1 import tensor_pb2 as tn
from weightplane.v1 import update_pb2 as up


async def talk(address: str, *messages: ag.SessionRequest) -> grpc.aio.AioRpcError:
    """Say these things on a fresh stream; how it ended."""
    async with dial(address) as channel:
        stream = ag_grpc.AgentServiceStub(channel).Session()
        try:
            for message in messages:
                await stream.write(message)
            while await asyncio.wait_for(stream.read(), 5) is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as e:
            return e
        except asyncio.InvalidStateError:  # it ended while we wrote
            return await _error(stream)
        raise AssertionError("the stream ended well")


def hello(**fields: Any) -> ag.SessionRequest:
    default: dict[str, Any] = {"group": "g", "agent_id": "r0", "incarnation": "i", "replica": replica_hello()}
    return ag.SessionRequest(hello=ag.Hello(**{**default, **fields}))


async def test_a_newer_hello_supersedes_the_older_stream() -> None:
    async with server() as running:
        old = await Replica(running.address, incarnation="same").start()
        new = await Replica(running.address, incarnation="same").start()
        assert new.welcome.session > old.welcome.session
        await until(lambda: old.ended is not None, "the old stream's end")
        assert old.ended is not None
        assert old.ended.code() is grpc.StatusCode.ABORTED and reason_of(old.ended) == "SESSION_SUPERSEDED"
        assert "do not redial" in (old.ended.details() or "")
        await old.kill()
        await asyncio.sleep(0.1)
        r = running.coordinator.group("g").state.replicas["r0"]
        assert r.liveness is Liveness.LIVE and r.session == new.welcome.session
        assert new.ended is None
        await new.kill()


async def test_a_new_life_aborts_what_the_old_one_took_part_in() -> None:
    async with server() as running, fleet(running.address) as (trainer, replicas):
        u = await trainer.start()
        reborn = await Replica(running.address, "r1").start()
        await refused(trainer.weights(u), "MEMBER_RESTARTED", grpc.StatusCode.ABORTED)
        stale = ag.PutWorkerPlacementRequest(
            group="g",
            replica_id="r1",
            incarnation=replicas[1].incarnation,
            manifest_id=trainer.manifest.id,
            placement=tn.Placement(member="r1/0", full=True),
        )
        await refused(reborn.agent.PutWorkerPlacement(stale, timeout=5), "MEMBER_RESTARTED")
        await reborn.kill()


async def test_heartbeats_may_come_by_a_stream_of_their_own() -> None:
    async with server() as running:
        replica = Replica(running.address, incarnation="i")
        replica.beats = False
        await replica.start()
        async with dial(running.address) as channel:
            stream = ag_grpc.AgentServiceStub(channel).Session()
            role = {"replica": None, "kind": ag.SESSION_KIND_HEARTBEAT}
            await stream.write(hello(**role))
            welcome = await stream.read()
            assert isinstance(welcome, ag.SessionResponse) and welcome.welcome.heartbeat_ms == 100
            for i in range(1, 16):
                await stream.write(ag.SessionRequest(heartbeat=ag.Heartbeat(sequence=i, progress=7 * i)))
                await asyncio.sleep(0.1)
            await until(lambda: running.coordinator.group("g").state.replicas["r0"].progress == 105, "all were heard")
            r = running.coordinator.group("g").state.replicas["r0"]
            assert r.liveness is Liveness.LIVE
            await stream.write(ag.SessionRequest(heartbeat=ag.Heartbeat(sequence=3, progress=1)))
            stopped = ag.Heartbeat(sequence=16, progress=106, process=ag.PROCESS_STATE_DEAD)
            await stream.write(ag.SessionRequest(heartbeat=stopped))
            group = running.coordinator.group("g")
            await until(lambda: group.state.replicas["r0"].liveness is Liveness.LOST, "death noticed at once", 1)
            assert group.state.replicas["r0"].progress == 106
        await replica.kill()


async def test_heartbeats_of_an_older_life_end_no_stream_of_the_living() -> None:
    """A host that was suspended comes back, and its helper dials again."""
    async with server() as running, fleet(running.address, 1) as (trainer, (replica,)):
        replica.beats = False
        streams = []
        for life in (replica.incarnation, "an older life"):
            stream = ag_grpc.AgentServiceStub(trainer.channel).Session()
            kind: dict[str, Any] = {"replica": None, "kind": ag.SESSION_KIND_HEARTBEAT}
            await stream.write(hello(agent_id=replica.rid, incarnation=life, **kind))
            assert isinstance(await stream.read(), ag.SessionResponse)
            streams.append(stream)
        group = running.coordinator.group("g")
        await streams[1].write(ag.SessionRequest(heartbeat=ag.Heartbeat(sequence=1, progress=99)))
        await streams[0].write(ag.SessionRequest(heartbeat=ag.Heartbeat(sequence=1, progress=7)))
        await until(lambda: group.state.replicas[replica.rid].progress == 7, "the living one's beat")
        for stream in streams:
            stream.cancel()


async def test_heartbeats_of_a_fenced_trainer_are_refused_and_end_no_stream_of_the_holder() -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, _):

        async def beats(of: Trainer, generation: int) -> Any:
            stream = ag_grpc.AgentServiceStub(trainer.channel).Session()
            role = ag.TrainerHello(generation=generation, rank=0)
            said = {"agent_id": "rank/0", "incarnation": of.incarnation, "replica": None, "trainer": role}
            await stream.write(hello(kind=ag.SESSION_KIND_HEARTBEAT, **said))
            return stream

        assert isinstance(await (await beats(trainer, 1)).read(), ag.SessionResponse)
        rival = Trainer(running.address, name="rival")
        await rival.init(takeover=True)
        living = await beats(rival, 2)
        assert isinstance(await living.read(), ag.SessionResponse)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (await beats(trainer, 1)).read()
        assert reason_of(caught.value) == "TRAINER_FENCED"
        await living.write(ag.SessionRequest(heartbeat=ag.Heartbeat(sequence=1, progress=5)))
        group = running.coordinator.group("g")

        def counts() -> bool:
            return group.state.trainer is not None and group.state.trainer.ranks[0].progress == 5

        await until(counts, "the holder's beat counts still")
        living.cancel()


async def test_who_was_taken_over_from_is_told_so_when_its_successors_rank_is_here_first() -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, _):

        async def listens(of: Trainer) -> Any:
            stream = ag_grpc.AgentServiceStub(of.channel).Session()
            role = ag.TrainerHello(generation=of.generation, rank=0)
            await stream.write(hello(agent_id="rank/0", incarnation=of.incarnation, replica=None, trainer=role))
            assert isinstance(await stream.read(), ag.SessionResponse)
            return stream

        old = await listens(trainer)
        rival = Trainer(running.address, name="rival")
        await rival.init(takeover=True)
        new = await listens(rival)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await asyncio.wait_for(old.read(), 5) is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert reason_of(caught.value) == "TRAINER_FENCED"
        assert "(rival) holds the group" in (caught.value.details() or "")
        again = await listens(rival)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await asyncio.wait_for(new.read(), 5) is not grpc.aio.EOF:
                pass
        assert reason_of(caught.value) == "SESSION_SUPERSEDED"
        again.cancel()


async def test_silence_is_suspect_then_lost_and_comes_back() -> None:
    async with server() as running:
        replica = await Replica(running.address).start()
        group = running.coordinator.group("g")
        replica.beats = False
        await until(lambda: group.state.replicas["r0"].liveness is Liveness.SUSPECT, "SUSPECT", 4)
        await until(lambda: group.state.replicas["r0"].liveness is Liveness.LOST, "LOST", 6)
        assert replica.ended is None
        replica.beats = True
        await until(lambda: group.state.replicas["r0"].liveness is Liveness.LIVE, "LIVE again", 2)
        await replica.kill()


@pytest.mark.parametrize(
    ("messages", "reason", "says"),
    [
        ([ag.SessionRequest(report=ag.ReplicaReport(sequence=1))], "INVALID_ARGUMENT", "hello first"),
        ([hello(agent_id="")], "INVALID_ARGUMENT", "hello.agent_id"),
        ([hello(incarnation="")], "INVALID_ARGUMENT", "hello.incarnation"),
        ([hello(replica=None)], "INVALID_ARGUMENT", "hello.role"),
        ([hello(kind=7)], "INVALID_ARGUMENT", "hello.kind"),
        ([hello(kind=ag.SESSION_KIND_HEARTBEAT)], "INVALID_ARGUMENT", "HEARTBEAT"),
        ([hello(replica=ag.ReplicaHello())], "INVALID_ARGUMENT", "workers"),
        ([hello(), hello()], "INVALID_ARGUMENT", "report, conditions, heartbeat or goodbye"),
        ([hello(), ag.SessionRequest()], "INVALID_ARGUMENT", "nothing"),
        ([hello(replica=replica_hello(engine="e" * 300))], "INVALID_ARGUMENT", "engine"),
        ([hello(replica=replica_hello(engine="e" * 70000))], "LIMIT", "at most 65536 bytes"),
        (
            [hello(), ag.SessionRequest(report=ag.ReplicaReport(sequence=1, update_id="u" * 70000))],
            "LIMIT",
            "at most 65536 bytes",
        ),
        (
            [hello(), ag.SessionRequest(report=ag.ReplicaReport(sequence=1, desired_revision=99))],
            "INVALID_ARGUMENT",
            "report.desired_revision",
        ),
        (
            [hello(), ag.SessionRequest(report=ag.ReplicaReport(sequence=1, held=[cm.HeldVersion(version=3)]))],
            "INVALID_ARGUMENT",
            "report.held",
        ),
    ],
)
async def test_a_bad_message_ends_the_stream_by_name(messages: list[Any], reason: str, says: str) -> None:
    async with server() as running:
        error = await talk(running.address, *messages)
        assert reason_of(error) == reason, error
        assert says in (error.details() or "")


async def test_a_group_has_a_bound() -> None:
    config = ServerConfig(MemoryStore(), core=FAST, limits=Limits(replicas=1))
    async with server(config) as running:
        first = await Replica(running.address, "r0").start()
        second = await Replica(running.address, "r1").start()
        assert second.ended is not None and second.ended.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason_of(second.ended) == "LIMIT" and "at most 1" in (second.ended.details() or "")
        again = await Replica(running.address, "r0").start()
        assert again.ended is None
        for r in (first, second, again):
            await r.kill()


async def test_goodbye_is_no_failure_and_leaves_the_next_barrier() -> None:
    async with server() as running, fleet(running.address) as (trainer, replicas):
        await trainer.publish()
        replicas[0].say(ag.SessionRequest(goodbye=ag.Goodbye(reason="scaling in")))
        group = running.coordinator.group("g")
        await until(lambda: group.state.replicas["r0"].admin == "LEAVING", "LEAVING")
        u = await trainer.start()
        assert [p.replica_id for p in u.participants] == ["r1", "r2"]
        assert [(a.replica_id, a.reason) for a in u.absent] == [("r0", "it is LEAVING")]
        check = fl.CheckReplicaRequest(group="g", replica_id="r0")
        assert not (await trainer.fleet.CheckReplica(check, timeout=5)).routable


async def test_held_is_what_the_workers_say_after_a_reconnect() -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, replicas):
        info = await trainer.publish()
        group = running.coordinator.group("g")
        assert group.state.replicas["r0"].weights is Weights.READY
        again = Replica(running.address, "r0", incarnation=replicas[0].incarnation)
        again._sequence = replicas[0]._sequence
        again.held = cm.HeldVersion(version=1, update_id="u-of-somebody-else")
        await again.start()
        await until(lambda: group.state.replicas["r0"].weights is Weights.JOINING, "JOINING")
        again.held = cm.HeldVersion(version=1, update_id=info.update_id)
        await again.send_report()
        await until(lambda: group.state.replicas["r0"].weights is Weights.READY, "READY")
        await again.kill()


async def test_pushes_coalesce_to_the_newest() -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, replicas):
        for _ in range(3):
            await trainer.publish()
        revisions = [d.revision for d in replicas[0].seen]
        assert revisions == sorted(set(revisions))
        assert replicas[0].seen[-1].committed.version == 3
        assert all(d.ByteSize() <= 64 << 10 for d in replicas[0].seen)
        decisions = [d.update.decision for d in replicas[0].seen if d.update.version == 3]
        assert decisions[-1] == ag.DECISION_COMMIT and ag.DECISION_ABORT not in decisions


async def test_receipts_are_fenced_by_life_epoch_update_and_plan() -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, replicas):
        u = await trainer.start()
        plan_id = u.channels[0].plan_id
        good: dict[str, Any] = {"group": "g", "replica_id": "r0", "incarnation": replicas[0].incarnation, "epoch": 1}
        receipt: dict[str, Any] = {
            "update_id": u.update_id,
            "member": "r0/0",
            "plan_id": plan_id,
            "evidence": cm.EVIDENCE_LIVE,
            "total": 3,
        }

        def put(receipt_: dict[str, Any], **fields: Any) -> Any:
            request = ag.PutReceiptRequest(**{**good, **fields}, receipt=up.Receipt(**receipt_))
            return replicas[0].agent.PutReceipt(request, timeout=5)

        await refused(put(receipt, epoch=9), "WRONG_PHASE")
        await refused(put(receipt, incarnation="older"), "MEMBER_RESTARTED")
        await refused(put({**receipt, "update_id": "u-0"}), "UNKNOWN_UPDATE")
        await refused(put({**receipt, "plan_id": "p-0"}), "INVALID_ARGUMENT")
        await refused(put({**receipt, "member": "r0/7"}), "INVALID_ARGUMENT")
        await refused(put({**receipt, "total": 2}), "INVALID_ARGUMENT")
        assert not (await put({**receipt, "digests": [1, 2]})).complete
        assert (await put({**receipt, "digests": [3], "first": 2})).complete
        await refused(put({**receipt, "digests": [3], "first": 3}), "INVALID_ARGUMENT")
        await trainer.stub.AbortUpdate(_abort(trainer, u.update_id), timeout=5)
        await refused(put({**receipt, "digests": [1, 2, 3]}), "PEER_RANK_FAILED", grpc.StatusCode.ABORTED)


def _abort(trainer: Trainer, update_id: str) -> Any:
    from weightplane.v1 import weight_transfer_pb2 as wt

    return wt.AbortUpdateRequest(request_id="a", group="g", generation=trainer.generation, update_id=update_id)


async def test_a_member_that_never_reads_holds_nothing_up() -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, _):
        group = running.coordinator.group("g")
        small = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))  # flow-control windows
        async with dial(running.address, *small) as channel:
            deaf = ag_grpc.AgentServiceStub(channel).Session()
            await deaf.write(hello(agent_id="deaf", replica=replica_hello(labels={"x": "y" * 200})))
            await until(lambda: "deaf" in group.state.replicas, "its hello")
            session = group.sessions["deaf", "control"]
            revision = -1
            while revision != session.revision:  # until the windows are full and a write waits
                revision = session.revision
                for _ in range(300):
                    session.wake()
                    await asyncio.sleep(0)
                await asyncio.sleep(0.05)
            assert (await trainer.publish()).phase == up.UPDATE_PHASE_COMMITTED
            stuck = session.revision
            async with dial(running.address) as other:
                newer = ag_grpc.AgentServiceStub(other).Session()
                await newer.write(hello(agent_id="deaf"))
                await newer.read()
                await until(lambda: group.sessions["deaf", "control"] is not session, "the newer session")
                assert session.ended.done() and session.revision == stuck
                newer.cancel()
            deaf.cancel()
