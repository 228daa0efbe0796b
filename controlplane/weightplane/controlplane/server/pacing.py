"""How often one connection may call and one session may speak: whoever does so oftener is held back, for a while."""

from __future__ import annotations

import asyncio
import time

from weightplane.controlplane.core.reasons import Failure, Reason

from .errors import Refused

__all__ = ["Pace", "Paces"]

_CALLS_S, _CALLS = 1000.0, 4000  # of a connection: calls a second, and in a burst
_PATIENCE_S = 5.0  # a call that would be held back for longer is refused
_MOST = 65_536  # connections that are remembered


class Pace:
    """So many turns a second, after a burst. A turn that comes early waits for its time."""

    __slots__ = ("_burst_s", "_due", "_each_s")

    def __init__(self, per_second: float, burst: int) -> None:
        self._each_s, self._burst_s = 1 / per_second, burst / per_second
        self._due = 0.0

    @property
    def idle(self) -> bool:
        """Whether it has nothing to remember."""
        return self._due <= time.monotonic()

    async def turn(self, patience_s: float = float("inf")) -> None:
        """Wait for one's turn; refused if that takes longer than ``patience_s``."""
        now = time.monotonic()
        due = max(self._due, now) + self._each_s
        wait = due - self._burst_s - now
        if wait > patience_s:
            text = f"calls: expected at most {1 / self._each_s:.0f} a second of one connection, found far more"
            raise Refused(Failure(Reason.LIMIT, text))
        self._due = due
        if wait > 0:
            await asyncio.sleep(wait)


class Paces:
    """One for each connection."""

    def __init__(self) -> None:
        self._of: dict[str, Pace] = {}

    async def turn(self, peer: str) -> None:
        """Wait for a turn of ``peer``'s."""
        pace = self._of.get(peer)
        if pace is None:
            if len(self._of) >= _MOST:
                self._of = {k: p for k, p in self._of.items() if not p.idle}
            pace = self._of[peer] = Pace(_CALLS_S, _CALLS)
        await pace.turn(_PATIENCE_S)
