"""For processes that a script starts: ``--announce FILE`` says where it listens, ``--exit-with PID`` ends it too."""

from __future__ import annotations

import json
import os
import select
import signal
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["AnnounceOption", "ExitWithOption", "announce", "exit_with"]

AnnounceOption = Annotated[
    Path | None,
    typer.Option("--announce", help="Write a JSON file with addresses and pid here once ready (atomically)."),
]
ExitWithOption = Annotated[
    int, typer.Option("--exit-with", min=0, help="End, as by SIGTERM, when the process of this pid ends.")
]


def announce(path: Path | None, **facts: Any) -> None:
    """Write the facts, whole or not at all: scripts wait for a fact and not for a time."""
    if path is None:
        return
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps({"pid": os.getpid(), **facts}), encoding="utf-8")
    part.replace(path)


def exit_with(pid: int) -> None:
    """Send SIGTERM to this process once process ``pid`` is gone, however it died. 0 = never."""
    if not pid:
        return
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGTERM)
        return

    def wait() -> None:
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        poll.poll()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="weightplane-exit-with", daemon=True).start()
