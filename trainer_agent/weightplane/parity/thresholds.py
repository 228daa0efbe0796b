"""How far apart engine and trainer may be, by dtype, and where each bound comes from. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from .stats import Stats, compare

__all__ = ["BY_DTYPE", "Thresholds", "calibrated", "exceeded", "thresholds_of"]


@dataclass(frozen=True)
class Thresholds:
    """Bounds of ``Stats``; all must hold. Nats, but ``clip_fraction``, ``ess`` and ``outside``, which are shares of the
    tokens. ``source``: why these.
    """

    mean_abs: float
    p99_abs: float
    kl: float
    clip_fraction: float
    ess: float
    outside: float
    source: str

    def at(self, temperature: float) -> Thresholds:
        """The bounds at a temperature below 1: logits and their errors are divided by it, so differences grow as its
        inverse and the divergence as its square. At 1, above, and for greedy sampling (0) as they are."""
        t = min(temperature, 1.0) or 1.0
        return replace(self, mean_abs=self.mean_abs / t, p99_abs=self.p99_abs / t, kl=self.kl / t**2)


_HALF_WAY = (
    "unit roundoffs: bfloat16 2^-8, float16 2^-11 (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., "
    "section 2.1). bfloat16's are twice what vLLM 0.32 on CPU and transformers differed by on a Qwen2 of 0.5 M "
    "parameters with logits up to 9 (mean 0.069, p99 0.31, KL 4.5e-3, clipped 4.9 %, ESS 0.991; docs/parity.md); "
    "float16's are an eighth of those"
)

BY_DTYPE: Mapping[str, Thresholds] = {
    "float32": Thresholds(
        mean_abs=1e-5,
        p99_abs=1e-4,
        kl=1e-8,
        clip_fraction=0.0,
        ess=0.999,
        outside=1e-3,
        source="mean and ESS: what this project asks for; p99 and KL: four times what vLLM 0.32 on CPU and "
        "transformers differed by, or more (docs/parity.md: mean 5e-6, p99 2.3e-5, KL 3e-11)",
    ),
    "bfloat16": Thresholds(
        mean_abs=0.14,
        p99_abs=0.62,
        kl=0.018,
        clip_fraction=0.2,
        ess=0.96,
        outside=0.02,
        source=_HALF_WAY,
    ),
    "float16": Thresholds(
        mean_abs=0.0175,
        p99_abs=0.078,
        kl=2.8e-4,
        clip_fraction=0.02,
        ess=0.998,
        outside=0.0025,
        source=_HALF_WAY,
    ),
}


def thresholds_of(dtype: str, overrides: Mapping[str, float] | None = None) -> Thresholds:
    """Those of a dtype, some replaced. ``ValueError`` names an unknown dtype or bound."""
    if dtype not in BY_DTYPE:
        raise ValueError(f"dtype: expected one of {', '.join(BY_DTYPE)}, found {dtype!r}")
    bounds = BY_DTYPE[dtype]
    known = sorted(set(asdict(bounds)) - {"source"})
    changed = dict(overrides or {})
    if unknown := sorted(set(changed) - set(known)):
        raise ValueError(f"unknown bound(s) {', '.join(unknown)}; known: {', '.join(known)}")
    for name, value in changed.items():
        if not value >= 0:
            raise ValueError(f"bound {name}: expected a number, 0 or more, found {value}")
    if not changed:
        return bounds
    source = f"{bounds.source}; {', '.join(sorted(changed))} as the caller says"
    return Thresholds(**{**asdict(bounds), **changed, "source": source})


def calibrated(scored: Sequence[Sequence[float]], exact: Sequence[Sequence[float]]) -> Thresholds:
    """Bounds from the trainer's own rounding, measured on the very tokens that are judged.

    Args:
        scored: the trainer's log-probabilities in its dtype, one list per sequence, nats.
        exact: the same weights and tokens computed in float32, the same shape.

    Engine and trainer each round from the exact value by about as much, so they differ by at most twice that (triangle
    inequality): mean and p99 double, KL and 1 - ESS, which grow as the square, take four times. A token can be clipped
    only if one of the two is off by half the clip's logarithm, so twice the share of those. Tokens outside: twice.
    """
    own = compare(scored, exact, clip_epsilon=1.2**0.5 - 1)
    n = own.tokens + own.outside
    # Of few tokens the shares are known to about one token.
    return Thresholds(
        mean_abs=2 * own.mean_abs,
        p99_abs=2 * own.p99_abs,
        kl=4 * own.kl,
        clip_fraction=2 * own.clip_fraction + 1 / max(n, 1),
        ess=1 - 4 * (1 - own.ess),
        outside=2 * (own.outside + 2) / max(n, 1),
        source="twice the trainer's own rounding on these tokens: its dtype against float32",
    )


def exceeded(stats: Stats, bounds: Thresholds) -> tuple[str, ...]:
    """Which bounds do not hold, each in words; a statistic that is NaN holds none, and any bad value is named."""
    found = []
    if stats.bad:
        shown = [f"{b.what} of the {b.side} at token {b.position} of sequence {b.sequence}" for b in stats.named[:3]]
        found.append(f"{stats.bad} values are no log-probabilities: {', '.join(shown)}")
    if stats.outside > bounds.outside * (stats.tokens + stats.outside):
        found.append(
            f"outside {stats.outside} of {stats.tokens + stats.outside} tokens: the trainer cannot sample them"
        )
    for name in ("mean_abs", "p99_abs", "kl", "clip_fraction"):
        value, most = getattr(stats, name), getattr(bounds, name)
        if not value <= most:
            found.append(f"{name} {value:.3g} > {most:.3g}")
    if not stats.ess >= bounds.ess:
        found.append(f"ess {stats.ess:.6g} < {bounds.ess:.6g}")
    return tuple(found)
