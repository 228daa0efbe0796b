"""vLLM knows one pause; here it gets holders. Calls to vLLM run on a thread of their own: nobody waits for them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from weightplane.controlplane.core.states import PauseMode
from weightplane.inference_agent.threads import WorkThread, detached

from ..base import EngineError
from .drivers import Driver, DriverError

__all__ = ["PauseDesk"]

log = logging.getLogger("weightplane.inference_agent")

_CALL_S = 30.0
_WAIT_S = 3600.0  # for requests in flight to end; the update that waits has a deadline of its own and resumes
_RESUME_S = 2.0  # that a caller of ``resume`` waits for vLLM
_ORDERED = ("operator", "trainer")  # whose pauses are orders of the control plane: they outlive an agent


class PauseDesk:
    """Generation runs while nobody holds it. ``noted``: called when the holders changed, for who comes after us.
    ``asleep``: whether vLLM sleeps: then it goes on when it wakes up, and not before.

    A hold is *in force* once vLLM confirmed. While one is, another is at once (requests that stand still cannot drain).
    """

    def __init__(
        self, driver: Driver, noted: Callable[[tuple[str, ...]], None], asleep: Callable[[], bool] = lambda: False
    ) -> None:
        self._driver, self._noted, self._asleep = driver, noted, asleep
        self._cond = threading.Condition()
        self._holds: dict[str, int] = {}  # holder: the number of its pause
        self._force: set[str] = set()
        self._cleared: set[str] = set()  # their pauses dropped the cache, and nothing was computed since
        self._failed: dict[str, Exception] = {}
        self._number = 0
        self._owed = False  # vLLM was told to go on, and did not confirm it
        self._calls = WorkThread("weightplane-vllm-pause")

    @property
    def holders(self) -> frozenset[str]:
        """Who holds."""
        with self._cond:
            return frozenset(self._holds)

    def pause(self, holder: str, mode: PauseMode, clear_cache: bool = False) -> None:
        """Begin; returns at once."""
        if mode not in self._driver.pause_modes:
            have = ", ".join(self._driver.pause_modes)
            raise ValueError(f"pause mode {mode}: this vLLM ({self._driver.name}) has {have}")
        with self._cond:
            self._number += 1
            number = self._holds[holder] = self._number
            self._failed.pop(holder, None)
            self._cleared.discard(holder)
            standing = bool(self._force)
            if standing:
                self._force.add(holder)
                self._cond.notify_all()
            self._noted(tuple(sorted(self._holds)))
        if standing and mode is not PauseMode.ABORT:
            return

        def work() -> None:
            self._pause(holder, number, mode, clear_cache)

        if mode is PauseMode.WAIT:
            detached("weightplane-vllm-drain", work)
        else:
            self._calls.submit(work)

    def _pause(self, holder: str, number: int, mode: PauseMode, clear_cache: bool) -> None:
        error: Exception | None = None
        try:
            self._driver.pause(mode, clear_cache, _WAIT_S if mode is PauseMode.WAIT else _CALL_S)
        except Exception as e:
            error = e
        with self._cond:
            if self._holds.get(holder) == number:
                if error is None:
                    self._force.add(holder)
                    if clear_cache and mode is not PauseMode.WAIT and self._driver.clears_as_it_pauses:
                        self._cleared.add(holder)
                else:
                    self._failed[holder] = error
                self._cond.notify_all()
            elif not self._holds and error is None:
                self._calls.submit(self._resume)  # our pause came after the resume

    def wait(self, holder: str, timeout: float) -> bool:
        """Wait until its hold is in force. Raises what vLLM answered instead."""
        end = time.monotonic() + timeout
        with self._cond:
            while True:
                if holder in self._failed:
                    raise self._failed[holder]
                if holder not in self._holds:
                    return False
                if holder in self._force:
                    return True
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._cond.wait(left)

    def restore(self, timeout: float) -> bool:
        """Whoever holds holds: pause vLLM again if somebody let it go on by hand. Whether it stands still, by its own
        word; False if no hold is in force. Raises what vLLM answers.
        """

        def work() -> bool:
            with self._cond:
                holders = sorted(self._holds)
                if not self._force:
                    return False
            paused = self._driver.is_paused(timeout)
            if paused or self._asleep():  # asleep it stands still by itself, and must not be disturbed
                return paused
            log.warning("vLLM was let go on (/resume by hand?) while %s holds it: paused again", ", ".join(holders))
            have = self._driver.pause_modes
            abort = "dirty" in holders and PauseMode.ABORT in have  # nobody waits for what those weights would say
            self._driver.pause(PauseMode.ABORT if abort else PauseMode.KEEP, False, _CALL_S)
            with self._cond:
                self._cleared.clear()
            return self._driver.is_paused(timeout)

        return bool(self._calls.submit(work).result())

    def paused_by_hand(self, timeout: float) -> bool:
        """Whether vLLM stands still, awake, though nobody holds it. Raises what vLLM answers, and ``TimeoutError``."""

        def work() -> bool:  # in the queue of calls: a resume of ours is behind us, or done
            with self._cond:
                number = self._number
                if self._holds or self._asleep():
                    return False
            paused = self._driver.is_paused(timeout)
            with self._cond:
                found = paused and not self._holds and self._number == number and not self._asleep()
                owed = found and self._owed
            if owed:  # it is our own pause, whose end failed
                self._resume()
            return found and not owed

        return bool(self._calls.submit(work).result(_CALL_S))

    def cleared(self, holder: str) -> bool:
        """Whether the cache is empty since its hold is in force."""
        with self._cond:
            return holder in self._cleared

    def in_force(self) -> bool:
        """Whether generation is known to stand still."""
        with self._cond:
            return bool(self._force)

    def resume(self, holder: str) -> None:
        """Let go of one hold; the last one lets vLLM go on. Waits for vLLM a moment, not longer."""
        with self._cond:
            if self._holds.pop(holder, None) is None:
                return
            self._force.discard(holder)
            self._cleared.discard(holder)
            self._failed.pop(holder, None)
            self._cond.notify_all()
            last = not self._holds
            if not last:
                self._noted(tuple(sorted(self._holds)))
        if last:  # noted once vLLM goes on: an agent that is killed before leaves a pause that is known for its own
            done = self._calls.submit(self._resume)
            try:
                done.result(_RESUME_S)
            except TimeoutError:
                log.warning("vLLM has not confirmed within %.1f s that generation goes on", _RESUME_S)

    def _resume(self) -> None:
        with self._cond:
            if self._holds or self._asleep():
                self._noted(tuple(sorted(self._holds)))
                return
            self._owed = True
        try:
            self._driver.resume(_CALL_S)
        except DriverError as e:
            log.error("vLLM does not let generation go on, and is told again within seconds: %s", e)
        else:
            with self._cond:
                self._owed = False
                self._noted(tuple(sorted(self._holds)))

    def adopt(self, holder: str) -> None:
        """It stands still for ``holder`` already."""
        with self._cond:
            self._number += 1
            self._holds[holder] = self._number
            self._force.add(holder)

    def forget(self, holder: str) -> None:
        """Drop a hold that ended with the engine which it was of."""
        with self._cond:
            self._holds.pop(holder, None)
            self._force.discard(holder)
            self._cleared.discard(holder)

    def lift(self, holder: str, call: Callable[[], None]) -> None:
        """Let go of a hold by a call after which vLLM goes on. Refused while anybody else holds; raises what it raises.

        Who pauses meanwhile is behind it in the queue of calls.
        """

        def work() -> None:
            with self._cond:
                others = sorted(set(self._holds) - {holder})
                if others:
                    who = ", ".join(others)
                    raise EngineError(f"vLLM generates as soon as it is awake, and {who} paused it: end that first")
                number = self._holds.pop(holder, 0)
                self._force.discard(holder)
            try:
                call()
            except BaseException:
                with self._cond:
                    self._holds[holder] = number
                    self._force.add(holder)
                raise
            with self._cond:
                self._noted(tuple(sorted(self._holds)))
                again = bool(self._holds)
            if again:  # one that drains has a thread of its own, and may have come before the call
                self._driver.pause(PauseMode.KEEP, False, _CALL_S)

        self._calls.submit(work).result()

    def inherit(self, left_by: tuple[str, ...]) -> None:
        """A fresh attachment: pauses of an agent before us that only the control plane may end stay until it does."""
        for holder in sorted(set(left_by) & set(_ORDERED)):
            log.warning("vLLM stands still for %s since before this agent, until the control plane lets it go", holder)
            self.adopt(holder)

    def let_go(self, left_by: tuple[str, ...]) -> None:
        """A fresh attachment: end the pause that an agent before us left behind. Nobody may hold here."""
        if left_by and not self.holders:
            log.warning("vLLM stood still, paused by an agent that is gone (%s): it goes on", ", ".join(left_by))
            self._resume()

    def again(self) -> None:
        """The engine started anew and knows nothing of its pauses: begin them again."""
        with self._cond:
            holders = list(self._holds)
            self._force.clear()
            self._cleared.clear()
        for holder in holders:
            self.pause(holder, PauseMode.KEEP)

    def close(self) -> None:
        """No more calls."""
        self._calls.stop()
