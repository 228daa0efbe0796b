"""The offline ``LLM`` in a program of one's own: its core in a process of its own, and in this one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.inference_agent.server import Server, eventually
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.trainer_agent import Publisher, SafetensorsSource, StateDictSource, UpdateFailed

from .fleet import tensors_of
from .models import CORE, ENVIRONMENT, PROMPTS, REPLICA, TOKENS, dtype_of
from .orders import ASLEEP, Orders

Golden = dict[str, list[list[int]]]


class Program:
    """What a user writes: an ``LLM`` and an agent; ``publish`` as the trainer of the same program would."""

    def __init__(
        self, model: Path, plane: Server, group: str, engine_options: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        from vllm import LLM

        from weightplane.inference_agent.engines.vllm.offline import OfflineDriver

        self.llm = LLM(
            model=str(model),
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=8,
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=64 << 20,
            weight_transfer_config={"backend": "weightplane"},
            dtype=dtype_of(model),
            **{**REPLICA, **options},
        )
        self.first, self.other = (n if "TA16" not in str(model) else f"T{n}16" for n in "AB")
        self.plane, self.group, self.step = plane, group, 0
        self.driver = OfflineDriver(self.llm)
        self._attach(engine_options or {})

    def _attach(self, options: Mapping[str, Any]) -> None:
        from weightplane.inference_agent.engines.vllm.adapter import VllmEngine

        self.engine = VllmEngine(self.driver, start_timeout_s=60, **options)
        self.agent = InferenceAgent(self.plane.address, self.group, "a", self.engine).start()
        assert self.agent.wait_live(20)

    def restart_agent(self, **options: Any) -> None:
        """Another agent, with other options of the engine, in place of the one."""
        first = self.agent.incarnation
        self.agent.stop()
        self.engine.close()
        self._attach(options)
        eventually(lambda: self.there(first), 20, "the new agent is known")

    def there(self, other_than: str) -> bool:
        r = self.plane.state(self.group).replicas["a"]
        return r.incarnation != other_than and r.reported

    def generate(self, prompts: list[list[int]], tokens: int = TOKENS) -> list[list[int]]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        given: Any = [{"prompt_token_ids": p} for p in prompts]
        return [list(o.outputs[0].token_ids) for o in self.llm.generate(given, sampling, use_tqdm=False)]

    def publish(self, weights: Path | dict[str, Any], **options: Any) -> Any:
        self.step += 1
        source = SafetensorsSource(weights) if isinstance(weights, Path) else StateDictSource(weights)
        with Publisher(self.plane.address, self.group, source, takeover=True, **options) as p:
            return p.publish(step=self.step)

    def close(self) -> None:
        self.agent.stop()
        self.engine.close()
        self.llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module", params=["own process", "this process"])
def program(
    request: pytest.FixtureRequest, golden: object, folders: dict[str, Path], plane: Server
) -> Iterator[Program]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", CORE)
        inside = request.param == "this process"
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0" if inside else "1")
        made = Program(folders["A" if inside else "TA16"], plane, "offline-in" if inside else "offline")
        yield made
        made.close()


def test_weights_go_there_and_back(program: Program, folders: dict[str, Path], golden: Golden) -> None:
    """A -> B -> A -> B between calls of ``generate``, staged and in place; tied in bfloat16, untied in float32."""
    a, b = program.first, program.other
    assert program.generate(PROMPTS) == golden[a]
    for target, mode in ((b, "staged"), (a, "in_place"), (b, "in_place"), (a, "staged")):
        receipt = program.publish(folders[target], mode=mode)
        assert {(r.state, r.mode) for r in receipt.replicas} == {("READY", mode.upper())}
        assert program.generate(PROMPTS) == golden[target]
        if hasattr(program.llm, "get_weight_version"):  # 0.26 has no label of its weights
            assert program.llm.get_weight_version() == str(receipt.version)


def test_generate_on_another_thread_is_kept(program: Program, folders: dict[str, Path], golden: Golden) -> None:
    """A call of ``generate`` that is under way stands still, and goes on with the new weights."""
    program.publish(folders[program.first])
    made: list[list[list[int]]] = []
    running = threading.Event()
    step = program.llm.llm_engine.step

    def told() -> Any:
        outputs = step()
        running.set()
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program.llm.llm_engine, "step", told)
        thread = threading.Thread(target=lambda: made.append(program.generate([PROMPTS[0]], 480)))
        with Publisher(
            program.plane.address, program.group, SafetensorsSource(folders[program.other]), takeover=True
        ) as p:
            thread.start()
            assert running.wait(60)
            receipt = p.publish(step=1)
        thread.join(120)
    assert {r.state for r in receipt.replicas} == {"READY"}
    assert len(made[0][0]) == 480
    assert program.generate(PROMPTS) == golden[program.other]


def test_it_sleeps_and_wakes_up_by_order(program: Program, folders: dict[str, Path], golden: Golden) -> None:
    """At both levels; the weights are awake for the update, and what generates afterwards is the update's."""
    program.publish(folders[program.first])
    orders = Orders(program.plane.address, program.group)
    for level, target in ((1, program.other), (2, program.first)):
        assert orders.sleep(level).admin == ASLEEP and bool(program.engine.mixed()) == (level == 2)
        orders.wake("weights")
        assert {r.state for r in program.publish(folders[target]).replicas} == {"READY"}
        assert orders.wake("kv_cache").routable
        assert program.generate(PROMPTS) == golden[target]


@pytest.mark.parametrize("mode", ["staged", "in_place"])
def test_what_does_not_fit_is_refused_before_the_first_byte(
    program: Program, folders: dict[str, Path], golden: Golden, mode: str
) -> None:
    """A wrong shape, a name that is missing, one too many: named, and vLLM goes on with what it had."""
    version = program.publish(folders[program.first]).version
    whole = tensors_of(folders[program.other])
    name = "model.layers.1.self_attn.k_proj.weight"
    without = {n: t for n, t in whole.items() if n != name}
    for tensors, kind in (
        ({**whole, name: whole[name][:-4].contiguous()}, "mis-shaped"),
        (without, "missing"),
        ({**without, name + "s": whole[name]}, "missing"),
    ):
        with pytest.raises(UpdateFailed) as failed:
            program.publish(tensors, mode=mode)
        assert name in str(failed.value) and kind.split("-")[-1] in str(failed.value), str(failed.value)
        assert program.engine.held()[0].version == version and not program.engine.mixed()
    assert program.generate(PROMPTS) == golden[program.first]
