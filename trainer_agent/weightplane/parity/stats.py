"""Statistics of two aligned sets of log-probabilities. Pure; the standard library only.

Everywhere ``behaviour`` is what the engine served for the tokens that it sampled and ``trainer`` what the trainer
computes for the same tokens, in nats. ``d = trainer - behaviour`` is the log of the importance weight ``w = exp(d)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["SERVED_FLOOR", "Bad", "Position", "Stats", "compare", "ess", "k3", "percentile"]

#: What vLLM serves for a log-probability that is minus infinity or NaN (0.32: ``token_in_token_out/serving.py``).
SERVED_FLOOR = -9999.0
_ROUNDING = 1e-4  # a log-probability of a certain token may come out this far above 0
_LEAST = -1e300  # what is below is a probability of 0 in any dtype, and a sum of some is beyond a double
_MOST_NAMED = 16


@dataclass(frozen=True, slots=True)
class Bad:
    """A value that is no log-probability, and so is in no statistic. ``position`` counts from the first sampled token.

    ``side``: behaviour | trainer. ``what``: nan | +inf | -inf | floor (``SERVED_FLOOR``: the engine had NaN or minus
    infinity, and does not say which) | positive (more than 0, a probability above 1). -inf on the trainer's side alone
    is no fault of arithmetic but a token outside of what top-k or top-p leaves there: see ``Stats.outside``.
    """

    sequence: int
    position: int
    side: str
    what: str


@dataclass(frozen=True, slots=True)
class Position:
    """All that was sampled at one position. Nats; ``mean`` is of d with its sign, the others of |d|."""

    position: int
    count: int
    mean: float
    mean_abs: float
    max_abs: float


@dataclass(frozen=True, slots=True)
class Stats:
    """Of ``tokens`` pairs that are finite on both sides, of ``sequences`` sequences that have at least one.

    Attributes:
        mean: of d, nats, with its sign; its negative is the plain Monte-Carlo estimate of KL(behaviour || trainer).
        mean_abs, p50_abs, p99_abs, max_abs: of |d|, nats. Percentiles interpolate linearly between order statistics
            (type 7 of Hyndman and Fan, The American Statistician 50, 1996: numpy's default).
        kl: KL(behaviour || trainer) per token, nats, by the estimator k3 (``k3``).
        clip_fraction: share of tokens with |w - 1| > ``clip_epsilon``: those that PPO's clip (arXiv:1707.06347) can
            reach, whatever their advantage's sign. 0 to 1.
        ess: effective sample size of the token weights over their number (``ess``). 0 to 1.
        ess_sequences: the same of one weight per sequence, the product of its tokens' weights.
        outside: tokens that the trainer's policy cannot sample (-inf there): one that the engine ranked just within
            top-k or top-p and the trainer just beyond. In no other statistic.
        bad: how many pairs were left out because a side is no log-probability.
        named: the first 16 values that are bad, then those outside.
        curve: by position, those with at least one pair.
    """

    tokens: int
    sequences: int
    mean: float
    mean_abs: float
    p50_abs: float
    p99_abs: float
    max_abs: float
    kl: float
    clip_epsilon: float
    clip_fraction: float
    ess: float
    ess_sequences: float
    outside: int
    bad: int
    named: tuple[Bad, ...]
    curve: tuple[Position, ...]


def percentile(values: Iterable[float], q: float) -> float:
    """The ``q``-th percentile (0 to 100), interpolated linearly between order statistics.

    ``ValueError``: no values, or a ``q`` outside.
    """
    ordered = sorted(values)
    if not ordered or not 0 <= q <= 100:
        raise ValueError(f"percentile: expected values and 0 <= q <= 100, found {len(ordered)} values and q = {q}")
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    # Between the two, whatever rounding does.
    return min(max(ordered[low] + (ordered[high] - ordered[low]) * (place - low), ordered[low]), ordered[high])


def ess(log_weights: Iterable[float]) -> float:
    """Effective sample size over the number of samples: ``(sum w)^2 / (n sum w^2)``, ``w = exp(log_weights)``.

    Kish, Survey Sampling (1965), section 8.2; for importance weights Kong, technical report 348, University of Chicago
    (1992). 1: all weights alike. 1/n: one sample carries all. Weights are scaled by the greatest, so none overflows.
    ``ValueError``: no weights, or one that is not finite.
    """
    logs = list(log_weights)
    if not logs or not all(map(math.isfinite, logs)):
        raise ValueError(f"ess: expected finite log-weights, found {len(logs)} of which some are not")
    most = max(logs)
    weights = [math.exp(v - most) for v in logs]
    found = math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))
    return min(found, 1.0)  # rounding


def k3(d: float) -> float:
    """One token's term of the estimator k3 of KL(behaviour || trainer): ``exp(d) - 1 - d``, never negative.

    Schulman, "Approximating KL Divergence" (2020): unbiased where tokens were sampled by ``behaviour`` and it gives
    every token that the trainer gives a probability one too; with top-k or top-p it is not quite. Infinite beyond
    exp's range.
    """
    try:
        return max(math.expm1(d) - d, 0.0)
    except OverflowError:
        return math.inf


def compare(
    behaviour: Sequence[Sequence[float]], trainer: Sequence[Sequence[float]], *, clip_epsilon: float = 0.2
) -> Stats:
    """Compare two sets of log-probabilities of the same sampled tokens.

    Args:
        behaviour: one list per sequence, one value per sampled token, nats.
        trainer: the same shape.
        clip_epsilon: see ``Stats.clip_fraction``; more than 0.

    ``ValueError``: the shapes differ, the sequence named. Nothing to compare, or all values bad: every statistic is NaN
    (and no verdict may call that good), with counts and names of what is bad.
    """
    if clip_epsilon <= 0:
        raise ValueError(f"clip_epsilon: expected more than 0, found {clip_epsilon}")
    if len(behaviour) != len(trainer):
        raise ValueError(f"expected as many sequences on both sides, found {len(behaviour)} and {len(trainer)}")
    logs: list[float] = []
    of_sequence: list[float] = []
    at: dict[int, list[float]] = {}
    named: list[Bad] = []
    beyonds: list[Bad] = []
    bad = outside = 0
    for i, (b, t) in enumerate(zip(behaviour, trainer, strict=True)):
        if len(b) != len(t):
            raise ValueError(f"sequence {i}: expected as many tokens on both sides, found {len(b)} and {len(t)}")
        mine: list[float] = []
        for n, pair in enumerate(zip(b, t, strict=True)):
            faults = [
                (side, what) for side, v in zip(("behaviour", "trainer"), pair, strict=True) if (what := _fault(v))
            ]
            if faults:
                beyond = faults == [("trainer", "-inf")]
                outside += beyond
                bad += not beyond
                into = beyonds if beyond else named
                into += [Bad(i, n, side, what) for side, what in faults if len(into) < _MOST_NAMED]
                continue
            d = pair[1] - pair[0]
            mine.append(d)
            at.setdefault(n, []).append(d)
        logs += mine
        if mine:
            of_sequence.append(math.fsum(mine))
    return _stats(logs, of_sequence, at, clip_epsilon, outside, bad, tuple([*named, *beyonds][:_MOST_NAMED]))


def _fault(value: float) -> str:
    """What keeps a value from being a log-probability; empty: nothing."""
    if math.isnan(value):
        return "nan"
    if math.isinf(value) or value < _LEAST:
        return "+inf" if value > 0 else "-inf"
    if value == SERVED_FLOOR:
        return "floor"
    return "positive" if value > _ROUNDING else ""


def _stats(
    logs: list[float],
    of_sequence: list[float],
    at: dict[int, list[float]],
    clip_epsilon: float,
    outside: int,
    bad: int,
    named: tuple[Bad, ...],
) -> Stats:
    n = len(logs)
    if not n:
        nan = math.nan
        return Stats(0, 0, nan, nan, nan, nan, nan, nan, clip_epsilon, nan, nan, nan, outside, bad, named, ())
    sizes = [abs(d) for d in logs]
    low, high = math.log1p(-clip_epsilon) if clip_epsilon < 1 else -math.inf, math.log1p(clip_epsilon)
    curve = tuple(
        Position(p, len(v), math.fsum(v) / len(v), math.fsum(map(abs, v)) / len(v), max(map(abs, v)))
        for p, v in sorted(at.items())
    )
    return Stats(
        tokens=n,
        sequences=len(of_sequence),
        mean=math.fsum(logs) / n,
        mean_abs=math.fsum(sizes) / n,
        p50_abs=percentile(sizes, 50),
        p99_abs=percentile(sizes, 99),
        max_abs=max(sizes),
        kl=math.fsum(map(k3, logs)) / n,
        clip_epsilon=clip_epsilon,
        clip_fraction=sum(d < low or d > high for d in logs) / n,
        ess=ess(logs),
        ess_sequences=ess(of_sequence),
        outside=outside,
        bad=bad,
        named=named,
        curve=curve,
    )
