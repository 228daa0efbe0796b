"""The port of the gateway: HTTP/1.1 by uvicorn on the event loop that runs, TLS as everywhere, files read anew.

Of uvicorn only the parts that keep to themselves are used: no signal handlers, no logging set up, no loop of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from weightplane.controlplane.core.reasons import Reason

from .gateway_call import error_of, refusal
from .tls import Tls, names_in, stamp_of

__all__ = ["Listener"]

log = logging.getLogger(__name__)

_MOST = 256  # connections that are answered at a time, open streams among them; one more is told so
_ASKING = 256  # and that are still asking
_LOOKS = (0.25, 2.0, 10.0)  # seconds between looks at whether somebody who says no more is still there
_IDLE_S = 10.0  # that a connection may take for a request's headers, the time before them included
_UNREAD_S = 30.0  # that a connection stays whose caller takes nothing of what is sent
_UNREAD = 256 << 10  # bytes on their way to one; by default the kernel keeps megabytes for who reads nothing
_LOOK_S = 1.0
_LEAVE_S = 2


class _Connection(H11Protocol):
    """Remembers the client's certificate; ends a connection that asks nothing, or byte by byte. Where there are too
    many, the one that has been asking for longest makes room."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "certificate": names_in(transport.get_extra_info("peercert"))}
        self._asks_since, self._asks_by = self.loop.time(), self.loop.call_later(_IDLE_S, self._idle)
        self._unread_by: asyncio.TimerHandle | None = None
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD)
        self._half_closed, self._asked = False, self.app
        self.app = self._answer
        self._find_room()

    def _find_room(self) -> None:
        there = [c for c in self.connections if isinstance(c, _Connection) and not c.transport.is_closing()]
        if len(there) <= _MOST + _ASKING:
            return
        asking = [c for c in there if c.asks and c is not self]
        if asking:
            min(asking, key=lambda c: c._asks_since).transport.abort()
        else:
            self.limit_concurrency = 1  # of this connection: its request is told so, and it is closed

    @property
    def asks(self) -> bool:
        """Whether the whole of a request's headers is still to come."""
        return self.cycle is None or self.cycle.response_complete

    def on_response_complete(self) -> None:
        self._asks_by.cancel()
        self._asks_since, self._asks_by = self.loop.time(), self.loop.call_later(_IDLE_S, self._idle)
        super().on_response_complete()
        if self._half_closed and self.asks:
            self.transport.close()  # what was answered goes out first

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if sum(isinstance(c, _Connection) and not c.asks for c in self.connections) > _MOST:
            await _too_many(send)
        else:
            await self._asked(scope, receive, send)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Somebody who says no more may still listen, or be gone: both begin alike, and only what we send tells. TLS
        cannot be half-closed here: asyncio closes it."""
        if self.scheme == "https" or self.asks or self.cycle.more_body:
            return False
        if not self._half_closed:
            self._half_closed = True
            self._look(0)
        return True

    def _look(self, n: int) -> None:
        """Send what a caller that listens passes over: who is gone answers with a reset, which ends the call. At most
        four interim answers (some clients take no more than five), or a blank before a stream's next line."""
        if self.asks or self.transport.is_closing():
            return
        streams = "lines" in self.scope.get("state", {})
        if streams and self.conn.our_state is h11.SEND_BODY:
            self.transport.write(self.conn.send(h11.Data(data=b" ")) or b"")
        elif not self.cycle.response_started and self.scope["http_version"] == "1.1":
            interim = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
            self.transport.write(self.conn.send(interim) or b"")
        if n < len(_LOOKS) or streams:
            self.loop.call_later(_LOOKS[min(n, len(_LOOKS) - 1)], self._look, n + 1)

    def _idle(self) -> None:
        if self.asks:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_by is not None:
            self._unread_by.cancel()

    def _wait_for_reader(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._unread_by = self.loop.call_later(_UNREAD_S, self._unread, left)

    def _unread(self, before: int) -> None:
        """Of 256 calls at a time it would keep one for ever. It cannot be told: it does not read."""
        if self.transport.get_write_buffer_size() < before:  # it reads, slowly
            return self._wait_for_reader()
        path = self.scope["path"][:200] if self.scope else "no request"
        log.warning("gateway: %s of %s: its caller took nothing for %g s; it is ended", path, self.client, _UNREAD_S)
        self.transport.abort()
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._asks_by.cancel()
        if self._unread_by is not None:
            self._unread_by.cancel()
        super().connection_lost(exc)


async def _too_many(send: Any) -> None:
    text = f"expected at most {_MOST} calls at a time, each open stream one, found one more: end some, or dial gRPC"
    body = json.dumps(error_of(refusal(Reason.LIMIT, text))).encode()
    size = str(len(body)).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", size), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 429, "headers": head})
    await send({"type": "http.response.body", "body": body})


class Listener:
    """Serves an ASGI application from ``start`` to ``close``."""

    def __init__(self, app: Any, address: str, tls: Tls | None) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port, self._tls = host.strip("[]"), int(port), tls
        config = uvicorn.Config(
            app,
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(_IDLE_S),
            timeout_graceful_shutdown=_LEAVE_S,
        )
        config.load()
        self._config = config
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._looking: asyncio.Task[None] | None = None
        self.address = ""

    async def start(self) -> None:
        """Listen. Raises ``OSError`` if the port is taken, ``ssl.SSLError`` for files that are no pair."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((self._host, self._port))
            self._socket.setblocking(False)
            seen = self._renew()
            await self._server.startup(sockets=[self._socket.dup()])
        except BaseException:
            self._socket.close()
            raise
        shown = f"[{self._host}]" if ":" in self._host else self._host
        self.address = f"{shown}:{self._socket.getsockname()[1]}"
        if self._tls is not None:
            self._looking = asyncio.create_task(self._look(self._tls, seen))
        log.info("gateway on %s", self.address)

    def _renew(self) -> object:
        """Read the certificates now; what they were read from."""
        if self._tls is None:
            return None
        seen = stamp_of(self._tls.files)
        self._config.ssl = self._tls.context()
        return seen

    async def _look(self, tls: Tls, seen: object) -> None:
        """Handshakes after a change of the files have the new ones: a listener of their own takes the port over."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if stamp_of(tls.files) == seen:
                continue
            seen = stamp_of(tls.files)
            older = self._server.servers
            try:
                self._renew()
                await self._server.startup(sockets=[self._socket.dup()])
            except (OSError, ValueError) as e:  # half of a rotation, perhaps
                log.error("gateway: %s; the certificates read before stay in use", e)
                self._server.servers = older
                continue
            for server in older:
                server.close()

    async def close(self) -> None:
        """Stop; calls under way have a moment. Idempotent."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        self._socket.close()
        if self._server.started:
            self._server.started = False
            await self._server.shutdown()
