"""Every RPC of the contract: without an identity, with the wrong role, with the wrong group, on a real server."""

from __future__ import annotations

import asyncio
import importlib
import logging
import pkgutil
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor, message_factory

import weightplane.v1
from tests.server.scripted import FAST, Trainer, reason_of, server
from weightplane.controlplane.server.app import ServerConfig
from weightplane.controlplane.server.authorisation import RPC_TABLE, Scope
from weightplane.controlplane.server.security import Role, Security, parse_tokens
from weightplane.controlplane.store.memory import MemoryStore
from weightplane.v1 import agent_pb2, agent_pb2_grpc, fleet_pb2, fleet_pb2_grpc, weight_transfer_pb2

TOKENS = {role: f"{role.value}-{'s3cret' * 4}" for role in Role}
ELSEWHERE = {role: f"{role.value}-{'0thers' * 4}" for role in Role}  # of another group
#: What an agent hosts for a channel's members, who show its key: tests/security/test_strangers.py.
OF_CHANNELS = {"weightplane.v1.TensorService"}


def contract() -> list[descriptor.MethodDescriptor]:
    """Every method of every service in the contract."""
    found = []
    for module in pkgutil.iter_modules(weightplane.v1.__path__):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(f"weightplane.v1.{module.name}").DESCRIPTOR
            for service in file.services_by_name.values():
                if service.full_name not in OF_CHANNELS:
                    found += service.methods
    return found


METHODS = contract()


def path(method: descriptor.MethodDescriptor) -> str:
    assert method.containing_service is not None
    return f"/{method.containing_service.full_name}/{method.name}"


def test_S03_S04_the_table_has_a_row_for_every_rpc_and_no_other() -> None:
    assert len(METHODS) >= 33
    assert set(RPC_TABLE) == {path(m) for m in METHODS}
    assert all(row.roles for row in RPC_TABLE.values())


def test_every_rpc_that_names_a_group_is_confined_by_it() -> None:
    for method in METHODS:
        assert method.input_type is not None
        named = "group" in method.input_type.fields_by_name
        assert (RPC_TABLE[path(method)].scope is Scope.REQUEST) == named, method.name
    assert {p.rpartition("/")[2] for p, r in RPC_TABLE.items() if r.scope is Scope.HELLO} == {"Session"}
    assert {p.rpartition("/")[2] for p, r in RPC_TABLE.items() if r.scope is Scope.ANSWER} == {"ListGroups"}


async def call(
    channel: grpc.aio.Channel, method: descriptor.MethodDescriptor, token: str | None, group: str = ""
) -> str:
    """Call with a request that names a group at most; the reason of the refusal, or OK."""
    assert method.input_type is not None
    request: Any = message_factory.GetMessageClass(method.input_type)()
    if method.name == "Session":
        request.hello.group = group
    elif group and method.name != "ListGroups":
        request.group = group
    metadata = [] if token is None else [("authorization", f"Bearer {token}")]
    make: Any = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, True): channel.stream_stream,
    }[method.client_streaming, method.server_streaming]
    answers = message_factory.GetMessageClass(method.output_type)
    stub = make(
        path(method), request_serializer=type(request).SerializeToString, response_deserializer=answers.FromString
    )
    try:
        if method.client_streaming:
            # An iterator, not ``write``: that one says INTERNAL where the server refused the call before it.
            async for _ in stub(iter([request]), metadata=metadata, timeout=5):
                break
        elif method.server_streaming:
            async for _ in stub(request, metadata=metadata, timeout=5):
                break
        else:
            await stub(request, metadata=metadata, timeout=5)
    except grpc.aio.AioRpcError as e:
        return reason_of(e)
    return "OK"


