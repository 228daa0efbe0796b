"""Loads that end in the middle, on a real model in this process: what is live afterwards; the next load is exact."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightplane.controlplane import failpoints
from weightplane.inference_agent.engines.mismatch import ProblemKind

from .models import make_model
from .real_model import DEVICE, Broken, RealModel, given, real_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm sets up .venv-vllm for it"
)
Q, K = (f"model.layers.1.self_attn.{p}_proj.weight" for p in "qk")
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
O_PROJ = "model.layers.1.self_attn.o_proj.weight"
Named = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealModel]:
    with real_model(make_model(tmp_path_factory.mktemp("real") / "A", 0)) as model:
        yield model


@pytest.fixture(scope="module")
def a(real: RealModel) -> Named:
    return real.named(Path(real.config.model_config.model))


@pytest.fixture(scope="module")
def b(a: Named) -> Named:
    generator = torch.Generator().manual_seed(7)
    return {n: torch.randn(t.shape, generator=generator) * 0.2 for n, t in a.items()}


@pytest.fixture(autouse=True)
def begins_with_a(request: pytest.FixtureRequest) -> None:
    real: RealModel = request.getfixturevalue("real")
    named = request.getfixturevalue("a")
    if real.differs(named):
        from weightplane.inference_agent.vllm_plugin.restoring import restore

        restore(real.model)
        real.load(named)


def test_packed_weights_follow(real: RealModel, a: Named, b: Named) -> None:
    """Trap 1: on CPU kernels compute from packed copies, which vLLM's layerwise reload alone makes anew."""
    assert not real.differs(a)
    assert real.model.model.layers[0].self_attn.qkv_proj.weight.numel() == 0, "packed: there is nothing to write to"
    before = real.tensors()
    for target in (b, a):
        real.load(target)
        assert not real.differs(target)
    assert real.tensors() == before, "live tensors do not move"


def test_a_survey_leaves_the_model_as_it_was(real: RealModel, a: Named, b: Named) -> None:
    before = real.tensors()
    assert real.survey(b).taken == set(b)
    assert real.tensors() == before and not real.half_loaded() and not real.differs(a)


@pytest.mark.parametrize("name", [K, NORM, EMBEDDING])
def test_what_a_cast_would_silently_lose_is_refused_by_name(real: RealModel, b: Named, name: str) -> None:
    """Before the first byte. Between the types that models are trained and served in a cast is meant."""
    for dtype in (torch.float64, torch.int64, torch.int8, torch.bool):
        found = real.survey({**b, name: b[name].to(dtype)})
        ((kind, named, text),) = found.problems
        assert (kind, named) == (ProblemKind.DTYPE, name) and str(dtype) in text and "torch.float32" in text, text
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert not real.survey({**b, name: b[name].to(dtype)}).problems


def test_after_a_failure_the_live_tensors_are_back(real: RealModel, a: Named, b: Named) -> None:
    """Trap 5: nothing stays on meta. Finished layers hold the new values, untouched ones compute the old ones.

    (The layer in between may hold new biases: vLLM leaves those live during a reload.)"""
    before = real.tensors()
    with pytest.raises(Broken):
        real.load(b, breaks_at=K)
    assert not [n for n, p in real.model.named_parameters() if p.is_meta], "layers were left on meta"
    assert real.tensors() == before, "other tensors are live than before"
    assert not real.differs(b, range(1)) and not real.differs(a, range(2, 3))


def test_after_a_failure_nothing_is_kept_for_the_retry(real: RealModel, b: Named) -> None:
    """Trap 6: between ``q`` and ``k`` of one layer, ``q`` is buffered and counted."""
    with pytest.raises(Broken):
        real.load(b, breaks_at=K)
    assert not real.half_loaded(), "vLLM would count what came before the failure"
    real.load(b)
    assert not real.differs(b)


def test_what_somebody_else_left_half_loaded_is_not_counted_in(real: RealModel, a: Named, b: Named) -> None:
    """Trap 6, at each start: another weight-sync client died between ``q`` and ``k``; its ``q`` is not ours."""
    from vllm.model_executor.model_loader.reload import layerwise

    from weightplane.inference_agent.vllm_plugin.loading import load

    found = real.survey(b)
    layerwise.initialize_layerwise_reload(real.model)
    with pytest.raises(Broken):
        real.model.load_weights(given(a, K))
    assert real.half_loaded()
    load(real.model, real.config.model_config, DEVICE, given(b), found)
    assert not real.differs(b)


def test_a_wrong_shape_does_not_come_again(real: RealModel, b: Named) -> None:
    """Trap 5: vLLM buffers a mis-shaped tensor and would load it again on the retry. It is named."""
    from weightplane.inference_agent.vllm_plugin.loading import LoadFailed, load

    found = real.survey(b)
    wrong = {**b, O_PROJ: b[O_PROJ][:, :-8].contiguous()}
    with pytest.raises(LoadFailed, match="o_proj") as failed:
        load(real.model, real.config.model_config, DEVICE, given(wrong), found)
    assert failed.value.tensors == (O_PROJ,)
    assert not real.half_loaded()
    real.load(b)
    assert not real.differs(b)


