"""How an agent reaches the control plane: address, TLS, token. One value that can be handed to a helper process."""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from .addresses import is_loopback
from .pems import check_pair
from .renewing import RenewingChannel

__all__ = ["CLIENT_OPTIONS", "Dial", "PlaintextRefused", "check_port"]

_MIB = 1 << 20
_FILES = ("ca", "cert", "key")
#: gRPC gives an attempt to connect at least this long, under the odd name of min_reconnect_backoff: a first call fails
#: with its first attempt, and two round trips over an ocean, or a busy server's answer, take more than 100 ms; its TLS
#: more than a second.
_CONNECT_MS, _HANDSHAKE_MS = 1_000, 5_000
#: Pings find a dead connection within half a minute; our server forgives them at any rate. Retries are ours to make.
CLIENT_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", 16 * _MIB),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),  # a broken connection is not shared with somebody else's channel
)


class PlaintextRefused(ValueError):
    """An address off loopback without TLS. Its own kind, so that a command line can name its own switches."""


def check_port(address: str, least: int = 1) -> None:
    """``ValueError`` for host:port whose port is none (gRPC would take it modulo 65536)."""
    if address.startswith("unix:"):
        return
    if address.startswith(("http:", "https:", "grpc:")) or not address.isprintable() or " " in address:
        raise ValueError(f"{address!r}: expected host:port, no URL and no blanks")
    port = address.rpartition(":")[2]
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and least <= int(port) <= 65535):
        raise ValueError(f"{address!r}: expected host:port with a port from {least} to 65535, found {port[:20]!r}")


def _read(variable: str, path: str) -> bytes:
    """The file that an environment variable names, if it does."""
    try:
        return Path(path).read_bytes() if path else b""
    except OSError as e:
        raise OSError(e.errno, f"{variable}: {e.strerror}", path) from None


@dataclass(frozen=True)
class Dial:
    """Where and how to dial. PEM texts, not paths. ``token``: sent as bearer token with every call.

    ``files``: where the three were read (empty for one that is not there); they are read anew when they change.
    Without ``tls`` only a loopback address (or a Unix socket) may be dialled, unless ``insecure`` says that the
    network is trusted. ``ca_pem`` empty = the system's authorities; ``cert_pem`` and ``key_pem`` for mTLS.
    """

    address: str
    tls: bool = False
    ca_pem: bytes = field(default=b"", repr=False)
    cert_pem: bytes = field(default=b"", repr=False)
    key_pem: bytes = field(default=b"", repr=False)
    token: str = field(default="", repr=False)
    files: tuple[str, ...] = ()
    server_name: str = ""
    insecure: bool = False

    def __post_init__(self) -> None:
        if not self.address:
            raise ValueError("the control plane's address is empty: expected host:port or unix:path")
        check_port(self.address)
        if bool(self.cert_pem) != bool(self.key_pem):
            raise ValueError("a client certificate and its key come together")
        if not (self.token.isascii() and self.token.isprintable() and self.token == self.token.strip()):
            raise ValueError("the token: expected printable ASCII without blanks around it, as a header carries it")
        if (self.ca_pem or self.cert_pem) and not self.tls:
            raise ValueError("certificates are given, but tls is off")
        if not self.tls and not self.insecure and not is_loopback(self.address):
            raise PlaintextRefused(
                f"{self.address} is not a loopback address: use TLS, or say insecure=True if the network is trusted"
            )

    @classmethod
    def from_environment(cls, address: str) -> Dial:
        """As WEIGHTPLANE_CA, _CERT, _KEY (files), _TOKEN and _INSECURE=1 say. Raises ``ValueError`` and ``OSError``."""
        paths = {n: os.environ.get(f"WEIGHTPLANE_{n.upper()}", "") for n in _FILES}
        if (paths["cert"] or paths["key"]) and not paths["ca"]:
            raise ValueError("WEIGHTPLANE_CERT and _KEY are shown over TLS, which WEIGHTPLANE_CA turns on: set it")
        pems = {name: _read(f"WEIGHTPLANE_{name.upper()}", path) for name, path in paths.items()}
        ca, cert, key = pems.values()
        if cert and key:
            check_pair(Path(paths["cert"]), Path(paths["key"]), Path(paths["ca"]))
        return cls(
            address,
            tls=bool(ca),
            ca_pem=ca,
            cert_pem=cert,
            key_pem=key,
            files=tuple(paths.values()) if ca else (),
            token=os.environ.get("WEIGHTPLANE_TOKEN", "").strip(),  # a secret from a file mostly ends with a newline
            insecure=os.environ.get("WEIGHTPLANE_INSECURE", "") == "1",
        )

    def channel(self) -> grpc.Channel:
        """A new channel; it connects when it is first used, and again by itself."""
        if not self.tls:
            return grpc.insecure_channel(self.address, [*CLIENT_OPTIONS])
        if self.files:
            there = tuple(filter(None, self.files))
            return RenewingChannel(there, lambda: self.read_again()._secure())
        return self._secure()

    def _secure(self) -> grpc.Channel:
        options: dict[str, Any] = {**dict(CLIENT_OPTIONS), "grpc.min_reconnect_backoff_ms": _HANDSHAKE_MS}
        if self.server_name:
            options["grpc.ssl_target_name_override"] = self.server_name
        credentials = grpc.ssl_channel_credentials(self.ca_pem or None, self.key_pem or None, self.cert_pem or None)
        return grpc.secure_channel(self.address, credentials, [*options.items()])

    def read_again(self) -> Dial:
        """The same with what its files hold now. Raises ``ValueError`` and ``OSError``."""
        ca, cert, key = (Path(f) if f else None for f in self.files)
        if cert is not None and key is not None:
            check_pair(cert, key, ca)
        pems = {f"{n}_pem": Path(f).read_bytes() for n, f in zip(_FILES, self.files, strict=True) if f}
        return replace(self, files=(), **pems)  # type: ignore[arg-type]

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, secrets included: for a pipe to a child process, never for a log."""
        out = {k: getattr(self, k) for k in ("address", "tls", "token", "files", "server_name", "insecure")}
        for k in ("ca_pem", "cert_pem", "key_pem"):
            out[k] = base64.b64encode(getattr(self, k)).decode()
        return out

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Dial:
        """What ``to_dict`` gave."""
        pems = {k: base64.b64decode(data[k]) for k in ("ca_pem", "cert_pem", "key_pem")}
        return cls(**{**data, "files": tuple(data["files"]), **pems})
