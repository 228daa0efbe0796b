"""The gateway's streams, and callers that are slow, silent, too many, or gone."""

# ruff: noqa: E402 - what follows the check for the extra imports it
from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn", reason="the extra weightplane[gateway] is not installed")
pytest.importorskip("starlette", reason="the extra weightplane[gateway] is not installed")

from tests.server.by_http import FLEET, TOKENS, TRANSFER, bearer, connection, eventually, gated, post
from tests.server.certificates import HAS_OPENSSL, authority, certificate
from tests.server.scripted import fleet, server, until
from weightplane.controlplane.server import gateway, gateway_call, gateway_listener
from weightplane.controlplane.server.app import ServerConfig
from weightplane.controlplane.server.gateway_call import HttpContext, Lines, Method
from weightplane.controlplane.server.security import Role, Security, Tls
from weightplane.controlplane.store.memory import MemoryStore
from weightplane.v1 import fleet_pb2


async def test_a_stream_is_lines_as_they_come_and_ends_with_its_caller() -> None:
    async with gated() as running, fleet(running.address, 1) as (trainer, _):
        group = running.coordinator.group("g")
        watchers = len(group.watchers)
        asking = connection(running.gateway)
        head = {"Content-Type": "application/json"}

        def begin() -> http.client.HTTPResponse:
            asking.request("POST", FLEET + "WatchGroup", b'{"group": "g"}', head)
            return asking.getresponse()

        answer = await asyncio.to_thread(begin)
        assert answer.getheader("content-type") == "application/x-ndjson"
        first = json.loads(await asyncio.to_thread(answer.readline))
        assert first["full"] and first["group"]["committed"]["version"] == "0"
        await trainer.publish()
        newest = first
        while newest["group"]["committed"]["version"] != "1":
            newest = json.loads(await asyncio.to_thread(answer.readline))
        assert len(group.watchers) == watchers + 1
        answer.close()
        asking.close()
        await until(lambda: len(group.watchers) == watchers, "the server's side of the stream ends")


async def test_a_stream_that_is_refused_is_an_answer_and_one_that_fails_says_so_last() -> None:
    async with gated() as running:
        status, said = await post(running, FLEET + "WatchGroup", {"group": "nobody"})
        assert (status, said["reason"]) == (404, "UNKNOWN_GROUP")
        await post(running, FLEET + "CreateGroup", {"group": "g", "request_id": "q"})

        def all_of_it() -> list[dict[str, Any]]:
            asking = connection(running.gateway)
            head = {"Content-Type": "application/json", "Weightplane-Timeout": "0.3"}
            asking.request("POST", FLEET + "WatchGroup", b'{"group": "g"}', head)
            answer = asking.getresponse()
            assert answer.status == 200
            return [json.loads(line) for line in answer]

        *_, last = await asyncio.to_thread(all_of_it)
        assert last["error"]["code"] == "DEADLINE_EXCEEDED"


async def test_a_token_that_is_withdrawn_ends_its_streams_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    viewer = f"viewer {TOKENS[Role.VIEWER]}\n"
    file.write_text(viewer + f"operator {TOKENS[Role.OPERATOR]}\n")
    file.chmod(0o600)
    async with gated(Security(token_file=file)) as running:
        await post(running, FLEET + "CreateGroup", {"group": "g", "request_id": "q"}, **bearer(Role.OPERATOR))
        asking = connection(running.gateway)
        head = {"Content-Type": "application/json", **bearer(Role.OPERATOR)}

        def begin() -> http.client.HTTPResponse:
            asking.request("POST", FLEET + "WatchGroup", b'{"group": "g"}', head)
            return asking.getresponse()

        answer = await asyncio.to_thread(begin)
        await asyncio.to_thread(answer.readline)
        file.write_text(viewer)
        last = json.loads(await asyncio.to_thread(answer.readline))
        assert last["error"]["code"] == "UNAUTHENTICATED"
        asking.close()


# --- callers that misbehave -----------------------------------------------------------------------------------------


