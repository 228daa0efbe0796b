"""Whole updates against a real server on loopback."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from tests.server.scripted import Fail, Replica, Trainer, fleet, refused, server, until, update_of
from weightplane.v1 import agent_pb2 as ag
from weightplane.v1 import common_pb2 as cm
from weightplane.v1 import update_pb2 as up
from weightplane.v1 import weight_transfer_pb2 as wt


async def test_three_replicas_commit_together() -> None:
    async with server() as running, fleet(running.address) as (trainer, replicas):
        info = await trainer.publish()
        assert info.phase == up.UPDATE_PHASE_COMMITTED and info.version == 1
        assert [o.replica_id for o in info.outcomes] == ["r0", "r1", "r2"]
        for outcome in info.outcomes:
            assert outcome.state == up.WEIGHTS_STATE_READY
            assert outcome.held == cm.HeldVersion(version=1, update_id=info.update_id)
            assert outcome.evidence == cm.EVIDENCE_LIVE
        assert all(r.held.version == 1 for r in replicas)
        again = await trainer.publish()
        assert again.version == 2 and again.timings.total_s > 0
        assert again.source_free and again.remaining_ms == 0


async def test_two_ranks_and_two_workers() -> None:
    async with server() as running:
        replica = Replica(running.address, workers=2)
        await replica.start()
        ranks = [Trainer(running.address, rank=r, world=2) for r in range(2)]
        ranks[1].incarnation = ranks[0].incarnation
        first, second = await asyncio.gather(*(r.init() for r in ranks))
        assert first.generation == second.generation == 1 and first.channels == second.channels
        await asyncio.gather(*(r.put_manifest() for r in ranks))
        u = await ranks[0].start()
        await asyncio.gather(*(r.weights(u) for r in ranks))
        await asyncio.gather(*(r.digests(u) for r in ranks))
        infos = await asyncio.gather(*(r.finish(u) for r in ranks))
        assert infos[0].phase == infos[1].phase == up.UPDATE_PHASE_COMMITTED
        assert infos[0].outcomes[0].bytes_received == 2 * u.channels[0].nbytes
        await replica.kill()


async def test_a_failing_replica_aborts_all_by_name_and_the_next_update_works() -> None:
    async with server() as running, fleet(running.address) as (trainer, replicas):

        async def fail(_: ag.DesiredUpdate) -> None:
            raise Fail("out of staging", cm.REASON_RESOURCE)

        replicas[1].hooks["prepare"] = fail
        u = await trainer.start()
        await trainer.weights(u)
        error = await refused(trainer.rest(u), "RESOURCE", grpc.StatusCode.ABORTED)
        info = update_of(error)  # the answer to PutDigests, if the abort came first; else to FinishUpdate
        assert info.phase in (up.UPDATE_PHASE_ABORTING, up.UPDATE_PHASE_ABORTED) and info.failure.member == "r1"
        assert "out of staging" in info.failure.message
        group = running.coordinator.group("g")
        await until(lambda: group.state.open is None, "the drain", 5)
        assert (await trainer.get(u.update_id)).phase == up.UPDATE_PHASE_ABORTED
        assert not any(r.held.version for r in replicas)
        del replicas[1].hooks["prepare"]
        await refused(trainer.start(), "REBIND_REQUIRED")  # what the abort could still touch is not used again
        await trainer.init()
        assert (await trainer.publish()).phase == up.UPDATE_PHASE_COMMITTED


async def test_apply_failing_after_the_decision_is_dirty_and_named() -> None:
    async with server() as running, fleet(running.address) as (trainer, replicas):

        async def fail(_: ag.DesiredUpdate) -> None:
            raise Fail("apply broke", dirty=True)

        replicas[2].hooks["apply"] = fail
        info = await trainer.publish()
        assert info.phase == up.UPDATE_PHASE_COMMITTED
        states = {o.replica_id: o.state for o in info.outcomes}
        assert states == {
            "r0": up.WEIGHTS_STATE_READY,
            "r1": up.WEIGHTS_STATE_READY,
            "r2": up.WEIGHTS_STATE_DIRTY,
        }
        assert "apply broke" in info.outcomes[2].failure.message
        del replicas[2].hooks["apply"]
        healed = await trainer.publish()
        assert all(o.state == up.WEIGHTS_STATE_READY for o in healed.outcomes)


async def test_a_wrong_digest_names_the_tensor() -> None:
    async with server() as running, fleet(running.address) as (trainer, replicas):
        replicas[0].corrupt = {1}
        u = await trainer.start()
        await trainer.weights(u)
        error = await refused(trainer.rest(u), "DIGEST_MISMATCH", grpc.StatusCode.ABORTED)
        failure = update_of(error).failure
        assert list(failure.tensors) == ["b"] and failure.tensor_count == 1 and failure.member == "r0/0"


@pytest.mark.parametrize("verify", [cm.VERIFY_LEVEL_OFF, cm.VERIFY_LEVEL_SAMPLED])
async def test_lesser_levels_commit_too(verify: int) -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, _):
        u = await trainer.start(verify=verify)
        assert int(u.verify) == verify
        await trainer.weights(u)
        if verify != int(cm.VERIFY_LEVEL_OFF):
            await refused(trainer.finish(u), "DIGESTS_REQUIRED", grpc.StatusCode.FAILED_PRECONDITION)
            await trainer.digests(u)
        assert (await trainer.finish(u)).phase == up.UPDATE_PHASE_COMMITTED


async def test_busy_refuses_waits_or_supersedes() -> None:
    async with server() as running, fleet(running.address) as (trainer, _):
        first = await trainer.start()
        error = await refused(trainer.start(), "UPDATE_IN_PROGRESS", grpc.StatusCode.FAILED_PRECONDITION)
        assert update_of(error).update_id == first.update_id
        waiting = asyncio.create_task(trainer.start(on_busy=cm.ON_BUSY_WAIT))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await trainer.weights(first)
        await trainer.digests(first)
        await trainer.finish(first)
        second = await waiting
        assert second.version == 2
        third = await trainer.start(on_busy=cm.ON_BUSY_SUPERSEDE)
        assert third.version == 3
        assert (await trainer.get(second.update_id)).failure.reason == cm.REASON_SUPERSEDED


@pytest.mark.alone
async def test_waiting_ends_with_the_callers_own_deadline_and_a_reason() -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, _):
        await trainer.start()
        trainer.timeout = 2.0
        started = time.monotonic()
        error = await refused(trainer.start(on_busy=cm.ON_BUSY_WAIT), "UPDATE_IN_PROGRESS")
        assert time.monotonic() - started < 2.0
        assert "stayed open" in (error.details() or "")  # it is no DEADLINE_EXCEEDED of the caller's own


async def test_a_repeated_start_gets_the_first_answer() -> None:
    async with server() as running, fleet(running.address) as (trainer, _):
        request = trainer.start_request()
        first = await trainer.stub.StartUpdate(request, timeout=5)
        again = await trainer.stub.StartUpdate(request, timeout=5)
        assert again.update_id == first.update_id and again.version == first.version
        request.trainer_step = 99
        await refused(trainer.stub.StartUpdate(request, timeout=5), "REQUEST_ID_REUSED")
        by_request = wt.GetUpdateRequest(group="g", request_id=request.request_id)
        assert (await trainer.stub.GetUpdate(by_request, timeout=5)).update.update_id == first.update_id


async def test_repeats_of_every_phase_are_harmless() -> None:
    async with server() as running, fleet(running.address) as (trainer, _):
        u = await trainer.start()
        assert (await trainer.weights(u)).all_called
        assert (await trainer.weights(u)).all_called
        await trainer.digests(u)
        await trainer.digests(u)
        first, second = await asyncio.gather(trainer.finish(u), trainer.finish(u))
        assert first.phase == second.phase == up.UPDATE_PHASE_COMMITTED
        await trainer.digests(u)
        assert (await trainer.finish(u)).version == 1


async def test_several_calls_name_disjoint_buckets() -> None:
    async with server() as running, fleet(running.address, bucket_bytes=4096) as (trainer, _):
        from weightplane.controlplane.core.manifest import Manifest, TensorMeta

        trainer.manifest = Manifest.of([TensorMeta(f"t{i}", "int8", (4096,)) for i in range(3)])
        await trainer.put_manifest()
        u = await trainer.start(verify=cm.VERIFY_LEVEL_OFF)
        channel = u.channels[0]
        assert channel.buckets == 3

        def ranges(first: int, count: int) -> list[ag.BucketRange]:
            return [ag.BucketRange(channel_id=channel.channel_id, first=first, count=count)]

        assert not (await trainer.weights(u, 1, buckets=ranges(0, 1))).all_called
        await refused(trainer.weights(u, 2, buckets=ranges(0, 2)), "INVALID_ARGUMENT")
        await refused(trainer.weights(u, 4, buckets=ranges(1, 2)), "INVALID_ARGUMENT")
        await refused(trainer.finish(u), "INCOMPLETE", grpc.StatusCode.FAILED_PRECONDITION)
        assert (await trainer.weights(u, 2, buckets=ranges(1, 2))).all_called
        await refused(trainer.finish(u), "INCOMPLETE", grpc.StatusCode.ABORTED)  # elements: the script knows MODEL only


async def test_abort_is_drained_and_repeatable() -> None:
    async with server() as running, fleet(running.address) as (trainer, replicas):
        u = await trainer.start()
        await trainer.weights(u)
        request = wt.AbortUpdateRequest(
            request_id="a", group="g", generation=trainer.generation, update_id=u.update_id, reason="changed my mind"
        )
        info = (await trainer.stub.AbortUpdate(request, timeout=5)).update
        assert info.phase == up.UPDATE_PHASE_ABORTED and not any(o.unquiesced for o in info.outcomes)
        assert info.failure.reason == cm.REASON_PEER_RANK_FAILED and info.failure.message == "changed my mind"
        assert (await trainer.stub.AbortUpdate(request, timeout=5)).update.phase == up.UPDATE_PHASE_ABORTED
        assert all(r.report.stage == ag.REPLICA_STAGE_ABORTED for r in replicas)


async def test_an_operator_aborts_whatever_is_open() -> None:
    async with server() as running, fleet(running.address) as (trainer, _):
        request = wt.AbortUpdateRequest(request_id="a", group="g", reason="maintenance", rank=-1)
        await refused(trainer.stub.AbortUpdate(request, timeout=5), "UNKNOWN_UPDATE")
        u = await trainer.start()
        request.request_id = "b"
        info = (await trainer.stub.AbortUpdate(request, timeout=5)).update
        assert info.update_id == u.update_id and info.failure.reason == cm.REASON_ABORTED_BY_CALLER


@pytest.mark.alone
async def test_a_silent_replica_is_lost_and_named_within_its_lease() -> None:
    async with server() as running, fleet(running.address) as (trainer, replicas):
        u = await trainer.start()
        await trainer.weights(u)
        await trainer.digests(u)

        async def never(_: ag.DesiredUpdate) -> None:
            await asyncio.sleep(60)

        replicas[1].hooks["apply"] = never
        replicas[1].beats = False
        await replicas[1].kill()
        started = time.monotonic()
        finishing = asyncio.create_task(trainer.finish(u))
        group = running.coordinator.group("g")
        if group.state.open is not None and not group.state.open.parts["r1"].voted:
            error = await refused(finishing, "MEMBER_LOST", grpc.StatusCode.ABORTED)
            assert update_of(error).failure.member == "r1"
        else:
            info = await finishing  # it had voted: decided without a word from it, and PENDING or gone
            assert info.phase == up.UPDATE_PHASE_COMMITTED
        assert time.monotonic() - started < 4


async def test_a_cancelled_finish_leaves_the_update_to_itself() -> None:
    async with server() as running, fleet(running.address) as (trainer, replicas):
        u = await trainer.start()
        await trainer.weights(u)
        await trainer.digests(u)
        gate = asyncio.Event()

        async def wait(_: ag.DesiredUpdate) -> None:
            await gate.wait()

        replicas[0].hooks["apply"] = wait
        trainer.timeout = 0.5
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await trainer.finish(u)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        trainer.timeout = 5
        gate.set()
        group = running.coordinator.group("g")
        await until(lambda: group.state.open is None, "the update to end")
        assert (await trainer.get(u.update_id)).phase == up.UPDATE_PHASE_COMMITTED


@pytest.mark.alone
async def test_an_update_ends_by_its_deadline() -> None:
    async with server() as running, fleet(running.address) as (trainer, replicas):

        async def never(_: ag.DesiredUpdate) -> None:
            await asyncio.sleep(60)

        replicas[0].hooks["arm"] = never
        started = time.monotonic()
        u = await trainer.start(update_timeout_ms=1000)
        error = await refused(trainer.weights(u), "DEADLINE", grpc.StatusCode.DEADLINE_EXCEEDED)
        assert "r0" in (error.details() or "")
        group = running.coordinator.group("g")
        await until(lambda: group.state.open is None, "the end")
        assert time.monotonic() - started < 2.2


async def test_at_least_goes_on_without_the_one_that_failed() -> None:
    async with server() as running, fleet(running.address) as (trainer, replicas):

        async def fail(_: ag.DesiredUpdate) -> None:
            raise Fail("no")

        replicas[0].hooks["prepare"] = fail
        info = await trainer.publish(commit_policy=cm.CommitPolicy(at_least=2))
        assert info.phase == up.UPDATE_PHASE_COMMITTED
        assert [o.excluded for o in info.outcomes] == [True, False, False]
        assert replicas[0].held.version == 0 and replicas[1].held.version == 1


async def test_mixed_modes_are_refused_without_their_order_and_named() -> None:
    async with server() as running:
        staged = Replica(running.address, "staged")
        in_place = Replica(running.address, "inplace")
        del in_place.hello.modes[:]
        in_place.hello.modes.append(cm.MODE_IN_PLACE)
        in_place.hello.staging_refusal = "no memory"
        await staged.start()
        await in_place.start()
        trainer = Trainer(running.address)
        await trainer.init()
        await trainer.put_manifest()
        u = await trainer.start(mode=cm.MODE_STAGED)
        modes = {p.replica_id: (p.mode, p.mode_reason) for p in u.participants}
        assert modes == {"staged": (cm.MODE_STAGED, ""), "inplace": (cm.MODE_IN_PLACE, "no memory")}
        assert len(u.channels) == 2
        await refused(trainer.weights(u), "WRONG_PHASE", grpc.StatusCode.FAILED_PRECONDITION)
        by_mode = {c.mode: c.channel_id for c in u.channels}
        await trainer.weights(u, 1, buckets=[ag.BucketRange(channel_id=by_mode[cm.MODE_STAGED])])
        last = [ag.BucketRange(channel_id=by_mode[cm.MODE_IN_PLACE])]
        await refused(trainer.weights(u, 2, buckets=last), "DIGESTS_REQUIRED")
        await trainer.digests(u)
        await trainer.weights(u, 2, buckets=last)
        assert (await trainer.finish(u)).phase == up.UPDATE_PHASE_COMMITTED
        await staged.kill()
        await in_place.kill()
