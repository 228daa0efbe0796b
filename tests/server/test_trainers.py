"""The hold on a group: generations, fencing, takeover, leases, rebinding."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from tests.server.scripted import Replica, Trainer, _hold, fleet, offer, refused, server, until, update_of
from weightplane.v1 import agent_pb2 as ag
from weightplane.v1 import agent_pb2_grpc as ag_grpc
from weightplane.v1 import common_pb2 as cm
from weightplane.v1 import fleet_pb2 as fl
from weightplane.v1 import update_pb2 as up
from weightplane.v1 import weight_transfer_pb2 as wt


async def test_a_second_trainer_is_refused_then_takes_over_and_fences() -> None:
    async with server() as running, fleet(running.address) as (first, _):
        u = await first.start()
        second = Trainer(running.address, name="rival")
        error = await refused(second.init(), "TRAINER_HELD", grpc.StatusCode.ALREADY_EXISTS)
        assert "'job'" in (error.details() or "") and "takeover" in (error.details() or "")
        answer = await second.init(takeover=True)
        assert answer.generation == 2
        fenced = grpc.StatusCode.PERMISSION_DENIED
        await refused(first.weights(u), "TRAINER_FENCED", fenced)
        await refused(first.put_manifest(), "TRAINER_FENCED", fenced)
        await refused(first.put_placement(), "TRAINER_FENCED", fenced)
        await refused(first.start(), "TRAINER_FENCED", fenced)
        await refused(first.init(), "TRAINER_FENCED", fenced)
        await second.put_manifest()
        assert (await second.publish()).version == 2
        old = await second.get(u.update_id)
        assert old.phase == up.UPDATE_PHASE_ABORTED and old.failure.reason == cm.REASON_SUPERSEDED
        await second.channel.close()


async def test_a_late_duplicate_of_an_init_takes_nothing_back() -> None:
    async with server() as running, fleet(running.address, 1) as (_, _agents):
        second = Trainer(running.address, name="second")
        request = wt.InitTransferRequest(
            request_id="twice", group="g", trainer_id="second", incarnation="s", offers=[offer()], takeover=True
        )
        first_answer = await second.stub.InitTransfer(request, timeout=5)
        third = Trainer(running.address, name="third")
        await third.init(takeover=True)
        assert await second.stub.InitTransfer(request, timeout=5) == first_answer
        assert running.coordinator.group("g").state.last_generation == third.generation == 3
        await third.put_manifest()


async def test_a_successor_waits_for_the_lease_of_a_dead_trainer_and_no_longer() -> None:
    async with server() as running:
        replica = await Replica(running.address).start()
        first = Trainer(running.address)
        await first.init()
        second = Trainer(running.address, name="next")
        await refused(second.init(), "TRAINER_HELD")
        group = running.coordinator.group("g")

        async def try_again() -> None:
            while True:
                try:
                    await second.init()
                    return
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.1)

        await asyncio.wait_for(try_again(), 6)
        assert group.state.last_generation == 2
        await replica.kill()


async def test_closing_gives_the_hold_up_at_once() -> None:
    async with server() as running, fleet(running.address, 1) as (first, _):
        request = wt.CloseTransferRequest(request_id="x", group="g", generation=first.generation)
        await first.stub.CloseTransfer(request, timeout=5)
        await first.stub.CloseTransfer(request, timeout=5)
        second = Trainer(running.address, name="next")
        assert (await second.init()).generation == 2


async def test_a_watch_is_a_lease_and_its_end_aborts_what_waits_for_the_trainer() -> None:
    async with server() as running:
        replica = await Replica(running.address).start()
        trainer = Trainer(running.address)
        await trainer.init()
        await trainer.put_manifest()
        hold = asyncio.create_task(_hold(trainer))
        await asyncio.sleep(3.0)  # past the lease that InitTransfer gave
        group = running.coordinator.group("g")
        assert group.state.trainer is not None and group.state.trainer.ranks[0].watches == 1
        u = await trainer.start()
        hold.cancel()
        await until(lambda: group.state.open is None, "the abort", 5)
        lost = await trainer.get(u.update_id)
        assert lost.failure.reason == cm.REASON_MEMBER_LOST and lost.failure.member == "rank/0"
        await replica.kill()


async def test_a_rank_with_a_session_is_told_of_updates_and_of_being_fenced() -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, _):
        stream = ag_grpc.AgentServiceStub(trainer.channel).Session()
        role = ag.TrainerHello(generation=1, rank=0)
        hello = ag.Hello(group="g", agent_id="rank/0", incarnation=trainer.incarnation, trainer=role)
        await stream.write(ag.SessionRequest(hello=hello))
        first = await stream.read()
        assert isinstance(first, ag.SessionResponse) and first.welcome.ttl_ms == 1200
        await stream.write(ag.SessionRequest(heartbeat=ag.Heartbeat(sequence=1)))
        u = await trainer.start()
        await trainer.weights(u)
        await trainer.rest(u)

        async def told(what: Callable[[ag.DesiredTrainer], bool]) -> None:
            while True:
                message = await asyncio.wait_for(stream.read(), 3)
                assert isinstance(message, ag.SessionResponse)
                if what(message.trainer):
                    return

        await told(lambda t: t.update.phase == up.UPDATE_PHASE_COMMITTED)
        rival = Trainer(running.address, name="rival")
        await rival.init(takeover=True)
        await told(lambda t: t.fenced)
        await refused(_join(trainer, "rank/0", trainer.incarnation, 1), "TRAINER_FENCED")
        await refused(_join(trainer, "rank/1", rival.incarnation, 2, rank=1), "INVALID_ARGUMENT")
        await refused(_join(trainer, "rank/0", "else", 2), "INVALID_ARGUMENT")
        stream.cancel()


async def _join(trainer: Trainer, agent_id: str, incarnation: str, generation: int, rank: int = 0) -> None:
    call = ag_grpc.AgentServiceStub(trainer.channel).Session()
    role = ag.TrainerHello(generation=generation, rank=rank)
    hello = ag.Hello(group="g", agent_id=agent_id, incarnation=incarnation, trainer=role)
    await call.write(ag.SessionRequest(hello=hello))
    async for _ in call:
        pass


async def test_a_new_replica_needs_a_rebind_which_mints_no_generation() -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, _):
        await trainer.publish()
        late = await Replica(running.address, "late").start()
        await refused(trainer.start(), "REBIND_REQUIRED", grpc.StatusCode.FAILED_PRECONDITION)
        before = trainer.generation
        answer = await trainer.init()
        assert answer.generation == before and answer.committed.version == 1
        info = await trainer.publish()
        assert {o.replica_id for o in info.outcomes} == {"r0", "late"} and late.held.version == 2
        await late.kill()


async def test_no_transport_is_explained_per_replica() -> None:
    async with server() as running:
        replica = Replica(running.address)
        replica.hello.workers[0].ClearField("offers")
        replica.hello.workers[0].refusals.append(ag.TransportRefusal(transport="grpc", reason="port in use"))
        await replica.start()
        trainer = Trainer(running.address)
        answer = await trainer.init()
        assert answer.choices[0].transport == "" and not answer.channels and list(answer.choices[0].workers) == [0]
        assert [(r.transport, r.reason) for r in answer.choices[0].refusals if r.transport == "grpc"] == [
            ("grpc", "the worker: port in use")
        ]
        await trainer.put_manifest()
        error = await refused(trainer.start(), "NOT_ENOUGH_REPLICAS")
        assert "worker 0" in (error.details() or "") and "port in use" in (error.details() or "")
        await replica.kill()


async def test_resuming_an_older_checkpoint_unroutes_until_it_commits() -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, replicas):
        await trainer.publish(trainer_step=10)
        check = fl.CheckReplicaRequest(group="g", replica_id="r0")
        assert (await trainer.fleet.CheckReplica(check, timeout=5)).routable
        resumed = Trainer(running.address, name="resumed")
        error = await refused(resumed.init(takeover=True, resume_step=-1), "INVALID_ARGUMENT")  # who means: none
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "resume_step" in str(error.details())
        assert (await trainer.fleet.CheckReplica(check, timeout=5)).routable
        await resumed.init(takeover=True, resume_step=4)
        answer = await trainer.fleet.CheckReplica(check, timeout=5)
        assert answer.live and answer.ready and not answer.routable and "resumed" in answer.reason
        await resumed.put_manifest()
        u = await resumed.start(trainer_step=5)
        assert u.pause_mode == cm.PAUSE_MODE_ABORT
        await resumed.weights(u)
        await resumed.rest(u)
        assert (await trainer.fleet.CheckReplica(check, timeout=5)).routable
        assert replicas[0].held.version == 2


async def test_an_aborted_update_is_the_answer_to_every_rank() -> None:
    async with server() as running:
        replica = await Replica(running.address).start()
        ranks = [Trainer(running.address, rank=r, world=2) for r in range(2)]
        ranks[1].incarnation = ranks[0].incarnation
        await asyncio.gather(*(r.init() for r in ranks))
        await asyncio.gather(*(r.put_manifest() for r in ranks))
        u = await ranks[0].start()
        waiting = asyncio.create_task(ranks[0].weights(u))
        await asyncio.sleep(0.05)
        abort = wt.AbortUpdateRequest(
            request_id="a", group="g", generation=1, update_id=u.update_id, reason="cuda error", rank=1
        )
        await ranks[1].stub.AbortUpdate(abort, timeout=5)
        error = await refused(waiting, "PEER_RANK_FAILED", grpc.StatusCode.ABORTED)
        assert update_of(error).failure.member == "rank/1" and "cuda error" in (error.details() or "")
        await refused(ranks[0].finish(u), "PEER_RANK_FAILED", grpc.StatusCode.ABORTED)
        await replica.kill()
