"""Who is no member of a channel gets nothing at its ports: the data port, the control sockets, the workers' socket.

The shared-memory segments and the control connections of ``ucx`` and ``cuda_ipc`` have theirs in
``tests/transports/test_shm.py`` and ``test_pull.py`` (keys, 0600, proofs of both sides, junk, strangers).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from tests.security.target import BUCKETS, KEY, TOKEN
from tests.server.certificates import HAS_OPENSSL
from weightplane.controlplane.certificates import Authority, Made
from weightplane.controlplane.core.plan import Bucket, Segment
from weightplane.controlplane.dial import Dial
from weightplane.controlplane.server import agent_service, app, artifacts, coordinator, pacing
from weightplane.inference_agent import generate
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.engines.vllm import links
from weightplane.inference_agent.generate import GenerateServer
from weightplane.inference_agent.vllm_plugin.session import WorkerSession
from weightplane.inference_agent.vllm_plugin.wire import PROTOCOL, Hello, State
from weightplane.trainer_agent import ModuleSource, Publisher
from weightplane.transports import grpc_data_port, grpc_tls, pull_control
from weightplane.transports.base import ChannelSpec, PeerLost, TransportError
from weightplane.transports.grpc_data_port import GrpcReceiveChannel
from weightplane.transports.grpc_stream import GrpcTransport
from weightplane.v1.transport_pb2 import TransferOpen, TransferRequest, TransferResponse

PATH = "/weightplane.v1.TensorService/Transfer"
ONE = Bucket(0, "rank/0", ("r0/0",), (Segment(0, 0, 4096),), 4096)


@pytest.fixture(autouse=True)
def no_agent_of_this_process_has_a_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_tls, "_presented", [])


@pytest.fixture
def transport() -> Iterator[GrpcTransport]:
    made = GrpcTransport()
    yield made
    made.shutdown()


def spec(transport: GrpcTransport, **changes: Any) -> ChannelSpec:
    offers = {m: transport.offer(m) for m in ("rank/0", "r0/0")}
    given: dict[str, Any] = {"channel_id": "c", "group": "g", "transport": "grpc", "key": KEY, "offers": offers}
    return ChannelSpec(**{**given, "senders": ("rank/0",), "receivers": ("r0/0",), "bucket_bytes": 4096, **changes})


@pytest.fixture
def receiver(transport: GrpcTransport) -> Iterator[GrpcReceiveChannel]:
    made = transport.open_receiver(spec(transport), "r0/0")
    made.arm(TOKEN, BUCKETS[:1], time.monotonic() + 60)
    yield made
    made.close()


def opened(transport: GrpcTransport, key: bytes | None, **changes: Any) -> str:
    """What an opening gets: a code, or OPEN."""
    given: dict[str, Any] = {"channel_id": "c", "update_id": TOKEN.update_id, "epoch": 1, "generation": 1}
    opening = TransferOpen(**{**given, "sender": "rank/0", "receiver": "r0/0", **changes})
    metadata = () if key is None else (("weightplane-channel-key-bin", key),)
    own = [
        ("grpc.use_local_subchannel_pool", 1)
    ]  # a port of an earlier test may have been this one, and is backed off from
    with grpc.insecure_channel(transport.offer("r0/0").grpc.address, own) as channel:
        call: Any = channel.stream_stream(PATH, None, TransferResponse.FromString)
        messages = [TransferRequest(open=opening), TransferRequest(bucket=0, offset=0, data=bytes(4096))]
        try:
            sent = iter([m.SerializeToString() for m in messages])
            for answer in call(sent, metadata=metadata, timeout=10, wait_for_ready=True):
                assert answer.bucket == -1
                return "OPEN"
        except grpc.RpcError as e:
            assert isinstance(e, grpc.Call)
            return str(e.code().name)
    return "ended"


def test_a_data_port_is_open_to_the_key_of_a_channel_and_to_nothing_else(
    transport: GrpcTransport, receiver: GrpcReceiveChannel
) -> None:
    for key in (None, b"", bytes(32), KEY[:31], KEY + b"x"):
        assert opened(transport, key) == "PERMISSION_DENIED", key
    assert opened(transport, KEY, channel_id="another") == "NOT_FOUND"
    assert opened(transport, KEY, receiver="r1/0") == "NOT_FOUND"
    assert opened(transport, KEY, sender="rank/1") == "PERMISSION_DENIED"
    assert opened(transport, KEY, epoch=0) == "FAILED_PRECONDITION"  # of an epoch that is over
    assert receiver.bytes_landed == 0
    assert opened(transport, KEY) == "OPEN"
    receiver.close()
    assert opened(transport, KEY) == "NOT_FOUND"  # the key dies with its channel


@pytest.fixture
def authorities(tmp_path: Path) -> tuple[Authority, Authority]:
    made = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    for authority in made:
        authority.ensure()
    return made


def use(monkeypatch: pytest.MonkeyPatch, prefix: str, made: Made | None) -> None:
    """This process's certificate, from now on."""
    for name, path in {"CERT": made and made.certificate, "KEY": made and made.key}.items():
        monkeypatch.setenv(f"WEIGHTPLANE_{prefix}{name}", str(path or ""))


