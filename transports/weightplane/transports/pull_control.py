"""The sender's end of control connections: one listener and one thread for all sending channels of a transport.

The thread never waits for a single peer: sockets do not block, what a connection may make us hold is bounded, and one
that has not shown its channel's key within seconds is closed. Whatever arrives touches its own channel only.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

from weightplane.controlplane.addresses import is_loopback_host
from weightplane.v1.transport_pb2 import (
    PullArmed,
    PullBye,
    PullChallenge,
    PullEndpoint,
    PullHello,
    PullMessage,
    PullRefused,
    PullWelcome,
)

from .base import ChannelSpec, TransportError
from .pull_wire import (
    FRAME,
    PROTOCOL,
    FrameError,
    Frames,
    encode,
    host_id,
    new_nonce,
    problem_of,
    proof,
    socket_path,
    tune_tcp,
)

__all__ = ["Link", "Listener", "Owner"]

_PREFIX: Final = "weightplane-pull-"
_UNPROVEN: Final = 64  # connections that have not shown a key yet; the oldest goes first
_PROVE_S: Final = 5.0  # seconds until a connection must have shown it
_OUTBOX: Final = 64 << 20  # bytes that may wait for a receiver that does not read
_CHUNK: Final = 64 << 10

log = logging.getLogger(__name__)


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


class Listener:
    """Takes connections at a unix socket, and at a TCP address if ``bind`` (host:port) is given. Any thread."""

    def __init__(self, directory: Path, bind: str = "", advertise: str = "") -> None:
        self._owners: dict[tuple[str, str, str], Owner] = {}
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._woken: list[Link] = []
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._path: Path | None = None
        self._listeners: list[socket.socket] = []
        try:
            address = self._listen_tcp(bind, advertise) if bind else ""
            name = self._listen_unix(directory)
        except BaseException:
            self._release()
            raise
        self.endpoint = PullEndpoint(host_id=host_id(directory), socket=name, address=address)
        for made in self._listeners:
            made.setblocking(False)
            self._selector.register(made, selectors.EVENT_READ, made)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="weightplane-pull", daemon=True)
        self._thread.start()

    def register(self, owner: Owner) -> None:
        """Make a channel known: its receivers may connect from now on."""
        with self._lock:
            self._owners[self._key(owner)] = owner
        self.wake()

    def unregister(self, owner: Owner, links: Iterable[Link]) -> None:
        """Forget a channel and close its connections, within a second."""
        with self._lock:
            if self._owners.get(self._key(owner)) is owner:
                del self._owners[self._key(owner)]
        for link in (waited := list(links)):
            link.close("this side closed", "closed")
        until = time.monotonic() + 1
        if threading.current_thread() is not self._thread:
            for link in waited:
                link.closed.wait(max(0.0, until - time.monotonic()))

    def wake(self, link: Link | None = None) -> None:
        """Make the thread look at ``link``, or at its owners' pace."""
        with self._lock:
            if link is not None:
                self._woken.append(link)
            if not self._stopping:
                os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """Close everything; bounded."""
        with self._lock:
            if self._stopping:
                return
            os.eventfd_write(self._wake_fd, 1)
            self._stopping = True
        self._thread.join(5)

    @staticmethod
    def _key(owner: Owner) -> tuple[str, str, str]:
        return owner.spec.transport, owner.spec.channel_id, owner.member

    # --- sockets

    def _listen_tcp(self, bind: str, advertise: str) -> str:
        problem = problem_of(bind, advertise)
        if problem:
            raise TransportError(problem)
        host, _, port = bind.rpartition(":")
        try:
            made = socket.create_server(
                (host.strip("[]"), int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
        except OSError as e:
            raise TransportError(f"WEIGHTPLANE_PULL_BIND={bind!r}: cannot listen there: {e.strerror or e}") from e
        self._listeners.append(made)
        if not is_loopback_host(host):
            log.warning("INSECURE, as asked for: control connections on %s are plaintext off loopback", bind)
        return advertise or f"{host}:{made.getsockname()[1]}"

    def _listen_unix(self, directory: Path) -> str:
        _sweep(directory)
        name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listeners.append(made)
        self._path = directory / name
        try:
            with socket_path(directory, f".{name}") as path:  # complete and private before it has its name
                made.bind(path)
                os.chmod(path, 0o600)
            made.listen(128)
            os.rename(directory / f".{name}", self._path)
            atexit.register(_remove, self._path, os.getpid())  # a process ends without shutting its transports down
        except OSError as e:
            raise TransportError(f"cannot listen in {directory}: {e.strerror or e}; set WEIGHTPLANE_SHM_DIR") from e
        return name

    def _release(self) -> None:
        for made in self._listeners:
            made.close()
        if self._path is not None:
            for path in (self._path, self._path.with_name(f".{self._path.name}")):
                path.unlink(missing_ok=True)
        self._selector.close()
        with self._lock:
            self._stopping = True
            os.close(self._wake_fd)

    # --- the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        finally:
            for link in list(self._links):
                self._drop(link, "the listener stopped")
            self._release()

    def _turn(self) -> None:
        with self._lock:
            owners = list(self._owners.values())
        paces = [p for o in owners if (p := o.pace()) is not None]
        unproven = [link for link in self._links if link.owner is None]
        if unproven:
            paces.append(max(0.0, min(link.since for link in unproven) + _PROVE_S - time.monotonic()))
        for key, events in self._selector.select(min(paces) if paces else None):
            if key.data is None:
                self._wakes()
            elif isinstance(key.data, Link):
                self._ready(key.data, events)
            else:
                self._accept(key.data)
        for owner in owners:
            if owner.pace() is not None:
                owner.serve()
        if unproven:
            limit = time.monotonic() - _PROVE_S
            for link in unproven:
                if link.owner is None and link.since <= limit:
                    self._drop(link, "showed no key in time")

    def _wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        with self._lock:
            woken, self._woken = self._woken, []
        for link in woken:
            if link in self._links:
                self._watch(link)

    def _watch(self, link: Link) -> None:
        waits = link.flush()
        if link.gone:
            self._drop(link, link.gone)
        else:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if waits else 0)
            self._selector.modify(link.socket, events, link)

    def _accept(self, listener: socket.socket) -> None:
        try:
            made, _ = listener.accept()
        except OSError as e:
            log.debug("accept: %s", e)
            return
        made.setblocking(False)
        if made.family != socket.AF_UNIX:
            tune_tcp(made)
        link = Link(self, made)
        self._links.add(link)
        self._selector.register(made, selectors.EVENT_READ, link)
        unproven = sorted((x for x in self._links if x.owner is None), key=lambda x: x.since)
        for old in unproven[: max(0, len(unproven) - _UNPROVEN)]:
            self._drop(old, "too many connections show no key")

    def _ready(self, link: Link, events: int) -> None:
        if link not in self._links:
            return
        try:
            if events & selectors.EVENT_READ:
                self._read(link)
            if link in self._links:
                self._watch(link)
        except (FrameError, TransportError) as e:
            level = logging.DEBUG if link.owner is None else logging.WARNING  # strangers do not fill our log
            log.log(level, "control connection of %r: %s", link.receiver or "nobody known", e)
            self._drop(link, f"sent what it must not: {e}")
        except Exception:
            log.exception("control connection of %r", link.receiver or "nobody known")
            self._drop(link, "this side failed on its message; see the log")

    def _read(self, link: Link) -> None:
        try:
            data = link.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as e:
            self._drop(link, f"is gone ({e.strerror or e})")
            return
        if not data:
            self._drop(link, link.gone or "closed the connection, or died")
            return
        link.frames.feed(data)
        for message in link.frames.messages():
            if link.gone:
                return
            if link.owner is not None:
                link.owner.said(link, message)
            else:
                self._handshake(link, message)

    def _handshake(self, link: Link, message: PullMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "hello" and link.hello is None:
            link.hello = hello = message.hello
            owner = self._find(hello)
            if hello.protocol != PROTOCOL or len(hello.nonce) != 32:
                self._refuse(link, f"protocol {hello.protocol} is not ours ({PROTOCOL})")
            elif owner is None:
                self._refuse(link, "no such channel is open here", retry=True)
            else:
                link.nonce = new_nonce()
                shown = proof(owner.spec.key, "sender", hello, link.nonce)
                link.post(PullMessage(challenge=PullChallenge(nonce=link.nonce, proof=shown)))
        elif kind == "proof" and link.hello is not None:
            owner = self._find(link.hello)
            if owner is None:
                self._refuse(link, "no such channel is open here", retry=True)
                return
            wanted = proof(owner.spec.key, "receiver", link.hello, link.nonce)
            if not link.nonce or not hmac.compare_digest(wanted, message.proof.proof):
                self._refuse(link, "the channel's key was not shown")
                return
            refusal = owner.admit(link)
            if refusal:
                self._refuse(link, refusal)
            else:
                link.owner, link.frames.limit = owner, FRAME
                link.post(PullMessage(welcome=owner.welcome()))
        else:
            raise FrameError(f"{kind} before the key was shown")

    def _find(self, hello: PullHello) -> Owner | None:
        with self._lock:
            for (_, channel, member), owner in self._owners.items():
                if channel == hello.channel_id and member == hello.sender and hello.receiver in owner.spec.receivers:
                    return owner
        return None

    def _refuse(self, link: Link, reason: str, retry: bool = False) -> None:
        link.post(PullMessage(refused=PullRefused(reason=reason, retry=retry)))
        self._drop(link, reason)

    def _drop(self, link: Link, why: str) -> None:
        if link not in self._links:
            return
        self._links.discard(link)
        link.close(why)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.socket)
        link.socket.close()
        link.closed.set()
        if link.owner is not None:
            link.owner.ended(link)


def _remove(path: Path, pid: int) -> None:
    """Take our own name away; a forked child leaves it to its parent."""
    if os.getpid() == pid:
        path.unlink(missing_ok=True)


def _sweep(directory: Path) -> None:
    """Remove sockets whose listener died."""
    try:
        names = [n for n in os.listdir(directory) if n.lstrip(".").startswith(_PREFIX)]
    except OSError:
        return
    for name in names:
        path = directory / name
        with contextlib.suppress(OSError), socket_path(directory, name) as at:
            if name.startswith(".") and time.time() - path.stat().st_mtime < 60:
                continue  # one that is being made
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.setblocking(False)
                try:
                    probe.connect(at)
                except ConnectionRefusedError:
                    path.unlink(missing_ok=True)
