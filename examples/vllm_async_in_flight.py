"""An AsyncLLM generates without a break while new weights arrive: each output says which version made which tokens.

Run, in an environment that has vLLM and weightplane: python examples/vllm_async_in_flight.py CHECKPOINT OTHER
CHECKPOINT: what vLLM starts from; OTHER: of the same architecture, what the trainer publishes.
"""

import asyncio
import sys
from typing import Any

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from weightplane.controlplane.core.model import Config
from weightplane.controlplane.server.app import ServerConfig
from weightplane.controlplane.server.thread import ControlPlaneThread
from weightplane.controlplane.store import open_store
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.vllm.adapter import VllmEngine
from weightplane.inference_agent.engines.vllm.async_llm import AsyncDriver
from weightplane.inference_agent.engines.vllm.spans import spans_of_labels
from weightplane.trainer_agent import Publisher, SafetensorsSource


async def rollouts(llm: AsyncLLM, name: int, stop: asyncio.Event, some: asyncio.Event, spans: list[Any]) -> None:
    """Generate until told to stop; each finished output leaves its spans."""
    count = 0
    while not stop.is_set():
        count += 1
        sampling = SamplingParams(temperature=1.0, max_tokens=200, detokenize=False, ignore_eos=True)
        prompt = {"prompt_token_ids": [1, 10 + name, 20]}
        async for output in llm.generate(prompt, sampling, f"{name}-{count}"):
            some.set()
            if output.finished:
                done = output.outputs[0]
                spans.append(spans_of_labels(done.weight_versions, len(done.token_ids)))


def publish(address: str, folders: list[str]) -> list[int]:
    """The trainer's part, on a thread of its own."""
    versions = []
    for step, folder in enumerate(folders):
        with Publisher(address, "policy", SafetensorsSource(folder), takeover=True) as publisher:
            publisher.wait_for_replicas(1)
            versions.append(publisher.publish(step, pause="keep", cache="clear").version)
    return versions


async def main(checkpoint: str, other: str) -> None:
    """The program: an engine, its agent, rollouts, and a trainer that publishes under them."""
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=checkpoint,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=64 << 20,
            weight_transfer_config={"backend": "weightplane"},
        )
    )
    loop = asyncio.get_running_loop()
    stop, some, spans = asyncio.Event(), asyncio.Event(), list[Any]()
    # Everything shares one machine here: three seconds of silence (the default) are no sign of death on a busy one.
    patient = ServerConfig(open_store("memory:"), core=Config(ttl_s=15.0, routing_budget_s=60.0))
    with ControlPlaneThread(patient) as plane:
        # The engine waits for vLLM, which runs on this loop: so it is made, and ended, on another thread.
        engine = await asyncio.to_thread(VllmEngine, AsyncDriver(llm, loop))
        agent = InferenceAgent(plane.address, "policy", "replica-a", engine)
        await asyncio.to_thread(agent.start)
        workers = [asyncio.create_task(rollouts(llm, n, stop, some, spans)) for n in range(4)]
        await some.wait()
        versions = await asyncio.to_thread(publish, plane.address, [other, checkpoint, other])
        stop.set()
        await asyncio.gather(*workers)
        await asyncio.to_thread(agent.stop)
        await asyncio.to_thread(engine.close)
    llm.shutdown()
    crossed = sum(len(s) > 1 for s in spans)
    ordered = all([p.version for p in s] == sorted(p.version for p in s) and all(p.known for p in s) for s in spans)
    print(f"published {versions} under {len(spans)} outputs, every token labelled and in order: {ordered}")
    print(f"outputs that two or more versions made: {crossed}")


if __name__ == "__main__":  # vLLM starts processes that import this file again
    asyncio.run(main(sys.argv[1], sys.argv[2]))
