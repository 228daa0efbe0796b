"""How commands speak: people get tables on a terminal, machines get one JSON document with ``--json``."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TextIO

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from weightplane.v1 import common_pb2, update_pb2

from .exits import Exit

__all__ = [
    "complain",
    "console",
    "emit_json",
    "err",
    "human_bytes",
    "message_dict",
    "phase_name",
    "reason_name",
    "seconds",
    "short_name",
    "table",
]


def _width(stream: TextIO) -> int | None:
    """Rich takes whatever is no terminal for 80 columns wide and breaks lines there: a log or a pipe has room."""
    return None if stream.isatty() or "COLUMNS" in os.environ else 160


#: All but tab and new line: a terminal obeys them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def _shown(text: str) -> str:
    """Text of whoever it is: a replica's explanation may have colours and orders to the terminal in it."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class _Console(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(_shown(o) if isinstance(o, str) else o for o in objects), **options)


console = _Console(highlight=False, width=_width(sys.stdout))
err = _Console(stderr=True, highlight=False, width=_width(sys.stderr))


def message_dict(message: Message) -> dict[str, Any]:
    """A message as JSON-ready data: field names as in the contract, int64 as strings, enums by name."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def emit_json(data: Message | Mapping[str, Any] | list[Any]) -> None:
    """Print one JSON document on standard output."""
    plain = message_dict(data) if isinstance(data, Message) else data
    sys.stdout.write(json.dumps(plain, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def complain(text: str, reason: str, code: Exit, as_json: bool, todo: str) -> NoReturn:
    """Say what is wrong (``reason``: its kind, or nothing) and what to do, and end with the documented code."""
    if as_json:
        emit_json({"error": {"reason": reason, "message": text, "next": todo, "exit": int(code)}})
    else:
        err.print(f"[bold red]error[/] {reason}: " if reason else "[bold red]error[/] ", end="")
        err.print(text, markup=False, soft_wrap=True)  # a line in a log stays one line
        if todo:
            err.print(f"  next: {todo}", markup=False, soft_wrap=True)
    raise typer.Exit(code)


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table; cells that start with a digit are not aligned specially, so that columns stay readable."""
    grid = Table(title=escape(_shown(title)), title_justify="left", header_style="bold")
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(_shown(cell)) for cell in row))
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


def short_name(name: str, prefix: str) -> str:
    """An enum's value as people say it: "WEIGHTS_STATE_READY" is "ready"."""
    return name.removeprefix(prefix + "_").lower()


def phase_name(phase: int) -> str:
    """An update's phase."""
    return short_name(update_pb2.UpdatePhase.Name(phase), "UPDATE_PHASE")  # type: ignore[arg-type]


def reason_name(reason: int) -> str:
    """A failure's reason, as the contract has it."""
    return short_name(common_pb2.Reason.Name(reason), "REASON").upper()  # type: ignore[arg-type]
