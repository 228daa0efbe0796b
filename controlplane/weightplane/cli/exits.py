"""Exit codes of every command. Scripts may rely on them; ``docs/cli.md`` lists them."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Exit"]


class Exit(IntEnum):
    """What a command's exit status means."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    UNREACHABLE = 3
    REFUSED = 4
    FAILED = 5
    UNKNOWN_OUTCOME = 6
    NOT_FOUND = 7
    DENIED = 8
    INTERRUPTED = 130
