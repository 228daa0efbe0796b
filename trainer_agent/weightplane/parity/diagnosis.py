"""Which kind of mismatch it is, and the likeliest cause: the hypothesis under which the difference goes away. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .stats import Stats
from .thresholds import Thresholds, exceeded

__all__ = ["Candidate", "Diagnosis", "choose"]

#: A cause explains a difference of which it leaves at most this share (docs/parity.md has what right and wrong ones
#: left).
EXPLAINS = 0.1


@dataclass(frozen=True)
class Candidate:
    """One hypothesis, tried on the same tokens.

    ``kind``: semantic | inference-path | objective. ``cause``: a stable word. ``stats``: engine against trainer under
    the hypothesis. ``text``: the cause in words. ``advice``: what to set. ``fault`` False: the group asked for it, and
    only its size is reported.
    """

    kind: str
    cause: str
    stats: Stats
    text: str
    advice: str
    fault: bool = True


@dataclass(frozen=True)
class Diagnosis:
    """What was concluded.

    ``kind``: none (at parity) | semantic | inference-path | objective. ``cause``: the candidate's, "nan",
    "trainer-nan", "unknown" or "none". ``before``: mean |Δ| as served, nats; ``left``: what the cause leaves of it;
    ``next_best``: what the best of the other causes leaves (NaN: there is none). ``fault``: whether it is one under
    what the group declared.
    """

    kind: str
    cause: str
    text: str
    advice: str
    fault: bool
    before: float
    left: float
    next_best: float
    candidates: tuple[Candidate, ...]

    @property
    def separation(self) -> float:
        """How many times more the best of the other causes leaves; infinite where there is none or nothing is left."""
        return self.next_best / self.left if self.left > 0 and not math.isnan(self.next_best) else math.inf


def choose(
    served: Stats,
    thresholds: Thresholds,
    candidates: Sequence[Candidate],
    *,
    rescored: Stats | None = None,
    neutral: Stats | None = None,
    untold: bool = False,
) -> Diagnosis:
    """Name the likeliest cause.

    Args:
        served: engine against trainer, as it is.
        thresholds: within them nothing is accused.
        candidates: what was tried; one is believed if it brings the difference within the bounds or takes nine tenths
            of it away, and of those the one that leaves least.
        rescored: the engine's own scores of the same tokens (temperature 1, cache not read) against the trainer's;
            where no candidate is believed they tell what is served wrongly from what is computed wrongly.
        neutral: of ``served``, what was sampled at temperature 1 without filters: no way to serve it wrongly is known.
        untold: the engine does not tell which tokens of its prompts came from its cache: none could be accused.
    """
    tried = tuple(candidates)
    beyond = exceeded(served, thresholds)
    before = served.mean_abs
    if not beyond:
        return Diagnosis("none", "none", "engine and trainer are at parity", "", False, before, before, math.nan, tried)
    nan = [b for b in served.named if b.side == "behaviour" and b.what in ("nan", "floor", "-inf", "+inf")]
    if served.bad and nan:
        share = served.bad / (served.bad + served.tokens + served.outside)
        where = (
            ""
            if rescored is None or not rescored.bad
            else ", and so are its scores of the same tokens without its cache"
        )
        text = (
            f"{served.bad} of its log-probabilities ({share:.0%}) are not finite{where}: nor are weights or activations"
        )
        advice = (
            "look for NaN in what is published, and publish again; where some comes up later all the same, the memory "
            "of the engine's cache still holds it: restart the engine"
        )
        return Diagnosis("inference-path", "nan", text, advice, True, before, math.nan, math.nan, tried)
    if served.bad and any(b.side == "trainer" and b.what in ("nan", "+inf") for b in served.named):
        text = f"{served.bad} of the trainer's log-probabilities are not finite, the engine's are"
        advice = "look for NaN in the trainer's weights: the engine may still have the ones before"
        return Diagnosis("objective", "trainer-nan", text, advice, True, before, math.nan, math.nan, tried)
    usable = sorted((c for c in tried if c.stats.tokens and not c.stats.bad), key=_left)
    believed = [c for c in usable if _left(c) <= max(thresholds.mean_abs, EXPLAINS * before)]
    if believed:
        best = believed[0]
        others = [_left(c) for c in usable if c.cause != best.cause]
        return Diagnosis(
            best.kind,
            best.cause,
            best.text,
            best.advice,
            best.fault,
            before,
            _left(best),
            others[0] if others else math.nan,
            tried,
        )
    left = _left(usable[0]) if usable else math.nan
    kind, text = "inference-path", f"nothing that was tried explains it; {beyond[0]}"
    todo: list[str] = []
    if not any(c.cause == "version-behind" for c in tried):
        todo.append("give the weights of the version before (--previous)")
    if rescored is None or exceeded(rescored, thresholds):
        todo += ["see that --checkpoint is what was published", "give a fresh engine (--fresh)"]
        todo.append("audit dtype and quantization: --dtype here is to be the engine's (vLLM makes bfloat16 of float32)")
    else:
        text = "the engine computes the same tokens rightly when asked again, without its cache and at temperature 1"
        if untold:
            todo.append("start vLLM with --enable-prompt-tokens-details, or it does not tell what its cache gave it")
        if neutral is not None and exceeded(neutral, thresholds):
            text += ", and wrongly at temperature 1 with it: what is in its cache is likely stale"
            todo.append("publish(cache='clear')")
        else:
            kind = "semantic"
            todo.append("audit logprobs mode, sampling defaults and cache")
    return Diagnosis(kind, "unknown", text, "; ".join(todo), True, before, left, math.nan, tried)


def _left(candidate: Candidate) -> float:
    """What a hypothesis leaves: mean |Δ|; a token that cannot be sampled under it counts as ten nats."""
    s = candidate.stats
    return (s.mean_abs * s.tokens + 10.0 * s.outside) / (s.tokens + s.outside)
