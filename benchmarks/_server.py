"""The control plane as a process: ``python benchmarks/_server.py STORE.db [CERT KEY CLIENT-CA]`` prints its address."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from benchmarks import _timeline
from weightplane.controlplane.core.model import Config
from weightplane.controlplane.server.app import ServerConfig, serve, tune_collector
from weightplane.controlplane.server.security import Security, Tls
from weightplane.controlplane.store import open_store


async def main(file: str, *tls: str) -> None:
    """Serve until killed. Leases are long: what is measured is work, not a busy machine's missed beats."""
    security = Security(tls=Tls(*map(Path, tls))) if tls else Security()
    config = Config(ttl_s=600.0, routing_budget_s=3600.0)
    running = await serve(ServerConfig(open_store(f"sqlite:{file}"), security=security, core=config))
    tune_collector()
    print(running.address, flush=True)
    await running.wait()


if __name__ == "__main__":
    _timeline.install("server")
    asyncio.run(main(*sys.argv[1:]))
