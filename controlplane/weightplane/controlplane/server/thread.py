"""A control plane in a thread of this process, for notebooks and examples: ``with ControlPlaneThread() as plane``."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Self

from weightplane.controlplane.store import open_store

from .app import Running, ServerConfig, serve

__all__ = ["ControlPlaneThread"]


class ControlPlaneThread:
    """Serves between ``__enter__`` and ``__exit__`` with an event loop of its own; ``address`` is where.

    The default forgets everything at its end and listens on loopback. Raises what ``serve`` raises.
    """

    def __init__(self, config: ServerConfig | None = None) -> None:
        self._config = config or ServerConfig(open_store("memory:"))
        self._ready = threading.Event()
        self._over: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: Running | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="weightplane-control-plane", daemon=True)

    @property
    def address(self) -> str:
        """host:port."""
        assert self._running is not None, "not entered"
        return self._running.address

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loop is not None and self._over is not None:
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._running = await serve(self._config)
        self._ready.set()
        await self._over.wait()
        await self._running.stop()
