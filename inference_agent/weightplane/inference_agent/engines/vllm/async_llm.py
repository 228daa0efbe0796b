"""A vLLM ``AsyncLLM`` that lives in this process: ``VllmEngine(AsyncDriver(llm, loop))`` in a program of one's own.

Its coroutines run on the program's own loop; the agent's threads wait for them. The program may generate all the while.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from weightplane.controlplane.core.states import PauseMode

from .drivers import Driver, DriverError, DriverTimeout, Label, labelled
from .reading import read_here
from .settings import EngineSettings

__all__ = ["AsyncDriver"]


class AsyncDriver(Driver):
    """``llm``: an ``AsyncLLM`` with ``weight_transfer_config={"backend": "weightplane"}``; ``loop``: it runs there.

    Never call the engine that is built on this from a thread that runs ``loop``: it would wait for itself.
    """

    name = "AsyncLLM"

    def __init__(self, llm: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._llm, self._loop = llm, loop

    @property
    def instances(self) -> int:
        """See ``Driver``."""
        return 1

    @property
    def pause_modes(self) -> tuple[PauseMode, ...]:
        """All three."""
        return (PauseMode.KEEP, PauseMode.WAIT, PauseMode.ABORT)

    def alive(self, timeout: float) -> bool:
        """See ``Driver``."""
        try:
            self._run("check_health", self._llm.check_health, timeout)
        except DriverError:
            return False
        return True

    def initialise(self, infos: Sequence[Mapping[str, Any]], timeout: float) -> None:
        """See ``Driver``."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info=dict(infos[0]))
        self._run("init", lambda: self._llm.init_weight_transfer_engine(request), timeout)

    def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> None:
        """See ``Driver``."""
        how = mode.value.lower()
        self._run("pause", lambda: self._llm.pause_generation(mode=how, clear_cache=clear_cache), timeout)

    def resume(self, timeout: float) -> None:
        """See ``Driver``."""
        self._run("resume", self._llm.resume_generation, timeout)

    def is_paused(self, timeout: float) -> bool:
        """See ``Driver``."""
        return bool(self._run("is_paused", self._llm.is_paused, timeout))

    def in_flight(self, timeout: float) -> int:
        """See ``Driver``. Counted in this process: nobody is asked."""
        return int(self._llm.output_processor.get_num_unfinished_requests())

    def is_sleeping(self, timeout: float) -> bool:
        """See ``Driver``."""
        return bool(self._run("is_sleeping", self._llm.is_sleeping, timeout))

    def sleep(self, level: int, timeout: float) -> None:
        """See ``Driver``."""
        self._run("sleep", lambda: self._llm.sleep(level, "keep"), timeout)

    def wake(self, tags: Sequence[str], last: bool, timeout: float) -> None:
        """See ``Driver``."""
        self._run("wake_up", lambda: self._llm.wake_up(list(tags)), timeout)
        if last:
            self.resume(timeout)

    def update(self, info: Mapping[str, Any], label: Label, timeout: float) -> None:
        """See ``Driver``. An update that somebody left open is closed first."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm, request = self._llm, WeightTransferUpdateRequest(update_info=dict(info))

        async def work() -> None:
            try:
                await llm.start_weight_update()
            except Exception:
                await llm.finish_weight_update()
                await llm.start_weight_update()
            await llm.update_weights(request)
            await llm.finish_weight_update(**labelled(llm.finish_weight_update, label))

        self._run("update", work, timeout)

    def clear_cache(self, timeout: float) -> None:
        """See ``Driver``."""
        if not self._run("reset_prefix_cache", lambda: self._llm.reset_prefix_cache(True, False), timeout):
            raise DriverError("vLLM did not clear its prefix cache: blocks are still held")

    def settings(self, timeout: float) -> Sequence[EngineSettings]:
        """See ``Driver``. Read from this process: nobody is asked."""
        return (read_here(self._llm.vllm_config),)

    def _run(self, what: str, work: Callable[[], Coroutine[Any, Any, Any]], timeout: float) -> Any:
        """Run a coroutine on the program's loop and wait for it; one that is late is cancelled."""
        if self._loop.is_closed():
            raise DriverError(f"{what}: the loop that vLLM ran on is closed")
        future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError as e:
            if not future.done():
                future.cancel()
                raise DriverTimeout(f"{what}: vLLM did not answer within {timeout:.1f} s") from e
            raise DriverError(f"{what}: TimeoutError: {e}") from e
        except Exception as e:
            raise DriverError(f"{what}: {type(e).__name__}: {e}") from e
