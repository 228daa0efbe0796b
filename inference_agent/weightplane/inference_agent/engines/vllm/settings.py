"""What decides which log-probabilities an engine serves, and what a group declares of it. Typed; pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["Declared", "EngineSettings", "declared_from"]


@dataclass(frozen=True)
class EngineSettings:
    """An engine's effective settings. ``None``: not known, which is not the same as not set.

    Attributes:
        engine_version: vLLM's release.
        weight_version: the version of the weights that it has now (0: those it was started with), as it says itself.
        logprobs_mode: raw_logprobs | processed_logprobs | raw_logits | processed_logits.
        max_logprobs: how many alternatives a request may ask for; -1: all.
        dtype, head_dtype: of the model, of its last projection: float32 | bfloat16 | float16.
        kv_cache_dtype: "auto" is the model's.
        quantization: its name; empty: none.
        prefix_caching, async_scheduling, chunked_prefill, batch_invariant: whether on.
        generation_config: auto | vllm | a folder: where defaults of requests come from.
        sampling_defaults: those that are not neutral, by the names of ``generation_config.json``.
        speculative: how it speculates; empty: not.
        cache_policy: clear | keep | salt: what updates do with cached keys and values.
        pause_mode: keep | wait | abort: what updates do with requests in flight.
    """

    engine_version: str | None = None
    weight_version: int | None = None
    logprobs_mode: str | None = None
    max_logprobs: int | None = None
    dtype: str | None = None
    head_dtype: str | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    prefix_caching: bool | None = None
    async_scheduling: bool | None = None
    chunked_prefill: bool | None = None
    batch_invariant: bool | None = None
    generation_config: str | None = None
    sampling_defaults: Mapping[str, float] | None = None
    speculative: str | None = None
    cache_policy: str | None = None
    pause_mode: str | None = None


@dataclass(frozen=True)
class Declared:
    """What a group says of its engines. The defaults are those under which trainer and engine can be equal.

    Attributes:
        logprobs_mode: processed: the policy that sampled is the one that is trained.
        dtype: the trainer's compute dtype; empty: the engine's is right whatever it is.
        head_dtype: of the last projection, on both sides.
        kv_cache_dtype, quantization, speculative: as in ``EngineSettings``; "auto", and none.
        sampling_defaults: what a request gets that does not say; none.
        async_scheduling, chunked_prefill, batch_invariant, prefix_caching: ``None``: either will do.
        cache_policy, pause_mode: what updates ask for.
        weight_version: the version expected; ``None``: any.
        engine_version: a release, or the beginning of one ("0.32"); empty: any that was run.
    """

    logprobs_mode: str = "processed_logprobs"
    dtype: str = ""
    head_dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    quantization: str = ""
    speculative: str = ""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    async_scheduling: bool | None = False
    chunked_prefill: bool | None = None
    batch_invariant: bool | None = None
    prefix_caching: bool | None = None
    cache_policy: str = "clear"
    pause_mode: str = "keep"
    weight_version: int | None = None
    engine_version: str = ""


_WORDS = {
    "logprobs_mode": ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    "dtype": ("", "float32", "bfloat16", "float16"),
    "head_dtype": ("float32", "bfloat16", "float16"),
    "cache_policy": ("clear", "keep", "salt"),
    "pause_mode": ("keep", "wait", "abort"),
}


def declared_from(pairs: Iterable[str]) -> Declared:
    """``Declared`` from ``name=value`` words; ``none`` for a flag says that either will do.

    ``ValueError`` names an unknown name, and what was expected of a value.
    """
    found: dict[str, Any] = {}
    known = {f.name for f in fields(Declared)}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or name not in known:
            raise ValueError(f"{pair!r}: expected name=value, name one of {', '.join(sorted(known))}")
        found[name] = _value(name, text)
    return Declared(**found)


def _number(value: Any) -> bool:
    """Whether it is a number that can be equal to another, or none."""
    return value is None or (isinstance(value, int | float) and math.isfinite(value))


def _value(name: str, text: str) -> Any:
    default = getattr(Declared(), name)
    if name == "sampling_defaults":
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict) or not all(_number(v) for v in value.values()):
            raise ValueError(f'{name}: expected a JSON object such as {{"temperature": 0.7}}, found {text!r:.200}')
        return value
    if name == "weight_version":
        if not text.isdecimal() or len(text) > 19:
            raise ValueError(f"{name}: expected a version, 0 or more, found {text!r:.200}")
        return int(text)
    if default is None or isinstance(default, bool):
        flags = {"true": True, "false": False, "none": None}
        if text not in flags:
            raise ValueError(f"{name}: expected true, false or none, found {text!r}")
        return flags[text]
    if name in _WORDS and text not in _WORDS[name]:
        raise ValueError(f"{name}: expected one of {', '.join(w for w in _WORDS[name] if w)}, found {text!r}")
    return text
