"""vLLM 0.26, the release for GPUs: what of it the adapter uses, recorded from its sources, and what differs there.

The run itself is ``benchmarks/vllm_gpu.py``. ``test_loading.py`` passed with 0.26's own sources on a CPU, but for what
looks at weights packed by kernels that its wheel has not got for CPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.loop import Loop
from weightplane.controlplane.core.states import PauseMode
from weightplane.inference_agent.engines.base import EngineError
from weightplane.inference_agent.engines.vllm.adapter import VllmEngine
from weightplane.inference_agent.engines.vllm.async_llm import AsyncDriver
from weightplane.inference_agent.engines.vllm.drivers import Driver
from weightplane.inference_agent.engines.vllm.offline import OfflineDriver
from weightplane.inference_agent.vllm_plugin import compat

from .test_compat import NEEDS_VLLM, config, sort
from .test_guards import Pretended, hello

_RELOAD = "vllm.model_executor.model_loader.reload."
_ONLINE = "vllm.model_executor.layers.quantization.online.fp8"


class Base:
    """``WeightTransferEngine`` of 0.26."""

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None: ...


#: What it declares abstract.
DEMANDED = (
    "init_transfer_engine",
    "start_weight_update",
    "finish_weight_update",
    "receive_weights",
    "shutdown",
    "trainer_send_weights",
)


class Llm:
    """``LLM`` of 0.26, with a core in a process of its own; notes its calls. It has no weight version."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        core = SimpleNamespace(call_utility=None, _send_input=lambda *_: None)
        self.llm_engine = SimpleNamespace(engine_core=core, is_sleeping=lambda: True)

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.calls.append(f"init {request['init_info']}")

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, request: Any) -> None:
        self.calls.append(f"update {request['update_info']}")

    def finish_weight_update(self) -> None:
        self.calls.append("finish")

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.calls.append(f"sleep {level} {mode}")

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(f"wake_up {tags}")

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self.calls.append("reset_prefix_cache")
        return True


class AsyncLlm:
    """``AsyncLLM`` of 0.26."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def check_health(self) -> None: ...

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.calls.append(f"init {request.init_info}")

    async def start_weight_update(self) -> None:
        self.calls.append("start")

    async def update_weights(self, request: Any) -> None:
        self.calls.append(f"update {request.update_info}")

    async def finish_weight_update(self) -> None:
        self.calls.append("finish")

    async def pause_generation(
        self, *, mode: str = "abort", wait_for_inflight_requests: bool | None = None, clear_cache: bool = True
    ) -> None:
        self.calls.append(f"sleep 0 {mode}")
        if clear_cache:
            self.calls.append("reset_prefix_cache")

    async def resume_generation(self) -> None:
        self.calls.append("wake_up ['scheduling']")

    async def is_paused(self) -> bool:
        return True

    async def is_sleeping(self) -> bool:
        return True

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self.calls.append("reset_prefix_cache")
        return True


@pytest.fixture(params=["LLM", pytest.param("AsyncLLM", marks=NEEDS_VLLM)])
def driven(request: pytest.FixtureRequest) -> Iterator[tuple[Driver, Any]]:
    if request.param == "LLM":
        llm = Llm()
        yield OfflineDriver(llm), llm
        return
    later = AsyncLlm()
    with Loop() as made:
        yield AsyncDriver(later, made.loop), later


def test_the_drivers_call_what_the_release_has(driven: tuple[Driver, Any]) -> None:
    """A whole update by each driver; the label goes nowhere, where vLLM has no place for it."""
    driver, llm = driven
    driver.initialise([{"socket": "s"}], 60)
    driver.pause(PauseMode.KEEP, True, 5)
    assert driver.is_paused(5) and driver.is_sleeping(5) and driver.alive(5)
    driver.update({"do": "apply"}, lambda: "7", 60)
    driver.clear_cache(5)
    driver.resume(5)
    assert llm.calls == [
        "init {'socket': 's'}",
        "sleep 0 keep",
        "reset_prefix_cache",
        "start",
        "update {'do': 'apply'}",
        "finish",
        "reset_prefix_cache",
        "wake_up ['scheduling']",
    ]


def test_the_engine_is_made_as_in_later_releases() -> None:
    c = config()
    assert sort(Base, "c", c, "cuda:0", "m") == compat.Handed(c, "the parallel config", c.model_config, "cuda:0", "m")


@NEEDS_VLLM
def test_our_engine_has_what_it_demands() -> None:
    from weightplane.inference_agent.vllm_plugin.engine import WeightplaneTransferEngine as Ours

    assert all(callable(getattr(Ours, n)) for n in DEMANDED)


def modules(monkeypatch: pytest.MonkeyPatch, **found: Any) -> None:
    """vLLM's reload modules with these names in them."""
    for name in ("layerwise", "meta", "utils"):
        module = ModuleType(_RELOAD + name)
        for key in found.get(name, ()):
            setattr(module, key, found[name][key])
        monkeypatch.setitem(sys.modules, _RELOAD + name, module)


