"""The control plane of ``vllm_gpu.py``, a process of its own: prints its address. Leases outlast busy moments."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from benchmarks import _timeline
from weightplane.controlplane.core.model import Config
from weightplane.controlplane.server.app import ServerConfig, serve, tune_collector
from weightplane.controlplane.store.memory import Disk, MemoryStore


async def main() -> None:
    """Serve until killed."""
    running = await serve(ServerConfig(MemoryStore(Disk()), "127.0.0.1:0", Config(ttl_s=20.0)))
    tune_collector()
    print(running.address, flush=True)
    await running.wait()


if __name__ == "__main__":
    _timeline.install("server")
    asyncio.run(main())
