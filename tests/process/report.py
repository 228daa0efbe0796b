"""What the process tests print at the end of the run (``conftest.py``), and keep where asked."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

__all__ = ["TEXTS", "keep", "render"]

#: (title, text) shown in pytest's terminal summary.
TEXTS: list[tuple[str, str]] = []


def render(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int = 200) -> str:
    table = Table(show_lines=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


def keep(variable: str, title: str, preface: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a Markdown table to the file that the environment variable names, if it does."""
    path = os.environ.get(variable)
    if not path:
        return
    lines = [f"# {title}", "", preface, "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", "<br>") for cell in row) + " |" for row in rows]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
