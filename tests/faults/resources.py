"""What a process holds, from ``/proc``, and what lies in a fleet's shared-memory folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Held", "held", "segments", "tree"]


@dataclass(frozen=True)
class Held:
    descriptors: int
    threads: int
    anonymous_kib: int


def held(pid: int) -> Held:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return Held(
        len(list(Path(f"/proc/{pid}/fd").iterdir())),
        int(status["Threads"]),
        int(status.get("RssAnon", "0 kB").split()[0]),
    )


def segments(folder: Path) -> list[str]:
    """Names in a shared-memory folder."""
    return sorted(p.name for p in folder.iterdir())


def tree(pid: int) -> list[int]:
    """A process and its children, as far as they live."""
    found, wait = [], [pid]
    while wait:
        now = wait.pop()
        try:
            tasks = list(Path(f"/proc/{now}/task").iterdir())
        except FileNotFoundError:
            continue
        found.append(now)
        for task in tasks:
            try:
                wait += [int(p) for p in (task / "children").read_text().split()]
            except FileNotFoundError:
                continue  # that thread has ended meanwhile
    return found
