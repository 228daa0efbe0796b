"""How commands speak: people get tables on a terminal, machines get one JSON document with ``--json``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

__all__ = ["console", "emit_json", "err", "human_bytes", "message_dict", "seconds", "table"]


def _width(stream: TextIO) -> int | None:
    """Rich takes whatever is no terminal for 80 columns wide and breaks lines there: a log or a pipe has room."""
    return None if stream.isatty() or "COLUMNS" in os.environ else 160


console = Console(highlight=False, width=_width(sys.stdout))
err = Console(stderr=True, highlight=False, width=_width(sys.stderr))


def message_dict(message: Message) -> dict[str, Any]:
    """A message as JSON-ready data: field names as in the contract, int64 as strings, enums by name."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def emit_json(data: Message | Mapping[str, Any] | list[Any]) -> None:
    """Print one JSON document on standard output."""
    plain = message_dict(data) if isinstance(data, Message) else data
    sys.stdout.write(json.dumps(plain, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table; cells that start with a digit are not aligned specially, so that columns stay readable."""
    grid = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*row)
    console.print(grid)


def human_bytes(n: float) -> str:
    """Bytes with a decimal unit: 1500 is "1.5 kB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n) < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def seconds(s: float) -> str:
    """A duration, fit for a column."""
    return f"{s * 1000:.1f} ms" if s < 1 else f"{s:.2f} s"
