"""A gRPC channel is closed although a message to a host that reads nothing is still being written."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator

import grpc
import pytest

from tests.process.harness import eventually
from weightplane.controlplane.grpc_close import CLOSE_S, close_channels

_SETTINGS, _WINDOW_UPDATE, _ACK = 4, 8, 1
_MOST = 2**31 - 1


def frame(kind: int, flags: int, payload: bytes) -> bytes:
    """Of HTTP/2, on stream 0 (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + bytes(4) + payload


class ReadsNothing:
    """Speaks just enough HTTP/2 to be sent everything at once, and then reads no more of it."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._accepted: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        self._accepted.append(connection)
        connection.recv(64)  # its preface
        initial_window = struct.pack(">HI", 4, _MOST)
        connection.sendall(frame(_SETTINGS, 0, initial_window) + frame(_SETTINGS, _ACK, b""))
        connection.sendall(frame(_WINDOW_UPDATE, 0, struct.pack(">I", _MOST - 65535)))

    def unread(self) -> int:
        """Bytes that have come and lie in the socket."""
        found = fcntl.ioctl(self._accepted[0], termios.FIONREAD, bytes(4)) if self._accepted else bytes(4)
        return int.from_bytes(found, sys.byteorder)

    def close(self) -> None:
        for held in (*self._accepted, self._listener):
            held.close()


@pytest.fixture
def busy() -> Iterator[tuple[grpc.Channel, ReadsNothing]]:
    """A channel whose one call is cancelled while its message is on the way, and where to."""
    peer = ReadsNothing()
    channel = grpc.insecure_channel(peer.address, [("grpc.max_send_message_length", -1)])
    grpc.channel_ready_future(channel).result(10)

    def requests() -> Iterator[bytes]:
        yield bytes(64 << 20)
        threading.Event().wait(10)

    method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream("/s/m", None, None)
    call = method(requests())
    eventually(lambda: peer.unread() > 1 << 16, "the message is being written")
    call.cancel()
    yield channel, peer
    peer.close()


def closers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "weightplane-close"]


def test_closing_does_not_wait_for_a_write_that_nobody_takes(busy: tuple[grpc.Channel, ReadsNothing]) -> None:
    channel, peer = busy
    began = time.monotonic()
    close_channels([channel])
    assert time.monotonic() - began < CLOSE_S + 1
    assert closers(), "the write had ended: this showed nothing"
    peer.close()
    eventually(lambda: not closers(), "the channel is closed once its connection has ended")


def test_a_channel_at_rest_is_closed_when_the_call_returns() -> None:
    channel = grpc.insecure_channel("127.0.0.1:1")
    method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/s/m", None, None)
    close_channels([channel, grpc.insecure_channel("127.0.0.1:1")])
    assert not closers()
    with pytest.raises(ValueError, match="closed"):
        method(b"")


def test_where_no_thread_is_to_be_had_it_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    close_channels([grpc.insecure_channel("127.0.0.1:1")])
    assert "stays open: can't start new thread" in caplog.text