async def test_a_call_ends_with_its_caller_or_its_time() -> None:
    async with gated() as running, fleet(running.address, 1) as (trainer, _):
        u = await trainer.start()
        group = running.coordinator.group("g")
        asked = {
            "group": "g",
            "generation": str(trainer.generation),
            "manifest_id": trainer.manifest.id,
            "on_busy": "ON_BUSY_WAIT",
        }
        status, said = await post(
            running, TRANSFER + "StartUpdate", {**asked, "request_id": "late"}, weightplane_timeout="0.5"
        )
        assert (status, said["reason"]) == (400, "UPDATE_IN_PROGRESS"), said  # the core's own word at the deadline
        await until(lambda: not group.state.queue, "whoever waited is forgotten")
        asking = connection(running.gateway)

        def send() -> None:
            body = json.dumps({**asked, "request_id": "gone"}).encode()
            asking.request("POST", TRANSFER + "StartUpdate", body, {"Content-Type": "application/json"})

        await asyncio.to_thread(send)
        await until(lambda: len(group.state.queue) == 1, "it waits")
        asking.close()
        await until(lambda: not group.state.queue, "it is forgotten")
        assert group.state.open is not None and group.state.open.update_id == u.update_id


async def test_a_call_that_does_not_end_in_time_is_answered_for_and_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = asyncio.Event()

    async def never(*_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(gateway, "_GRACE_S", 0.1)
    monkeypatch.setattr("weightplane.controlplane.server.fleet_service.FleetService.ListGroups", never)
    async with gated() as running:
        status, said = await post(running, FLEET + "ListGroups", weightplane_timeout="0.2")
        assert (status, said["code"]) == (504, "DEADLINE_EXCEEDED") and "unknown: ask GetUpdate" in said["message"]
        await asyncio.wait_for(ended.wait(), 5)


async def test_silent_and_slow_callers_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_listener, "_IDLE_S", 0.3)
    monkeypatch.setattr(gateway, "_BODY_S", 0.3)
    async with gated() as running:
        port = int(running.gateway.rpartition(":")[2])

        def talk(said: bytes) -> bytes:
            with socket.create_connection(("127.0.0.1", port), 10) as s:
                s.sendall(said)
                heard = b""
                while piece := s.recv(65536):
                    heard += piece
                return heard

        head = f"POST {FLEET}ListGroups HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
        assert await asyncio.to_thread(talk, b"") == b""
        assert await asyncio.to_thread(talk, head) == b""
        slow = await asyncio.to_thread(talk, head + b"Connection: close\r\nContent-Length: 9\r\n\r\n{")
        assert slow.startswith(b"HTTP/1.1 408") and b"DEADLINE_EXCEEDED" in slow
        assert (await asyncio.to_thread(talk, b"\x16\x03\x01 junk\r\n\r\n")).startswith(b"HTTP/1.1 400")
        assert (await post(running, FLEET + "ListGroups"))[0] == 200


async def test_headers_that_drip_after_an_answer_are_let_go_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_listener, "_IDLE_S", 0.5)
    async with gated() as running:
        port = int(running.gateway.rpartition(":")[2])

        def drip() -> bytes:
            with socket.create_connection(("127.0.0.1", port), 10) as s:
                s.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                heard = b""
                while b"}]}" not in heard:
                    heard += s.recv(65536)
                s.settimeout(0.05)
                s.sendall(b"POST /x HTTP/1.1\r\nHost: localhost\r\n")
                while True:
                    try:
                        s.sendall(b"A: b\r\n")
                        return s.recv(65536)
                    except TimeoutError:
                        continue
                    except ConnectionError:
                        return b""

        assert await asyncio.wait_for(asyncio.to_thread(drip), 20) == b""


async def test_who_asks_for_longest_makes_room_and_one_too_many_is_told_so() -> None:
    async with gated() as running:
        port = int(running.gateway.rpartition(":")[2])
        head = f"POST {FLEET}ListGroups HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()

        def holding(said: bytes) -> list[socket.socket]:
            held = []
            for _ in range(gateway_listener._MOST):
                held.append(socket.create_connection(("127.0.0.1", port), 5))
                held[-1].sendall(said)
            return held

        def status() -> int:
            asking = connection(running.gateway)
            asking.request("POST", FLEET + "ListGroups", b"{}", {"Content-Type": "application/json"})
            return asking.getresponse().status

        with contextlib.ExitStack() as stack:
            for half in [head] * 3:
                for s in await asyncio.to_thread(holding, half):
                    stack.enter_context(contextlib.closing(s))
                assert await asyncio.to_thread(status) == 200
        with contextlib.ExitStack() as stack:
            for s in await asyncio.to_thread(holding, head + b"Content-Length: 9\r\n\r\n{"):  # their answers are due
                stack.enter_context(contextlib.closing(s))
            assert await asyncio.to_thread(eventually, lambda: status() == 429)
        assert await asyncio.to_thread(eventually, lambda: status() == 200)


