"""A vLLM ``LLM`` that lives in this process: ``VllmEngine(OfflineDriver(llm))`` in a program of one's own.

The program calls ``llm.generate`` on its own thread whenever it likes, updates come on the agent's. Two forms of vLLM:

* Its core in a process of its own (the default): requests in flight may be kept, drained or aborted.
* Its core in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``): passes run on the program's thread and updates
  on the agent's, never both; requests in flight can only be kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from weightplane.controlplane.core.states import PauseMode
from weightplane.inference_agent.threads import detached

from .drivers import Driver, DriverError, DriverTimeout, Label, labelled
from .reading import read_here
from .settings import EngineSettings

__all__ = ["OfflineDriver"]

_TURN_S = 60.0  # for one forward pass to end


class OfflineDriver(Driver):
    """``llm``: an ``LLM`` with ``weight_transfer_config={"backend": "weightplane"}``. One driver per ``llm``."""

    name = "LLM"
    clears_as_it_pauses = True

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        core = llm.llm_engine.engine_core
        self._turns: _Turns | None = None
        self._alive: Callable[[], bool] = lambda: True
        if hasattr(core, "call_utility"):
            _lock_sends(core)
            resources = getattr(core, "resources", None)
            self._alive = lambda: not getattr(resources, "engine_dead", False)
        elif hasattr(core, "engine_core"):
            llm.llm_engine.engine_core = self._turns = _Turns(core)
        else:
            raise DriverError(
                f"LLM: its core client is a {type(core).__name__}, expected vLLM's SyncMPClient or InprocClient: this "
                f"release of vLLM is driven as AsyncLLM or over HTTP"
            )

    @property
    def instances(self) -> int:
        """See ``Driver``."""
        return 1

    @property
    def pause_modes(self) -> tuple[PauseMode, ...]:
        """All three; KEEP alone where the core runs in this process: vLLM can neither drain nor abort there."""
        if self._turns is not None:
            return (PauseMode.KEEP,)
        return (PauseMode.KEEP, PauseMode.WAIT, PauseMode.ABORT)

    def alive(self, timeout: float) -> bool:
        """See ``Driver``."""
        return self._alive()

    def initialise(self, infos: Sequence[Mapping[str, Any]], timeout: float) -> None:
        """See ``Driver``."""
        request = {"init_info": dict(infos[0])}
        self._run("init", lambda: self._llm.init_weight_transfer_engine(request), timeout)

    def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> None:
        """See ``Driver``. A sleep of level 0 is vLLM's pause; it touches no memory."""
        how = mode.value.lower()

        def work() -> None:
            if self._turns is not None:
                self._turns.stop()
            self._llm.sleep(level=0, mode=how)
            if clear_cache and mode is not PauseMode.WAIT:
                self._clear()

        self._run("pause", work, timeout)

    def resume(self, timeout: float) -> None:
        """See ``Driver``."""

        def work() -> None:
            self._llm.wake_up(tags=["scheduling"])
            if self._turns is not None:
                self._turns.go_on()

        self._run("resume", work, timeout)

    def is_paused(self, timeout: float) -> bool:
        """See ``Driver``."""
        return bool(self._run("is_paused", self._llm.llm_engine.is_sleeping, timeout))

    def in_flight(self, timeout: float) -> int:
        """See ``Driver``. Counted in this process: nobody is asked."""
        return int(self._llm.llm_engine.get_num_unfinished_requests())

    def is_sleeping(self, timeout: float) -> bool:
        """See ``Driver``."""
        return bool(self._run("is_sleeping", self._llm.llm_engine.is_sleeping, timeout))

    def sleep(self, level: int, timeout: float) -> None:
        """See ``Driver``."""
        self._run("sleep", lambda: self._llm.sleep(level=level, mode="keep"), timeout)

    def wake(self, tags: Sequence[str], last: bool, timeout: float) -> None:
        """See ``Driver``."""
        self._run("wake_up", lambda: self._llm.wake_up(tags=list(tags)), timeout)
        if last:
            self.resume(timeout)

    def update(self, info: Mapping[str, Any], label: Label, timeout: float) -> None:
        """See ``Driver``. An update that somebody left open is closed first."""

        def work() -> None:
            try:
                self._llm.start_weight_update()
            except Exception:
                self._llm.finish_weight_update()
                self._llm.start_weight_update()
            self._llm.update_weights({"update_info": dict(info)})
            self._llm.finish_weight_update(**labelled(self._llm.finish_weight_update, label))

        self._run("update", work, timeout)

    def clear_cache(self, timeout: float) -> None:
        """See ``Driver``."""
        self._run("reset_prefix_cache", self._clear, timeout)

    def settings(self, timeout: float) -> Sequence[EngineSettings]:
        """See ``Driver``. Read from this process: nobody is asked."""
        return (read_here(self._llm.llm_engine.vllm_config),)

    def _clear(self) -> None:
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise DriverError("vLLM did not clear its prefix cache: blocks are still held")

    def _run(self, what: str, work: Callable[[], Any], timeout: float) -> Any:
        """vLLM's calls have no time limit of their own: one that is late is left behind, on a daemon thread."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as e:
                future.set_exception(e)

        detached(f"weightplane-llm-{what}", run)
        try:
            return future.result(timeout)
        except DriverError:
            raise
        except TimeoutError as e:
            if not future.done():
                raise DriverTimeout(f"{what}: vLLM did not answer within {timeout:.1f} s") from e
            raise DriverError(f"{what}: TimeoutError: {e}") from e
        except Exception as e:
            raise DriverError(f"{what}: {type(e).__name__}: {e}") from e


def _lock_sends(core: Any) -> None:
    """The client's socket is for one thread, and here two send: the program's requests, the agent's calls."""
    send = core._send_input
    if getattr(send, "weightplane", False):
        return
    lock = threading.Lock()

    def locked(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return send(*args, **kwargs)

    locked.weightplane = True  # type: ignore[attr-defined]
    core._send_input = locked


class _Turns:
    """Stands in for a core client in this process: one thread at a time, and no pass while ``stop`` is in force."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._cond = threading.Condition()
        self._busy: int | None = None
        self._asking = 0  # who waits for a turn goes before the next pass
        self._stopped = False

    def stop(self) -> None:
        """No pass begins any more; returns once none runs."""
        with self._cond:
            self._stopped = True
            if not self._cond.wait_for(lambda: self._busy is None, _TURN_S):
                raise DriverTimeout(f"pause: a forward pass did not end within {_TURN_S:.0f} s")

    def go_on(self) -> None:
        """Passes may begin."""
        with self._cond:
            self._stopped = False
            self._cond.notify_all()

    def get_output(self) -> Any:
        """A pass."""
        with self._turn(passes=True):
            return self._core.get_output()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._core, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._turn():
                return found(*args, **kwargs)

        return call

    @contextmanager
    def _turn(self, passes: bool = False) -> Iterator[None]:
        me = threading.get_ident()
        with self._cond:
            self._asking += not passes
            while (self._busy not in (None, me)) or (passes and (self._stopped or self._asking)):
                self._cond.wait()
            self._asking -= not passes
            outer, self._busy = self._busy, me
        try:
            yield
        finally:
            with self._cond:
                self._busy = outer
                self._cond.notify_all()
