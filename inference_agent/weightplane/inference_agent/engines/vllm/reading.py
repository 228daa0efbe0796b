"""An engine's effective settings, read from a running vLLM: over HTTP, or from the ``VllmConfig`` of one in process."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from .foreign import in_words
from .settings import EngineSettings
from .spans import version_of_label

__all__ = ["EngineUnreadable", "read_config", "read_here", "read_server"]

_MISSING = object()
_T = TypeVar("_T")
_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class EngineUnreadable(RuntimeError):
    """The engine cannot be asked. ``reachable``: it answered, though not with what was asked for."""

    def __init__(self, text: str, reachable: bool) -> None:
        super().__init__(text)
        self.reachable = reachable


def read_server(url: str, *, timeout: float = 30.0) -> EngineSettings:
    """Ask a vLLM server that was started with ``VLLM_SERVER_DEV_MODE=1``.

    What its updates do (``cache_policy``, ``pause_mode``) is the publisher's and not known here. ``EngineUnreadable``:
    nobody answers, or there is no ``/server_info``.
    """
    base = (url if "//" in url else f"http://{url}").rstrip("/")
    info = _get(base, "/server_info?config_format=json", timeout)
    config = info.get("vllm_config")
    if not isinstance(config, dict):
        raise EngineUnreadable(
            f"{base}/server_info has no vllm_config as JSON: this release is too old to be read", True
        )
    environment = info.get("vllm_env")
    try:
        found = read_config(config, environment if isinstance(environment, dict) else None)
    except (TypeError, ValueError, AttributeError) as e:
        raise EngineUnreadable(f"{base}/server_info: no settings of a vLLM: {type(e).__name__}: {e}", True) from e
    version = _get(base, "/version", timeout).get("version")
    try:
        label = _get(base, "/weight_info", timeout).get("weight_version")
    except EngineUnreadable as e:
        if not e.reachable:
            raise
        label = None  # an older release that labels no weights
    return replace(
        found,
        engine_version=str(version) if version else None,
        weight_version=version_of_label(label),
    )


def read_here(config: Any) -> EngineSettings:
    """From the ``VllmConfig`` of a vLLM in this process."""
    import vllm
    from vllm import envs

    environment = {name: getattr(envs, name) for name in ("VLLM_BATCH_INVARIANT",) if hasattr(envs, name)}
    return replace(read_config(config, environment), engine_version=str(vllm.__version__))


def read_config(config: Any, environment: Mapping[str, Any] | None = None) -> EngineSettings:
    """From a ``VllmConfig``, or its JSON as ``/server_info`` gives it.

    ``environment``: the engine's ``VLLM_*`` variables as vLLM reads them. Release and weights are not in a config.
    """
    quantization = _of(config, "model_config", "quantization")
    speculative = _of(config, "speculative_config")
    method = None if speculative is _MISSING else "" if speculative is None else str(_of(speculative, "method"))
    invariant = (environment or {}).get("VLLM_BATCH_INVARIANT")
    return EngineSettings(
        logprobs_mode=_text(_of(config, "model_config", "logprobs_mode")),
        max_logprobs=_typed(_of(config, "model_config", "max_logprobs"), int),
        dtype=_dtype(_of(config, "model_config", "dtype")),
        head_dtype=_head(config),
        kv_cache_dtype=_text(_of(config, "cache_config", "cache_dtype")),
        quantization=None if quantization is _MISSING else str(quantization or ""),
        prefix_caching=_typed(_of(config, "cache_config", "enable_prefix_caching"), bool),
        async_scheduling=_typed(_of(config, "scheduler_config", "async_scheduling"), bool),
        chunked_prefill=_typed(_of(config, "scheduler_config", "enable_chunked_prefill"), bool),
        batch_invariant=None if invariant is None else bool(invariant),
        generation_config=_text(_of(config, "model_config", "generation_config")),
        sampling_defaults=_defaults(config),
        speculative=method,
    )


def _get(base: str, path: str, timeout: float) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(base + path, timeout=timeout) as answer:
            found = json.loads(answer.read())
    except urllib.error.HTTPError as e:
        hint = ". Start vLLM with VLLM_SERVER_DEV_MODE=1" if e.code == 404 else ""
        raise EngineUnreadable(f"GET {base}{path}: HTTP {e.code}{hint}", True) from e
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as e:
        answered = isinstance(e, json.JSONDecodeError | UnicodeDecodeError | RecursionError)
        raise EngineUnreadable(f"GET {base}{path}: {in_words(e)}", answered) from e
    if not isinstance(found, dict):
        raise EngineUnreadable(f"GET {base}{path}: expected a JSON object", True)
    return found


def _of(config: Any, *path: str) -> Any:
    """An attribute of an attribute, or an entry of an entry; ``_MISSING`` where one is not there."""
    for name in path:
        config = config.get(name, _MISSING) if isinstance(config, Mapping) else getattr(config, name, _MISSING)
        if config is _MISSING or config is None:
            return config
    return config


def _text(value: Any) -> str | None:
    return None if value is _MISSING or value is None else str(value)


def _typed(value: Any, kind: type[_T]) -> _T | None:
    return value if isinstance(value, kind) else None


def _dtype(value: Any) -> str | None:
    """ "torch.float32", a ``torch.dtype`` or "float32" as "float32"."""
    text = _text(value)
    return None if text is None else text.removeprefix("torch.")


def _head(config: Any) -> str | None:
    """The dtype of the last projection. In process vLLM says it. Over HTTP it is concluded from what vLLM concludes it
    from: the override, else the checkpoint's config, else the model's dtype; not known where the checkpoint is not on
    this host. (A platform without that dtype falls back to the model's, which is told in vLLM's log alone.)"""
    model = _of(config, "model_config")
    if not isinstance(model, Mapping):
        return _dtype(_of(model, "head_dtype"))
    own = _dtype(model.get("dtype"))
    head = _of(model, "hf_overrides", "head_dtype")
    if head is _MISSING or head is None:
        there = _checkpoint(str(model.get("model")), "config.json")
        if there is None:
            return None
        head = there.get("head_dtype") or "model"
    return own if head == "model" else str(head).lower().removeprefix("torch.")


def _defaults(config: Any) -> dict[str, float] | None:
    """What requests get that do not say, as ``ModelConfig.get_diff_sampling_param`` puts it together."""
    model = _of(config, "model_config")
    source, override = _of(model, "generation_config"), _of(model, "override_generation_config")
    if source is _MISSING or override is _MISSING:
        return None
    found: dict[str, Any] = {}
    if source != "vllm":
        folder = str(_of(model, "model")) if source == "auto" else str(source)
        there = _checkpoint(folder, "generation_config.json")
        if there is None:
            return None
        found |= there
    found |= override or {}
    return {k: found[k] for k in _SAMPLING if isinstance(found.get(k), int | float)}


def _checkpoint(folder: str, name: str) -> dict[str, Any] | None:
    """A JSON file of a checkpoint; empty where the checkpoint has none; ``None`` where it cannot be read here."""
    path = Path(folder)
    try:
        if not path.is_dir():
            return None
        found = json.loads((path / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