def send(transport: GrpcTransport, made: ChannelSpec) -> None:
    sender = transport.open_sender(made, "rank/0")
    try:
        sender.arm(TOKEN, [ONE], time.monotonic() + 8)
        sender.send(ONE, [torch.full((4096,), 7, dtype=torch.uint8)])
        sender.flush()
    finally:
        sender.close()


@pytest.mark.skipif(not HAS_OPENSSL, reason="needs the openssl command")
def test_a_data_port_with_tls_asks_for_a_certificate_and_says_what_is_wrong(
    authorities: tuple[Authority, Authority], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = authorities
    monkeypatch.setenv("WEIGHTPLANE_CA", str(ours.ca))
    use(monkeypatch, "DATA_", ours.member(["inference"], "dev"))
    transport = GrpcTransport()
    made = spec(transport)
    assert made.offers["r0/0"].grpc.ca_pem == ours.ca.read_bytes()
    receiver = transport.open_receiver(made, "r0/0")
    receiver.arm(TOKEN, [ONE], time.monotonic() + 60)
    target = torch.zeros(4096, dtype=torch.uint8)
    try:
        with grpc.insecure_channel(made.offers["r0/0"].grpc.address) as channel:  # plaintext
            with pytest.raises(grpc.RpcError):
                call: Any = channel.stream_stream(PATH)
                list(call(iter([b""]), timeout=3))
        use(monkeypatch, "", theirs.member(["trainer"], "dev"))
        with pytest.raises(PeerLost, match="the server does not accept our client certificate"):
            send(transport, made)
        use(monkeypatch, "", None)
        with pytest.raises(PeerLost, match="demands a client certificate: set WEIGHTPLANE_CERT and WEIGHTPLANE_KEY"):
            send(transport, made)
        assert receiver.bytes_landed == 0
        use(monkeypatch, "", ours.member(["trainer"], "dev"))
        thread = threading.Thread(target=receiver.receive, args=(ONE, [target]))
        thread.start()
        send(transport, made)
        thread.join(10)
        assert bool((target == 7).all())
    finally:
        receiver.close()
        transport.shutdown()


@pytest.mark.parametrize(
    ("bind", "advertise", "words"),
    [
        ("0.0.0.0:0", "10.0.0.1:1", "give it a certificate"),
        ("127.0.0.1.example.com:0", "", "give it a certificate"),
        ("0.0.0.0:0", "", "say what senders dial"),
        ("127.0.0.1:0", "0.0.0.0:1", "a wildcard address reaches nobody"),
    ],
)
def test_a_data_port_off_loopback_needs_a_certificate(
    bind: str, advertise: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTPLANE_DATA_BIND", bind)
    monkeypatch.setenv("WEIGHTPLANE_DATA_ADVERTISE", advertise)
    transport = GrpcTransport()
    assert words in transport.probe().reason
    with pytest.raises(TransportError, match=words):
        transport.offer("r0/0")


def test_insecure_ports_are_logged_at_every_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WEIGHTPLANE_INSECURE", "1")
    monkeypatch.setenv("WEIGHTPLANE_DATA_BIND", "0.0.0.0:0")
    monkeypatch.setenv("WEIGHTPLANE_DATA_ADVERTISE", "10.0.0.1:1")
    for _ in range(2):
        transport = GrpcTransport()
        transport.offer("r0/0")
        transport.shutdown()
        engine = TorchModuleEngine(torch.nn.Linear(1, 1))
        GenerateServer(engine, lambda *_, **__: [], host="0.0.0.0", insecure=True).start().stop()
    said = [r.getMessage() for r in caplog.records if "INSECURE, as asked for" in r.getMessage()]
    assert sum("data port" in s for s in said) == 2 and sum("/generate" in s for s in said) == 2


# --- the socket of an agent for its engine's workers


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[tuple[links.Listener, list[str]]]:
    known: list[str] = []
    made = links.Listener(str(tmp_path), lambda token, link, hello: known.append(hello.life))
    made.expect({"the-token-of-this-life"})
    yield made, known
    made.close()


def say(path: str, data: bytes) -> bytes:
    """What a worker that says this is told; empty: it is let go."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.settimeout(15)
        made.connect(path)
        made.sendall(data)
        try:
            return made.recv(100)
        except ConnectionResetError:
            return b""


def hello(token: str) -> bytes:
    made = Hello(PROTOCOL, token, 0, 1, "life", os.getpid(), "cpu", "", "0", "m", "", "", State())
    data = json.dumps({"tell": "hello", **made.json()}).encode()
    return len(data).to_bytes(4, "big") + data


def test_a_workers_socket_is_this_users_alone_and_asks_for_its_token(
    workers: tuple[links.Listener, list[str]],
) -> None:
    listener, known = workers
    assert listener.folder.stat().st_mode & 0o777 == 0o700 and listener.folder.stat().st_uid == os.getuid()
    for token in ("", "another", "thé", "the-token-of-this-life "):
        assert say(listener.path, hello(token)) == b""
    for junk in (b"\x00\x00\x00\x02[]", b"\x00\x00\x00\x05junk!", b'\x00\x00\x00\x09{"id": 1}', b"\xff" * 64):
        assert say(listener.path, junk) == b""
    assert known == []
    assert b"welcome" in say(listener.path, hello("the-token-of-this-life"))
    assert known == ["life"]


def test_who_has_not_shown_the_token_makes_the_agent_hold_little(workers: tuple[links.Listener, list[str]]) -> None:
    listener, _ = workers
    tracemalloc.start()
    try:
        assert say(listener.path, (1 << 29).to_bytes(4, "big") + b"{") == b""
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(links._GREETED + 20)]
    before = threading.active_count()
    try:
        for made in silent:
            made.connect(listener.path)
        time.sleep(0.3)
        assert threading.active_count() - before <= links._GREETED
    finally:
        for made in silent:
            made.close()
    assert b"welcome" in say(listener.path, hello("the-token-of-this-life"))


def test_the_connections_of_generate_are_bounded_and_who_asks_for_longest_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generate, "_MOST_CONNECTIONS", 3)
    begun, go_on = threading.Semaphore(0), threading.Event()

    def slow(*_: object, **__: object) -> list[Any]:
        begun.release()
        assert go_on.wait(60)
        return []

    server = GenerateServer(TorchModuleEngine(torch.nn.Linear(1, 1)), slow, serve_unsynced=True).start()
    host, _, port = server.address.rpartition(":")

    def made(said: bytes = b"") -> socket.socket:
        s = stack.enter_context(contextlib.closing(socket.create_connection((host, int(port)), 10)))
        s.sendall(said)
        return s

    version = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    body = json.dumps({"prompts": [[1]], "max_new_tokens": 1}).encode()
    asked = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        stack.callback(go_on.set)
        first, *_others = [made() for _ in range(3)]
        assert made(version).recv(15) == b"HTTP/1.1 200 OK"
        assert first.recv(1) == b""
        for _ in range(3):
            made(asked)
            assert begun.acquire(timeout=20)
        with contextlib.suppress(ConnectionResetError):
            assert made(version).recv(1) == b"", "all are being answered"
        go_on.set()
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(ConnectionError):
                if made(version).recv(15) == b"HTTP/1.1 200 OK":
                    break
            assert time.monotonic() < deadline


def test_the_bounds_that_are_published_are_the_codes() -> None:
    text = (Path(__file__).resolve().parents[2] / "SECURITY.md").read_text()
    limits = artifacts.Limits()
    said = {
        f"a request | {dict(app.SERVER_OPTIONS)['grpc.max_receive_message_length'] >> 20} MiB": True,  # type: ignore[operator]
        f"of a session {agent_service.MAX_MESSAGE >> 10} KiB": True,
        f"| {app.ServerConfig.calls:,}, more are refused": True,
        f"{pacing._CALLS_S:.0f} a second after a burst of {pacing._CALLS}": True,
        f"{agent_service._MESSAGES_S:.0f} a second after a burst of {agent_service._MESSAGES}": True,
        f"{coordinator._MAX_GROUPS}; {limits.replicas}": True,
        f"tensors {limits.tensors:,}; pieces of a placement {limits.pieces:,}": True,
        f"manifests {limits.manifests}, layouts {limits.layouts}, plans {limits.plans}": True,
        f"{grpc_data_port._STREAMS} streams": True,
        f"{pull_control._UNPROVEN} connections that have shown no key, for {pull_control._PROVE_S:.0f} s": True,
        f"{links._GREETED} that have shown no token, for {links._HELLO_S:.0f} s and {links._FIRST >> 10} KiB": True,
        f"{generate._MOST_CONNECTIONS} connections, bodies of {generate._MAX_BODY >> 20} MiB": True,
    }
    assert {words: words in text for words in said} == said


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_a_worker_attaches_to_no_other_users_socket(tmp_path: Path) -> None:
    """Whoever reaches vLLM's HTTP port can name a path: the worker looks at who listens there."""
    path = str(tmp_path / "agent.sock")
    script = (
        "import os, socket, sys, time\n"
        "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); os.chmod(sys.argv[1], 0o777)\n"
        "os.setuid(65534); s.listen(1); print('listens', flush=True); time.sleep(60)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", script, path], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline() == b"listens\n"
        said = Hello(PROTOCOL, "t", 0, 1, "life", 1, "cpu", "", "0", "m", "", "", State())
        worker: Any = object()  # never reached
        with pytest.raises(RuntimeError, match="a process of user 65534 is at the other end; this one runs as 0"):
            WorkerSession(worker, path, said).start()
    finally:
        other.kill()
        other.communicate()


def test_the_certificate_of_an_agent_that_is_over_is_shown_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CA", "CERT", "KEY"):
        monkeypatch.delenv(f"WEIGHTPLANE_{name}", raising=False)
    first, second = (Dial("127.0.0.1:1", tls=True, ca_pem=b"ca", cert_pem=c, key_pem=b"key") for c in (b"one", b"two"))

    def shown() -> bytes | None:
        mine = grpc_tls.own()
        return mine.cert if mine is not None else None

    for dial in (first, second):
        grpc_tls.present(dial)
    assert shown() == b"two"
    grpc_tls.withdraw(second)
    assert shown() == b"one"
    grpc_tls.withdraw(Dial("127.0.0.1:1", tls=True, ca_pem=b"ca", cert_pem=b"one", key_pem=b"key"))  # not that agent
    assert shown() == b"one"
    agent = InferenceAgent(second, "g", "r0", TorchModuleEngine(torch.nn.Linear(1, 1)), heartbeat=False).start()
    assert shown() == b"two"
    agent.stop()
    assert shown() == b"one"
    Publisher(second, "g", ModuleSource(torch.nn.Linear(1, 1))).close()
    assert shown() == b"one"
    grpc_tls.withdraw(first)
    assert shown() is None and GrpcTransport().offer("r0/0").grpc.ca_pem == b""
