"""Who may call what, and how that is known."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

from tests.server.certificates import HAS_OPENSSL, authority, certificate
from tests.server.scripted import reason_of, server
from weightplane.controlplane.dial import Dial
from weightplane.controlplane.server.app import CLIENT_OPTIONS, ServerConfig, serve
from weightplane.controlplane.server.security import Role, Security, Tls, is_loopback, parse_tokens
from weightplane.controlplane.store.memory import MemoryStore
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc

TOKENS = {role: f"{role.value}-{'s3cret' * 4}" for role in Role}


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
        ("127.0.0.1.example.com:1", False),
        ("localhost.example.com:1", False),
        ("[::ffff:10.0.0.1]:1", False),
    ],
)
def test_only_loopback_is_open_without_being_asked(
    address: str, loopback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert is_loopback(address) is loopback
    tls, tokens = Tls(Path("c"), Path("k")), parse_tokens(f"viewer {'s3cret' * 4}")
    if loopback:
        Security().check(address)
        return
    for short in (Security(), Security(tokens=tokens), Security(tls=tls)):
        with pytest.raises(ValueError, match="not loopback"):
            short.check(address)
    Security(tls=tls, tokens=tokens).check(address)
    Security(tls=Tls(Path("c"), Path("k"), Path("ca"))).check(address)
    assert not caplog.text
    for loud in (Security(insecure=True), Security(tls=tls, insecure=True)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            loud.check(address)
        assert "INSECURE" in caplog.text


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
            stub = fleet_pb2_grpc.FleetServiceStub(channel)
            bearer = [("authorization", f"Bearer {TOKENS[Role.VIEWER]}")]
            await stub.ListGroups(fleet_pb2.ListGroupsRequest(), timeout=5, metadata=bearer)
            with pytest.raises(grpc.aio.AioRpcError) as e:
                await stub.ListGroups(fleet_pb2.ListGroupsRequest(), timeout=5)
            assert reason_of(e.value) == "UNAUTHENTICATED"


async def test_C44_a_client_that_pings_hard_keeps_its_long_call() -> None:
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
