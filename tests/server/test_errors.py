"""Errors: one table, ErrorInfo on each, bounded, and nothing of the server's insides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.server.scripted import Replica, Trainer, fleet, reason_of, refused, server
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.server import fields
from weightplane.controlplane.server.calls import Guard
from weightplane.controlplane.server.errors import CODES, MAX_DETAILS, Refused, code_of, status_of
from weightplane.controlplane.server.security import Authoriser, Security
from weightplane.v1 import agent_pb2 as ag
from weightplane.v1 import common_pb2 as cm
from weightplane.v1 import fleet_pb2 as fl
from weightplane.v1 import fleet_pb2_grpc
from weightplane.v1 import update_pb2 as up
from weightplane.v1 import weight_transfer_pb2 as wt


def test_every_reason_has_a_code_and_a_number_in_the_contract() -> None:
    assert set(CODES) == set(Reason)
    assert {f"REASON_{r}" for r in Reason} == set(cm.Reason.keys()) - {"REASON_UNSPECIFIED"}
    assert code_of(Reason.ENGINE) is grpc.StatusCode.ABORTED
    assert code_of(Reason.MANIFEST_MISMATCH) is grpc.StatusCode.FAILED_PRECONDITION
    assert code_of(Reason.MANIFEST_MISMATCH, ended=True) is grpc.StatusCode.ABORTED
    assert code_of(Reason.DEADLINE, ended=True) is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("name", ["r", "模型" * 60])
def test_a_status_is_bounded_and_keeps_the_failed_ones(name: str) -> None:
    bad = up.ReplicaOutcome(replica_id=f"{name}-bad", failure=cm.Failure(reason=cm.REASON_ENGINE, message="m" * 2000))
    update = up.UpdateInfo(
        update_id="u-1",
        participants=[up.Participant(replica_id=f"{name}{i}") for i in range(1000)],
        outcomes=[up.ReplicaOutcome(replica_id=f"{name}{i}", incarnation="x" * 30) for i in range(1000)] + [bad],
    )
    failure = Failure(Reason.ENGINE, "é" * 5000, "r1", "VERIFYING", ("t" * 900,) * 9, 9)
    status = status_of(Refused(failure, update, ended=True))
    assert status.ByteSize() <= MAX_DETAILS and len(status.details) == 3
    packed = up.UpdateInfo()
    assert status.details[2].Unpack(packed)
    assert [o.replica_id for o in packed.outcomes] == [f"{name}-bad"]
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert dict(info.metadata) == {"member": "r1", "phase": "VERIFYING", "update_id": "u-1"}
    assert len(status.message.encode()) <= 600


async def test_a_thousand_failed_replicas_still_reach_a_client_with_default_limits() -> None:
    update = up.UpdateInfo(
        update_id="u-1",
        outcomes=[
            up.ReplicaOutcome(replica_id=f"r{i}", failure=cm.Failure(message="w" * 500, tensors=["t" * 300] * 5))
            for i in range(1000)
        ],
    )

    class Service(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            async def fail(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
                status = rpc_status.to_status(status_of(Refused(Failure(Reason.ENGINE, "ж" * 3000), update, True)))
                await context.abort(status.code, status.details or "", status.trailing_metadata or ())

            return grpc.unary_unary_rpc_method_handler(fail)

    server_ = grpc.aio.server()
    server_.add_generic_rpc_handlers((Service(),))
    port = server_.add_insecure_port("127.0.0.1:0")
    await server_.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for _ in range(20):
            call: Any = channel.unary_unary("/x/y")
            error = await refused(call(b"", timeout=5), "ENGINE")
            assert error.code() is grpc.StatusCode.ABORTED
    await server_.stop(0)


async def test_a_unary_call_without_a_deadline_is_refused() -> None:
    async with server() as running:
        trainer = Trainer(running.address)
        request = fl.ListGroupsRequest()
        error = await refused(trainer.fleet.ListGroups(request), "DEADLINE_REQUIRED", grpc.StatusCode.INVALID_ARGUMENT)
        assert "ListGroups" in (error.details() or "")
        await trainer.fleet.ListGroups(request, timeout=5)
        await trainer.channel.close()


async def test_an_unexpected_error_is_internal_and_stays_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from weightplane.controlplane.server import fleet_view

    def broken(*_: object) -> None:
        raise RuntimeError("the password is tulip")

    async with server() as running, fleet(running.address, 0) as (trainer, _):
        monkeypatch.setattr(fleet_view, "group_info", broken)
        with caplog.at_level(logging.ERROR):
            call = trainer.fleet.GetGroup(fl.GetGroupRequest(group="g"), timeout=5)
            error = await refused(call, "INTERNAL", grpc.StatusCode.INTERNAL)
        assert "tulip" not in str(error)
        number = (error.details() or "").split()[2].rstrip(":")
        logged = [r for r in caplog.records if number in r.getMessage()]
        assert logged and "tulip" in str(logged[0].exc_info)


async def test_a_fault_of_the_core_reaches_its_caller_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightplane.controlplane.core import group as core
    from weightplane.controlplane.core.events import StartUpdate

    real = core.step

    def step(state: object, event: object, now: float) -> object:
        if isinstance(event, StartUpdate):
            raise KeyError("planted")
        return real(state, event, now)  # type: ignore[arg-type]

    async with server() as running, fleet(running.address, 1) as (trainer, _):
        monkeypatch.setattr(core, "step", step)
        await refused(trainer.start(), "INTERNAL")
        monkeypatch.setattr(core, "step", real)
        assert (await trainer.publish()).version == 1


async def test_unknown_names_are_not_found() -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, replicas):
        not_found = grpc.StatusCode.NOT_FOUND
        stub, agent = trainer.stub, replicas[0].agent
        await refused(trainer.fleet.GetGroup(fl.GetGroupRequest(group="no"), timeout=5), "UNKNOWN_GROUP", not_found)
        check = fl.CheckReplicaRequest(group="g", replica_id="no")
        await refused(trainer.fleet.CheckReplica(check, timeout=5), "UNKNOWN_REPLICA", not_found)
        await refused(trainer.get("u-no"), "UNKNOWN_UPDATE", not_found)
        by_request = wt.GetUpdateRequest(group="g", request_id="no")
        await refused(stub.GetUpdate(by_request, timeout=5), "UNKNOWN_UPDATE", not_found)
        await refused(trainer.start(manifest_id="m-" + "0" * 32), "UNKNOWN_MANIFEST", not_found)
        await refused(
            agent.GetManifest(ag.GetManifestRequest(group="g", manifest_id="m-0"), timeout=5), "UNKNOWN_MANIFEST"
        )
        await refused(trainer.plan("p-no"), "UNKNOWN_PLAN", not_found)


async def test_a_malformed_name_is_refused_by_field() -> None:
    async with server() as running:
        trainer = Trainer(running.address, group="a b")
        error = await refused(trainer.init(), "INVALID_ARGUMENT", grpc.StatusCode.INVALID_ARGUMENT)
        assert (error.details() or "").startswith("group: expected") and "'a b'" in (error.details() or "")
        bad = Replica(running.address, "rank/0")
        await bad.start()
        assert bad.ended is not None and reason_of(bad.ended) == "INVALID_ARGUMENT"
        await bad.kill()
        await trainer.channel.close()


@pytest.mark.parametrize(
    "method", ["WeightTransferService/StartUpdate", "FleetService/WatchGroup", "AgentService/Session"]
)
async def test_bytes_that_are_no_message_are_the_callers_mistake(method: str, caplog: pytest.LogCaptureFixture) -> None:
    async with server() as running, grpc.aio.insecure_channel(running.address) as channel:
        path, garbage = f"/weightplane.v1.{method}", b"\xff\xff\xff"
        stub: Any = channel
        if method.endswith("Session"):
            call: Any = stub.stream_stream(path)(iter([garbage]), timeout=5)
            error = await refused(call.read(), "INVALID_ARGUMENT", grpc.StatusCode.INVALID_ARGUMENT)
        elif method.endswith("WatchGroup"):
            call = stub.unary_stream(path)(garbage, timeout=5)
            error = await refused(call.read(), "INVALID_ARGUMENT", grpc.StatusCode.INVALID_ARGUMENT)
        else:
            call = stub.unary_unary(path)(garbage, timeout=5)
            error = await refused(call, "INVALID_ARGUMENT", grpc.StatusCode.INVALID_ARGUMENT)
        assert f"expected the bytes of a {method.partition('/')[2]}Request" in (error.details() or "")
        assert not [r for r in caplog.records if r.exc_info], "a traceback for a caller's mistake"


async def test_a_name_that_would_break_a_log_line_is_refused_and_an_explanation_may_have_lines() -> None:
    async with server() as running:
        trainer = Trainer(running.address, name="job\n2026 INFO all is well")
        error = await refused(trainer.init(), "INVALID_ARGUMENT", grpc.StatusCode.INVALID_ARGUMENT)
        assert (error.details() or "").startswith("trainer_id: expected no control characters, found 'job\\n2026")
        await trainer.channel.close()
    assert fields.text("reason", "first\nsecond", 100, lines=True) == "first\nsecond"


class _Late(fleet_pb2_grpc.FleetServiceServicer):
    """Its answer comes when the caller is gone: it does not look at its cancellation."""

    async def ListGroups(self, request: Any, context: Any) -> Any:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        raise Refused(Failure(Reason.UNKNOWN_GROUP, "nobody hears this"))

    async def WatchGroup(self, request: Any, context: Any) -> Any:  # type: ignore[override]
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await context.write(fl.WatchGroupResponse())


def test_a_caller_whose_deadline_passed_leaves_no_traceback_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        server = grpc.aio.server(interceptors=[Guard(Authoriser(Security()))])
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(_Late(), server)  # type: ignore[abstract]
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await asyncio.wait_for(channel.channel_ready(), 10)
            stub: Any = fleet_pb2_grpc.FleetServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as unary:
                await stub.ListGroups(fl.ListGroupsRequest(), timeout=0.3)
            with pytest.raises(grpc.aio.AioRpcError) as stream:
                async for _ in stub.WatchGroup(fl.WatchGroupRequest(group="g"), timeout=0.3):
                    pass
        await server.stop(5)  # waits for the handlers
        assert unary.value.code() is stream.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    with caplog.at_level(logging.DEBUG, "weightplane.controlplane.server.calls"):
        asyncio.run(run())
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []
    assert any("was gone before it heard" in r.getMessage() for r in caplog.records)
