"""Checks of request fields. Each refusal names the field, what was expected and what was found."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.names import NAME_RULE, is_name

from .errors import Refused, shorten

__all__ = ["between", "invalid", "label", "labels", "name", "not_built", "refuse", "request_id", "text"]

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def refuse(reason: Reason, message: str, member: str = "") -> NoReturn:
    """Answer with this failure."""
    raise Refused(Failure(reason, message, member))


def invalid(field: str, expected: str, found: object) -> NoReturn:
    """A field that is missing, malformed or out of range."""
    shown = shorten(repr(found) if isinstance(found, (str, bytes)) else str(found), 200)
    refuse(Reason.INVALID_ARGUMENT, f"{field}: expected {expected}, found {shown}")


def not_built(what: str) -> NoReturn:
    """A part of the contract that this build lacks."""
    refuse(Reason.NOT_IMPLEMENTED, f"{what} is part of the contract but not built yet")


def name(field: str, value: str) -> str:
    """The name of a group or a replica."""
    if not is_name(value):
        invalid(field, NAME_RULE, value)
    return value


def text(field: str, value: str, most: int, empty: bool = False, lines: bool = False) -> str:
    """Free text of bounded size; of one line, without control characters, unless it is an explanation (``lines``)."""
    if not value and not empty:
        invalid(field, "some text", "nothing")
    size = len(value.encode())
    if size > most:
        invalid(field, f"at most {most} bytes", f"{size} bytes")
    if not lines and _CONTROL.search(value):
        invalid(field, "no control characters", value)
    return value


def request_id(value: str) -> str:
    """The caller's id of a logical call."""
    return text("request_id", value, 64)


def between(field: str, value: float, low: float, high: float) -> Any:
    """A number in a closed range."""
    if not low <= value <= high:
        invalid(field, f"{low}..{high}", value)
    return value


def label(field: str, value: str) -> str:
    """One label's key or value."""
    return text(field, value, 256, empty=True)


def labels(field: str, value: Mapping[str, str]) -> dict[str, str]:
    """A set of labels, at most 32 pairs."""
    if len(value) > 32:
        invalid(field, "at most 32 pairs", f"{len(value)} pairs")
    return {text(f"{field} key", k, 256): label(f"{field}[{k!r}]", v) for k, v in value.items()}
