"""The pauses that the state machine asks of the engine: begun at once, confirmed when they are in force."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from weightplane.controlplane.core import replica as core
from weightplane.controlplane.core.states import PauseMode

from .engines.base import Engine
from .threads import detached

__all__ = ["Pauses"]

log = logging.getLogger("weightplane.inference_agent")

_LOOK_S = 0.5


class Pauses:
    """``pause`` and ``resume`` return at once; ``Paused`` and ``Resumed`` are emitted. ``failed(holder, error)``: a
    pause raised. After ``Resumed`` no ``Paused`` of an earlier pause of that holder comes. Thread-safe.
    """

    def __init__(
        self,
        engine: Engine,
        replica_id: str,
        emit: Callable[[Any], None],
        failed: Callable[[str, BaseException], None],
    ) -> None:
        self._engine, self._replica_id = engine, replica_id
        self._emit, self._failed = emit, failed
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}  # by holder: rises with every pause and resume
        self._since: dict[str, float] = {}
        self._closed = False

    def pause(self, holder: str, mode: PauseMode) -> None:
        """Begin a pause."""
        with self._lock:
            number = self._numbers[holder] = self._numbers.get(holder, 0) + 1
        try:
            self._engine.pause(holder, mode)
            if self._engine.wait_paused(holder, 0):
                self._in_force(holder, number)
                return
        except BaseException as e:  # the thread is ours, whatever an engine raises
            self._raised(holder, e)
            return
        detached(f"weightplane-pause-{holder}", lambda: self._wait(holder, number))

    def _wait(self, holder: str, number: int) -> None:
        try:
            while not self._closed and self._numbers.get(holder) == number:
                if self._engine.wait_paused(holder, _LOOK_S):
                    self._in_force(holder, number)
                    return
        except BaseException as e:
            self._raised(holder, e)

    def _in_force(self, holder: str, number: int) -> None:
        with self._lock:
            if self._numbers.get(holder) == number:  # not resumed meanwhile
                self._since[holder] = time.monotonic()
                self._emit(core.Paused(holder))

    def _raised(self, holder: str, error: BaseException) -> None:
        log.error("replica %s: pausing for %s failed", self._replica_id, holder, exc_info=error)
        self._failed(holder, error)

    def resume(self, holder: str) -> None:
        """Let go of a holder."""
        with self._lock:
            self._numbers[holder] = self._numbers.get(holder, 0) + 1
            self._since.pop(holder, None)
        try:
            self._engine.resume(holder)
        except BaseException:
            log.exception("replica %s: the engine did not let %s go", self._replica_id, holder)
        self._emit(core.Resumed(holder))

    def since(self, holder: str) -> float:
        """Since when a holder's pause is in force (monotonic); 0 if it is not."""
        with self._lock:
            return self._since.get(holder, 0.0)

    def close(self) -> None:
        """Stop waiting."""
        self._closed = True
