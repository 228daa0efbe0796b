"""TLS of ``grpc``'s data ports: a replica shows its own certificate there, and asks the trainer for one.

It is in force where this process has a certificate: ``WEIGHTPLANE_CA``, ``WEIGHTPLANE_CERT`` and ``WEIGHTPLANE_KEY``
(or ``WEIGHTPLANE_DATA_CERT`` and ``_DATA_KEY`` for the port alone), or the ``Dial`` of the agent in it. A data port's
files are read anew when they change. Off loopback there is no data port without it, unless ``WEIGHTPLANE_INSECURE=1``.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc

from weightplane.controlplane.dial import Dial
from weightplane.controlplane.handshake import trouble

from .base import TransportError

__all__ = [
    "Own",
    "insecure_allowed",
    "own",
    "present",
    "sender_credentials",
    "server_credentials",
    "why_not",
    "withdraw",
]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Own:
    """PEM texts: this process's certificate, its key, and the authority that both sides trust."""

    ca: bytes
    cert: bytes
    key: bytes


_lock = threading.Lock()
_presented: list[tuple[Dial, Own]] = []  # of the agents that live in this process; the newest is shown


def present(dial: Dial) -> None:
    """Use the certificate that an agent of this process dials with, where the environment names none.

    Until ``withdraw`` is called with the same ``dial``, as often as this was. Any thread.
    """
    if dial.tls and dial.ca_pem and dial.cert_pem:
        with _lock:
            _presented.append((dial, Own(dial.ca_pem, dial.cert_pem, dial.key_pem)))


def withdraw(dial: Dial) -> None:
    """Take back what ``present`` was given once: the agent is over, and a later one may have none. Any thread."""
    with _lock:
        for k in reversed(range(len(_presented))):
            if _presented[k][0] is dial:
                del _presented[k]
                return


def own(port: bool = False) -> Own | None:
    """This process's certificate, ``port``: the one for its data port; ``None`` if it has none."""
    paths = [os.environ.get(f"WEIGHTPLANE_{n}", "") for n in ("CA", "CERT", "KEY")]
    if port and os.environ.get("WEIGHTPLANE_DATA_CERT"):
        paths[1:] = [os.environ["WEIGHTPLANE_DATA_CERT"], os.environ.get("WEIGHTPLANE_DATA_KEY", "")]
    if not all(paths):
        with _lock:
            return _presented[-1][1] if _presented else None
    try:
        return Own(*(Path(p).read_bytes() for p in paths))
    except OSError as e:
        raise TransportError(f"{e.filename}: {e.strerror}; WEIGHTPLANE_CA, _CERT and _KEY name PEM files") from e


def server_credentials() -> tuple[grpc.ServerCredentials, bytes] | None:
    """For a data port: its credentials, and the authority that senders are told of. ``None``: plaintext."""
    first = own(port=True)
    if first is None:
        return None
    last = first

    def configuration(o: Own) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(o.key, o.cert)], root_certificates=o.ca)

    def newer() -> grpc.ServerCertificateConfiguration | None:
        """For gRPC, at each handshake: ``None`` means as before."""
        nonlocal last
        try:
            found = own(port=True)
        except TransportError as e:
            log.error("the data port's certificate: %s; the one read before stays in use", e)
            return None
        if found is None or found == last:
            return None
        last = found
        return configuration(found)

    credentials = grpc.dynamic_ssl_server_credentials(
        configuration(first),
        newer,  # type: ignore[arg-type]
        require_client_authentication=True,
    )
    return credentials, first.ca


def sender_credentials(ca: bytes) -> grpc.ChannelCredentials:
    """For a sender: trust the receiver's authority, show our own certificate if we have one."""
    mine = own()
    return grpc.ssl_channel_credentials(ca, mine.key if mine else None, mine.cert if mine else None)


def why_not(address: str, ca: bytes) -> str:
    """What is wrong with TLS towards a data port, with a space before it; empty if nothing is."""
    mine = own()
    try:
        dial = Dial(
            address, tls=True, ca_pem=ca, cert_pem=mine.cert if mine else b"", key_pem=mine.key if mine else b""
        )
    except ValueError:
        return ""
    found = trouble(dial)
    return f" ({found})" if found else ""


def insecure_allowed() -> bool:
    """Whether the operator trusts the network."""
    return os.environ.get("WEIGHTPLANE_INSECURE", "") == "1"
