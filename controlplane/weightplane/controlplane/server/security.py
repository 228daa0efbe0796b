"""How a server is protected: loopback, or TLS and an identity for every caller, or an explicit flag.

Without tokens and without an authority for client certificates, every caller that reaches the port has every role; that
is refused off loopback. A token file is read anew when it changes; who is no longer in it loses its streams too.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from weightplane.controlplane.addresses import is_loopback
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.pems import check_pair

from .authorisation import RPC_TABLE, Row
from .errors import Refused
from .identities import ANYONE, Identity, Role, by_certificate, digest_of, parse_tokens
from .tls import Tls, warn_if_readable

__all__ = ["Authoriser", "Identity", "Role", "Security", "Tls", "is_loopback", "parse_tokens"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Security:
    """How a server is protected. ``tokens``: SHA-256 of each -> its identity; the tokens themselves are not kept.

    ``token_file``: more of them, read when the server starts and whenever the file changes.
    """

    tls: Tls | None = None
    tokens: dict[bytes, Identity] = field(default_factory=dict, repr=False)
    token_file: Path | None = None
    insecure: bool = False

    @property
    def identifies(self) -> bool:
        """Whether callers are asked who they are."""
        return bool(self.tokens) or self.token_file is not None or self.by_certificate

    @property
    def by_certificate(self) -> bool:
        """Whether callers show certificates."""
        return self.tls is not None and self.tls.client_ca is not None

    def check(self, address: str) -> None:
        """Refuse to listen in the open; say so where it was asked for."""
        problem = self.problem(address)
        if not problem:
            return
        if not self.insecure:
            raise ValueError(f"{address!r} is not loopback: {problem}, or ask for insecure explicitly")
        log.warning("INSECURE, as asked for: listening on %s, off loopback; to mend it, %s", address, problem)

    def read(self) -> None:
        """Look at every file once. ``ValueError`` or ``OSError`` names one that cannot be used."""
        if self.tls is not None:
            check_pair(self.tls.certificate, self.tls.key, self.tls.client_ca)
        Tokens(self)

    def problem(self, address: str) -> str:
        """What is to be done before ``address`` may be listened on, and what it is about; empty if nothing is."""
        if is_loopback(address):
            return ""
        if self.tls is None:
            return "give a TLS certificate and its key (anyone in between could read and change weights)"
        if not self.identifies:
            return (
                "give an authority for client certificates, or tokens (TLS alone asks nobody who they are: anyone who "
                "reaches the port could replace the fleet's weights)"
            )
        return ""


class Tokens:
    """Those of a server, by their SHA-256; some from a file that may change."""

    def __init__(self, security: Security) -> None:
        self._given, self._file = security.tokens, security.token_file
        self._seen: object = None
        self.known: dict[bytes, Identity] = dict(security.tokens)
        if self._file is not None:
            self._seen = _stamp(self._file)
            self.known = self._read(self._file)
            warn_if_readable(self._file)

    def refresh(self) -> bool:
        """Read the file if it changed; whether that is so. A faulty one is told of, and changes nothing."""
        if self._file is None:
            return False
        seen = _stamp(self._file)
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            self.known = self._read(self._file)
        except (OSError, ValueError) as e:
            log.error("tokens: %s; those read before stay in use", e)
            return False
        log.info("%s: read anew, %d token(s) in all", self._file, len(self.known))
        return True

    def _read(self, file: Path) -> dict[bytes, Identity]:
        try:
            found = parse_tokens(file.read_text(encoding="utf-8"))
        except ValueError as e:  # bytes that are no UTF-8 among them
            raise ValueError(f"{file}: {e}") from None
        if not found:  # half-written, perhaps: it must never mean that nobody is asked
            raise ValueError(f"{file}: expected lines ROLE[+ROLE...][@GROUP[,GROUP...]] TOKEN, found none")
        return {**self._given, **found}


def _stamp(file: Path) -> object:
    """Equal while the file is the same, or as absent as it was."""
    try:
        found = file.stat()
    except OSError as e:
        return str(e)
    return found.st_mtime_ns, found.st_ino, found.st_size


class Authoriser:
    """Admits calls by the one table. Raises ``ValueError`` or ``OSError`` for a token file that cannot be used."""

    def __init__(self, security: Security) -> None:
        self._asks = security.identifies
        self._by_tokens = bool(security.tokens) or security.token_file is not None
        self._by_certificates = security.by_certificate
        self._tokens = Tokens(security)

    def refresh(self) -> bool:
        """Look at the token file; whether who may call changed."""
        return self._tokens.refresh()

    def strange(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Whether a call's metadata alone says that it is nobody's: not a byte of its request need be read then."""
        if not self._by_tokens or self._by_certificates:
            return False
        try:
            return all(key != "authorization" or self._by_token(value) is None for key, value in metadata)
        except Refused:
            return True

    def admit(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> tuple[Identity, Row]:
        """The caller's identity and the method's row, or a refusal."""
        identity = self.identify(context)
        row = RPC_TABLE.get(method)
        if row is None or not row.roles & identity.roles:
            need, have = "/".join(sorted(row.roles if row else ())), ", ".join(sorted(identity.roles)) or "none"
            name = method.rpartition("/")[2]
            message = f"{name}: expected role {need or 'that exists'}, found {have} ({identity.name})"
            raise Refused(Failure(Reason.PERMISSION_DENIED, message))
        return identity, row

    def identify(self, context: grpc.aio.ServicerContext[Any, Any]) -> Identity:
        """Who calls, as things are now, or a refusal."""
        shown = context.auth_context() if self._by_certificates else {}
        return self.identity(
            context.invocation_metadata() or (), shown.get("x509_common_name", ()), shown.get("peer_uri", ())
        )

    def identity(
        self, metadata: Iterable[tuple[str, str | bytes]], names: Iterable[bytes], uris: Iterable[bytes]
    ) -> Identity:
        """The same from what a call or an HTTP request says, and the verified certificate's names, if it has one."""
        if not self._asks:
            return ANYONE
        if self._by_tokens:
            for key, value in metadata:
                if key == "authorization":
                    return self._by_token(value)
        if self._by_certificates:
            return by_certificate(names, uris)
        raise Refused(
            Failure(Reason.UNAUTHENTICATED, "expected metadata 'authorization: Bearer TOKEN', found no such entry")
        )

    def _by_token(self, header: str | bytes) -> Identity:
        scheme, _, token = (header if isinstance(header, str) else "").partition(" ")
        given = digest_of(token.strip())
        found: Identity | None = None
        for known, identity in self._tokens.known.items():  # all of them, in constant time each
            if hmac.compare_digest(known, given):
                found = identity
        if scheme.lower() != "bearer" or found is None:
            raise Refused(Failure(Reason.UNAUTHENTICATED, "the bearer token is not one of this server's"))
        return found
