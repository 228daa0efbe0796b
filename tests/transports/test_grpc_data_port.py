"""The data port of ``grpc`` towards clients that are none of ours."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from weightplane.transports.base import TransportError
from weightplane.transports.grpc_data_port import DataPort
from weightplane.transports.grpc_wire import METHOD, SERVICE
from weightplane.v1.transport_pb2 import TransferOpen, TransferRequest


@pytest.fixture
def port() -> Iterator[DataPort]:
    made = DataPort("127.0.0.1:0", "")
    yield made
    made.stop()


def refused(port: DataPort, *messages: bytes) -> Any:
    """What the port tells a client that sends these bytes."""
    with grpc.insecure_channel(port.address) as channel:
        call: Any = channel.stream_stream(f"/{SERVICE}/{METHOD}")
        with pytest.raises(grpc.RpcError) as found:
            list(call(iter(messages), timeout=20))
    return found.value


@pytest.mark.parametrize("garbage", [b"\xff" * 16, b"\x22\xff\xff\xff\xff\x0f", b"\x10", b"\x0a\x05ab"])
def test_bytes_that_are_no_message_are_an_invalid_argument(port: DataPort, garbage: bytes) -> None:
    error = refused(port, garbage)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
    assert "TransferRequest" in error.details() and ".proto" in error.details()


def test_a_message_that_opens_no_stream_is_an_invalid_argument(port: DataPort) -> None:
    assert refused(port, TransferRequest(bucket=1).SerializeToString()).code() is grpc.StatusCode.INVALID_ARGUMENT
    opening = TransferRequest(open=TransferOpen(channel_id="none", receiver="r/0")).SerializeToString()
    assert refused(port, opening).code() is grpc.StatusCode.NOT_FOUND


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(TransportError, match=f"cannot listen on {address}: another process listens there"):
            DataPort(address, "")
