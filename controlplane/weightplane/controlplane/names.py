"""What a group or a replica may be called. One rule, for the server and for those who would be refused by it."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["NAME_RULE", "is_name"]

NAME_RULE: Final = "1 to 128 letters, digits, '.', '_', '-', '/', beginning with a letter or digit"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


def is_name(value: str) -> bool:
    """Whether ``value`` is as ``NAME_RULE`` says."""
    return _NAME.fullmatch(value) is not None
