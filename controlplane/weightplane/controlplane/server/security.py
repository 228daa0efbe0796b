"""Who may call what: loopback, or TLS, or an explicit flag; bearer tokens or client certificates; roles.

Tokens come from a file or the environment, one per line: ``ROLE[+ROLE...] TOKEN``; ``#`` begins a comment. A client
certificate's common name is ``ROLE[+ROLE...]/NAME``. Without either, every caller that reaches the port has every role.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import grpc

from weightplane.controlplane.core.reasons import Failure, Reason

from .errors import Refused

__all__ = ["RPC_ROLES", "Authoriser", "Identity", "Role", "Security", "Tls", "is_loopback", "parse_tokens"]

log = logging.getLogger(__name__)


class Role(StrEnum):
    """What an identity may be."""

    TRAINER = "trainer"
    INFERENCE = "inference"
    OPERATOR = "operator"
    VIEWER = "viewer"


_T, _I, _O, _V = Role.TRAINER, Role.INFERENCE, Role.OPERATOR, Role.VIEWER
_ALL = frozenset(Role)
_TRAINER = frozenset({_T})
_INFERENCE = frozenset({_I})
_OPERATOR = frozenset({_O})
_TRANSFER, _FLEET, _AGENT = (
    f"/weightplane.v1.{name}/" for name in ("WeightTransferService", "FleetService", "AgentService")
)

#: Method -> roles, any one of which will do. What is not here is refused.
RPC_ROLES: dict[str, frozenset[Role]] = {
    **{
        _TRANSFER + name: _TRAINER
        for name in (
            "InitTransfer",
            "PutManifest",
            "PutPlacement",
            "StartUpdate",
            "GetPlan",
            "UpdateWeights",
            "PutDigests",
            "FinishUpdate",
            "CloseTransfer",
        )
    },
    _TRANSFER + "AbortUpdate": frozenset({_T, _O}),  # generation 0 needs the operator
    _TRANSFER + "GetUpdate": _ALL,
    _TRANSFER + "WatchUpdate": _ALL,  # a generation needs the trainer
    **{
        _FLEET + name: _OPERATOR
        for name in (
            "CreateGroup",
            "UpdateGroup",
            "SleepReplica",
            "WakeReplica",
            "DrainReplica",
            "ActivateReplica",
            "PinReplica",
            "UnpinReplica",
        )
    },
    _FLEET + "PauseGeneration": frozenset({_T, _O}),  # holder "operator" needs the operator
    _FLEET + "ResumeGeneration": frozenset({_T, _O}),
    **{
        _FLEET + name: _ALL
        for name in ("ListGroups", "GetGroup", "ListReplicas", "ListUpdates", "WatchGroup", "CheckReplica")
    },
    _AGENT + "Session": frozenset({_T, _I}),  # by the hello's role
    **{_AGENT + name: _INFERENCE for name in ("GetManifest", "GetPlan", "PutWorkerPlacement", "PutReceipt")},
}


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller, by name, with its roles."""

    name: str
    roles: frozenset[Role]

    def require(self, role: Role, what: str) -> None:
        """Refuse unless this identity has ``role``."""
        if role not in self.roles:
            have = ", ".join(sorted(self.roles)) or "none"
            raise Refused(
                Failure(Reason.PERMISSION_DENIED, f"{what}: expected role {role}, found {have} ({self.name})")
            )


ANYONE = Identity("anyone on this port", _ALL)


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of the server, and of the authority that clients' certificates must come from (mTLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Read the files."""
        ca = self.client_ca.read_bytes() if self.client_ca is not None else None
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)


@dataclass(frozen=True, slots=True)
class Security:
    """How a server is protected. ``tokens``: SHA-256 of each -> its identity; the tokens themselves are not kept."""

    tls: Tls | None = None
    tokens: dict[bytes, Identity] = field(default_factory=dict, repr=False)
    insecure: bool = False

    def check(self, address: str) -> None:
        """Refuse to listen in the open; say so where it was asked for."""
        if self.tls is not None or is_loopback(address):
            return
        if not self.insecure:
            raise ValueError(
                f"{address!r} is not loopback: give TLS files, or ask for insecure explicitly (anyone who reaches the "
                "port could then replace the fleet's weights)"
            )
        log.warning("listening on %s without TLS, as asked for: anyone in between can read and change weights", address)


def is_loopback(address: str) -> bool:
    """Whether ``host:port`` (or a Unix socket) is reached from this machine alone."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_tokens(text: str) -> dict[bytes, Identity]:
    """Read tokens; a faulty line is named by its number, never shown."""
    tokens: dict[bytes, Identity] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2:
            raise ValueError(f"tokens, line {number}: expected ROLE[+ROLE...] TOKEN, found {len(words)} word(s)")
        if len(words[1]) < 16:
            raise ValueError(f"tokens, line {number}: expected a token of at least 16 characters")
        tokens[_digest(words[1])] = Identity(f"token {number}", _roles(words[0], f"tokens, line {number}"))
    return tokens


def _roles(text: str, where: str) -> frozenset[Role]:
    try:
        return frozenset(Role(r) for r in text.split("+"))
    except ValueError:
        raise ValueError(f"{where}: expected roles out of {', '.join(Role)} joined by '+'") from None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


class Authoriser:
    """Admits calls by the one table."""

    def __init__(self, security: Security) -> None:
        self._tokens = security.tokens
        self._certificates = security.tls is not None and security.tls.client_ca is not None

    def admit(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> Identity:
        """The caller's identity, or a refusal."""
        identity = self._identify(context)
        allowed = RPC_ROLES.get(method)
        if allowed is None or not allowed & identity.roles:
            need, have = "/".join(sorted(allowed or ())), ", ".join(sorted(identity.roles)) or "none"
            name = method.rpartition("/")[2]
            message = f"{name}: expected role {need or 'that exists'}, found {have} ({identity.name})"
            raise Refused(Failure(Reason.PERMISSION_DENIED, message))
        return identity

    def _identify(self, context: grpc.aio.ServicerContext[Any, Any]) -> Identity:
        if not self._tokens and not self._certificates:
            return ANYONE
        if self._tokens:
            for key, value in context.invocation_metadata() or ():
                if key == "authorization":
                    return self._by_token(value if isinstance(value, str) else "")
        if self._certificates:
            return _by_certificate(context.auth_context().get("x509_common_name", ()))
        raise Refused(
            Failure(Reason.UNAUTHENTICATED, "expected metadata 'authorization: Bearer TOKEN', found no such entry")
        )

    def _by_token(self, header: str) -> Identity:
        scheme, _, token = header.partition(" ")
        given = _digest(token.strip())
        found: Identity | None = None
        for known, identity in self._tokens.items():  # all of them, in constant time each
            if hmac.compare_digest(known, given):
                found = identity
        if scheme.lower() != "bearer" or found is None:
            raise Refused(Failure(Reason.UNAUTHENTICATED, "the bearer token is not one of this server's"))
        return found


def _by_certificate(common_names: Iterable[bytes]) -> Identity:
    for raw in common_names:
        name = raw.decode("utf-8", "replace")
        roles, slash, _ = name.partition("/")
        if slash and all(r in set(Role) for r in roles.split("+")):
            return Identity(name, frozenset(Role(r) for r in roles.split("+")))
        return Identity(name, frozenset())
    raise Refused(Failure(Reason.UNAUTHENTICATED, "the client certificate has no common name ROLE[+ROLE...]/NAME"))
