"""Repeats of mutating calls: the same ``request_id`` gets the first answer and does nothing.

The core remembers what StartUpdate began, durably. Here are the others, in memory, the last thousand of a group: an
answer that was given is given again, so that a late duplicate of, say, a pause does not undo the resume after it. A
call that was refused, or is still being served, is simply tried again: the core joins it to the first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Protocol, TypeVar

from weightplane.controlplane.core.reasons import Reason

from . import fields

__all__ = ["Answers"]

_KEPT = 1000


class Request(Protocol):
    """A request with an id."""

    request_id: str

    def SerializeToString(self, *, deterministic: bool = ...) -> bytes:
        """Protobuf's own."""
        ...


A = TypeVar("A")


class Answers:
    """(method, request_id) -> content and answer. ``keep`` nothing of a call whose answer the core can give again."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[bytes, object | None]] = OrderedDict()

    def earlier(self, method: str, request: Request, answer: type[A]) -> A | None:
        """The first answer, if this is a repeat; refuses an id that came with other content."""
        key = fields.request_id(request.request_id)
        known = self._known.get(key)
        if known is None:
            self._put(key, (_fingerprint(method, request), None))
            return None
        if known[0] != _fingerprint(method, request):
            message = f"request_id {key!r} came with another call or other content before: mint a new one"
            fields.refuse(Reason.REQUEST_ID_REUSED, message)
        return known[1] if isinstance(known[1], answer) else None

    def keep(self, method: str, request: Request, answer: object) -> None:
        """Remember the answer."""
        self._put(request.request_id, (_fingerprint(method, request), answer))

    def _put(self, key: str, entry: tuple[bytes, object | None]) -> None:
        self._known[key] = entry
        self._known.move_to_end(key)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)


def _fingerprint(method: str, request: Request) -> bytes:
    return hashlib.sha256(method.encode() + request.SerializeToString(deterministic=True)).digest()
