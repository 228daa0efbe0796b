"""What a group or a replica may be called. One rule, for the server and for those who would be refused by it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

__all__ = ["CONFINED", "NAME_RULE", "check_labels", "check_text", "is_name"]

NAME_RULE: Final = "1 to 128 letters, digits, '.', '_', '-', '/', beginning with a letter or digit"
#: How a refusal says that the caller is for other groups, whatever its roles: commands know by it what to advise.
CONFINED: Final = "is confined to group"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


def is_name(value: str) -> bool:
    """Whether ``value`` is as ``NAME_RULE`` says."""
    return _NAME.fullmatch(value) is not None


def check_text(what: str, value: str, most: int = 256) -> None:
    """``ValueError`` for a text of more than ``most`` bytes or with control characters."""
    size = len(value.encode())
    if size > most:
        raise ValueError(f"{what}: expected at most {most} bytes, found {size}")
    if _CONTROL.search(value):
        raise ValueError(f"{what}: expected no control characters, found {value!r}")


def check_labels(labels: Mapping[str, str]) -> None:
    """``ValueError`` for a replica's labels that a control plane would refuse: at most 32 pairs of short texts."""
    if len(labels) > 32:
        raise ValueError(f"labels: expected at most 32 pairs, found {len(labels)}")
    for key, value in labels.items():
        if not key:
            raise ValueError(f"labels: expected some text as the key of {value[:64]!r}, found nothing")
        check_text(f"the label key {key[:64]!r}", key)
        check_text(f"label {key!r}", value)
