"""A TCP proxy in front of the control plane, one for each member: delay, black hole, half-closed, cut, at byte level.

All proxies of a test run on one event loop in a thread (``tests/loop.py``); what they should do is set from elsewhere.
"""

from __future__ import annotations

import asyncio

from tests.loop import Loop

__all__ = ["Link"]


class Link:
    """One member's way to ``target``.

    ``blackhole``: bytes are taken and never delivered, and nothing is closed. ``partition``: nothing gets through and
    no connection is made. ``delay``: seconds that each piece waits, in order. ``half_close``: towards the member the
    stream ends, the other way it goes on.
    """

    def __init__(self, loop: Loop, target: str) -> None:
        self._loop, self._target = loop, target
        self.delay = 0.0
        self._flows = asyncio.Event()
        self._flows.set()
        self._refuses = self._closed = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._to_member: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = loop.run(self._start())

    async def _start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        host, _, port = self._target.rpartition(":")
        try:
            up_reader, up_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, up_writer}
        self._to_member.add(writer)
        tasks = [
            asyncio.create_task(self._pump(reader, up_writer)),
            asyncio.create_task(self._pump(up_reader, writer)),
        ]
        self._tasks.update(tasks)
        try:
            await asyncio.gather(*tasks)
        finally:
            self._tasks.difference_update(tasks)
            for w in (writer, up_writer):
                self._writers.discard(w)
                w.transport.abort()
            self._to_member.discard(writer)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                if self.delay:
                    await asyncio.sleep(self.delay)
                await self._flows.wait()
                sink.write(data)
                await sink.drain()
            await self._flows.wait()
            if sink.can_write_eof() and not sink.is_closing():
                sink.write_eof()
        except (OSError, RuntimeError):  # the other side is gone: so is this flow
            sink.transport.abort()
        except asyncio.CancelledError:  # ``close``: asyncio's streams log what is cancelled as if it had failed
            if not self._closed:
                raise

    # --- faults

    def blackhole(self) -> None:
        self._loop.loop.call_soon_threadsafe(self._flows.clear)

    def partition(self) -> None:
        self._refuses = True
        self.blackhole()

    def cut(self) -> None:
        """Reset every connection."""

        async def work() -> None:
            for writer in list(self._writers):
                writer.transport.abort()

        self._loop.run(work())

    def half_close(self) -> None:
        async def work() -> None:
            for writer in list(self._to_member):
                if writer.can_write_eof():
                    writer.write_eof()

        self._loop.run(work())

    def heal(self) -> None:
        self._refuses, self.delay = False, 0.0
        self._loop.loop.call_soon_threadsafe(self._flows.set)

    def close(self) -> None:
        async def work() -> None:
            self._closed = True
            self._server.close()
            self._flows.set()
            for writer in list(self._writers):
                writer.transport.abort()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        self._loop.run(work())
