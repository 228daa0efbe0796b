"""An HTTP server of the standard library with a thread for each connection, up to so many, and none that drips."""

from __future__ import annotations

import logging
import math
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["BoundedHandler", "BoundedHttpServer"]

log = logging.getLogger(__name__)

_MOMENT_S = 0.25  # for a thread to end whose connection was shut


class BoundedHttpServer(ThreadingHTTPServer):
    """At most ``most`` connections at a time. One more takes the place of that which has been asking for longest; where
    all are being answered it is closed. The handler's ``timeout`` is how long one may be silent, and ask in all: what
    comes byte by byte holds a thread no longer.
    """

    daemon_threads = True

    def __init__(self, where: tuple[str, int], handler: type[BoundedHandler], most: int) -> None:
        self._room = threading.BoundedSemaphore(most)
        self._patience_s = math.inf if handler.timeout is None else handler.timeout
        self._lock = threading.Lock()
        self._asking: dict[socket.socket, float] = {}  # since when
        super().__init__(where, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give the connection a thread, if there is room or can be made."""
        if not self._room.acquire(blocking=False):
            self._shut_longest()
            if not self._room.acquire(timeout=_MOMENT_S):
                self.shutdown_request(request)
                return
        self.asks(request)
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread was to be had
            self.asked(request)
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """In the connection's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.asked(request)
            self._room.release()

    def service_actions(self) -> None:
        """Between connections, twice a second and more: end those that have asked for too long."""
        super().service_actions()
        now = time.monotonic()
        with self._lock:
            late = [c for c, since in self._asking.items() if now - since > self._patience_s]
        for connection in late:
            self._shut(connection)

    def asks(self, connection: Any) -> None:
        """Its client is expected to send the whole of a request from now on. Any thread, as ``asked``."""
        with self._lock:
            self._asking[connection] = time.monotonic()

    def asked(self, connection: Any) -> None:
        """It has, or is gone. A repeat is no error."""
        with self._lock:
            self._asking.pop(connection, None)

    @contextmanager
    def asking(self, connection: Any) -> Iterator[None]:
        """``asks`` and ``asked``."""
        self.asks(connection)
        try:
            yield
        finally:
            self.asked(connection)

    def _shut_longest(self) -> None:
        with self._lock:
            longest = min(self._asking, key=self._asking.__getitem__, default=None)
        if longest is not None:
            self._shut(longest)

    def _shut(self, connection: socket.socket) -> None:
        """Wake its thread, which ends. Of TLS the TCP connection: its own shutdown is for who reads."""
        self.asked(connection)
        try:
            socket.socket.shutdown(connection, socket.SHUT_RDWR)
        except OSError as e:  # it is gone already
            log.debug("a connection that asked for too long: %s", e)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tell of what a handler raised; that a client left is no error of ours."""
        error = sys.exception()
        if isinstance(error, OSError):  # it has gone away, or was too slow
            log.debug("%s left: %s", client_address, error)
        else:
            log.error("a request of %s failed", client_address, exc_info=error)


class BoundedHandler(BaseHTTPRequestHandler):
    """Says when a request's line and headers are expected, and when they are there. A body is for who reads it."""

    @property
    def bounded(self) -> BoundedHttpServer:
        """The server."""
        assert isinstance(self.server, BoundedHttpServer)
        return self.server

    def handle_one_request(self) -> None:
        """The next request of the connection."""
        with self.bounded.asking(self.connection):
            super().handle_one_request()

    def parse_request(self) -> bool:
        """Line and headers."""
        good = super().parse_request()
        self.bounded.asked(self.connection)
        return good
