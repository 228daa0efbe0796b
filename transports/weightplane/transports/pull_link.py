"""A sender's connection to one receiver of its channel, and the channel as the listener sees it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Final, Protocol

from weightplane.v1.transport_pb2 import PullArmed, PullBye, PullHello, PullMessage, PullWelcome

from .base import ChannelSpec
from .pull_wire import Frames, encode

if TYPE_CHECKING:
    from .pull_control import Listener

__all__ = ["Link", "Owner"]

_OUTBOX: Final = 64 << 20  # bytes that may wait for a receiver that does not read


class Owner(Protocol):
    """A sending channel, as the listener sees it. Called on the listener's thread; must not block."""

    spec: ChannelSpec
    member: str

    def welcome(self) -> PullWelcome:
        """What a receiver is told first."""
        ...

    def admit(self, link: Link) -> str:
        """Take a proven connection; a text refuses it."""
        ...

    def said(self, link: Link, message: PullMessage) -> None:
        """A proven receiver sent something."""
        ...

    def ended(self, link: Link) -> None:
        """The connection is over; ``link.gone`` says why."""
        ...

    def pace(self) -> float | None:
        """Seconds until ``serve`` should be called again; ``None``: not needed now."""
        ...

    def serve(self) -> None:
        """Let the transport work for its readers."""
        ...


class Link:
    """A connection to one receiver. ``post`` and ``close``: any thread; they return at once."""

    def __init__(self, listener: Listener, sock: socket.socket) -> None:
        self._listener, self.socket = listener, sock
        self.frames = Frames()
        self.hello: PullHello | None = None
        self.nonce = b""
        self.owner: Owner | None = None  # set once the key was shown
        self.since = time.monotonic()
        self.gone = ""
        # the channel's, under its lock
        self.armed: PullArmed | None = None
        self.serve = False
        self.regions: set[int] = set()
        self.versions: dict[int, int] = {}
        self._lock = threading.Lock()
        self._outbox = bytearray()
        self.closed = threading.Event()

    @property
    def receiver(self) -> str:
        """The member at the other end."""
        return self.hello.receiver if self.hello is not None else ""

    def post(self, *messages: PullMessage) -> None:
        """Send, now or as soon as the receiver reads. After the end: nothing."""
        data = b"".join(map(encode, messages))
        with self._lock:
            if self.gone:
                return
            if not self._outbox:
                data = data[self._write(data) :]
            self._outbox += data
            if len(self._outbox) > _OUTBOX:
                self._end(f"does not read: {len(self._outbox)} bytes wait for it")
            waits = bool(self._outbox) or bool(self.gone)
        if waits:
            self._listener.wake(self)

    def close(self, why: str, bye: str = "") -> None:
        """End the connection; ``bye`` is told if it can be told at once."""
        with self._lock:
            if not self.gone:
                if bye and not self._outbox:
                    self._write(encode(PullMessage(bye=PullBye(reason=bye))))
                self._end(why)
        self._listener.wake(self)

    def flush(self) -> bool:
        """Write what waits; whether anything still does. The listener's thread."""
        with self._lock:
            if self._outbox and not self.gone:
                del self._outbox[: self._write(self._outbox)]
            return bool(self._outbox) and not self.gone

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return self.socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as e:
            self._end(f"is gone ({e.strerror or e})")
            return 0

    def _end(self, why: str) -> None:
        if not self.gone:
            self.gone = why
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
