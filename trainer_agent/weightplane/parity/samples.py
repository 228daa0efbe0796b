"""What is probed with: seeded prompts, ways to sample, and the completions that came back. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from weightplane.inference_agent.spans import Span

__all__ = ["DEFAULT_SAMPLINGS", "Plan", "Rounds", "Sample", "Sampling", "Scorer", "draw_prompts", "sampling_from"]


@dataclass(frozen=True, order=True)
class Sampling:
    """How tokens are sampled. ``temperature`` 0: greedy; ``top_k`` 0 and ``top_p`` 1: all tokens."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < math.inf and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ValueError(f"expected a finite temperature >= 0, top_k >= 0 and 0 < top_p <= 1, found {self}")

    def __str__(self) -> str:
        more = [f"top-k {self.top_k}"] * bool(self.top_k) + [f"top-p {self.top_p:g}"] * (self.top_p < 1)
        return ", ".join([f"temperature {self.temperature:g}", *more])


@dataclass(frozen=True)
class Sample:
    """A completion as the engine served it.

    Attributes:
        prompt, tokens: token ids; at least one each.
        served: log-probability of each of ``tokens`` as served, nats.
        sampling: how it was asked for.
        spans: which version sampled which tokens.
        cached: how many of the prompt's tokens the engine took from its prefix cache; ``None``: it does not tell.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    served: tuple[float, ...]
    sampling: Sampling
    spans: tuple[Span, ...] = ()
    cached: int | None = None


#: The trainer's side: for each sample the log-probability of each of its tokens (nats), under its sampling, given its
#: prompt and the tokens before.
Scorer = Callable[[Sequence[Sample]], Sequence[Sequence[float]]]


@runtime_checkable
class Rounds(Protocol):
    """A ``Scorer`` that can tell how much its own dtype rounds."""

    @property
    def rounds(self) -> bool:
        """Whether it computes in less than float32."""
        ...

    def exact(self, samples: Sequence[Sample]) -> Sequence[Sequence[float]]:
        """As the scorer itself, computed in float32 from the same weights."""
        ...


DEFAULT_SAMPLINGS = (
    Sampling(1.0),
    Sampling(0.7),
    Sampling(1.3),
    Sampling(1.0, top_k=20),
    Sampling(0.7, top_p=0.9),
    Sampling(0.8, top_k=50, top_p=0.95),
)


@dataclass(frozen=True)
class Plan:
    """What a probe asks: each prompt ``completions`` times for each of ``samplings``, ``max_tokens`` tokens each time.

    ``seed``: of the sampler; the same plan asks the same again, so that after an update what the engine cached before
    it is met.
    """

    prompts: tuple[tuple[int, ...], ...]
    samplings: tuple[Sampling, ...] = DEFAULT_SAMPLINGS
    completions: int = 2
    max_tokens: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.prompts or not all(self.prompts) or not self.samplings:
            raise ValueError("a plan has at least one prompt of at least one token, and one way to sample")
        if self.completions < 1 or self.max_tokens < 1:
            raise ValueError(f"expected completions and max_tokens of 1 or more, found {self}")


def draw_prompts(
    seed: int, count: int, length: int, vocab_size: int, shared: float = 0.75
) -> tuple[tuple[int, ...], ...]:
    """``count`` prompts of ``length`` token ids drawn from the upper 99 % of the vocabulary (special tokens lie low).

    The first ``shared`` part is the same in all, as a system prompt is: an engine with a prefix cache uses it.
    """
    if count < 1 or length < 1 or vocab_size < 2 or not 0 <= shared <= 1:
        raise ValueError(
            f"expected prompts, a length and a vocabulary, found {count}, {length}, {vocab_size}, {shared}"
        )
    rng = random.Random(seed)
    low = max(1, vocab_size // 100)
    common = [rng.randrange(low, vocab_size) for _ in range(int(length * shared))]
    return tuple(
        (*common, *(rng.randrange(low, vocab_size) for _ in range(length - len(common)))) for _ in range(count)
    )


def sampling_from(text: str) -> Sampling:
    """``TEMPERATURE[,top_k=K][,top_p=P]`` as a sampling. ``ValueError`` says what was expected."""
    first, *rest = text.split(",")
    try:
        options = dict(_pair(r) for r in rest)
        if unknown := set(options) - {"top_k", "top_p"}:
            raise ValueError(f"unknown {sorted(unknown)}")
        return Sampling(float(first), int(options.get("top_k", "0")), float(options.get("top_p", "1")))
    except ValueError as e:
        raise ValueError(f"{text!r}: expected TEMPERATURE[,top_k=K][,top_p=P] ({e})") from e


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name.strip(), value
