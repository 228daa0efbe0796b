"""``--announce FILE``: a process says where it listens once it does: scripts wait for a fact, not for a time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["AnnounceOption", "announce"]

AnnounceOption = Annotated[
    Path | None,
    typer.Option("--announce", help="Write a JSON file with addresses and pid here once ready (atomically)."),
]


def announce(path: Path | None, **facts: Any) -> None:
    """Write the facts, whole or not at all."""
    if path is None:
        return
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps({"pid": os.getpid(), **facts}), encoding="utf-8")
    part.replace(path)
