"""Whether an address can be listened on: asked before gRPC is, whose own answer is a line from its C core."""

from __future__ import annotations

import errno
import socket

__all__ = ["PortRefused", "check_free"]


class PortRefused(OSError):
    """An address cannot be listened on. ``taken``: another process listens there."""

    def __init__(self, address: str, error: OSError) -> None:
        self.taken = error.errno == errno.EADDRINUSE
        why = "another process listens there" if self.taken else error.strerror or str(error)
        super().__init__(error.errno, f"cannot listen on {address}: {why}")

    def __str__(self) -> str:
        return str(self.strerror)


def check_free(address: str) -> None:
    """``PortRefused`` if host:port cannot be listened on now. Port 0 and Unix sockets are left to who listens."""
    host, _, port = address.rpartition(":")
    if address.startswith("unix:") or not port.isdigit() or port == "0":
        return
    try:
        found = socket.getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as e:
        raise PortRefused(address, e) from None
    family, kind, protocol, _, where = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: what only lingers is free
        try:
            probe.bind(where)
        except OSError as e:
            raise PortRefused(address, e) from None
