"""Every port of ours in one process, to be fuzzed: ``python -m tests.security.target FOLDER`` prints where they are."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from tests.server.scripted import FAST
from tests.transports.pull_memory import MemoryTransport
from weightplane.controlplane.core.plan import Bucket, Segment
from weightplane.controlplane.server.app import ServerConfig, serve
from weightplane.controlplane.store.memory import MemoryStore
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.engines.vllm.links import Listener
from weightplane.inference_agent.generate import GenerateServer
from weightplane.transports.base import ArmToken, ChannelSpec
from weightplane.transports.grpc_stream import GrpcTransport

KEY = bytes(range(32))
TOKEN = ArmToken("u", 1, 1)
WORKER_TOKEN = "a-workers-token"
BUCKETS = [Bucket(i, "rank/0", ("r0/0",), (Segment(0, i * 4096, 4096),), 4096) for i in range(256)]


def spec(transport: Any, name: str) -> ChannelSpec:
    offers = {m: transport.offer(m) for m in ("rank/0", "r0/0")}
    return ChannelSpec("c", "g", name, KEY, ("rank/0",), ("r0/0",), 4096, offers)


def receive(channel: Any) -> None:
    """Take what comes, bucket after bucket; one that was given up is taken again."""
    channel.arm(TOKEN, BUCKETS, time.monotonic() + 7200)
    for bucket in BUCKETS:
        while True:
            try:
                channel.receive(bucket, [torch.zeros(4096, dtype=torch.uint8)])
                break
            except Exception as e:
                logging.info("receive: %s", e)
                time.sleep(0.05)


async def main(folder: str) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    os.environ["WEIGHTPLANE_SHM_DIR"] = folder
    os.environ["WEIGHTPLANE_PULL_BIND"] = "127.0.0.1:0"
    running = await serve(ServerConfig(MemoryStore(), core=FAST, probes="127.0.0.1:0", gateway="127.0.0.1:0"))
    data = GrpcTransport()
    channel = data.open_receiver(spec(data, "grpc"), "r0/0")
    threading.Thread(target=receive, args=(channel,), daemon=True).start()
    pull = MemoryTransport()
    sender = pull.open_sender(spec(pull, "pull_memory"), "rank/0")
    endpoint = pull.offer("rank/0").ucx.endpoint
    engine = TorchModuleEngine(torch.nn.Linear(2, 2))
    generate = GenerateServer(engine, lambda *_, **__: [], serve_unsynced=True).start()
    worker = Listener(folder, lambda token, link, hello: None)
    worker.expect({WORKER_TOKEN})
    where = {
        "plane": running.address,
        "probes": running.probes,
        "gateway": running.gateway,
        "data": data.offer("r0/0").grpc.address,
        "pull": str(Path(folder) / endpoint.socket),
        "pull_tcp": endpoint.address,
        "generate": generate.address,
        "worker": worker.path,
    }
    print(json.dumps(where), flush=True)
    await running.wait()
    del sender


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
