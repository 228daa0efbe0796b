"""An event loop in a thread, closed at its end: an open one keeps three descriptors until it is collected."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["Loop"]

T = TypeVar("T")


class Loop:
    """A context; or from birth to ``close``."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="test-loop", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(self._drop())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            self.loop.close()

    async def _drop(self) -> None:
        """What is still under way is cancelled."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def run(self, work: Coroutine[Any, Any, T], timeout: float = 30.0) -> T:
        """What ``work`` returns."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def close(self) -> None:
        """Stop and close it."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        assert not self._thread.is_alive(), "the loop does not end"

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
