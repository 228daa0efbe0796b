"""An engine's settings judged against what its group declares. Pure: settings in, conditions out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Check:
    """A value that must be the one declared: ``field`` of ``EngineSettings`` and of ``Declared`` alike.

    ``name``: of the value, in words. ``why`` it matters. ``setting``: what makes it so, given what is declared.
    """

    type: str
    field: str
    name: str
    why: str
    setting: Callable[[Any], str]

    def __call__(self, found: EngineSettings, declared: Declared) -> Condition:
        value, wanted = getattr(found, self.field), getattr(declared, self.field)
        if wanted == "" and self.field == "dtype":
            wanted = None  # any
        setting = "" if wanted is None else self.setting(wanted)
        return _judge(self.type, value, wanted, self.why, setting, self.name)


def _judge(kind: str, found: Any, wanted: Any, why: str, setting: str, name: str) -> Condition:
    """``wanted`` None: any will do."""
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


def _flag(name: str) -> Callable[[Any], str]:
    """``--name`` or ``--no-name``."""
    return lambda on: f"--{'' if on else 'no-'}{name}"


def _prefix_caching(found: EngineSettings, declared: Declared) -> Condition:
    why = "keys and values that one version computed may serve another's requests: new tokens on old ones"
    condition = _judge(
        "PrefixCaching",
        found.prefix_caching,
        declared.prefix_caching,
        why,
        _flag("enable-prefix-caching")(declared.prefix_caching),
        "prefix caching",
    )
    if condition.status != "True" or not found.prefix_caching:
        return condition
    if declared.cache_policy == "clear" and found.cache_policy not in (None, "clear"):
        message = f"prefix caching is on, and updates use the cache policy {found.cache_policy}: {why}"
        return Condition("PrefixCaching", "False", "KeptAcrossUpdates", message, "publish(cache='clear')")
    return condition


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


_CHECKS: tuple[Callable[[EngineSettings, Declared], Condition], ...] = (
    _Check(
        "LogprobsMode",
        "logprobs_mode",
        "logprobs mode",
        "raw log-probabilities are those before temperature, penalties, top-k and top-p, not of the policy that "
        "sampled; logits are no log-probabilities. Every ratio at another temperature than 1 is then wrong",
        "--logprobs-mode {}".format,
    ),
    _sampling,
    _prefix_caching,
    _Check(
        "CachePolicy",
        "cache_policy",
        "cache policy of updates",
        "with `clear` requests in flight are computed again under the new weights; with `keep` and `salt` they go on "
        "from keys and values of the old ones, which the trainer does not have",
        "publish(cache='{}')".format,
    ),
    _Check(
        "PauseMode",
        "pause_mode",
        "pause mode of updates",
        "`keep` lets an output go on under the new weights, so that it is of several versions and its spans must be "
        "used; `wait` and `abort` end it first",
        "publish(pause='{}')".format,
    ),
    _Check(
        "AsyncScheduling",
        "async_scheduling",
        "async scheduling",
        "one step is scheduled before the last one's tokens are known; it is a default that changed between releases, "
        "so two fleets that are set up alike differ in it",
        _flag("async-scheduling"),
    ),
    _Check(
        "Dtype",
        "dtype",
        "dtype",
        "each side rounds at other places: every token differs by the size of the coarser dtype's rounding",
        "--dtype {}".format,
    ),
    _Check(
        "HeadDtype",
        "head_dtype",
        "dtype of the last projection",
        "logits are rounded in proportion to their size, and log-probabilities by as much (MiniMax-M1, "
        "arXiv:2506.13585, and ScaleRL, arXiv:2510.13786, compute the head in float32)",
        """--hf-overrides '{{"head_dtype": "{}"}}'""".format,
    ),
    _Check(
        "KvCacheDtype",
        "kv_cache_dtype",
        "dtype of cached keys and values",
        "keys and values are rounded once more than the trainer rounds them",
        "--kv-cache-dtype {}".format,
    ),
    _Check(
        "Quantization",
        "quantization",
        "quantization",
        "the engine computes with other weights than the trainer sends",
        lambda wanted: f"--quantization {wanted}" if wanted else "no --quantization",
    ),
    _Check(
        "ChunkedPrefill",
        "chunked_prefill",
        "chunked prefill",
        "a prompt cut in pieces is added up in another order: rounding differs from prompt to prompt with the load",
        _flag("enable-chunked-prefill"),
    ),
    _Check(
        "BatchInvariance",
        "batch_invariant",
        "batch invariance",
        "without it the same request is rounded otherwise in another batch",
        lambda wanted: f"VLLM_BATCH_INVARIANT={int(bool(wanted))}",
    ),
    _Check(
        "SpeculativeDecoding",
        "speculative",
        "speculative decoding",
        "tokens are then scored several at a time after a draft, and drafts are older than the model",
        lambda wanted: f"--speculative-config with method {wanted}" if wanted else "no --speculative-config",
    ),
    _release,
    _Check(
        "WeightVersion",
        "weight_version",
        "version of its weights",
        "log-probabilities of other weights are of another policy",
        "publish version {} to it".format,
    ),
)


def audit(found: EngineSettings, declared: Declared) -> tuple[Condition, ...]:
    """Every condition, in a fixed order, whatever its status."""
    return tuple(check(found, declared) for check in _CHECKS)
