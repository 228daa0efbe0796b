"""Heartbeats from a process of their own, so that a busy interpreter (a GIL held for 20 s) costs no lease.

``HeartbeatHelper`` starts ``python -m weightplane.controlplane.heartbeat`` as a fresh process (never a fork of this
one) and shares one page with it. The helper holds a HEARTBEAT session for the member, tells how the member's process is
(running, stopped), and never outlives it: within a second of the parent's death it says DEAD and exits.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from enum import IntEnum

from .dial import Dial

__all__ = ["HeartbeatHelper", "HelperStatus"]

_PAGE = 4096
_TEXT_AT, _TEXT_MAX = 64, 1024


class HelperStatus(IntEnum):
    """What the helper says of its session."""

    STARTING = 0
    CONNECTING = 1
    LIVE = 2
    SUPERSEDED = 3
    EXITED = 4


class Page:
    """The shared page: words of 8 bytes, one writer each. ``progress`` is the parent's, the rest the helper's."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, _PAGE)
        self._words = memoryview(self._map).cast("q")

    @property
    def progress(self) -> int:
        """Units of work done, as the parent counts them."""
        return self._words[0]

    @progress.setter
    def progress(self, value: int) -> None:
        self._words[0] = value

    @property
    def status(self) -> HelperStatus:
        """See ``HelperStatus``."""
        return HelperStatus(self._words[1])

    @property
    def beats(self) -> int:
        """Heartbeats written to the stream."""
        return self._words[2]

    @beats.setter
    def beats(self, value: int) -> None:
        self._words[2] = value

    @property
    def text(self) -> str:
        """The last error, for people."""
        return bytes(self._map[_TEXT_AT : _TEXT_AT + _TEXT_MAX]).rstrip(b"\0").decode("utf-8", "replace")

    def say(self, status: HelperStatus, text: str = "") -> None:
        """Set status and text."""
        raw = text.encode()[:_TEXT_MAX]
        self._map[_TEXT_AT : _TEXT_AT + _TEXT_MAX] = raw + bytes(_TEXT_MAX - len(raw))
        self._words[1] = int(status)

    def close(self) -> None:
        """Unmap."""
        self._words.release()
        self._map.close()


def _shared_file() -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("weightplane-heartbeat", os.MFD_CLOEXEC)
    else:  # pragma: no cover - not Linux
        with tempfile.TemporaryFile() as f:
            fd = os.dup(f.fileno())
    os.ftruncate(fd, _PAGE)
    return fd


@dataclass(frozen=True, slots=True)
class _Member:
    group: str
    agent_id: str
    incarnation: str
    generation: int
    rank: int


class HeartbeatHelper:
    """The parent's side. One per life of a member; ``start`` once, ``stop`` ends it. Any thread.

    A replica gives ``group``, ``agent_id`` and ``incarnation``; a trainer rank also ``generation`` and ``rank``.
    """

    def __init__(
        self, dial: Dial, group: str, agent_id: str, incarnation: str, *, generation: int = 0, rank: int = -1
    ) -> None:
        self._dial = dial
        self._member = _Member(group, agent_id, incarnation, generation, rank)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._fd = _shared_file()
        self._page = Page(self._fd)
        self._last = HelperStatus.STARTING, ""
        self._before = 0  # beats of the processes before this one
        self._closed = False

    def start(self) -> None:
        """Start the process (again, if it died). ``OSError`` if the system has no room for it."""
        with self._lock:
            if self._closed or (self._process is not None and self._process.poll() is None):
                return
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
            env.pop("WEIGHTPLANE_FAILPOINTS", None)  # they are meant for the member
            self._before = self._page.beats
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "weightplane.controlplane.heartbeat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=None,
                close_fds=True,
                pass_fds=(self._fd,),
                start_new_session=True,  # a Ctrl-C or Ctrl-Z at the parent's terminal is not for the helper
                env=env,
            )
            m = self._member
            first = {
                "dial": self._dial.to_dict(),
                "group": m.group,
                "agent_id": m.agent_id,
                "incarnation": m.incarnation,
                "generation": m.generation,
                "rank": m.rank,
                "fd": self._fd,
                "parent": os.getpid(),
            }
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(first).encode() + b"\n")
                process.stdin.flush()
            except OSError:
                process.kill()
                process.wait()
                raise
            self._process = process

    @property
    def pid(self) -> int:
        """Its process id; 0 when it was never started."""
        return self._process.pid if self._process is not None else 0

    def alive(self) -> bool:
        """Whether it runs."""
        with self._lock:
            return self._process is not None and self._process.poll() is None

    @property
    def status(self) -> HelperStatus:
        """What it says of its session."""
        with self._lock:
            return self._last[0] if self._closed else self._page.status

    @property
    def error(self) -> str:
        """Its last error; empty if none."""
        with self._lock:
            return self._last[1] if self._closed else self._page.text

    @property
    def beats(self) -> int:
        """Heartbeats written so far."""
        with self._lock:
            return 0 if self._closed else self._page.beats

    @property
    def silent(self) -> bool:
        """Whether the process that runs now has not beaten yet."""
        with self._lock:
            return not self._closed and self._page.beats == self._before

    def progress(self, value: int) -> None:
        """Publish the member's progress counter; it should rise while work is done."""
        with self._lock:
            if not self._closed:
                self._page.progress = value

    def stop(self, timeout: float = 2.0) -> None:
        """End the process (killed after ``timeout``) and free the page. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._last = self._page.status, self._page.text
            process = self._process
            self._page.close()
            os.close(self._fd)
        if process is None:
            return
        assert process.stdin is not None
        try:
            process.stdin.write(b"leave\n")
            process.stdin.close()
        except BrokenPipeError:
            pass  # it has left
        except OSError:
            process.kill()  # somebody closed our end: it cannot be told
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    from weightplane.controlplane.heartbeat_process import main

    raise SystemExit(main())
