"""Which layers go past vLLM's loaders: on a real model in this process, with each thing that stops them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch

from .models import make_model
from .real_model import DEVICE, RealModel, real_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm sets up .venv-vllm for it"
)
Plant = Callable[[RealModel, pytest.MonkeyPatch], None]


@pytest.fixture(scope="module", params=["untied", "tied"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealModel]:
    folder = make_model(tmp_path_factory.mktemp("fitting") / "A", 0, tie=request.param == "tied")
    with pytest.MonkeyPatch.context() as patch:
        import vllm._custom_ops as custom_ops

        patch.setattr(custom_ops, "_supports_onednn", False)
        with real_model(folder) as model:
            yield model


def surveyed(real: RealModel, quantized: bool = False) -> Any:
    from weightplane.inference_agent.vllm_plugin.surveying import survey

    named = real.named(Path(real.config.model_config.model))
    return survey(real.model, real.manifest(named), DEVICE, quantized)


def test_plain_layers_go_past_the_loaders(real: RealModel) -> None:
    """And what was recorded is what lies there: the checkpoint that it was started from."""
    found = surveyed(real)
    assert found.direct is not None and not found.indirect and not found.problems
    named = real.named(Path(real.config.model_config.model))
    slot: Any = {i: (named[t.name], ()) for i, t in enumerate(real.manifest(named))}
    assert not found.direct.differs(slot) and not found.direct.in_place_refusal
    assert found.direct.elements == sum(t.numel() for t in named.values()) == sum(found.expected.values())


def _layer(real: RealModel) -> Any:
    return real.model.model.layers[1]


def _method(real: RealModel, patch: pytest.MonkeyPatch) -> None:
    layer = _layer(real).mlp.down_proj
    kind = type(layer.quant_method)
    patch.setattr(layer, "quant_method", type("ShufflingMethod", (kind,), {})())


def _packed(real: RealModel, patch: pytest.MonkeyPatch) -> None:
    layer = _layer(real).self_attn.o_proj
    copy = layer.weight.data.clone()
    patch.setattr(layer, "cpu_linear", lambda x, weight, bias: torch.nn.functional.linear(x, copy, bias))


def _keeps(real: RealModel, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_layer(real).mlp.gate_up_proj, "halves", torch.zeros(3), raising=False)


def _post(real: RealModel, patch: pytest.MonkeyPatch) -> None:
    layer = _layer(real).input_layernorm
    patch.setattr(layer, "process_weights_after_loading", MethodType(lambda *_: None, layer), raising=False)


def _attention(real: RealModel, patch: pytest.MonkeyPatch) -> None:
    attention = _layer(real).self_attn.attn
    step = {"process_weights_after_loading": lambda *_: None}
    other: Any = object.__new__(type("Shuffling", (type(attention.impl),), step))
    other.__dict__.update(vars(attention.impl))
    patch.setattr(attention, "impl", other)


def _scales(real: RealModel, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_layer(real).self_attn.attn, "quant_method", object(), raising=False)


def _another_attention(real: RealModel, patch: pytest.MonkeyPatch) -> None:
    attention = _layer(real).self_attn.attn
    patch.setattr(attention, "__class__", type("SinkAttention", (type(attention),), {}))


def _release(real: RealModel, patch: pytest.MonkeyPatch) -> None:
    from weightplane.inference_agent.vllm_plugin import compat

    patch.setattr(compat, "RUN", {"0.1": "CPU"})


def _derives(real: RealModel, patch: pytest.MonkeyPatch) -> None:
    """The model's own loading makes something of the embedding."""
    whole = real.model.load_weights

    def load_weights(weights: Any) -> Any:
        loaded = whole(weights)
        real.model.table = real.model.model.embed_tokens.weight.sum(1)
        return loaded

    patch.setattr(real.model, "load_weights", load_weights)
    patch.setattr(real.model, "table", None, raising=False)


@pytest.mark.parametrize(
    ("plant", "why"),
    [
        (_method, r"layers\.1\.mlp\.down_proj .* has ShufflingMethod"),
        (_packed, r"layers\.1\.self_attn\.o_proj .* packed copy"),
        (_keeps, r"layers\.1\.mlp\.gate_up_proj .* keeps a tensor 'halves'"),
        (_post, r"layers\.1\.input_layernorm .* makes something of its weights"),
        (_attention, r"layers\.1\.self_attn\.attn .* has Shuffling, which makes"),
        (_scales, r"layers\.1\.self_attn\.attn .* scales of a quantised"),
        (_another_attention, r"layers\.1\.self_attn\.attn \(SinkAttention\) makes something"),
        (_release, r"was not run with this release"),
        (_derives, r"embed_tokens\.weight goes through aten\.sum"),
    ],
)
def test_what_is_not_known_goes_through_them_and_is_named(
    real: RealModel, plant: Plant, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import re

    plant(real, monkeypatch)
    found = surveyed(real)
    assert found.direct is None and re.search(why, found.indirect), found.indirect
    assert not found.problems, "it can be loaded all the same"


def test_quantised_weights_go_through_them(real: RealModel) -> None:
    found = surveyed(real, quantized=True)
    assert found.direct is None and "quantises" in found.indirect


def test_packed_layers_go_through_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CPU does by itself."""
    import vllm._custom_ops as custom_ops

    monkeypatch.setattr(custom_ops, "_supports_onednn", True)
    with real_model(make_model(tmp_path / "A", 0)) as real:
        found = surveyed(real)
    assert found.direct is None and "packed copy" in found.indirect