def test_what_the_release_calls_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ``is_deferred_attention_layer``, but the classes; no ``get_tensor_load_numel``: every element is loaded."""
    attention = type("Attention", (), {})
    names = dict.fromkeys(n for n in compat._USED[_RELOAD + "layerwise"] if "|" not in n)
    metas = dict.fromkeys(compat._USED[_RELOAD + "meta"])
    layerwise = {**names, "Attention": attention, "MLAAttention": type("MLAAttention", (), {})}
    modules(monkeypatch, layerwise=layerwise, meta=metas, utils={"get_layer_tensors": None})
    assert compat.lacks() == []
    assert compat.is_deferred_attention(attention()) and not compat.is_deferred_attention(object())
    assert compat.load_numel(torch.empty(3, 4)) == 12
    later = {**names, "is_deferred_attention_layer": lambda layer: layer == "attention"}
    utils = {"get_layer_tensors": None, "get_tensor_load_numel": lambda _: 7}
    modules(monkeypatch, layerwise=later, meta=metas, utils=utils)
    assert compat.is_deferred_attention("attention") and not compat.is_deferred_attention(attention())
    assert compat.load_numel(torch.empty(3, 4)) == 7
    modules(monkeypatch, layerwise=names, meta=metas, utils=utils)
    assert compat.lacks() == [_RELOAD + "layerwise.is_deferred_attention_layer|Attention"]


def quantised(method: str) -> Any:
    c = config(quant_config=object())
    c.model_config.quantization = method
    return c


def test_fp8_is_updated_on_a_gpu_where_the_reload_quantises_again(monkeypatch: pytest.MonkeyPatch) -> None:
    online = ModuleType(_ONLINE)
    monkeypatch.setitem(sys.modules, _ONLINE, online)
    assert [n for n, _ in compat.refusals(quantised("fp8"), "cuda")] == ["quantization"]
    online.initialize_online_processing = None  # type: ignore[attr-defined]
    assert compat.refusals(quantised("fp8"), "cuda") == []
    assert [n for n, _ in compat.refusals(quantised("fp8"), "cpu")] == ["quantization"]
    assert [n for n, _ in compat.refusals(quantised("torchao"), "cuda")] == ["quantization"]


@NEEDS_VLLM
def test_workers_of_data_parallel_instances_are_told_apart() -> None:
    """Of those that one front end calls together; an instance that is a server of its own has rank 0 as ever."""
    from weightplane.inference_agent.vllm_plugin.engine import WeightplaneTransferEngine as Ours

    def said(**parallel: Any) -> tuple[int, int]:
        made: Any = object.__new__(Ours)
        made._parallel = SimpleNamespace(rank=1, world_size=2, **parallel)
        made.device, made.model_config, made.model = torch.device("cpu"), SimpleNamespace(model="m"), None
        made.vllm_config = SimpleNamespace(model_config=made.model_config)
        made.worker = SimpleNamespace(life="life", state=hello("").state)
        found = made._hello("token")
        return found.rank, found.world

    assert said() == (1, 2)
    assert said(data_parallel_size_local=2, data_parallel_rank_local=0) == (1, 4)
    assert said(data_parallel_size_local=2, data_parallel_rank_local=1) == (3, 4)
    assert said(data_parallel_size_local=1, data_parallel_rank_local=1) == (1, 2)


class Twice(Pretended):
    """Two instances behind one front end whose workers cannot be told apart."""

    def initialise(self, infos: Sequence[Mapping[str, Any]], timeout: float) -> None:
        for _ in range(2):
            super().initialise(infos, timeout)


def test_two_workers_that_say_they_are_the_same_are_refused() -> None:
    """One of them would keep its old weights at every update."""
    with pytest.raises(EngineError, match="data-parallel"):
        VllmEngine(Twice(), start_timeout_s=5)