async def test_of_300_streams_at_once_as_many_run_as_may_and_the_rest_are_told_why() -> None:
    async with gated() as running:
        await post(running, FLEET + "CreateGroup", {"group": "g", "request_id": "q"})
        port, group = int(running.gateway.rpartition(":")[2]), running.coordinator.group("g")

        async def one() -> tuple[asyncio.StreamWriter, bytes]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(asked("WatchGroup", b'{"group": "g"}'))
            return writer, await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30) + await reader.read(500)

        answers = await asyncio.gather(*(one() for _ in range(300)))
        refused = [said for _, said in answers if not said.startswith(b"HTTP/1.1 200")]
        assert len(refused) == 300 - gateway_listener._MOST == 300 - len(group.watchers)
        for said in refused:
            assert said.startswith(b"HTTP/1.1 429") and b"RESOURCE_EXHAUSTED" in said and b"at most 256" in said, said
        for writer, _ in answers:
            writer.close()
        await until(lambda: not group.watchers, "the streams end with their callers")


def asked(name: str, body: bytes, service: str = FLEET) -> bytes:
    head = f"POST {service}{name} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def test_a_line_that_many_are_sent_is_made_once_and_the_loop_turns_between_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """255 streams that were served at a stretch, each with JSON of its own, cost a publish seconds."""
    made, turns, over = 0, 0, False

    def counted(_: Any) -> bytes:
        nonlocal made
        made += 1
        return b"{}"

    async def others() -> None:
        nonlocal turns
        while not over:
            turns += 1
            await asyncio.sleep(0)

    lines, message = Lines(), fleet_pb2.WatchGroupResponse(revision=1)
    monkeypatch.setattr(gateway_call, "body_of", counted)
    busy = asyncio.create_task(others())
    said = await asyncio.gather(*(lines.of(message) for _ in range(255)))
    over = True
    await busy
    assert (len(said), made) == (255, 1) and turns >= 255


async def test_who_does_not_read_its_stream_is_let_go(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended, sent = asyncio.Event(), 0

    async def much(_: Any, __: Any, context: Any) -> None:
        nonlocal sent
        try:
            while True:
                await context.write(fleet_pb2.WatchGroupResponse(removed=["r" * 1000] * 30))
                sent += 1
        finally:
            ended.set()

    monkeypatch.setattr(gateway_listener, "_UNREAD_S", 0.5)
    monkeypatch.setattr("weightplane.controlplane.server.fleet_service.FleetService.WatchGroup", much)
    async with gated() as running:
        with socket.create_connection(("127.0.0.1", int(running.gateway.rpartition(":")[2])), 5) as unread:
            unread.sendall(asked("WatchGroup", b'{"group": "g"}'))
            await asyncio.wait_for(ended.wait(), 20)
            assert "WatchGroup" in caplog.text and "its caller took nothing for 0.5 s" in caplog.text
            assert sent < 200  # 6 MB: what the kernels' buffers hold is bounded, too


async def test_who_says_no_more_still_gets_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-closed: shutdown(SHUT_WR) after the request. The answer is due only once that was seen."""
    go_on, began = asyncio.Event(), asyncio.Event()

    async def late(*_: Any) -> fleet_pb2.ListGroupsResponse:
        began.set()
        await go_on.wait()
        return fleet_pb2.ListGroupsResponse()

    monkeypatch.setattr(gateway_listener, "_LOOKS", (0.05, 0.05, 0.05))
    monkeypatch.setattr("weightplane.controlplane.server.fleet_service.FleetService.ListGroups", late)
    async with gated() as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(running.gateway.rpartition(":")[2]))
        writer.write(asked("ListGroups", b"{}"))
        writer.write_eof()
        await began.wait()
        interim = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)  # its end was seen
        go_on.set()
        rest = interim + await asyncio.wait_for(reader.read(), 5)
        parts = [p for p in rest.split(b"\r\n\r\n") if not p.startswith(b"HTTP/1.1 100 ")]
        assert parts[0].startswith(b"HTTP/1.1 200") and json.loads(parts[1]) == {"groups": []}, rest
        writer.close()


