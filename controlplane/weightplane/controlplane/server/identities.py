"""Who a caller is: its name, its roles, and the groups that it may name. From a bearer token or a certificate.

A token's line is ``ROLE[+ROLE...][@GROUP[,GROUP...]] TOKEN``; ``#`` begins a comment. A client certificate's common
name is ``ROLE[+ROLE...]/NAME``, and its alternative names ``URI:weightplane:group:GROUP`` are its groups. Where no
group is named, all are meant.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import unquote

from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.names import CONFINED, NAME_RULE, is_name

from .errors import Refused

__all__ = ["ANYONE", "GROUP_URI", "Identity", "Role", "by_certificate", "digest_of", "parse_tokens"]

GROUP_URI = "weightplane:group:"
_LEAST_TOKEN = 16


class Role(StrEnum):
    """What an identity may be."""

    TRAINER = "trainer"
    INFERENCE = "inference"
    OPERATOR = "operator"
    VIEWER = "viewer"


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller, by name, with its roles. ``groups``: those that it may name, ``None`` for all."""

    name: str
    roles: frozenset[Role]
    groups: frozenset[str] | None = None

    def require(self, role: Role, what: str) -> None:
        """Refuse unless this identity has ``role``."""
        if role not in self.roles:
            have = ", ".join(sorted(self.roles)) or "none"
            raise Refused(
                Failure(Reason.PERMISSION_DENIED, f"{what}: expected role {role}, found {have} ({self.name})")
            )

    def may_see(self, group: str) -> bool:
        """Whether a group is one of this identity's."""
        return self.groups is None or group in self.groups

    def enter(self, group: str, what: str) -> None:
        """Refuse a group that is not this identity's; whether there is one of that name is not told."""
        if not self.may_see(group):
            mine = ", ".join(sorted(self.groups or ())[:8])
            text = f"{what}: {self.name} {CONFINED} {mine}, found {group[:128]!r}"
            raise Refused(Failure(Reason.PERMISSION_DENIED, text))


ANYONE = Identity("anyone on this port", frozenset(Role))


def digest_of(token: str) -> bytes:
    """What is kept of a token."""
    return hashlib.sha256(token.encode()).digest()


def parse_tokens(text: str) -> dict[bytes, Identity]:
    """Read tokens; a faulty line is named by its number, never shown."""
    tokens: dict[bytes, Identity] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"tokens, line {number}"
        if len(words) != 2:
            raise ValueError(f"{where}: expected ROLE[+ROLE...][@GROUP[,GROUP...]] TOKEN, found {len(words)} word(s)")
        if len(words[1]) < _LEAST_TOKEN:
            raise ValueError(f"{where}: expected a token of at least {_LEAST_TOKEN} characters")
        key = digest_of(words[1])
        if key in tokens:
            raise ValueError(f"{where}: the token of {tokens[key].name} comes again: each identity has its own")
        roles, at, groups = words[0].partition("@")
        scope = _groups(groups.split(","), where) if at else None
        tokens[key] = Identity(f"token {number}", _roles(roles, where), scope)
    return tokens


def by_certificate(names: Iterable[bytes], alternatives: Iterable[bytes]) -> Identity:
    """The identity in a verified client certificate; one without a role of ours has none."""
    uris = [raw.decode("utf-8", "replace") for raw in alternatives]
    scope = frozenset(unquote(u.removeprefix(GROUP_URI)) for u in uris if u.startswith(GROUP_URI)) or None
    for raw in names:
        name = raw.decode("utf-8", "replace")
        roles, slash, _ = name.partition("/")
        if slash and all(r in set(Role) for r in roles.split("+")):
            return Identity(name, frozenset(Role(r) for r in roles.split("+")), scope)
        return Identity(name, frozenset(), scope)
    text = "expected a client certificate whose common name is ROLE[+ROLE...]/NAME (weightplane certs makes one), or a "
    text += "bearer token where the server has some; found no certificate with a common name"
    raise Refused(Failure(Reason.UNAUTHENTICATED, text))


def _roles(text: str, where: str) -> frozenset[Role]:
    try:
        return frozenset(Role(r) for r in text.split("+"))
    except ValueError:
        raise ValueError(f"{where}: expected roles out of {', '.join(Role)} joined by '+'") from None


def _groups(names: list[str], where: str) -> frozenset[str]:
    if not all(is_name(n) for n in names):
        raise ValueError(f"{where}: expected groups after '@' joined by ',', each of {NAME_RULE}")
    return frozenset(names)
