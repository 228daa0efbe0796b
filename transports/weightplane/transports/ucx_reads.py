"""READs of one NIXL agent: some in flight at once, counted in order, and none left over when something goes wrong."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import numpy as np

from .ucx_agent import Agent, UcxError

__all__ = ["Read", "Reads", "rows", "slow_after", "where"]

log = logging.getLogger(__name__)

_IN_FLIGHT: Final = 4
_STEP: Final = 2 << 20  # bytes are counted, and a failpoint passed, in steps of at most this
_SLOW_S: Final = 0.005
_GIB: Final = 1 << 30
_QUIET_S: Final = 0.5  # seconds that a READ which was given up may take to end

#: A prepared READ: its number at the agent, and its bytes.
Read = tuple[int, int]


class Reads:
    """See the module text. One thread at a time."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def run(
        self,
        reads: Sequence[Read],
        check: Callable[[], None],
        landed: Callable[[int], None],
        idle: Callable[[float, int], None],
        give_up: Callable[[Collection[Read]], object],
    ) -> None:
        """Run READs, some at once, in order. ``idle(seconds, bytes)``: between two looks at one that takes so long.

        Whatever goes wrong (``UcxError``, what ``check`` and ``landed`` raise): ``give_up`` sees to it that those in
        flight land no more, and they are counted as landed: they may have been written, in part or whole.
        """
        waiting, flying = deque(reads), deque[Read]()
        agent, started = self._agent, 0.0
        try:
            while waiting or flying:
                while waiting and len(flying) < _IN_FLIGHT:
                    check()
                    read, nbytes = waiting[0]
                    flying.append(waiting.popleft())
                    if len(flying) == 1:
                        started = time.monotonic()
                    if agent.start(read):
                        if len(flying) > 1:
                            break  # earlier ones are counted first
                        flying.popleft()
                        _count(nbytes, landed)
                while flying:
                    read, nbytes = flying[0]
                    if not agent.done(read):
                        idle(time.monotonic() - started, nbytes)
                        check()
                        continue
                    flying.popleft()
                    started = time.monotonic()
                    _count(nbytes, landed)
                    if waiting:
                        break
        except BaseException:
            cut_off = sum(nbytes for _, nbytes in flying)
            give_up(flying)
            if cut_off:
                with contextlib.suppress(Exception):
                    landed(cut_off)
            raise

    def quiet(self, name: str, flying: Collection[Read]) -> bool:
        """Disconnect from ``name``, then wait until NIXL says that every READ is over; whether it did in time."""
        until = time.monotonic() + _QUIET_S
        with contextlib.suppress(UcxError):
            self._agent.remove(name)
        left = [read for read, _ in flying]
        while left:
            left = [h for h in left if not self._over(h)]
            if left and time.monotonic() > until:
                return False
            if left:
                time.sleep(0.001)
        return True

    def _over(self, read: int) -> bool:
        try:
            return self._agent.done(read)
        except UcxError as e:
            log.debug("a read that was given up: %s", e)
            return True


def slow_after(nbytes: int) -> float:
    """Seconds after which a READ is thought to need the sender's processor: 5 ms, and a second for each GiB."""
    return _SLOW_S + nbytes / _GIB


def _count(nbytes: int, landed: Callable[[int], None]) -> None:
    for at in range(0, nbytes, _STEP):
        landed(min(_STEP, nbytes - at))


def rows(found: Sequence[tuple[int, int, int]]) -> Any:
    """What ``Agent.prepare`` takes: (address, bytes, device) of each stretch."""
    return np.array(found, dtype=np.uint64).reshape(-1, 3)


def where(device: int, stretches: Sequence[tuple[int, int]]) -> tuple[str, Any]:
    """Kind and rows of stretches (address, bytes) in another's memory; ``device`` below 0 is its host."""
    kind, index = ("DRAM", 0) if device < 0 else ("VRAM", device)
    return kind, rows([(address, n, index) for address, n in stretches])
