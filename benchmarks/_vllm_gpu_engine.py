"""A stock vLLM of ``vllm_gpu.py`` in a process of its own, with our agent beside it or driven vLLM's own way.

``python benchmarks/_vllm_gpu_engine.py llm|async`` takes commands (see ``_process``). ``WEIGHTPLANE_BENCH_LOG``: where
everything that vLLM and we print goes. ``trainer.…``: a trainer in this very process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from benchmarks import _timeline
from benchmarks._process import serve
from benchmarks._vllm_gpu_models import to_log

_PROMPT = [3, 14, 159, 265, 358, 97, 323, 84]


class Engine:
    """An ``LLM``. ``inside``: its core in this process too."""

    _agent: Any = None

    def start(self, folder: str, backend: str, inside: bool, options: dict[str, Any]) -> dict[str, Any]:
        """Bring it up. ``backend``: of vLLM's weight transfer."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if inside else "1"
        begin = time.monotonic()
        import vllm

        imported = time.monotonic()
        transfer = {"weight_transfer_config": {"backend": backend}} if backend else {}
        self._make(folder, {**options, **transfer})
        end = time.monotonic()
        return {"vllm": str(vllm.__version__), "import_s": imported - begin, "start_s": end - imported}

    def _make(self, folder: str, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm: Any = LLM(model=folder, **options)

    def _driver(self) -> Any:
        from weightplane.inference_agent.engines.vllm.offline import OfflineDriver

        return OfflineDriver(self.llm)

    @property
    def trainer(self) -> Any:
        """A trainer in this process."""
        if not hasattr(self, "_trainer"):
            from benchmarks._vllm_gpu_trainer import Trainer

            self._trainer = Trainer()
        return self._trainer

    # --- ours

    def join(self, address: str, group: str, transports: list[str]) -> dict[str, Any]:
        """Become a replica of a group; what the replica says of itself."""
        from weightplane.inference_agent.agent import InferenceAgent
        from weightplane.inference_agent.engines.vllm.adapter import VllmEngine

        if not hasattr(self, "engine"):
            self.engine: Any = VllmEngine(self._driver(), start_timeout_s=30, apply_timeout_s=60)
        self._agent = InferenceAgent(address, group, "vllm", self.engine, transports=transports).start()
        if not self._agent.wait_live(20):
            raise RuntimeError(f"the agent did not get through: {self._agent.status().error}")
        workers = [(d.kind, d.uuid) for d in self.engine.workers]
        modes = [str(m) for m in self.engine.modes]
        return {"name": self.engine.name, "workers": workers, "modes": modes, "no_staging": self.engine.staging_refusal}

    def leave(self) -> None:
        """Leave the group; the engine stays attached to the workers."""
        if self._agent is not None:
            self._agent.stop()
            self._agent = None

    def standing(self) -> dict[str, Any]:
        """What the replica holds, and who holds generation back."""
        held = [[h.version, h.update_id] for h in self.engine.held()]
        return {"held": held, "mixed": self.engine.mixed(), "holders": sorted(self.engine.holders())}

    def loads(self) -> list[dict[str, Any]]:
        """How each worker's newest update was loaded: its way, why not past vLLM's loaders, what was read back."""
        return [dict(load) for load in self.engine.loads]

    # --- what it is asked

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        return [json.loads(a) for a in self.llm.collective_rpc(method, args=args)]

    def checksums(self, rows: dict[str, Any]) -> list[Any]:
        """Of each worker (see ``Probe``)."""
        return self._rpc("probe_checksums", json.dumps(rows))

    def live(self) -> list[Any]:
        """Of each worker (see ``Probe``)."""
        return self._rpc("probe_live")

    def memory(self, reset: bool) -> list[Any]:
        """Of each worker (see ``Probe``)."""
        return self._rpc("probe_memory", reset)

    def generate(self, tokens: int) -> list[int]:
        """Greedy tokens after a short prompt."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        (out,) = self.llm.generate([{"prompt_token_ids": _PROMPT}], sampling, use_tqdm=False)
        return list(out.outputs[0].token_ids)

    def ask_on(self, tokens: int) -> None:
        """Ask again and again, one request after the other, on a thread of its own, until ``asked``."""
        self._answers: list[tuple[float, float]] = []
        self._cut_short = 0
        self._over = threading.Event()
        self._failed = ""

        def run() -> None:
            while not self._over.is_set():
                begin = time.monotonic()
                try:
                    made = len(self.generate(tokens))
                except Exception as e:
                    self._failed = f"{type(e).__name__}: {e}"
                    return
                if made == tokens:
                    self._answers.append((begin, time.monotonic()))
                else:
                    self._cut_short += 1  # a pause with abort ended it

        self._asker = threading.Thread(target=run, daemon=True)
        self._asker.start()

    def answered(self) -> dict[str, Any]:
        """(begin, end) of every whole answer so far; what failed."""
        answers = list(self._answers)
        return {"answers": answers, "cut_short": self._cut_short, "failed": self._failed, "now": time.monotonic()}

    def asked(self, seconds: float) -> dict[str, Any]:
        """Stop asking."""
        self._over.set()
        self._asker.join(seconds)
        return {**self.answered(), "stuck": self._asker.is_alive()}

    # --- vLLM's own weight transfer

    def native(self, what: str, info: dict[str, Any]) -> float:
        """``init``, ``start``, ``update`` or ``finish``; seconds."""
        begin = time.monotonic()
        if what == "init":
            self.llm.init_weight_transfer_engine({"init_info": info})
        elif what == "start":
            self.llm.start_weight_update()
        elif what == "update":
            self.llm.update_weights({"update_info": info})
        else:
            self.llm.finish_weight_update()
        return time.monotonic() - begin

    def native_cycle(self, info: dict[str, Any]) -> dict[str, float]:
        """One update: pause, start, update, finish, resume; seconds of each. The trainer sends meanwhile."""
        begin = time.monotonic()
        self.llm.sleep(level=0, mode="keep")
        said = {"pause": time.monotonic() - begin}
        for what in ("start", "update", "finish"):
            said[what] = self.native(what, info)
        before = time.monotonic()
        self.llm.wake_up(tags=["scheduling"])
        self.llm.reset_prefix_cache(reset_running_requests=True)
        return {**said, "resume": time.monotonic() - before, "total": time.monotonic() - begin}


class AsyncEngine(Engine):
    """An ``AsyncLLM`` on a loop of its own, maybe of several data-parallel instances."""

    def _make(self, folder: str, options: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._number = 0

        async def make() -> Any:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder, **options))

        self.llm = self._run(make())

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _driver(self) -> Any:
        from weightplane.inference_agent.engines.vllm.async_llm import AsyncDriver

        return AsyncDriver(self.llm, self._loop)

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        return [json.loads(a) for a in self._run(self._everywhere(method, args))]

    async def _everywhere(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """Of the workers of every instance: vLLM's own call answers for the first one only."""
        core = self.llm.engine_core
        engines = getattr(core, "core_engines", ())
        if len(engines) < 2:
            return list(await self.llm.collective_rpc(method, args=args))
        one = core._call_utility_async
        asked = [one("collective_rpc", method, None, args, None, engine=e) for e in engines]
        return [answer for answers in await asyncio.gather(*asked) for answer in answers]

    def generate(self, tokens: int) -> list[int]:
        """See ``Engine``."""
        return list(self._run(self._one(tokens)))

    async def _one(self, tokens: int, first: int = 3) -> list[int]:
        from vllm import SamplingParams

        self._number += 1
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompt: Any = {"prompt_token_ids": [first, *_PROMPT[1:]]}
        made: list[int] = []
        async for out in self.llm.generate(prompt, sampling, f"r{self._number}"):
            made = list(out.outputs[0].token_ids)
        return made

    def load_on(self, requests: int, tokens: int) -> None:
        """Keep so many requests in flight until ``loaded``."""
        self._over = threading.Event()
        self._made = 0
        self._failed = ""

        async def one(first: int) -> None:
            while not self._over.is_set():
                try:
                    self._made += len(await self._one(tokens, first))
                except Exception as e:
                    self._failed = f"{type(e).__name__}: {e}"
                    return

        self._tasks = [asyncio.run_coroutine_threadsafe(one(5 + i), self._loop) for i in range(requests)]

    def made(self) -> int:
        """Tokens of whole answers under the load so far."""
        return self._made

    def loaded(self, seconds: float) -> dict[str, Any]:
        """End the load; what came of it."""
        self._over.set()
        end = time.monotonic() + seconds
        while not all(t.done() for t in self._tasks) and time.monotonic() < end:
            time.sleep(0.02)
        stuck = sum(not t.done() for t in self._tasks)
        return {"tokens": self._made, "failed": self._failed, "stuck": stuck}


def main() -> None:
    """Serve commands."""
    serve(AsyncEngine() if sys.argv[1] == "async" else Engine())
    os._exit(0)  # vLLM's own end may wait for what is stuck


if __name__ == "__main__":
    to_log()
    _timeline.install("vllm")
    main()
