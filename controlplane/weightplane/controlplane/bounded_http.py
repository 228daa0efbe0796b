"""An HTTP server of the standard library with a thread for each connection, up to so many; more are closed."""

from __future__ import annotations

import logging
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["BoundedHttpServer"]

log = logging.getLogger(__name__)


class BoundedHttpServer(ThreadingHTTPServer):
    """At most ``most`` connections at a time. A handler's ``timeout`` says how long a silent one may hold a thread."""

    daemon_threads = True

    def __init__(self, where: tuple[str, int], handler: type[BaseHTTPRequestHandler], most: int) -> None:
        self._room = threading.BoundedSemaphore(most)
        super().__init__(where, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give the connection a thread, if there is room."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread was to be had
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """In the connection's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tell of what a handler raised; that a client left is no error of ours."""
        error = sys.exception()
        if isinstance(error, OSError):  # it has gone away, or was too slow
            log.debug("%s left: %s", client_address, error)
        else:
            log.error("a request of %s failed", client_address, exc_info=error)
