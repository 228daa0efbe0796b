"""What the trainer would compute if it had the engine's fault: the same tokens, one hypothesis at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .probe import ProbeError
from .samples import Sample, Sampling
from .scorer import TransformersScorer

__all__ = ["Variants"]


class Variants:
    """Scores of the same samples, computed rightly or with one thing wrong.

    Args:
        scorer: of the version that the samples' last tokens are of.
        version: that version.
        previous: of the version before, or ``None``: whatever needs its weights is then not tried.
        previous_version: that version; -1: not told.
    """

    def __init__(
        self,
        scorer: TransformersScorer,
        version: int,
        previous: TransformersScorer | None = None,
        previous_version: int = -1,
    ) -> None:
        self.scorer, self.version = scorer, version
        self.previous, self.previous_version = previous, previous_version

    @property
    def before(self) -> str:
        """The version before, in words."""
        return f"version {self.previous_version}" if self.previous_version >= 0 else "the version before"

    def right(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Each token by the weights of the version that it is labelled with, all keys and values by those too.

        ``ProbeError``: a token of a version that neither scorer has.
        """
        return self._by_version(samples, self.scorer.score(samples))

    def as_if_sampled(self, samples: Sequence[Sample], *, temperature: bool, filters: bool) -> list[list[float]]:
        """``right``, but without the temperature, or without top-k and top-p, or (raw) without any of them."""

        def other(s: Sampling) -> Sampling:
            return Sampling(
                s.temperature if temperature else 1.0, s.top_k if filters else 0, s.top_p if filters else 1.0
            )

        return self.right([replace(s, sampling=other(s.sampling)) for s in samples])

    def head_in(self, samples: Sequence[Sample], dtype: str) -> list[list[float]]:
        """``right``, the last projection computed in another dtype."""
        return self._by_version(samples, self.scorer.score(samples, head_dtype=dtype), head_dtype=dtype)

    def behind(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Every token by the previous weights, whatever its label says."""
        return self._previous().score(samples)

    def modules(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Each module with parameters of its own, by name, and its tensors of the version before.

        A tied head comes by itself, apart from the embedding. A module whose tensors did not change is left out.
        """
        now = dict(self.scorer.model.named_parameters(remove_duplicate=False))
        before = dict(self._previous().model.named_parameters(remove_duplicate=False))
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in before.items():
            found.setdefault(name.rpartition(".")[0], {})[name] = tensor
        for module, tensors in found.items():
            if any(not torch.equal(t, now[n]) for n, t in tensors.items()):
                yield module, tensors

    def stale(self, samples: Sequence[Sample], weights: dict[str, Tensor]) -> list[list[float]]:
        """``right``, some tensors of the version before."""
        return self._by_version(samples, self.scorer.score(samples, weights=weights))

    @torch.no_grad()
    def on_old_keys(self, samples: Sequence[Sample], lengths: Sequence[int]) -> list[list[float]]:
        """``right``, keys and values of each sequence's first ``lengths`` tokens computed by the version before."""
        found = self._by_version(samples, self.scorer.score(samples))
        for row, (s, length) in enumerate(zip(samples, lengths, strict=True)):
            length = min(length, len(s.prompt) + len(s.tokens) - 1)
            if not length:
                continue
            ids = torch.tensor([[*s.prompt, *s.tokens]])
            cache = self._previous().keys(ids[:, :length])
            logits = self.scorer.logits(ids[:, length:], cache=cache)[0]
            first = max(0, length + 1 - len(s.prompt))  # the first token that was sampled from these logits
            some = replace(s, tokens=s.tokens[first:])
            found[row][first:] = self.scorer.of_logits(some, logits)
        return found

    def _previous(self) -> TransformersScorer:
        if self.previous is None:
            raise ProbeError("the weights of the version before are not given")
        return self.previous

    def _by_version(
        self, samples: Sequence[Sample], scores: list[list[float]], head_dtype: str = ""
    ) -> list[list[float]]:
        """``scores``, with those of tokens of the version before replaced by that version's."""
        old = [i for i, s in enumerate(samples) if any(x.version != self.version or not x.known for x in s.spans)]
        if not old:
            return scores
        theirs = self._previous().score([samples[i] for i in old], head_dtype=head_dtype)
        for i, row in zip(old, theirs, strict=True):
            for span in samples[i].spans:
                if not span.known or span.version not in (self.version, self.previous_version):
                    raise ProbeError(f"tokens of version {span.version if span.known else 'unknown'}: no weights of it")
                if span.version == self.previous_version:
                    scores[i][span.start : span.stop] = row[span.start : span.stop]
        return scores
