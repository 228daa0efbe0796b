"""The probe: completions from an engine's real API, scored by the trainer on the same tokens at the same version."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightplane.inference_agent.engines.vllm.rollouts import (
    RolloutError,
    Rollouts,
    RolloutUnreachable,
    VllmOutput,
)

from .samples import Plan, Rounds, Sample, Sampling, Scorer
from .stats import Stats, compare
from .thresholds import Thresholds, calibrated, exceeded
from .together import together

__all__ = ["ProbeError", "ProbeResult", "Unreachable", "in_vocabulary", "judge", "probe", "sample", "scored"]

_AT_ONCE = 4  # requests


class ProbeError(RuntimeError):
    """The engine or the scorer did not do its part, or the weights changed meanwhile. Nothing was measured."""


class Unreachable(ProbeError):
    """Nobody answers where the engine should be."""


@dataclass(frozen=True)
class ProbeResult:
    """What was measured.

    Attributes:
        version: of the weights that every token was sampled by, as the engine labels it.
        samples, scores: what was compared.
        whole: all of it; ``by_sampling``: each way to sample, in the plan's order.
        thresholds, exceeded: the bounds of all together, and those that do not hold (empty: at parity), the sampling
            named.
        seconds: of the engine, of the scorer.
    """

    version: int
    samples: tuple[Sample, ...]
    scores: tuple[tuple[float, ...], ...]
    whole: Stats
    by_sampling: Mapping[Sampling, Stats]
    thresholds: Thresholds
    exceeded: tuple[str, ...]
    seconds: tuple[float, float]

    @property
    def ok(self) -> bool:
        """Whether every bound holds, for all tokens together and for each way to sample."""
        return not self.exceeded


def probe(
    url: str, scorer: Scorer, plan: Plan, thresholds: Thresholds, *, version: int | None = None, timeout: float = 120.0
) -> ProbeResult:
    """Ask the engine at ``url`` for the plan's completions, score them, compare.

    ``version``: the one whose weights the scorer has; ``None``: whatever the engine has. ``timeout``: of one request,
    seconds. ``ProbeError``: the engine does not answer or holds another version, an update came in between, the scorer
    gave other shapes.
    """
    began = time.monotonic()
    held, samples = sample(url, plan, version=version, timeout=timeout)
    in_vocabulary(url, samples, int(getattr(scorer, "vocab_size", 0)))
    return scored(held, samples, scorer, thresholds, engine_seconds=time.monotonic() - began)


def scored(
    version: int, samples: Sequence[Sample], scorer: Scorer, thresholds: Thresholds, *, engine_seconds: float = 0.0
) -> ProbeResult:
    """Score what an engine served, and judge it. ``ProbeError``: the scorer gave other shapes."""
    began = time.monotonic()
    scores = checked(samples, scorer(samples))
    exact = checked(samples, scorer.exact(samples)) if isinstance(scorer, Rounds) and scorer.rounds else None
    seconds = (engine_seconds, time.monotonic() - began)
    return judge(version, samples, scores, thresholds, exact=exact, seconds=seconds)


def sample(
    url: str, plan: Plan, *, version: int | None = None, timeout: float = 120.0, **options: Any
) -> tuple[int, tuple[Sample, ...]]:
    """The version held and the plan's completions, all of that version. ``options``: of vLLM's sampling parameters,
    beside the plan's. Errors as of ``probe``."""
    rollouts = Rollouts(url, timeout=timeout)
    try:
        held = rollouts.held()
        if version is not None and held != version:
            raise ProbeError(f"{url} holds version {held}, the trainer's is {version}: publish it first")
        jobs = [(s, n, p) for s in plan.samplings for n, p in enumerate(plan.prompts)]
        answers = together(lambda job: _ask(rollouts, plan, *job, options), jobs, _AT_ONCE, "probe")
    except RolloutUnreachable as e:
        raise Unreachable(str(e)) from e
    except RolloutError as e:
        raise ProbeError(str(e)) from e
    if short := [len(outs) for outs in answers if len(outs) != plan.completions]:
        raise ProbeError(f"{url}: expected {plan.completions} completions of each prompt, found {short[0]}")
    found = tuple(_sample(url, plan, p, s, out) for (s, _, p), outs in zip(jobs, answers, strict=True) for out in outs)
    others = sorted(
        {str(x.version if x.known else "unknown") for s in found for x in s.spans if x.version != held or not x.known}
    )
    if others:
        raise ProbeError(
            f"{url} sampled tokens of version {', '.join(others)}, it held {held}: an update came in between"
        )
    return held, found


