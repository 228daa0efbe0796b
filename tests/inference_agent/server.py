"""A real control plane in a thread: its own loop, a memory store whose disk survives restarts, one fixed port."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tests.loop import Loop
from weightplane.controlplane.core.group_state import GroupState
from weightplane.controlplane.core.model import Config
from weightplane.controlplane.server.app import Running, ServerConfig, serve
from weightplane.controlplane.server.security import Security
from weightplane.controlplane.store.memory import Disk, MemoryStore

FAST = Config(beat_s=0.2, ttl_s=3.0, quiesce_s=2.0)
T = TypeVar("T")


class Server:
    """``start`` and ``stop`` as often as you like: the disk and the port stay, the epoch rises."""

    def __init__(self, config: Config = FAST, security: Security | None = None) -> None:
        self.config, self.security = config, security or Security()
        self.disk = Disk()
        self.address = "127.0.0.1:0"
        self._loop = Loop()
        self._running: Running | None = None

    def start(self) -> Server:
        async def up() -> Running:
            config = ServerConfig(MemoryStore(self.disk), self.address, self.config, security=self.security)
            return await serve(config)

        self._running = self.run(up())
        self.address = self._running.address
        return self

    def stop(self) -> None:
        if self._running is not None:
            self.run(self._running.stop())
            self._running = None

    def close(self) -> None:
        self.stop()
        self._loop.close()

    def run(self, work: Any) -> Any:
        return self._loop.run(work)

    @property
    def running(self) -> Running:
        """The server that runs now."""
        assert self._running is not None
        return self._running

    def state(self, group: str = "g") -> GroupState:
        running = self.running

        async def look() -> GroupState:
            return running.coordinator.ensure(group).state

        state: GroupState = self.run(look())
        return state


@contextmanager
def server(config: Config = FAST, security: Security | None = None) -> Iterator[Server]:
    s = Server(config, security).start()
    try:
        yield s
    finally:
        s.close()


def eventually(look: Callable[[], T], timeout: float = 10.0, what: str = "") -> T:
    """Poll until truthy; the value."""
    end = time.monotonic() + timeout
    while True:
        value = look()
        if value:
            return value
        assert time.monotonic() < end, f"not within {timeout} s: {what or look}"
        time.sleep(0.02)
