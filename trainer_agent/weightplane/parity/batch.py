"""What a training loop asks of every batch: how much its importance weights are worth, and how old its tokens are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weightplane.inference_agent.spans import Lag, Span, lag

from .stats import Stats, compare

__all__ = ["BatchParity", "batch_parity"]


@dataclass(frozen=True, slots=True)
class BatchParity:
    """Of one batch.

    Attributes:
        stats: behaviour against the old policy as the trainer recomputed it, all tokens.
        lag: how many versions before ``version`` tokens were sampled; it also counts tokens of unknown version, which
            are in ``stats`` and in no entry of ``by_version``.
        by_version: the same statistics of the tokens that one version sampled, by version. At ``version`` itself only a
            mismatch of engine and trainer is left; what older tokens have more is the policy's own movement. Each span
            counts as a sequence, positions from its start.
    """

    stats: Stats
    lag: Lag
    by_version: dict[int, Stats]

    @property
    def ess(self) -> float:
        """Effective sample size of the token weights over their number; 0 to 1, NaN if there is nothing to compare."""
        return self.stats.ess


def batch_parity(
    behaviour: Sequence[Sequence[float]],
    spans: Sequence[Sequence[Span]],
    recomputed: Sequence[Sequence[float]],
    version: int,
    *,
    clip_epsilon: float = 0.2,
    committed: Iterable[int] | None = None,
) -> BatchParity:
    """Judge a batch before it is trained on.

    Args:
        behaviour: log-probabilities as served with the rollouts: a list per sequence, a value per sampled token, nats.
        spans: of each sequence, which version sampled which tokens; together they cover all its tokens once.
        recomputed: log-probabilities of the same tokens under the trainer's weights of ``version`` (the old policy of
            the batch), same shape.
        version: those weights' version, as their publish was given it.
        clip_epsilon: PPO's clip.
        committed: versions that were committed; without it every number counts as one in ``lag`` (aborted updates use
            numbers up).

    ``ValueError``: shapes differ, spans do not cover a sequence (the sequence is named), or a token is of a version
    newer than ``version``.
    """
    if len(spans) != len(behaviour):
        raise ValueError(f"expected spans of {len(behaviour)} sequences, found {len(spans)}")
    parts: dict[int, tuple[list[list[float]], list[list[float]]]] = {}
    whole = compare(behaviour, recomputed, clip_epsilon=clip_epsilon)  # checks the shapes
    for i, (b, t, row) in enumerate(zip(behaviour, recomputed, spans, strict=True)):
        end = 0
        for s in sorted(row, key=lambda s: s.start):
            if s.start != end or s.stop > len(b):
                raise ValueError(f"sequence {i}: its spans do not cover its {len(b)} tokens once: {tuple(row)}")
            end = s.stop
            if not s.known:
                continue
            mine, theirs = parts.setdefault(s.version, ([], []))
            mine.append(list(b[s.start : s.stop]))
            theirs.append(list(t[s.start : s.stop]))
        if end != len(b):
            raise ValueError(f"sequence {i}: its spans do not cover its {len(b)} tokens once: {tuple(row)}")
    by_version = {v: compare(*parts[v], clip_epsilon=clip_epsilon) for v in sorted(parts)}
    return BatchParity(whole, lag([s for row in spans for s in row], version, committed), by_version)
