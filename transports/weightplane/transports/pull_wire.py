"""The control connection of transports that pull: frames, proofs of the key, and how a receiver reaches a sender.

The messages are ``weightplane.v1.PullMessage`` (``transport.proto`` tells their order). A frame is a length and a
message; what a peer may make us hold is bounded: 4 KiB until it has shown the channel's key, 4 MiB afterwards.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError

from weightplane.controlplane.addresses import is_loopback_host
from weightplane.v1.transport_pb2 import PullEndpoint, PullHello, PullMessage

from .base import TransportError

if TYPE_CHECKING:
    from .base import ChannelSpec

__all__ = [
    "FIRST_FRAME",
    "FRAME",
    "PROTOCOL",
    "FrameError",
    "Frames",
    "dial",
    "encode",
    "host_id",
    "new_nonce",
    "problem_of",
    "proof",
    "shm_directory",
]

PROTOCOL: Final = 1
FIRST_FRAME: Final = 4 << 10  # bytes of a message until both sides are proven
FRAME: Final = 4 << 20  # and afterwards
_LENGTH: Final = struct.Struct("<I")
_CONTEXT: Final = "weightplane-pull-1"
_WILDCARDS: Final = ("0.0.0.0", "[::]", "*", "")


class FrameError(Exception):
    """What came is no frame of ours; the connection is of no more use."""


def encode(message: PullMessage) -> bytes:
    """A message as a frame. ``FrameError`` if it is longer than a peer takes."""
    data = message.SerializeToString()
    if len(data) > FRAME:
        raise FrameError(f"a message of {len(data)} bytes; at most {FRAME} are taken")
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Cuts what arrives into messages. ``limit`` bounds one message's bytes and may be raised. One thread."""

    __slots__ = ("_data", "limit")

    def __init__(self, limit: int = FIRST_FRAME) -> None:
        self.limit = limit
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Take bytes of the stream; look at ``messages`` before more are fed."""
        self._data += data

    def next(self) -> PullMessage | None:
        """The next whole message. ``FrameError``: too long, or not a message."""
        if len(self._data) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._data)
        if size > self.limit:
            raise FrameError(f"a message of {size} bytes; at most {self.limit} are taken")
        end = _LENGTH.size + size
        if len(self._data) < end:
            return None
        try:
            message = PullMessage.FromString(bytes(self._data[_LENGTH.size : end]))
        except DecodeError as e:
            raise FrameError(f"not a PullMessage: {e}") from e
        del self._data[:end]
        return message

    def messages(self) -> Iterator[PullMessage]:
        """Every whole message that is here."""
        while (message := self.next()) is not None:
            yield message


def new_nonce() -> bytes:
    """32 random bytes."""
    return secrets.token_bytes(32)


def proof(key: bytes, side: str, hello: PullHello, sender_nonce: bytes) -> bytes:
    """What ``side`` (``"sender"``, ``"receiver"``) shows for the key (see ``PullChallenge``)."""
    made = hmac.new(key, digestmod="sha256")
    texts = (_CONTEXT, side, hello.channel_id, hello.sender, hello.receiver)
    for part in (*(t.encode("utf-8", "surrogatepass") for t in texts), hello.nonce, sender_nonce):
        made.update(struct.pack("<Q", len(part)) + part)
    return made.digest()


# --- where a sender is


def shm_directory() -> Path:
    """Where sockets and segments lie: ``WEIGHTPLANE_SHM_DIR`` or ``/dev/shm``."""
    return Path(os.environ.get("WEIGHTPLANE_SHM_DIR", "/dev/shm"))


def host_id(directory: Path) -> str:
    """Equal for two processes that can meet at a socket in ``directory``: boot id / mount / user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    stat = os.stat(directory)
    return f"{boot}/{stat.st_dev:x}.{stat.st_ino:x}/{os.geteuid()}"


def problem_of(bind: str, advertise: str) -> str:
    """Why a sender may not listen at ``bind`` and tell others ``advertise`` (both host:port), or nothing."""
    host, sep, port = bind.rpartition(":")
    if not sep or not port.isdigit():
        return f"WEIGHTPLANE_PULL_BIND={bind!r}: expected host:port"
    if advertise and advertise.rpartition(":")[0] in _WILDCARDS:
        return f"WEIGHTPLANE_PULL_ADVERTISE={advertise!r}: a wildcard address reaches nobody; name a host"
    if host in _WILDCARDS and not advertise:
        return f"WEIGHTPLANE_PULL_BIND={bind!r} is a wildcard: say what receivers dial with WEIGHTPLANE_PULL_ADVERTISE"
    if not is_loopback_host(host) and os.environ.get("WEIGHTPLANE_INSECURE", "") != "1":
        return f"plaintext on {bind!r}: keep WEIGHTPLANE_PULL_BIND on loopback, or set WEIGHTPLANE_INSECURE=1"
    return ""


@contextlib.contextmanager
def socket_path(directory: Path, name: str) -> Iterator[str]:
    """A path of a socket that fits its address (108 bytes) however deep the directory lies."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


def dial(spec: ChannelSpec, member: str, sender: str, endpoint: PullEndpoint, directory: Path) -> socket.socket:
    """A non-blocking connection to ``sender``: connected, or (TCP) about to be.

    ``TransportError`` says why the two cannot reach each other; ``OSError``: it is not there (now).
    """
    if not endpoint.host_id and not endpoint.address:
        raise TransportError(f"{sender!r} offered no endpoint for channel {spec.channel_id}", peers=(sender,))
    ours = host_id(directory)
    if endpoint.socket and endpoint.host_id == ours:
        if endpoint.socket != os.path.basename(endpoint.socket):
            raise TransportError(f"{sender!r} offered {endpoint.socket!r}, which is no file name", peers=(sender,))
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            made.setblocking(False)
            with socket_path(directory, endpoint.socket) as path:
                made.connect(path)
        except BaseException:
            made.close()
            raise
        return made
    host, _, port = endpoint.address.rpartition(":")
    if not host or not port.isdigit():
        raise TransportError(
            f"{sender!r} is at {endpoint.host_id} and {member!r} at {ours} (boot id / shared-memory mount / user), and "
            f"{sender!r} serves its own host only: set WEIGHTPLANE_PULL_BIND there",
            peers=(sender,),
        )
    if not is_loopback_host(host) and os.environ.get("WEIGHTPLANE_INSECURE", "") != "1":
        raise TransportError(
            f"{sender!r} at {endpoint.address} offers plaintext off loopback: set WEIGHTPLANE_INSECURE=1 to accept it",
            peers=(sender,),
        )
    return _dial_tcp(host.strip("[]"), int(port))


def _dial_tcp(host: str, port: int) -> socket.socket:
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind | socket.SOCK_CLOEXEC, proto)
    try:
        made.setblocking(False)
        tune_tcp(made)
        with contextlib.suppress(BlockingIOError):
            made.connect(address)
    except BaseException:
        made.close()
        raise
    return made


def tune_tcp(made: socket.socket) -> None:
    """Small messages at once; a host that vanished is noticed within half a minute while nothing is said."""
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000)):
        with contextlib.suppress(OSError):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
