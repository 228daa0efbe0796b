"""The audit of what vLLM itself makes of its flags: one wrong flag, one condition. No engine is started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from weightplane.inference_agent.engines.vllm.audit import audit
from weightplane.inference_agent.engines.vllm.reading import read_config, read_here
from weightplane.inference_agent.engines.vllm.settings import Declared, EngineSettings

from .models import ENVIRONMENT

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None, reason="needs vLLM: make test-vllm sets up .venv-vllm for it"
)

#: Flags under which all is as declared here.
RIGHT: dict[str, Any] = {
    "dtype": "bfloat16",
    "logprobs_mode": "processed_logprobs",
    "hf_overrides": {"head_dtype": "float32"},
    "generation_config": "vllm",
    "async_scheduling": False,
    "enable_prefix_caching": False,
    "enable_chunked_prefill": False,
    "max_model_len": 512,
    "enforce_eager": True,
}
DECLARED = Declared(dtype="bfloat16", prefix_caching=False, chunked_prefill=False)
#: A flag as it must not be (``None``: left to vLLM's default), and the condition that must say so.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"logprobs_mode": None}, "LogprobsMode"),
    ({"override_generation_config": {"temperature": 0.6}}, "SamplingDefaults"),
    ({"enable_prefix_caching": None}, "PrefixCaching"),
    ({"dtype": "float32"}, "Dtype"),
    ({"hf_overrides": None}, "HeadDtype"),
    ({"kv_cache_dtype": "fp8"}, "KvCacheDtype"),
    ({"enable_chunked_prefill": None}, "ChunkedPrefill"),
    ({"quantization": "fp8"}, "Quantization"),
    (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        "SpeculativeDecoding",
    ),
]
Read = Callable[[dict[str, Any]], EngineSettings]


@pytest.fixture(scope="module")
def read(folders: dict[str, Path]) -> Iterator[Read]:
    """The settings of an engine that would be started with these flags, as vLLM resolves them."""
    from vllm.engine.arg_utils import EngineArgs

    def of(flags: dict[str, Any]) -> EngineSettings:
        given = {k: v for k, v in {**RIGHT, **flags}.items() if v is not None}
        found = read_config(EngineArgs(model=str(folders["A16"]), **given).create_engine_config(), {})
        return replace(found, engine_version="0.32.0", weight_version=0, cache_policy="clear", pause_mode="keep")

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield of


def wrong(found: EngineSettings) -> set[str]:
    return {c.type for c in audit(found, DECLARED) if c.status == "False"}


def test_right_flags_are_as_declared(read: Read) -> None:
    assert wrong(read({})) == set()


@pytest.mark.parametrize(("flags", "condition"), WRONG)
def test_each_wrong_flag_is_found_by_itself(read: Read, flags: dict[str, Any], condition: str) -> None:
    assert wrong(read(flags)) == {condition}


def test_the_config_of_a_vllm_in_this_process_is_read_whole(read: Read, folders: dict[str, Path]) -> None:
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=str(folders["A16"]), **RIGHT).create_engine_config()
    found = read_here(config)
    assert found.engine_version == vllm.__version__ and found.batch_invariant is False
    asked = {"engine_version": None, "batch_invariant": None}
    assert replace(found, **asked) == replace(read_config(config), **asked)
