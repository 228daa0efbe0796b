"""The server's certificates, read anew when their files change: a handshake after that has the new ones."""

from __future__ import annotations

import logging
import ssl
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from weightplane.controlplane.pems import check_pair

__all__ = ["Contexts", "Tls", "names_in", "stamp_of", "warn_if_readable"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of the server, and of the authority that clients' certificates must come from (mTLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Read the files now, and again at the first handshake after they changed."""
        watched = Watched(self)
        return grpc.dynamic_ssl_server_credentials(
            watched.first,
            watched.newer,  # type: ignore[arg-type]  # None is taken, and means "as before"
            require_client_authentication=self.client_ca is not None,
        )

    def context(self) -> ssl.SSLContext:
        """The same for HTTP, from the files as they are now. A client's certificate is checked, not demanded."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.load_cert_chain(self.certificate, self.key)
        if self.client_ca is not None:
            made.load_verify_locations(self.client_ca)
            made.verify_mode = ssl.CERT_OPTIONAL
        return made

    @property
    def files(self) -> tuple[Path, ...]:
        """All of them."""
        return (self.certificate, self.key, *([self.client_ca] if self.client_ca is not None else []))


class Watched:
    """What the files of a ``Tls`` held when they were last good. ``newer``: any thread; never raises."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._seen = stamp_of(tls.files)
        self.first = self._read()
        warn_if_readable(tls.key)

    def newer(self) -> grpc.ServerCertificateConfiguration | None:
        """For gRPC, at each handshake: what to use from now on, ``None`` for what was used before."""
        with self._lock:
            seen = stamp_of(self._tls.files)
            if seen == self._seen:
                return None
            self._seen = seen
            try:
                found = self._read()
            except (OSError, ValueError) as e:  # half of a rotation, perhaps: the other half is looked at when it comes
                log.error("certificates: %s; those read before stay in use", e)
                return None
        log.info("certificates: %s is read anew", self._tls.certificate)
        return found

    def _read(self) -> grpc.ServerCertificateConfiguration:
        check_pair(self._tls.certificate, self._tls.key, self._tls.client_ca)
        ca = self._tls.client_ca.read_bytes() if self._tls.client_ca is not None else None
        pair = (self._tls.key.read_bytes(), self._tls.certificate.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=ca)


class Contexts:
    """For HTTP what ``Watched`` is for gRPC: what the files of a ``Tls`` held when they were last good. Any thread.

    Raises ``OSError`` where they are not good at first.
    """

    def __init__(self, tls: Tls, who: str) -> None:
        self._tls, self._who = tls, who
        self._lock = threading.Lock()
        self._seen = stamp_of(tls.files)
        self._good = tls.context()

    def newest(self) -> ssl.SSLContext:
        """To shake hands with now."""
        with self._lock:
            seen = stamp_of(self._tls.files)
            if seen != self._seen:
                self._seen = seen
                try:
                    self._good = self._tls.context()
                except (OSError, ValueError) as e:  # half of a rotation, perhaps
                    text = "%s: %s: %s; the certificates read before stay in use"
                    log.error(text, self._who, self._tls.certificate, e)
            return self._good


def warn_if_readable(path: Path) -> None:
    """Say so if others may read a secret."""
    mode = path.stat().st_mode
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("%s holds a secret and others may read it (mode %o): chmod 600", path, stat.S_IMODE(mode))


def stamp_of(files: tuple[Path, ...]) -> object:
    """Equal while the files are the same, or as absent as they were."""
    try:
        return [(s.st_mtime_ns, s.st_ino, s.st_size) for s in (f.stat() for f in files)]
    except OSError as e:
        return str(e)


def names_in(certificate: Any) -> tuple[list[bytes], list[bytes]]:
    """Common names and alternative URIs of a verified certificate."""
    found = certificate or {}
    subject = (pair for pairs in found.get("subject", ()) for pair in pairs)
    alternatives = found.get("subjectAltName", ())
    return (
        [value.encode() for key, value in subject if key == "commonName"],
        [value.encode() for key, value in alternatives if key == "URI"],
    )
