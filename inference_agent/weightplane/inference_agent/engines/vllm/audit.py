"""An engine's settings judged against what its group declares. Pure: settings in, conditions out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weightplane.controlplane.core.model import Condition
from weightplane.inference_agent.vllm_plugin.compat import RUN

from .settings import Declared, EngineSettings

__all__ = ["Condition", "audit"]


#: What leaves a distribution as it is.
NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def audit(found: EngineSettings, declared: Declared) -> tuple[Condition, ...]:
    """Every condition, in a fixed order, whatever its status."""
    return tuple(check(found, declared) for check in _CHECKS)


def _judge(kind: str, found: Any, wanted: Any, why: str, setting: str, name: str) -> Condition:
    """The common form: a value that must be the one declared. ``wanted`` None: any will do."""
    if found is None:
        return Condition(kind, "Unknown", "NotTold", f"the engine does not tell its {name}: {why}", setting)
    if wanted is None:
        return Condition(kind, "True", "NothingDeclared", f"{name} is {_word(found)}; any will do")
    if found == wanted:
        return Condition(kind, "True", "AsDeclared", f"{name} is {_word(found)}")
    message = f"{name} is {_word(found)}, declared is {_word(wanted)}: {why}"
    return Condition(kind, "False", "NotAsDeclared", message, setting)


def _word(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value) or "none"


def _logprobs(found: EngineSettings, declared: Declared) -> Condition:
    return _judge(
        "LogprobsMode",
        found.logprobs_mode,
        declared.logprobs_mode,
        "raw log-probabilities are those before temperature, penalties, top-k and top-p, not of the policy that "
        "sampled; logits are no log-probabilities. Every ratio at another temperature than 1 is then wrong",
        f"--logprobs-mode {declared.logprobs_mode}",
        "logprobs mode",
    )


def _prefix_caching(found: EngineSettings, declared: Declared) -> Condition:
    why = "keys and values that one version computed may serve another's requests: new tokens on old ones"
    condition = _judge(
        "PrefixCaching",
        found.prefix_caching,
        declared.prefix_caching,
        why,
        f"--{'' if declared.prefix_caching else 'no-'}enable-prefix-caching",
        "prefix caching",
    )
    if condition.status != "True" or not found.prefix_caching:
        return condition
    if declared.cache_policy == "clear" and found.cache_policy not in (None, "clear"):
        message = f"prefix caching is on, and updates use the cache policy {found.cache_policy}: {why}"
        return Condition("PrefixCaching", "False", "KeptAcrossUpdates", message, "publish(cache='clear')")
    return condition


def _cache_policy(found: EngineSettings, declared: Declared) -> Condition:
    return _judge(
        "CachePolicy",
        found.cache_policy,
        declared.cache_policy,
        "with `clear` requests in flight are computed again under the new weights; with `keep` and `salt` they go on "
        "from keys and values of the old ones, which the trainer does not have",
        f"publish(cache='{declared.cache_policy}')",
        "cache policy of updates",
    )


def _pause(found: EngineSettings, declared: Declared) -> Condition:
    return _judge(
        "PauseMode",
        found.pause_mode,
        declared.pause_mode,
        "`keep` lets an output go on under the new weights, so that it is of several versions and its spans must be "
        "used; `wait` and `abort` end it first",
        f"publish(pause='{declared.pause_mode}')",
        "pause mode of updates",
    )


def _async(found: EngineSettings, declared: Declared) -> Condition:
    return _judge(
        "AsyncScheduling",
        found.async_scheduling,
        declared.async_scheduling,
        "one step is scheduled before the last one's tokens are known; it is a default that changed between releases, "
        "so two fleets that are set up alike differ in it",
        f"--{'' if declared.async_scheduling else 'no-'}async-scheduling",
        "async scheduling",
    )


def _sampling(found: EngineSettings, declared: Declared) -> Condition:
    kind, setting = "SamplingDefaults", "--generation-config vllm"
    why = "a request that does not say is sampled with them, and the trainer does not know"
    if found.sampling_defaults is None:
        source = found.generation_config or "a generation config that is not told"
        message = f"defaults of requests come from {source!r} and could not be read: {why}"
        return Condition(kind, "Unknown", "NotTold", message, setting)
    mine, wanted = _not_neutral(found.sampling_defaults), _not_neutral(declared.sampling_defaults)
    if mine == wanted:
        return Condition(kind, "True", "AsDeclared", f"requests that do not say get {mine or 'neutral sampling'}")
    message = f"requests that do not say get {mine or 'neutral sampling'}, declared is {wanted or 'neutral'}: {why}"
    return Condition(kind, "False", "NotAsDeclared", message, setting)


def _not_neutral(values: Mapping[str, float]) -> dict[str, float]:
    return {
        k: v
        for k, v in sorted(values.items())
        if k in NEUTRAL and v is not None and v != NEUTRAL[k] and not (k == "top_k" and v < 0)
    }


def _dtype(found: EngineSettings, declared: Declared) -> Condition:
    return _judge(
        "Dtype",
        found.dtype,
        declared.dtype or None,
        "each side rounds at other places: every token differs by the size of the coarser dtype's rounding",
        f"--dtype {declared.dtype}",
        "dtype",
    )


def _head(found: EngineSettings, declared: Declared) -> Condition:
    return _judge(
        "HeadDtype",
        found.head_dtype,
        declared.head_dtype,
        "logits are rounded in proportion to their size, and log-probabilities by as much (MiniMax-M1, "
        "arXiv:2506.13585, and ScaleRL, arXiv:2510.13786, compute the head in float32)",
        f"""--hf-overrides '{{"head_dtype": "{declared.head_dtype}"}}'""",
        "dtype of the last projection",
    )


def _kv(found: EngineSettings, declared: Declared) -> Condition:
    return _judge(
        "KvCacheDtype",
        found.kv_cache_dtype,
        declared.kv_cache_dtype,
        "keys and values are rounded once more than the trainer rounds them",
        f"--kv-cache-dtype {declared.kv_cache_dtype}",
        "dtype of cached keys and values",
    )


def _quantization(found: EngineSettings, declared: Declared) -> Condition:
    return _judge(
        "Quantization",
        found.quantization,
        declared.quantization,
        "the engine computes with other weights than the trainer sends",
        f"--quantization {declared.quantization}" if declared.quantization else "no --quantization",
        "quantization",
    )


def _chunked(found: EngineSettings, declared: Declared) -> Condition:
    return _judge(
        "ChunkedPrefill",
        found.chunked_prefill,
        declared.chunked_prefill,
        "a prompt cut in pieces is added up in another order: rounding differs from prompt to prompt with the load",
        f"--{'' if declared.chunked_prefill else 'no-'}enable-chunked-prefill",
        "chunked prefill",
    )


def _invariant(found: EngineSettings, declared: Declared) -> Condition:
    return _judge(
        "BatchInvariance",
        found.batch_invariant,
        declared.batch_invariant,
        "without it the same request is rounded otherwise in another batch",
        f"VLLM_BATCH_INVARIANT={int(bool(declared.batch_invariant))}",
        "batch invariance",
    )


def _speculative(found: EngineSettings, declared: Declared) -> Condition:
    return _judge(
        "SpeculativeDecoding",
        found.speculative,
        declared.speculative,
        "tokens are then scored several at a time after a draft, and drafts are older than the model",
        f"--speculative-config with method {declared.speculative}"
        if declared.speculative
        else "no --speculative-config",
        "speculative decoding",
    )


def _release(found: EngineSettings, declared: Declared) -> Condition:
    kind, version = "EngineVersion", found.engine_version
    if version is None:
        return Condition(
            kind, "Unknown", "NotTold", "the engine does not tell its release, and defaults change with it"
        )
    if declared.engine_version:
        same = version == declared.engine_version or version.startswith(declared.engine_version + ".")
        why = "defaults and kernels change between releases"
        return _judge(
            kind,
            version,
            version if same else declared.engine_version,
            why,
            f"install {declared.engine_version}",
            "release",
        )
    if ".".join(version.split(".")[:2]) in RUN:
        return Condition(kind, "True", "WasRun", f"release is {version}, which was run")
    ran = ", ".join(RUN)
    message = (
        f"release {version} was never run with this release of weightplane ({ran} were): its defaults are not known"
    )
    return Condition(
        kind, "False", "NeverRun", message, f"one of {ran}, or declare engine_version and run `parity check`"
    )


def _weights(found: EngineSettings, declared: Declared) -> Condition:
    return _judge(
        "WeightVersion",
        found.weight_version,
        declared.weight_version,
        "log-probabilities of other weights are of another policy",
        f"publish version {declared.weight_version} to it",
        "version of its weights",
    )


_CHECKS: tuple[Callable[[EngineSettings, Declared], Condition], ...] = (
    _logprobs,
    _sampling,
    _prefix_caching,
    _cache_policy,
    _pause,
    _async,
    _dtype,
    _head,
    _kv,
    _quantization,
    _chunked,
    _invariant,
    _speculative,
    _release,
    _weights,
)
