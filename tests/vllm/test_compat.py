"""Releases of vLLM by what their weight transfer looks like. Not run: recorded signatures; the installed one is asked.

Recorded from vLLM's sources: the worker-side base class and what it demands. 0.32 runs in the other files here.
"""

from __future__ import annotations

import importlib.util
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from weightplane.inference_agent.vllm_plugin import compat

NEEDS_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm sets up .venv-vllm for it"
)


class NowBase:
    """0.32, and before it from when engines own their lifecycle on (vllm-project/vllm 02f250b, not run)."""

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None: ...


class ParallelBase:
    """Those that name ``parallel_config`` (as of fad2b68, not run): the model's loader comes with each update."""

    def __init__(self, config: Any, parallel_config: Any) -> None: ...


class ParallelModelBase:
    """A form in between, as a third party's engine factory has it (not run)."""

    def __init__(self, config: Any, parallel_config: Any, model: Any) -> None: ...


#: What a base class of one of these releases declares abstract.
DEMANDED = {
    "now": ("init_transfer_engine", "start_weight_update", "finish_weight_update", "receive_weights", "shutdown"),
    "02f250b": ("trainer_send_weights", "start_weight_update", "finish_weight_update", "receive_weights", "shutdown"),
    "fad2b68": ("init_transfer_engine", "receive_weights", "shutdown", "trainer_send_weights"),
}


def config(**changes: Any) -> Any:
    """As much of a ``VllmConfig`` as is looked at."""
    parts: dict[str, Any] = {
        "parallel_config": "the parallel config",
        "model_config": SimpleNamespace(hf_config=SimpleNamespace(), quantization=None),
        "device_config": SimpleNamespace(device="cuda:0"),
        "speculative_config": None,
        "quant_config": None,
    }
    return SimpleNamespace(**{**parts, **changes})


def sort(base: type, *args: Any, current: Any = None) -> compat.Handed:
    return compat.handed(inspect.signature(base.__init__), args, {}, current)  # type: ignore[misc]


def test_what_is_handed_over_is_found_by_name() -> None:
    c = config()
    assert sort(NowBase, "c", c, "cpu", "m") == compat.Handed(c, "the parallel config", c.model_config, "cpu", "m")
    old = compat.Handed(c, "p", c.model_config, "cuda:0", None)
    assert sort(ParallelBase, "c", "p", current=c) == old
    assert sort(ParallelModelBase, "c", "p", "m", current=c).model == "m"
    with pytest.raises(TypeError, match=r"\(config, parallel_config\).*vllm_config is not to be had"):
        sort(ParallelBase, "c", "p")


def test_an_unknown_version_is_warned_about_and_a_known_one_is_not() -> None:
    assert compat.note("0.32.0") == compat.note("0.32.1+cpu") == compat.note("0.26.0") == ""
    for version in ("0.25.1", "0.33.0", "0.3.2", "1.0", "dev"):
        assert version in compat.note(version) and "0.32 (CPU), 0.26 (GPU)" in compat.note(version)


def test_what_a_release_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in compat._USED:
        monkeypatch.setitem(__import__("sys").modules, module, None)  # as if it were not there
    assert compat.lacks() == list(compat._USED)


@pytest.mark.parametrize(
    ("changes", "name", "advice"),
    [
        ({"speculative_config": SimpleNamespace(method="eagle3")}, "speculative_config", "ngram"),
        ({"speculative_config": SimpleNamespace(method="draft_model")}, "speculative_config", "without"),
        ({"speculative_config": SimpleNamespace()}, "speculative_config", "without"),
        ({"quant_config": object()}, "quantization", "without --quantization"),
    ],
)
def test_what_cannot_be_updated_is_named_with_what_to_do(changes: Any, name: str, advice: str) -> None:
    ((said, text),) = compat.refusals(config(**changes))
    assert said == name and name in text and advice in text


def test_a_draft_model_is_refused_with_the_option_that_lets_it_be() -> None:
    drafts = config(speculative_config=SimpleNamespace(method="mtp"))
    assert compat.draft(drafts) == "mtp" and not compat.draft(config())
    assert not compat.draft(config(speculative_config=SimpleNamespace(method="suffix")))
    ((name, text),) = compat.refusals(drafts)
    assert name == compat.DRAFT and "frozen_draft=true" in text


def test_what_can_be_updated_is_not_refused() -> None:
    assert not compat.refusals(config())
    assert not compat.refusals(config(speculative_config=SimpleNamespace(method="ngram")))
    quantised = SimpleNamespace(hf_config=SimpleNamespace(quantization_config={"quant_method": "gptq"}))
    assert not compat.refusals(config(quant_config=object(), model_config=quantised))


@NEEDS_VLLM
def test_our_engine_has_what_each_release_demands() -> None:
    from weightplane.inference_agent.vllm_plugin.engine import WeightplaneTransferEngine as Ours

    for names in DEMANDED.values():
        assert all(callable(getattr(Ours, n)) for n in names)
    assert not Ours.__abstractmethods__
    receive = inspect.signature(Ours.receive_weights)
    receive.bind(None, "info")
    receive.bind(None, "info", "the model's load_weights")
    receive.bind(None, update_info="info", load_weights="the model's load_weights")


@NEEDS_VLLM
def test_the_installed_release_lacks_nothing() -> None:
    import vllm
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    assert compat.lacks() == [] and compat.note(vllm.__version__) == ""
    names = list(inspect.signature(WeightTransferEngine.__init__).parameters)
    assert names == list(inspect.signature(NowBase.__init__).parameters)
