"""A rollout of several turns on a vLLM server while weights change: salt, spans, lag, what was computed again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from weightplane.controlplane.core.states import CachePolicy
from weightplane.inference_agent.spans import Span, merge

from .rollouts import Rollouts, VllmOutput

__all__ = ["Trajectory", "quantile"]


class Trajectory:
    """One rollout, begun at the version that the server holds now. One thread.

    ``policy``: the group's cache policy. Under SALT its requests carry the salt of the version at its start (of an
    older one, on a replica that has not got that version yet): its own old keys and values are used until it ends,
    and no later trajectory meets them.
    """

    def __init__(self, server: Rollouts, policy: CachePolicy = CachePolicy.CLEAR) -> None:
        self.server, self.policy = server, policy
        self.started = server.held()
        self.tokens: list[int] = []  # all of it: what was put in and what was generated
        self.generated = 0
        self.spans: tuple[Span, ...] = ()  # over `tokens`; those that were put in are unknown
        self._again: int | None = 0

    def turn(self, new: Sequence[int], *, max_tokens: int, **options: Any) -> VllmOutput:
        """Put tokens in, let vLLM answer once. ``options``: of ``Rollouts.generate``.

        One that a pause with ``abort`` ended early (``finish``) is gone on with by ``turn([], …)``.
        """
        before = len(self.tokens)
        prompt = [*self.tokens, *new]
        if self.policy is CachePolicy.SALT:
            options["cache_salt"] = self.server.salt(self.started)
        (out,) = self.server.generate(prompt, max_tokens=max_tokens, **options)
        self._count(before, len(prompt), out)
        self.tokens = [*prompt, *out.tokens]
        self.generated += len(out.tokens)
        self.spans = merge([(self.spans, before), ((), len(new)), (out.spans, len(out.tokens))])
        return out

    def _count(self, before: int, prompt: int, out: VllmOutput) -> None:
        if self._again is None or out.cached_tokens is None:
            self._again = None
            return
        self._again += max(0, before - out.cached_tokens)
        if self.policy is CachePolicy.CLEAR:  # a change in mid-answer: all until then was computed anew
            self._again += sum(prompt + s.start for s in out.spans[1:])

    @property
    def reprefilled(self) -> int | None:
        """Tokens that were computed again though their keys and values had been there: those of earlier turns that
        were not found in the cache (vLLM keeps whole blocks, so up to a block at each turn in any case), and with
        CLEAR those before a change of weights within an answer. None if the server does not tell cached tokens."""
        return self._again

    def lags(self, current: int | None = None) -> list[int]:
        """For each generated token whose version is known: how many versions ``current`` (default: what the server
        holds now) is ahead of it. Asked when the trajectory is sampled for training, it is its staleness."""
        now = self.server.held() if current is None else current
        return [now - s.version for s in self.spans if s.known for _ in range(s.stop - s.start)]


def quantile(values: Sequence[int], q: float) -> int:
    """The nearest-rank quantile, e.g. 0.5 or 0.99. ``ValueError`` for no values."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]
