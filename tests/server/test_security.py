"""Who may call what, and how that is known."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor, message_factory

from tests.server.certificates import HAS_OPENSSL, authority, certificate
from tests.server.scripted import FAST, reason_of, server
from weightplane.controlplane.dial import Dial
from weightplane.controlplane.server.app import CLIENT_OPTIONS, ServerConfig, serve
from weightplane.controlplane.server.security import RPC_ROLES, Role, Security, Tls, is_loopback, parse_tokens
from weightplane.controlplane.store.memory import MemoryStore
from weightplane.v1 import agent_pb2, fleet_pb2, fleet_pb2_grpc, weight_transfer_pb2

TOKENS = {role: f"{role.value}-{'s3cret' * 4}" for role in Role}
METHODS: list[descriptor.MethodDescriptor] = [
    method
    for file, name in (
        (weight_transfer_pb2, "WeightTransferService"),
        (fleet_pb2, "FleetService"),
        (agent_pb2, "AgentService"),
    )
    for method in file.DESCRIPTOR.services_by_name[name].methods
]


def path(method: descriptor.MethodDescriptor) -> str:
    assert method.containing_service is not None
    return f"/{method.containing_service.full_name}/{method.name}"


def test_the_table_names_every_rpc_and_nothing_else() -> None:
    assert set(RPC_ROLES) == {path(m) for m in METHODS}
    assert all(RPC_ROLES.values())


async def call(channel: grpc.aio.Channel, method: descriptor.MethodDescriptor, token: str | None) -> str:
    """Call with an empty request; the reason of the refusal, or OK."""
    assert method.input_type is not None
    request = message_factory.GetMessageClass(method.input_type)()
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
            stream = stub(metadata=metadata, timeout=5)
            await stream.write(request)
            await stream.read()
        elif method.server_streaming:
            async for _ in stub(request, metadata=metadata, timeout=5):
                break
        else:
            await stub(request, metadata=metadata, timeout=5)
    except grpc.aio.AioRpcError as e:
        return reason_of(e)
    return "OK"


async def test_each_rpc_admits_its_roles_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    text = "# who may what\n" + "\n".join(f"{role} {token}" for role, token in TOKENS.items())
    config = ServerConfig(MemoryStore(), core=FAST, security=Security(tokens=parse_tokens(text)))
    with caplog.at_level(logging.DEBUG):
        async with server(config) as running, grpc.aio.insecure_channel(running.address) as channel:
            for method in METHODS:
                assert await call(channel, method, None) == "UNAUTHENTICATED", method.name
                assert await call(channel, method, "x" * 30) == "UNAUTHENTICATED", method.name
                assert await call(channel, method, TOKENS[Role.VIEWER][:-1]) == "UNAUTHENTICATED", method.name
                for role in Role:
                    reason = await call(channel, method, TOKENS[role])
                    if role in RPC_ROLES[path(method)]:
                        assert reason not in ("PERMISSION_DENIED", "UNAUTHENTICATED"), (method.name, role)
                    else:
                        assert reason == "PERMISSION_DENIED", (method.name, role)
    assert not any(token in caplog.text for token in TOKENS.values())


async def test_finer_rules_within_a_call() -> None:
    from tests.server.scripted import Trainer

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


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("unix:/tmp/x", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("example.com:1", False),
        (":1", False),
    ],
)
def test_only_loopback_is_open_without_being_asked(
    address: str, loopback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert is_loopback(address) is loopback
    if loopback:
        Security().check(address)
        return
    with pytest.raises(ValueError, match="not loopback"):
        Security().check(address)
    with caplog.at_level(logging.WARNING):
        Security(insecure=True).check(address)
    assert "without TLS" in caplog.text


async def test_an_open_address_is_refused_before_anything_happens() -> None:
    store = MemoryStore()
    with pytest.raises(ValueError, match="not loopback"):
        async with server(ServerConfig(store, "0.0.0.0:0")):
            pass
    assert store.disk.epoch == 0
    async with server(ServerConfig(store, "0.0.0.0:0", security=Security(insecure=True))) as running:
        assert running.address.startswith("0.0.0.0:")


def test_faulty_tokens_are_named_by_line_and_never_shown() -> None:
    for line in ("trainer short", "nobody abcdefghijklmnopqrst", "abcdefghijklmnopqrst", "a b c"):
        with pytest.raises(ValueError, match="line 2") as error:
            parse_tokens(f"# first\n{line}\n")
        assert "abcdefghijklmnopqrst" not in str(error.value) and "short" not in str(error.value)
    security = Security(tokens=parse_tokens("trainer+viewer abcdefghijklmnopqrst  # job 7"))
    assert "abcdefghijklmnopqrst" not in repr(security)
    (identity,) = security.tokens.values()
    assert identity.roles == {Role.TRAINER, Role.VIEWER}


@pytest.mark.skipif(not HAS_OPENSSL, reason="needs the openssl command")
async def test_tls_and_client_certificates_with_roles(tmp_path: Path) -> None:
    ca = authority(tmp_path)
    cert, key = certificate(tmp_path, "server", "weightplane")
    viewer = certificate(tmp_path, "viewer", "viewer/dashboard")
    nobody = certificate(tmp_path, "nobody", "somebody else")
    security = Security(tls=Tls(cert, key, client_ca=ca))
    async with server(ServerConfig(MemoryStore(), security=security)) as running:

        async def list_groups(pair: tuple[Path, Path] | None) -> str:
            credentials = grpc.ssl_channel_credentials(
                ca.read_bytes(),
                pair[1].read_bytes() if pair is not None else None,
                pair[0].read_bytes() if pair is not None else None,
            )
            async with grpc.aio.secure_channel(running.address, credentials, options=CLIENT_OPTIONS) as channel:
                stub = fleet_pb2_grpc.FleetServiceStub(channel)
                try:
                    await stub.ListGroups(fleet_pb2.ListGroupsRequest(), timeout=2)
                    drain = fleet_pb2.DrainReplicaRequest(request_id="1", group="g", replica_id="r")
                    await stub.DrainReplica(drain, timeout=2)
                except grpc.aio.AioRpcError as e:
                    if e.code() is grpc.StatusCode.UNAVAILABLE:
                        return "UNAVAILABLE"
                    return reason_of(e) + ": " + (e.details() or "")
                return "OK"

        assert (await list_groups(viewer)).startswith("PERMISSION_DENIED: DrainReplica: expected role operator")
        assert (await list_groups(nobody)).startswith("PERMISSION_DENIED: ListGroups")
        assert await list_groups(None) == "UNAVAILABLE"
        async with grpc.aio.insecure_channel(running.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await fleet_pb2_grpc.FleetServiceStub(channel).ListGroups(fleet_pb2.ListGroupsRequest(), timeout=1)


@pytest.mark.skipif(not HAS_OPENSSL, reason="needs the openssl command")
async def test_tls_with_a_token(tmp_path: Path) -> None:
    ca = authority(tmp_path)
    cert, key = certificate(tmp_path, "server", "weightplane")
    security = Security(tls=Tls(cert, key), tokens=parse_tokens(f"viewer {TOKENS[Role.VIEWER]}"))
    async with server(ServerConfig(MemoryStore(), security=security)) as running:
        credentials = grpc.ssl_channel_credentials(ca.read_bytes())
        async with grpc.aio.secure_channel(running.address, credentials) as channel:
            (method,) = [m for m in METHODS if m.name == "ListGroups"]
            assert await call(channel, method, TOKENS[Role.VIEWER]) == "OK"
            assert await call(channel, method, None) == "UNAUTHENTICATED"


async def test_c44_a_client_that_pings_hard_keeps_its_long_call() -> None:
    """C44: GOAWAY too_many_pings must not end a long call of a client with keepalive on."""
    from tests.server.scripted import fleet

    hard = [
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_timeout_ms", 2000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_time_between_pings_ms", 200),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    async with server() as running, fleet(running.address, 1) as (trainer, _):
        first = await trainer.start(update_timeout_ms=20_000)
        async with grpc.aio.insecure_channel(running.address, options=hard) as channel:
            from weightplane.v1 import common_pb2, weight_transfer_pb2_grpc

            stub = weight_transfer_pb2_grpc.WeightTransferServiceStub(channel)
            request = trainer.start_request(on_busy=common_pb2.ON_BUSY_WAIT)
            waiting = asyncio.ensure_future(stub.StartUpdate(request, timeout=20))
            started = time.monotonic()
            await asyncio.sleep(7)
            assert not waiting.done()
            await trainer.weights(first)
            await trainer.rest(first)
            assert (await waiting).version == 2 and time.monotonic() - started >= 7


def test_a_server_survives_in_a_thread_and_leaves_signals_alone() -> None:
    script = (
        "import asyncio, signal, threading\n"
        "from weightplane.controlplane.server.app import ServerConfig, serve\n"
        "from weightplane.controlplane.store.memory import MemoryStore\n"
        "before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)\n"
        "async def main():\n"
        "    running = await serve(ServerConfig(MemoryStore()))\n"
        "    print(running.address)\n"
        "    await running.stop()\n"
        "    await running.stop()\n"
        "t = threading.Thread(target=lambda: asyncio.run(main()))\n"
        "t.start(); t.join()\n"
        "assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))\n"
        "import sys; assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"127\.0\.0\.1:\d+\n", done.stdout)


@pytest.mark.parametrize("port", ["", "x", "-1", "65536", "999999", "\u0661\u0662"])
async def test_a_port_that_is_none_is_refused_to_listen_on_and_to_dial(port: str) -> None:
    with pytest.raises(ValueError, match="expected host:port with a port from 0 to 65535"):
        await serve(ServerConfig(MemoryStore(), address=f"127.0.0.1:{port}"))
    with pytest.raises(ValueError, match="expected host:port with a port from 1 to 65535"):
        Dial(f"127.0.0.1:{port}")