class Llm:
    """As much of a worker of vLLM as an update needs, with vLLM's own methods and its flag "active"."""

    def __init__(self, real: RealModel) -> None:
        from vllm.v1.worker.cpu_worker import CPUWorker

        from weightplane.inference_agent.vllm_plugin.engine import WeightplaneTransferEngine

        self.engine = WeightplaneTransferEngine(None, real.config, DEVICE, real.model)
        worker: Any = object.__new__(CPUWorker)
        worker.parallel_config = real.config.parallel_config
        worker.vllm_config, worker.rank, worker.weight_transfer_engine = real.config, 0, self.engine
        worker._weight_update_active = worker._weight_update_is_draft = False
        worker.model_runner = SimpleNamespace(reset_lora_state=lambda: None)
        self.worker = worker


def _fail_at_the_20th(name: str, nth: int) -> None:
    if (name, nth) == ("vllm.load.inside", 20):
        raise failpoints.FailpointError(name)


def test_a_failed_load_does_not_wedge_vllm(real: RealModel, b: Named) -> None:
    """Trap 7: with vLLM's own flag. A load that fails is told to the agent; vLLM finishes, starts and shuts down."""
    from weightplane.inference_agent.vllm_plugin.wire import manifest_json

    llm, manifest = Llm(real), real.manifest(b)
    replica, worker = llm.engine.worker, llm.worker
    replica.do("manifest", {"manifest": manifest_json(manifest)})
    replica.survey(manifest.id)
    replica.do("begin", {"update_id": "u", "version": 2, "manifest_id": manifest.id, "in_place": False})
    failpoints.set_hook(_fail_at_the_20th)
    try:
        worker.start_weight_update()
        worker.update_weights({"do": "apply", "update_id": "u"})
        worker.finish_weight_update()
    finally:
        failpoints.set_hook(None)
    assert "could not be loaded" in replica.state.mixed, "who attaches next is told why it is a mix"
    with pytest.raises(Exception, match=r"vllm\.load\.inside"):
        replica.do("applied", {"update_id": "u"})
    worker.start_weight_update()
    worker.finish_weight_update()
    worker.shutdown_weight_transfer_engine()


def test_what_no_update_can_follow_is_refused_by_name(
    real: RealModel, b: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft models and quantisation while loading: a problem of every manifest, so nothing is sent."""
    from weightplane.inference_agent.vllm_plugin.wire import manifest_json

    monkeypatch.setattr(real.config, "speculative_config", SimpleNamespace(method="eagle"))
    monkeypatch.setattr(real.config, "quant_config", object())
    replica, manifest = Llm(real).engine.worker, real.manifest(b)
    replica.do("manifest", {"manifest": manifest_json(manifest)})
    for _ in range(2):
        replica.survey(manifest.id)
    problems = replica.do("surveyed", {"manifest_id": manifest.id})["problems"]
    assert [(kind, name) for kind, name, _ in problems] == [
        ("unwritable", "speculative_config"),
        ("unwritable", "quantization"),
    ]
    assert all("start vLLM without" in text for _, _, text in problems)


def test_an_engine_without_the_model_takes_it_from_the_first_update(real: RealModel, b: Named) -> None:
    """Older releases hand over the model's ``load_weights`` with each update, and nothing before."""
    engine = Llm(real).engine
    engine.model = None
    assert engine._hello("t").staging_refusal == ""
    with pytest.raises(RuntimeError, match="hands over no model"):
        engine.receive_weights(engine.parse_update_info({"do": "survey"}), print)
    engine.receive_weights(engine.parse_update_info({"do": "survey"}), real.model.load_weights)
    assert engine.model is real.model


def test_a_release_that_lacks_something_serves_and_says_so(real: RealModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightplane.inference_agent.vllm_plugin import compat

    monkeypatch.setattr(compat, "lacks", lambda: ["vllm.reload.gone"])
    engine = Llm(real).engine
    with pytest.raises(RuntimeError, match=r"lacks what a load needs: vllm\.reload\.gone"):
        engine.init_transfer_engine(engine.parse_init_info({"socket": "/nowhere", "token": "t"}))
    engine.shutdown()


@pytest.mark.parametrize("first", ["the load ends", "the agent goes"])
def test_a_load_that_nobody_confirmed_is_named_so(real: RealModel, b: Named, first: str) -> None:
    """The agent dies between the load and its confirmation, or during the load: not "is being applied" for ever."""
    from weightplane.inference_agent.vllm_plugin.wire import manifest_json

    replica, manifest = Llm(real).engine.worker, real.manifest(b)
    replica.do("manifest", {"manifest": manifest_json(manifest)})
    replica.survey(manifest.id)
    replica.do("begin", {"update_id": "u", "version": 2, "manifest_id": manifest.id, "in_place": False})
    seen: list[str] = []

    def at(name: str, nth: int) -> None:
        if (name, nth) == ("vllm.load.inside", 20):
            seen.append(replica.state.mixed)
            if first == "the agent goes":
                replica.agent_gone()

    failpoints.set_hook(at)
    try:
        replica.apply("u")
    finally:
        failpoints.set_hook(None)
    if first == "the load ends":
        replica.agent_gone()
    assert seen == ["update u is being applied"]
    assert replica.state.mixed == "update u was loaded and never confirmed: its agent is gone"
    assert replica.state.held.version == 0
