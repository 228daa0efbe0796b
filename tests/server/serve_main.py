"""A server on SQLite in a process of its own, to be killed: ``python -m tests.server.serve_main FILE PORT``."""

from __future__ import annotations

import asyncio
import sys

from tests.server.scripted import FAST
from weightplane.controlplane.server.app import ServerConfig, serve, tune_collector
from weightplane.controlplane.store.sqlite import SqliteStore


async def main(file: str, port: str) -> None:
    """Serve until killed."""
    running = await serve(ServerConfig(SqliteStore(file), f"127.0.0.1:{port}", core=FAST))
    tune_collector()
    sys.stdout.write(f"serving {running.address}\n")
    sys.stdout.flush()
    await running.wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
