"""An ``AsyncLLM`` in this process, generating while the fleet's weights change under it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.inference_agent.server import Server, eventually
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.trainer_agent import Publisher, SafetensorsSource

from .models import CORE, ENVIRONMENT, PROMPTS, REPLICA, TOKENS, dtype_of
from .orders import ASLEEP, Orders

Golden = dict[str, list[list[int]]]


class Program:
    """What a user writes: a loop, an ``AsyncLLM`` on it, and an agent."""

    def __init__(self, model: Path, plane: Server) -> None:
        os.environ.update(ENVIRONMENT)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = CORE
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="test-loop", daemon=True).start()
        self.llm = self.run(self._make(model))
        from weightplane.inference_agent.engines.vllm.adapter import VllmEngine
        from weightplane.inference_agent.engines.vllm.async_llm import AsyncDriver

        self.engine = VllmEngine(AsyncDriver(self.llm, self.loop), start_timeout_s=60)
        self.agent = InferenceAgent(plane.address, "async", "a", self.engine).start()
        assert self.agent.wait_live(20)
        self.count = 0

    async def _make(self, model: Path) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(model),
                dtype=dtype_of(model),
                enforce_eager=True,
                max_model_len=512,
                max_num_seqs=8,
                skip_tokenizer_init=True,
                kv_cache_memory_bytes=64 << 20,
                weight_transfer_config={"backend": "weightplane"},
                **REPLICA,
            )
        )

    def run(self, work: Any, timeout: float = 240) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    async def generate(self, prompt: list[int], tokens: int, made: list[int]) -> list[int]:
        from vllm import SamplingParams

        self.count += 1
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        async for out in self.llm.generate({"prompt_token_ids": prompt}, sampling, f"r{self.count}"):
            made[:] = out.outputs[0].token_ids
        return made

    def all_tokens(self) -> list[list[int]]:
        return [self.run(self.generate(p, TOKENS, [])) for p in PROMPTS]

    def close(self) -> None:
        self.agent.stop()
        self.engine.close()
        self.loop.call_soon_threadsafe(self.llm.shutdown)
        self.loop.call_soon_threadsafe(self.loop.stop)


@pytest.fixture(scope="module")
def program(golden: object, folders: dict[str, Path], plane: Server) -> Iterator[Program]:
    made = Program(folders["A16"], plane)
    yield made
    made.close()


def test_weights_change_while_it_generates(
    program: Program, plane: Server, folders: dict[str, Path], golden: Golden
) -> None:
    """bfloat16. A -> B -> A; a request in flight keeps its prefix and goes on with the new weights."""
    assert program.all_tokens() == golden["A16"]
    for step, target in enumerate(("B16", "A16")):
        made: list[int] = []
        old = golden["A16" if target == "B16" else "B16"][0]
        flight = asyncio.run_coroutine_threadsafe(program.generate(PROMPTS[0], 450, made), program.loop)
        eventually(lambda m=made: len(m) > TOKENS, 30, "tokens come")  # type: ignore[misc]
        with Publisher(plane.address, "async", SafetensorsSource(folders[target]), takeover=True) as publisher:
            receipt = publisher.publish(step=step + 1)
        assert len(flight.result(120)) == 450 and made[:TOKENS] == old
        assert program.all_tokens() == golden[target]
        if hasattr(program.llm, "get_weight_version"):  # 0.26 has no label of its weights
            assert program.run(program.llm.get_weight_version()) == str(receipt.version)
        assert {r.state for r in receipt.replicas} == {"READY"}


def test_it_sleeps_and_wakes_up_by_order(
    program: Program, plane: Server, folders: dict[str, Path], golden: Golden
) -> None:
    """A request in flight stands still, and goes on with the weights of the update in between."""
    orders = Orders(plane.address, "async")
    made: list[list[int]] = []
    enough = threading.Event()

    async def one_after_the_other() -> None:
        while not enough.is_set():
            made.append([])
            await program.generate(PROMPTS[0], 450, made[-1])

    flight = asyncio.run_coroutine_threadsafe(one_after_the_other(), program.loop)
    eventually(lambda: made and made[0], 30, "tokens come")
    assert orders.sleep(1).admin == ASLEEP and program.run(program.llm.is_sleeping())
    orders.wake("weights")
    with Publisher(plane.address, "async", SafetensorsSource(folders["B16"]), takeover=True) as publisher:
        assert {r.state for r in publisher.publish(step=3).replicas} == {"READY"}
    enough.set()
    so_far = len(made), len(made[-1])
    assert so_far[1] < 450 and orders.wake("kv_cache").routable
    flight.result(120)
    assert (len(made), {len(m) for m in made}) == (so_far[0], {450}), "a request lost tokens, or was dropped"
    assert program.all_tokens() == golden["B16"]
