"""The engine asked again: the same tokens without its cache, and requests that an update meets in flight."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from weightplane.inference_agent.engines.vllm.rollouts import (
    RolloutError,
    Rollouts,
    RolloutUnreachable,
    VllmOutput,
)

from .probe import ProbeError, Unreachable
from .samples import Sample, Sampling
from .together import together

__all__ = ["rescored", "ride", "ride_through"]

_AT_ONCE = 4
_NOT_FINITE = "Out of range float values are not JSON compliant"  # HTTP 400, vLLM 0.32


def rescored(url: str, samples: Sequence[Sample], *, timeout: float = 120.0) -> list[list[float]]:
    """The engine's own log-probabilities of the same tokens as parts of a prompt.

    vLLM (0.32) computes those at temperature 1 without top-k and top-p in every logprobs mode, in one pass over the
    whole, and does not read its prefix cache for them. One list per sample, nats; NaN where vLLM says that some are not
    finite (it answers no request with such a value in it). ``ProbeError``.
    """
    return together(lambda s: _rescored(url, s, timeout), samples, _AT_ONCE, "rescore")


def _rescored(url: str, sample: Sample, timeout: float) -> list[float]:
    try:
        tokens = [*sample.prompt, *sample.tokens]
        return Rollouts(url, timeout=timeout).prompt_logprobs(tokens, len(sample.prompt))
    except RolloutUnreachable as e:
        raise Unreachable(str(e)) from e
    except RolloutError as e:
        if _NOT_FINITE in str(e):
            return [math.nan] * len(sample.tokens)
        raise ProbeError(str(e)) from e


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
    except RolloutUnreachable as e:
        raise Unreachable(str(e)) from e
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

    try:
        found = [s for rode in together(line, range(len(prompts)), len(prompts), "ride") for s in rode]
    finally:
        met.set()  # after a failure or Ctrl-C no line begins another
    if not found:
        raise ProbeError(f"{url}: no update came within {patience:g} s to requests in flight: publish while this runs")
    return tuple(found)
