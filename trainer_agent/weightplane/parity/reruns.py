"""The engine asked again: the same tokens without its cache, and requests that an update meets in flight."""

from __future__ import annotations

import http.client
import json
import math
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from weightplane.inference_agent.engines.vllm.rollouts import RolloutError, Rollouts, VllmOutput

from .probe import ProbeError
from .samples import Sample, Sampling

__all__ = ["rescored", "ride", "ride_through"]

_AT_ONCE = 4
_NOT_FINITE = "Out of range float values are not JSON compliant"  # HTTP 400, vLLM 0.32


def rescored(url: str, samples: Sequence[Sample], *, timeout: float = 120.0) -> list[list[float]]:
    """The engine's own log-probabilities of the same tokens as parts of a prompt.

    vLLM (0.32) computes those at temperature 1 without top-k and top-p in every logprobs mode, in one pass over the
    whole, and does not read its prefix cache for them. One list per sample, nats; NaN where vLLM says that some are not
    finite (it answers no request with such a value in it). ``ProbeError``.
    """
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="rescore") as pool:
        return list(pool.map(lambda s: _rescored(url, s, timeout), samples))


def _rescored(url: str, sample: Sample, timeout: float) -> list[float]:
    ids = [*sample.prompt, *sample.tokens]
    sampling = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
    body = json.dumps({"token_ids": ids, "sampling_params": sampling, "stream": False}).encode()
    base = (url if "//" in url else f"http://{url}").rstrip("/")
    request = urllib.request.Request(f"{base}/inference/v1/generate", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            entries: Any = json.loads(answer.read())["prompt_logprobs"]
        last = list(zip(ids, entries, strict=True))[len(sample.prompt) :]
        return [float(entry[str(token)]["logprob"]) for token, entry in last]
    except (OSError, http.client.HTTPException) as e:
        text = e.read(300).decode("utf-8", "replace") if isinstance(e, urllib.error.HTTPError) else str(e)
        if _NOT_FINITE in text:
            return [math.nan] * len(sample.tokens)
        raise ProbeError(f"{base}/inference/v1/generate: {type(e).__name__}: {text}") from e
    except (ValueError, KeyError, TypeError) as e:
        raise ProbeError(f"{base}/inference/v1/generate: no prompt_logprobs of each token ({e})") from e


def ride(
    url: str,
    prompt: Sequence[int],
    tokens: int,
    *,
    sampling: Sampling,
    seed: int = 0,
    timeout: float = 120.0,
    on_tokens: Callable[[int], None] | None = None,
) -> Sample:
    """One completion of ``tokens`` tokens, whatever updates it meets: its spans say which version sampled which.

    ``on_tokens``: called on this thread with how many there are, whenever some came: when to publish. ``ProbeError``.
    """
    options = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p, "seed": seed}
    out: VllmOutput | None = None
    try:
        for out in Rollouts(url, timeout=timeout).stream(prompt, max_tokens=tokens, **options):
            if on_tokens is not None:
                on_tokens(len(out.tokens))
    except RolloutError as e:
        raise ProbeError(str(e)) from e
    if out is None or not out.tokens or len(out.logprobs) != len(out.tokens):
        raise ProbeError(f"{url}: no completion with a log-probability of each token: {out}")
    return Sample(tuple(prompt), tuple(out.tokens), tuple(out.logprobs), sampling, out.spans, out.cached_tokens)


def ride_through(
    url: str, prompts: Sequence[Sequence[int]], tokens: int, *, sampling: Sampling, seed: int = 0, patience: float
) -> tuple[Sample, ...]:
    """Keep requests in flight, a line of them for each prompt, until an update meets one; those that it met.

    ``patience``: seconds until no more are begun. ``ProbeError``: no update came by then, or as ``ride``.
    """
    end, met = time.monotonic() + patience, threading.Event()

    def line(n: int) -> list[Sample]:
        found: list[Sample] = []
        turn = 0
        while not met.is_set() and time.monotonic() < end:
            sample = ride(url, prompts[n], tokens, sampling=sampling, seed=seed + len(prompts) * turn + n)
            turn += 1
            if len(sample.spans) > 1:
                found.append(sample)
                met.set()
        return found

    with ThreadPoolExecutor(len(prompts), thread_name_prefix="ride") as pool:
        found = [s for rode in pool.map(line, range(len(prompts))) for s in rode]
    if not found:
        raise ProbeError(f"{url}: no update came within {patience:g} s to requests in flight: publish while this runs")
    return tuple(found)
