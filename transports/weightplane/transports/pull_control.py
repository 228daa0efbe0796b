"""The sender's end of control connections: one listener and one thread for all sending channels of a transport.

The thread never waits for a single peer: sockets do not block, what a connection may make us hold is bounded, and one
that has not shown its channel's key within seconds is closed. Whatever arrives touches its own channel only.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from weightplane.v1.transport_pb2 import (
    PullChallenge,
    PullEndpoint,
    PullHello,
    PullMessage,
    PullRefused,
)

from .base import TransportError
from .pull_link import Link, Owner
from .pull_listening import listen_tcp, listen_unix
from .pull_wire import (
    FRAME,
    PROTOCOL,
    FrameError,
    host_id,
    new_nonce,
    proof,
    tune_tcp,
)

__all__ = ["Listener"]

_UNPROVEN: Final = 64  # connections that have not shown a key yet; the oldest goes first
_PROVE_S: Final = 5.0  # seconds until a connection must have shown it
_CHUNK: Final = 64 << 10

log = logging.getLogger(__name__)


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
            address = ""
            if bind:
                made, address = listen_tcp(bind, advertise)
                self._listeners.append(made)
            made, self._path = listen_unix(directory)
            self._listeners.append(made)
        except BaseException:
            self._release()
            raise
        self.endpoint = PullEndpoint(host_id=host_id(directory), socket=self._path.name, address=address)
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

    def _release(self) -> None:
        for made in self._listeners:
            made.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
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
