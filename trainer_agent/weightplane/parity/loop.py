"""In the loop: every N versions the engines' log-probabilities are compared with the trainer's, and the fleet is told.

check = LoopCheck(TransformersScorer.of(model), every=10)
receipt = publisher.publish(step)
check(publisher, receipt)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from weightplane.v1 import fleet_pb2, update_pb2

from .probe import ProbeError, ProbeResult, in_vocabulary, sample, scored
from .samples import Plan, Sample, Sampling, Scorer, draw_prompts
from .thresholds import BY_DTYPE, Thresholds
from .together import together

__all__ = ["LoopCheck", "summary"]

log = logging.getLogger(__name__)

SAMPLINGS = (Sampling(1.0), Sampling(0.7, top_k=20), Sampling(1.3, top_p=0.9))
_AT_ONCE = 4  # replicas
_MOST_REASON = 1024  # bytes, as the contract has it
_Samples = tuple[Sample, ...]


class Published(Protocol):
    """Of ``PublishReceipt`` what is looked at."""

    @property
    def version(self) -> int: ...
    @property
    def update_id(self) -> str: ...
    @property
    def committed(self) -> bool: ...
    @property
    def ready(self) -> tuple[str, ...]: ...


class Fleet(Protocol):
    """Of ``Publisher`` what is called."""

    def replicas(self, timeout: float = ...) -> list[fleet_pb2.ReplicaInfo]: ...
    def tell_parity(self, update_id: str, results: Sequence[update_pb2.ParityResult], timeout: float = ...) -> None: ...


class LoopCheck:
    """Called after each publish, on one rank; it checks the first version, then one of every ``every``, and after a
    check that failed each version until all is well.

    Args:
        scorer: the trainer's side, of the weights that were just published: ``TransformersScorer.of(model)``, or a
            function (``samples.Scorer``).
        every: versions from one check to the next.
        plan: what is asked; by default two prompts of 128 tokens below ``vocab`` (the scorer's ``vocab_size``), three
            ways to sample, 24 tokens each.
        thresholds: bounds; by default float32's. A scorer that rounds brings its own (``samples.Rounds``).
        urls: of replicas' servers by replica id, where they are not what the replica itself says.
        at_most: replicas at a time: those that failed last, then the others in turn.
        timeout: of one request, seconds. An engine that hangs fails its first one.
    """

    def __init__(
        self,
        scorer: Scorer,
        *,
        every: int = 10,
        plan: Plan | None = None,
        vocab: int = 0,
        thresholds: Thresholds = BY_DTYPE["float32"],
        urls: Mapping[str, str] | None = None,
        at_most: int = 8,
        timeout: float = 120.0,
    ) -> None:
        if every < 1 or at_most < 1:
            raise ValueError(f"expected every >= 1 and at_most >= 1, found {every}, {at_most}")
        vocab = vocab or int(getattr(scorer, "vocab_size", 0))
        if plan is None and not vocab:
            raise ValueError("expected a plan, or vocab: the prompts are token ids below it")
        self._vocab = vocab
        self._scorer, self._every, self._at_most, self._timeout = scorer, every, at_most, timeout
        self._plan = plan or Plan(draw_prompts(0, 2, 128, vocab), SAMPLINGS, 1, 24)
        self._thresholds, self._urls = thresholds, dict(urls or {})
        self._checked = 0
        self._failed: set[str] = set()
        self._turn = ""

    def due(self, version: int) -> bool:
        """Whether this version is one to check."""
        return bool(not self._checked or self._failed or version - self._checked >= self._every)

    def __call__(self, publisher: Fleet, receipt: Published) -> tuple[update_pb2.ParityResult, ...]:
        """Check the replicas that serve what was just published, if it is time, and tell the control plane; what was
        found (nothing: it was not time). An engine that does not answer is a result, NOT_MEASURED.

        Raises what the scorer raises, ``ProbeError`` for an answer of another shape, and as ``Publisher.tell_parity``.
        """
        if not receipt.committed or not self.due(receipt.version):
            return ()
        known = {r.replica_id: r for r in publisher.replicas()}
        chosen = [known[rid] for rid in self._choice(receipt.ready) if rid in known]
        served = together(lambda r: self._served(r, receipt.version), chosen, _AT_ONCE, "parity")
        found = tuple(self._judged(r, receipt.version, samples) for r, samples in zip(chosen, served, strict=True))
        self._checked = receipt.version
        self._failed -= {p.replica_id for p in found if p.verdict == update_pb2.PARITY_VERDICT_AT_PARITY}
        self._failed &= known.keys()
        self._failed |= {p.replica_id for p in found if p.verdict == update_pb2.PARITY_VERDICT_NOT_AT_PARITY}
        if found:
            publisher.tell_parity(receipt.update_id, found)
        return found

    def _choice(self, ready: Sequence[str]) -> list[str]:
        again = sorted(self._failed & set(ready))
        others = sorted(set(ready) - self._failed)
        after = [*(r for r in others if r > self._turn), *(r for r in others if r <= self._turn)]
        chosen = [*again, *after][: self._at_most]
        self._turn = next((r for r in reversed(chosen) if r not in self._failed), self._turn)
        return chosen

    def _served(self, replica: fleet_pb2.ReplicaInfo, version: int) -> list[_Samples] | str:
        """What each instance of a replica served, or why it is not known."""
        url = self._urls.get(replica.replica_id) or replica.serving_address
        if not url:
            return "the replica tells no serving_address: give its URL (urls)"
        try:
            served = [sample(u, self._plan, version=version, timeout=self._timeout)[1] for u in url.split(",")]
            for u, samples in zip(url.split(","), served, strict=True):
                in_vocabulary(u, samples, self._vocab)
            return served
        except ProbeError as e:
            return str(e)

    def _judged(
        self, replica: fleet_pb2.ReplicaInfo, version: int, served: list[_Samples] | str
    ) -> update_pb2.ParityResult:
        if isinstance(served, str):
            log.warning("replica %s was not checked: %s", replica.replica_id, served)
            return not_measured(replica.replica_id, version, served)
        results = [scored(version, s, self._scorer, self._thresholds) for s in served]
        worst = next((r for r in results if not r.ok), max(results, key=lambda r: r.whole.mean_abs))
        if not worst.ok:
            log.warning("replica %s is not at parity: %s", replica.replica_id, "; ".join(worst.exceeded))
        return summary(replica.replica_id, worst)


def summary(replica_id: str, result: ProbeResult) -> update_pb2.ParityResult:
    """A probe as the contract carries it."""
    s = result.whole
    verdict = update_pb2.PARITY_VERDICT_AT_PARITY if result.ok else update_pb2.PARITY_VERDICT_NOT_AT_PARITY
    return update_pb2.ParityResult(
        replica_id=replica_id,
        version=result.version,
        verdict=verdict,
        tokens=s.tokens,
        mean_abs=s.mean_abs,
        p99_abs=s.p99_abs,
        max_abs=s.max_abs,
        kl=max(s.kl, 0.0),
        ess=s.ess,
        clip_fraction=s.clip_fraction,
        reason=_short("; ".join(result.exceeded)),
    )


def not_measured(replica_id: str, version: int, why: str) -> update_pb2.ParityResult:
    """Nothing was compared."""
    nan = math.nan
    return update_pb2.ParityResult(
        replica_id=replica_id,
        version=version,
        verdict=update_pb2.PARITY_VERDICT_NOT_MEASURED,
        mean_abs=nan,
        p99_abs=nan,
        max_abs=nan,
        kl=nan,
        ess=nan,
        clip_fraction=nan,
        reason=_short(why),
    )


def _short(text: str) -> str:
    raw = text.encode("utf-8", "replace")
    return text if len(raw) <= _MOST_REASON else raw[: _MOST_REASON - 3].decode("utf-8", "ignore") + "..."
