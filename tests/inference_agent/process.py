"""Programs that tests run as real processes: a control plane, and a replica that generates."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests import warm
from weightplane.controlplane.core.model import Config
from weightplane.controlplane.heartbeat import HelperStatus
from weightplane.controlplane.server.app import ServerConfig, serve
from weightplane.controlplane.store.memory import MemoryStore
from weightplane.demo.model import ModelConfig, build_model
from weightplane.demo.sampling import Completion, StopGeneration, generate
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.generate import GenerateServer
from weightplane.inference_agent.serve import Served, run_agent

CONFIG = ModelConfig(vocab_size=16, d_model=32, n_layers=1, n_heads=2, max_len=64)


def demo_engine(seed: int = 0, staged: bool = True) -> Served:
    """The demo's model, as ``--engine tests.inference_agent.process:demo_engine`` would load it."""
    model = build_model(CONFIG, seed)

    def generator(prompts: Any, **options: Any) -> list[Completion]:
        return generate(model, prompts, **options)

    return Served(TorchModuleEngine(model, staged=staged), generator, StopGeneration)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


async def plane(ttl_s: float) -> None:
    running = await serve(ServerConfig(MemoryStore(), core=Config(beat_s=0.2, ttl_s=ttl_s)))
    say(address=running.address)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await running.stop()


def replica(address: str, name: str) -> int:
    def ready(agent: InferenceAgent, server: GenerateServer | None) -> None:
        assert server is not None and agent.wait_live()
        helper = agent._helper
        while helper is not None and helper.status is not HelperStatus.LIVE:  # until then nobody tells of our end
            time.sleep(0.02)
        say(incarnation=agent.incarnation, serving=server.address, helper=helper.pid if helper is not None else 0)

    engine = "tests.inference_agent.process:demo_engine"
    return run_agent(engine, address, "g", name, generate_port=0, transports=["shm", "grpc"], on_ready=ready)


@contextmanager
def program(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run this file with ``arguments``; yields the process and the first thing that it said."""
    process = warm.Popen(
        [sys.executable, "-m", "tests.inference_agent.process", *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    timer = threading.Timer(30, process.kill)
    timer.start()
    try:
        line = process.stdout.readline()
        timer.cancel()
        assert line, f"{arguments} said nothing, exit status {process.wait()}"
        yield process, json.loads(line)
    finally:
        timer.cancel()
        if process.poll() is None:
            process.kill()
        process.wait()


if __name__ == "__main__":
    if sys.argv[1] == "plane":
        asyncio.run(plane(float(sys.argv[2])))
    else:
        raise SystemExit(replica(sys.argv[2], sys.argv[3]))