async def test_S03_S04_each_rpc_admits_its_roles_and_groups_and_no_other(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "# who may what\n" + "\n".join(f"{role}@g {token}" for role, token in TOKENS.items())
    text += "\n" + "\n".join(f"{role}@other,third {token}" for role, token in ELSEWHERE.items())
    config = ServerConfig(MemoryStore(), core=FAST, security=Security(tokens=parse_tokens(text)))
    calls = {"without identity": 0, "wrong role": 0, "wrong group": 0}
    with caplog.at_level(logging.DEBUG):
        async with server(config) as running, grpc.aio.insecure_channel(running.address) as channel:
            for method in METHODS:
                for nobody in (None, "x" * 30, TOKENS[Role.VIEWER][:-1], ""):
                    assert await call(channel, method, nobody, "g") == "UNAUTHENTICATED", method.name
                    calls["without identity"] += 1
                row = RPC_TABLE[path(method)]
                for role in Role:
                    if role not in row.roles:
                        assert await call(channel, method, TOKENS[role], "g") == "PERMISSION_DENIED", (
                            method.name,
                            role,
                        )
                        calls["wrong role"] += 1
                        continue
                    reason = await call(channel, method, TOKENS[role], "g")
                    assert reason not in ("PERMISSION_DENIED", "UNAUTHENTICATED") or row.note, (method.name, role)
                    if row.scope is not Scope.ANSWER:
                        reason = await call(channel, method, ELSEWHERE[role], "g")
                        assert reason == "PERMISSION_DENIED", (method.name, role, reason)
                        calls["wrong group"] += 1
    assert not any(token in caplog.text for token in (*TOKENS.values(), *ELSEWHERE.values()))
    with capsys.disabled():
        refused = ", ".join(f"{n} {what}" for what, n in calls.items())
        print(f"\nauthorisation: {len(METHODS)} RPCs; refused, every one: {refused}")


async def test_a_confined_caller_sees_its_groups_only_and_is_not_told_of_others() -> None:
    text = "\n".join((f"operator {TOKENS[Role.OPERATOR]}", f"viewer@a,b {TOKENS[Role.VIEWER]}"))
    config = ServerConfig(MemoryStore(), core=FAST, security=Security(tokens=parse_tokens(text)))
    async with server(config) as running, grpc.aio.insecure_channel(running.address) as channel:
        fleet = fleet_pb2_grpc.FleetServiceStub(channel)

        def bearer(role: Role) -> Any:
            return [("authorization", f"Bearer {TOKENS[role]}")]

        for n, name in enumerate(("a", "b", "zz")):
            made = fleet_pb2.CreateGroupRequest(request_id=str(n), group=name)
            await fleet.CreateGroup(made, timeout=5, metadata=bearer(Role.OPERATOR))
        groups = await fleet.ListGroups(fleet_pb2.ListGroupsRequest(), timeout=5, metadata=bearer(Role.VIEWER))
        assert [g.group for g in groups.groups] == ["a", "b"]
        told = []
        for name in ("zz", "no-such-group"):
            with pytest.raises(grpc.aio.AioRpcError) as e:
                ask = fleet_pb2.GetGroupRequest(group=name)
                await fleet.GetGroup(ask, timeout=5, metadata=bearer(Role.VIEWER))
            told.append(str(e.value.details()).replace(name, "X"))
        assert told[0] == told[1] and "is confined to group a, b" in told[0]


async def test_a_token_that_is_withdrawn_calls_no_more_and_loses_its_streams(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    both = f"inference {TOKENS[Role.INFERENCE]}\nviewer {TOKENS[Role.VIEWER]}\n"
    file.write_text(both)
    config = ServerConfig(MemoryStore(), core=FAST, security=Security(token_file=file))
    async with server(config) as running, grpc.aio.insecure_channel(running.address) as channel:
        fleet = fleet_pb2_grpc.FleetServiceStub(channel)

        async def listed(role: Role) -> str:
            metadata = [("authorization", f"Bearer {TOKENS[role]}")]
            try:
                await fleet.ListGroups(fleet_pb2.ListGroupsRequest(), timeout=5, metadata=metadata)
            except grpc.aio.AioRpcError as e:
                return reason_of(e)
            return "OK"

        stream = agent_pb2_grpc.AgentServiceStub(channel).Session(
            metadata=[("authorization", f"Bearer {TOKENS[Role.INFERENCE]}")]
        )
        hello = agent_pb2.Hello(group="g", agent_id="r", incarnation="i", kind=agent_pb2.SESSION_KIND_HEARTBEAT)
        await stream.write(agent_pb2.SessionRequest(hello=hello))
        assert isinstance(await stream.read(), agent_pb2.SessionResponse)
        file.write_text("")  # in the middle of being written: nobody is let in by that, and nobody thrown out
        await asyncio.sleep(1.3)
        assert await listed(Role.VIEWER) == "OK" and not stream.done()
        file.write_text(f"viewer {TOKENS[Role.VIEWER]}\n")
        with pytest.raises(grpc.aio.AioRpcError) as e:
            await asyncio.wait_for(stream.read(), 5)
        assert reason_of(e.value) == "UNAUTHENTICATED"
        assert [await listed(r) for r in (Role.INFERENCE, Role.VIEWER)] == ["UNAUTHENTICATED", "OK"]
        file.write_text(both)
        end = asyncio.get_running_loop().time() + 5
        while await listed(Role.INFERENCE) != "OK":
            assert asyncio.get_running_loop().time() < end
            await asyncio.sleep(0.1)


async def test_finer_rules_within_a_call() -> None:
    text = "\n".join(f"{role} {token}" for role, token in TOKENS.items())
    config = ServerConfig(MemoryStore(), core=FAST, security=Security(tokens=parse_tokens(text)))
    async with server(config) as running:
        trainer = Trainer(running.address)

        def bearer(role: Role) -> Any:
            return [("authorization", f"Bearer {TOKENS[role]}")]

        async def reason(call_: Any) -> str:
            try:
                await call_
            except grpc.aio.AioRpcError as e:
                return reason_of(e)
            return "OK"

        group = fleet_pb2.CreateGroupRequest(request_id="1", group="g")
        await trainer.fleet.CreateGroup(group, timeout=5, metadata=bearer(Role.OPERATOR))
        abort = weight_transfer_pb2.AbortUpdateRequest(request_id="2", group="g")
        as_trainer = trainer.stub.AbortUpdate(abort, timeout=5, metadata=bearer(Role.TRAINER))
        assert await reason(as_trainer) == "PERMISSION_DENIED"
        pause = fleet_pb2.PauseGenerationRequest(request_id="3", group="g", holder="operator")
        by_trainer = trainer.fleet.PauseGeneration(pause, timeout=5, metadata=bearer(Role.TRAINER))
        assert await reason(by_trainer) == "PERMISSION_DENIED"
        pause.holder, pause.request_id = "trainer", "4"
        own = trainer.fleet.PauseGeneration(pause, timeout=5, metadata=bearer(Role.TRAINER))
        assert await reason(own) == "OK"
        watch = trainer.stub.WatchUpdate(
            weight_transfer_pb2.WatchUpdateRequest(group="g", generation=1), metadata=bearer(Role.VIEWER)
        )

        async def first() -> None:
            async for _ in watch:
                break

        assert await reason(first()) == "PERMISSION_DENIED"
        hello = agent_pb2.Hello(
            group="g", agent_id="rank/0", incarnation="i", trainer=agent_pb2.TrainerHello(generation=1)
        )
        from weightplane.v1 import agent_pb2_grpc

        stream = agent_pb2_grpc.AgentServiceStub(trainer.channel).Session(metadata=bearer(Role.INFERENCE))
        await stream.write(agent_pb2.SessionRequest(hello=hello))
        assert await reason(stream.read()) == "PERMISSION_DENIED"
        await trainer.channel.close()