async def test_a_stream_of_who_says_no_more_goes_on_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_listener, "_LOOKS", (0.05, 0.05, 0.05))
    async with gated() as running:
        await post(running, FLEET + "CreateGroup", {"group": "g", "request_id": "q"})
        group = running.coordinator.group("g")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(running.gateway.rpartition(":")[2]))
        writer.write(asked("WatchGroup", b'{"group": "g"}'))
        writer.write_eof()
        await asyncio.wait_for(reader.readuntil(b"\n1\r\n \r\n"), 5)  # its first line, and a look whether it is there
        await asyncio.wait_for(reader.readuntil(b"1\r\n \r\n"), 5)
        assert len(group.watchers) == 1
        policy = {"group": "g", "request_id": "p", "policy": {"min_replicas": 3}}
        assert (await post(running, FLEET + "UpdateGroup", policy))[0] == 200
        await asyncio.wait_for(reader.readuntil(b"min_replicas"), 5)
        writer.transport.abort()
        await until(lambda: not group.watchers, "it ends with its caller, who hears of nothing new")


async def test_a_taken_port_is_an_error_and_a_stopped_server_lets_go_of_its_own() -> None:
    async with gated() as running:
        taken = ServerConfig(MemoryStore(), gateway=running.gateway)
        with pytest.raises(OSError, match="another process listens there"):
            async with server(taken):
                pass
        again = replace(taken, store=MemoryStore())
    async with server(again) as later:
        assert later.gateway == running.gateway
        assert (await post(later, FLEET + "ListGroups"))[0] == 200


def test_a_gateway_in_the_open_needs_protection_as_the_rest_does() -> None:
    with pytest.raises(ValueError, match="not loopback"):
        asyncio.run(_serve_open())


async def _serve_open() -> None:
    async with server(ServerConfig(MemoryStore(), gateway="0.0.0.0:0")):
        pass


async def test_a_stream_whose_server_fails_ends_with_an_error_and_never_waits() -> None:
    async def fails(*_: Any) -> None:
        raise RuntimeError("a bug")

    method = Method(FLEET + "WatchGroup", fleet_pb2.WatchGroupRequest, fails, True, False)
    messages: asyncio.Queue[Any] = asyncio.Queue(1)
    context = HttpContext("http:test", (), (), (), None, messages.put)
    answer = await asyncio.wait_for(gateway._stream(method, None, context, messages, None), 5)
    assert answer.status_code == 500 and json.loads(bytes(answer.body))["code"] == "INTERNAL"


@pytest.mark.skipif(not HAS_OPENSSL, reason="needs the openssl command")
async def test_a_renewal_that_fails_leaves_the_port_served_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ca, own = authority(tmp_path), certificate(tmp_path, "server", "weightplane")
    viewer = ssl.create_default_context(cafile=str(ca))
    viewer.load_cert_chain(*certificate(tmp_path, "see", "viewer/see"))
    startup, tried = uvicorn.Server.startup, [0]

    async def fails_once(self: Any, sockets: Any = None) -> None:
        tried[0] += 1
        if tried[0] == 1:
            self.servers = []
            raise OSError(24, "Too many open files")
        await startup(self, sockets)

    async with gated(Security(tls=Tls(*own, ca))) as running:
        monkeypatch.setattr(uvicorn.Server, "startup", fails_once)
        certificate(tmp_path, "server", "weightplane")
        assert await asyncio.to_thread(eventually, lambda: "Too many open files" in caplog.text)
        assert (await post(running, FLEET + "ListGroups", {}, viewer))[0] == 200
        certificate(tmp_path, "server", "weightplane")
        assert await asyncio.to_thread(eventually, lambda: tried[0] > 1)
        assert (await post(running, FLEET + "ListGroups", {}, viewer))[0] == 200