def _ask(
    rollouts: Rollouts, plan: Plan, sampling: Sampling, n: int, prompt: Sequence[int], options: Mapping[str, Any]
) -> list[VllmOutput]:
    return rollouts.generate(
        prompt,
        max_tokens=plan.max_tokens,
        **{
            "n": plan.completions,
            "seed": plan.seed + n,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            **options,
        },
    )


def _sample(url: str, plan: Plan, prompt: tuple[int, ...], sampling: Sampling, out: VllmOutput) -> Sample:
    if not out.tokens or len(out.logprobs) != len(out.tokens) or len(out.tokens) > plan.max_tokens:
        raise ProbeError(
            f"{url}: expected 1 to {plan.max_tokens} tokens with a log-probability of each, found {len(out.tokens)} "
            f"tokens with {len(out.logprobs)} log-probabilities ({out.finish})"
        )
    return Sample(prompt, tuple(out.tokens), tuple(out.logprobs), sampling, out.spans, out.cached_tokens)


def in_vocabulary(url: str, samples: Sequence[Sample], vocab: int) -> None:
    """Whether every token is one that the trainer has; ``vocab`` 0: it is not known. ``ProbeError``."""
    most = max((t for s in samples for t in s.tokens), default=0)
    if vocab and most >= vocab:
        raise ProbeError(f"{url}: expected tokens below {vocab}, the trainer's vocabulary, found {most}")


def checked(samples: Sequence[Sample], scores: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """A scorer's answer, of the shape that it must have. ``ProbeError``."""
    try:
        found = tuple(tuple(float(v) for v in row) for row in scores)
    except (TypeError, ValueError, OverflowError) as e:
        raise ProbeError(
            f"the scorer: expected a list of log-probabilities for each sample, found {type(scores).__name__}: {e}"
        ) from e
    if [len(row) for row in found] != [len(s.tokens) for s in samples]:
        raise ProbeError(
            f"the scorer gave {len(found)} lists of {sum(map(len, found))} values for {len(samples)} samples of "
            f"{sum(len(s.tokens) for s in samples)} tokens"
        )
    return found


def judge(
    version: int,
    samples: Sequence[Sample],
    scores: Sequence[Sequence[float]],
    thresholds: Thresholds,
    *,
    exact: Sequence[Sequence[float]] | None = None,
    seconds: tuple[float, float] = (0.0, 0.0),
) -> ProbeResult:
    """Compare what was served with what was scored. Pure.

    ``exact``: the scores in float32, where the scorer rounds: bounds are then those of ``calibrated``.
    """
    given, whole = thresholds, compare([s.served for s in samples], scores)
    by_sampling: dict[Sampling, Stats] = {}
    coldest = min((s.sampling.temperature or 1.0 for s in samples), default=1.0)
    thresholds = thresholds.at(coldest) if exact is None else calibrated(scores, exact)
    beyond = list(exceeded(whole, thresholds))
    for sampling in dict.fromkeys(s.sampling for s in samples):
        mine = [i for i, s in enumerate(samples) if s.sampling == sampling]
        by_sampling[sampling] = compare([samples[i].served for i in mine], [scores[i] for i in mine])
        bounds = given.at(sampling.temperature)
        if exact is not None:
            bounds = calibrated([scores[i] for i in mine], [exact[i] for i in mine])
        beyond += [f"at {sampling}: {text}" for text in exceeded(by_sampling[sampling], bounds)]
    return ProbeResult(
        version,
        tuple(samples),
        tuple(tuple(s) for s in scores),
        whole,
        by_sampling,
        thresholds,
        tuple(beyond),
        seconds,
    )
