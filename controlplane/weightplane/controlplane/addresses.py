"""Whether an address is this machine's alone. One answer, for everyone who listens or dials."""

from __future__ import annotations

import ipaddress

__all__ = ["host_of", "is_loopback", "is_loopback_host"]


def host_of(address: str) -> str:
    """The host of ``host:port``, of ``[v6]:port`` or with gRPC's ``ipv4:`` before it."""
    return address.removeprefix("ipv4:").removeprefix("ipv6:").rpartition(":")[0].strip("[]")


def is_loopback_host(host: str) -> bool:
    """Whether a host is loopback. A name other than localhost is not, whatever it looks like or resolves to."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_loopback(address: str) -> bool:
    """Whether ``host:port`` (or a Unix socket) is reached from this machine alone."""
    return address.startswith(("unix:", "unix-abstract:")) or is_loopback_host(host_of(address))
