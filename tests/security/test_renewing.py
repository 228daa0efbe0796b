"""A client that was started with files takes renewed certificates, and keeps the old ones while they are half there."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from pathlib import Path

import grpc
import pytest

from tests.inference_agent.server import Server
from tests.server.certificates import HAS_OPENSSL
from weightplane.controlplane import renewing
from weightplane.controlplane.certificates import Authority
from weightplane.controlplane.dial import Dial
from weightplane.controlplane.server.security import Security, Tls
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc

pytestmark = pytest.mark.skipif(not HAS_OPENSSL, reason="needs the openssl command")


def test_a_channel_follows_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(renewing, "_LOOK_S", 0.0)
    authority = Authority(tmp_path)
    authority.ensure()
    server, mine = authority.server([]), authority.member(["viewer"], "me")
    for name, path in {"CA": authority.ca, "CERT": mine.certificate, "KEY": mine.key}.items():
        monkeypatch.setenv(f"WEIGHTPLANE_{name}", str(path))
    monkeypatch.delenv("WEIGHTPLANE_TOKEN", raising=False)
    plane = Server(security=Security(tls=Tls(server.certificate, server.key, authority.ca))).start()
    try:
        dial = Dial.from_dict(Dial.from_environment(plane.address).to_dict())  # as the heartbeat's process gets it
        with dial.channel() as channel:
            fleet = fleet_pb2_grpc.FleetServiceStub(channel)

            def ask() -> str:
                try:
                    fleet.ListGroups(fleet_pb2.ListGroupsRequest(), timeout=5)
                    fleet.GetGroup(fleet_pb2.GetGroupRequest(group="g"), timeout=5)
                except grpc.RpcError as e:
                    assert isinstance(e, grpc.Call)
                    return str(e.details())
                return "OK"

            assert "no group 'g' here" in ask()
            mine.key.write_text("half a ke")
            with caplog.at_level(logging.ERROR):
                assert "no group 'g' here" in ask()
                assert "no group 'g' here" in ask()
            assert caplog.text.count("those read before stay in use") == 1
            authority.member(["viewer"], "me", groups=["other"])  # renewed, and confined
            assert "viewer/me is confined to group other" in ask()
    finally:
        plane.stop()


def test_a_slow_handshake_is_waited_for(tmp_path: Path) -> None:
    """A server that many dial at once answers late: giving up each attempt early would make it ever later."""
    authority = Authority(tmp_path)
    authority.ensure()
    server, mine = authority.server([]), authority.member(["viewer"], "me")
    plane = Server(security=Security(tls=Tls(server.certificate, server.key, authority.ca))).start()
    host, _, port = plane.address.rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pass_on(source: socket.socket, sink: socket.socket, delay: float) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    time.sleep(delay)
                    sink.sendall(data)
                sink.shutdown(socket.SHUT_WR)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    far = socket.create_connection((host, int(port)))
                    threading.Thread(target=pass_on, args=(near, far, 0.0), daemon=True).start()
                    threading.Thread(target=pass_on, args=(far, near, 0.5), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        pair = mine.certificate.read_bytes(), mine.key.read_bytes()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        try:
            with Dial(
                address, tls=True, ca_pem=authority.ca.read_bytes(), cert_pem=pair[0], key_pem=pair[1]
            ).channel() as channel:
                fleet_pb2_grpc.FleetServiceStub(channel).ListGroups(fleet_pb2.ListGroupsRequest(), timeout=10)
        finally:
            plane.stop()
