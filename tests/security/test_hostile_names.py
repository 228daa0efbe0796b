"""Requests that name paths, addresses or functions: nothing is opened, fetched, imported or run because of them."""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.message import Message

from tests.server.scripted import Replica, Trainer, replica_hello, server
from tests.server.test_authorisation import METHODS, path
from weightplane.transports import registry
from weightplane.transports.base import ChannelSpec, TransportError
from weightplane.transports.pull_wire import dial
from weightplane.v1.transport_pb2 import GrpcRendezvous, PullEndpoint, Rendezvous, UcxRendezvous

MARK = "weightplane-mark-" + secrets.token_hex(6)
_events: list[str] = []
_on = False


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _on and not event.startswith(("object.", "code.", "builtins.id")) and MARK in repr(args):
        _events.append(f"{event} {args!r}"[:300])


sys.addaudithook(_hook)  # for the life of the process: quiet unless a test here listens


@pytest.fixture
def watched() -> Iterator[list[str]]:
    global _on
    _events.clear()
    _on = True
    yield _events
    _on = False


def filled(message: Message, text: str, data: bytes = b"", depth: int = 0) -> Message:
    """Every string in it, at every depth, is ``text``; bytes are ``data``."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        value = getattr(message, field.name)
        if field.type == field.TYPE_STRING:
            value.append(text) if field.is_repeated else setattr(message, field.name, text)
        elif field.type == field.TYPE_BYTES:
            value.append(data) if field.is_repeated else setattr(message, field.name, data)
        elif field.type == field.TYPE_MESSAGE and depth < 4 and not _googles(field):
            filled(value.add() if field.is_repeated else value, text, data, depth + 1)
            if not field.is_repeated:
                value.SetInParent()
    return message


def _googles(field: Any) -> bool:
    return bool(field.message_type.full_name.startswith("google"))


async def sent(channel: grpc.aio.Channel, method: Any, request: Message | bytes) -> grpc.StatusCode | None:
    name, data = path(method), request if isinstance(request, bytes) else request.SerializeToString()
    try:
        if method.client_streaming:
            stream: Any = channel.stream_stream(name)(timeout=3)
            await stream.write(data)
            await stream.read()
        elif method.server_streaming:
            call: Any = channel.unary_stream(name)
            async for _ in call(data, timeout=3):
                break
        else:
            one: Any = channel.unary_unary(name)
            await one(data, timeout=3)
    except grpc.aio.AioRpcError as e:
        return e.code()
    return None


async def test_S04_no_string_of_any_request_is_opened_fetched_imported_or_run(
    watched: list[str], tmp_path: Path
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    texts = [
        f"../../../../../../{tmp_path}/{MARK}",
        f"http://127.0.0.1:{listener.getsockname()[1]}/{MARK}",
        f"{MARK}:factory",
        f"os:system('touch {tmp_path}/{MARK}')",
        f"/{MARK}.so",
        f"$({MARK})",
    ]
    codes = []
    async with server() as running, grpc.aio.insecure_channel(running.address) as channel:
        for text in texts:
            for method in METHODS:
                request = filled(message_factory.GetMessageClass(method.input_type)(), text)
                codes += [await sent(channel, method, request)] if method.input_type.fields else []
        # what is no name is refused even where everything else is right
        trainer = Trainer(running.address)
        for text in (texts[0], texts[1], texts[3]):
            for field in ("group", "transport", "trainer_id", "incarnation"):
                try:
                    await trainer.init(**{field: text})
                except grpc.aio.AioRpcError as e:
                    assert e.code() is grpc.StatusCode.INVALID_ARGUMENT, (field, text, e.details())
                else:
                    assert field in ("trainer_id", "incarnation"), (field, text)  # free text, shown and compared
                    trainer = Trainer(running.address, group=f"g{secrets.token_hex(2)}")
        await trainer.channel.close()
        replica = Replica(running.address, "r0")
        replica.hello = replica_hello(serving_address=texts[1], engine=texts[2])
        offer = Rendezvous(transport="grpc", grpc=GrpcRendezvous(address=texts[1]))
        del replica.hello.workers[0].offers[:]
        replica.hello.workers[0].offers.append(offer)
        await replica.start()
        await asyncio.sleep(0.2)
        await replica.kill()
    assert None not in codes and len(codes) == len(texts) * (len(METHODS) - 1)  # ListGroups has nothing to fill
    assert watched == []
    with pytest.raises(BlockingIOError):
        listener.accept()
    listener.close()
    assert not (tmp_path / MARK).exists()


async def test_S01_a_pickle_in_any_field_or_in_place_of_any_message_runs_nothing(tmp_path: Path) -> None:
    file = tmp_path / "touched"
    pickled = f"cposix\nsystem\n(S'touch {file}'\ntR.".encode()  # what unpickles it runs touch
    async with server() as running, grpc.aio.insecure_channel(running.address) as channel:
        for method in METHODS:
            request = filled(message_factory.GetMessageClass(method.input_type)(), pickled.decode(), pickled)
            if method.input_type.fields:
                assert await sent(channel, method, request) is not None, method.name
            code = await sent(channel, method, pickled)
            assert code is grpc.StatusCode.INVALID_ARGUMENT, (method.name, code)
    await asyncio.sleep(0.2)
    assert not file.exists()


def test_a_transport_is_one_that_is_registered_never_a_module(watched: list[str]) -> None:
    for name in (f"{MARK}:factory", f"../{MARK}", "os:system", "weightplane.transports.shm:ShmTransport"):
        with pytest.raises(TransportError, match="no transport"):
            registry.get(name)
    assert watched == []


def test_a_socket_is_a_file_name_in_one_directory(tmp_path: Path) -> None:
    from weightplane.transports.pull_wire import host_id

    for name in (f"../{MARK}", f"/{MARK}", f"a/{MARK}"):
        endpoint = PullEndpoint(host_id=host_id(tmp_path), socket=name)
        offers = {"s": Rendezvous(transport="ucx", ucx=UcxRendezvous(endpoint=endpoint))}
        spec = ChannelSpec("c", "g", "ucx", bytes(32), ("s",), ("r",), 4096, offers)
        with pytest.raises(TransportError, match="which is no file name"):
            dial(spec, "r", "s", endpoint, tmp_path)
