"""The built-in trainer side: a checkpoint in ``transformers``, scored without a cache, its head in float32."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from .processed import processed_logprobs
from .samples import Sample

__all__ = ["TransformersScorer"]

_AT_ONCE = 8  # sequences of equal length in one pass


class TransformersScorer:
    """A ``Scorer`` over a checkpoint in the form of Hugging Face.

    Args:
        folder: of ``config.json`` and safetensors.
        dtype: float32 | bfloat16 | float16: what weights and activations are in.
        head_dtype: what the last projection is computed in: the hidden states and its weights are cast to it.

    ``weights``: the tensors by their names in the module; more by ``score(weights=…)``.
    """

    def __init__(self, folder: str | Path, *, dtype: str = "float32", head_dtype: str = "float32") -> None:
        from transformers import AutoModelForCausalLM  # type: ignore[import-not-found, unused-ignore]

        self.dtype, self.head_dtype = dtype, head_dtype
        self._take(AutoModelForCausalLM.from_pretrained(str(folder), dtype=getattr(torch, dtype)), live=False)

    @classmethod
    def of(cls, model: nn.Module, *, head_dtype: str = "float32") -> Self:
        """Over a model of ``transformers`` that is being trained, as it is whenever it is asked: the scorer of a loop.

        For the time of a pass it is in eval mode. Its parameters are whole: of a sharded model give a function that
        gathers.
        """
        made = cls.__new__(cls)
        made.dtype, made.head_dtype = str(next(model.parameters()).dtype).removeprefix("torch."), head_dtype
        made._take(model, live=True)
        return made

    def _take(self, model: Any, *, live: bool) -> None:
        self.model: nn.Module = model
        self._head: nn.Module = model.get_output_embeddings()
        self._exact: TransformersScorer | None = None
        self._live = live

    @property
    def vocab_size(self) -> int:
        """Rows of the last projection."""
        weight: Any = self._head.weight
        return int(weight.shape[0])

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Of every parameter, by its name in the module."""
        return {name: p.shape for name, p in self.model.named_parameters(remove_duplicate=False)}

    @property
    def tied(self) -> bool:
        """Whether the last projection's weights are the embedding's."""
        model: Any = self.model
        return model.get_input_embeddings().weight is model.get_output_embeddings().weight

    @property
    def rounds(self) -> bool:
        """See ``Rounds``."""
        return self.dtype != "float32" or self.head_dtype != "float32"

    def exact(self, samples: Sequence[Sample]) -> list[list[float]]:
        """See ``Rounds``. A copy of the model is cast, once."""
        if self._exact is None or self._live:
            whole = copy.copy(self)
            whole.dtype = whole.head_dtype = "float32"
            whole.model = copy.deepcopy(self.model).float()
            whole._head = whole.model.get_output_embeddings()  # type: ignore[operator]
            self._exact = whole
        return self._exact.score(samples)

    def __call__(self, samples: Sequence[Sample]) -> list[list[float]]:
        """See ``Scorer``."""
        return self.score(samples)

    def score(
        self,
        samples: Sequence[Sample],
        *,
        weights: Mapping[str, Tensor] | None = None,
        head_dtype: str = "",
    ) -> list[list[float]]:
        """Log-probabilities of each sample's tokens under its sampling.

        Args:
            samples: any lengths.
            weights: tensors that stand for the model's, by name (``lm_head.weight`` alone unties a tied head).
            head_dtype: another than the scorer's.
        """
        found: list[list[float]] = [[] for _ in samples]
        for indices in _alike(samples):
            ids = torch.tensor([[*samples[i].prompt, *samples[i].tokens] for i in indices])
            logits = self.logits(ids, weights=weights, head_dtype=head_dtype)
            for row, i in enumerate(indices):
                found[i] = self.of_logits(samples[i], logits[row])
        return found

    @torch.no_grad()
    def logits(
        self,
        ids: Tensor,
        *,
        weights: Mapping[str, Tensor] | None = None,
        head_dtype: str = "",
        cache: Any = None,
    ) -> Tensor:
        """Logits of the head's dtype ``[n, t, vocab]`` of token ids int64 ``[n, t]``; ``cache``: what came before."""
        given: dict[str, Any] = {"use_cache": cache is not None}
        if cache is not None:
            given["past_key_values"] = cache
        ids = ids.to(self._device)
        with self._evaluating(), self._head_in(getattr(torch, head_dtype or self.head_dtype), weights or {}):
            out: Any = torch.func.functional_call(
                self.model, dict(weights or {}), (), {"input_ids": ids, **given}, tie_weights=False
            )
        logits: Tensor = out.logits
        return logits.cpu()

    @torch.no_grad()
    def keys(self, ids: Tensor) -> Any:
        """Keys and values of token ids int64 ``[1, t]``, for ``logits(cache=…)`` of this or another model."""
        with self._evaluating():
            out: Any = self.model(input_ids=ids.to(self._device), use_cache=True)
        return out.past_key_values

    def of_logits(self, sample: Sample, logits: Tensor) -> list[float]:
        """Log-probabilities of a sample's tokens, from logits ``[≥ tokens + 1, vocab]`` whose last row is its last
        token's."""
        rows = logits[-len(sample.tokens) - 1 : -1]
        tokens, served = torch.tensor(sample.tokens), torch.tensor(sample.served, dtype=torch.float32)
        return [float(v) for v in processed_logprobs(rows, tokens, sample.sampling, served)]

    @property
    def _device(self) -> torch.device:
        weight: Any = self._head.weight
        found: torch.device = weight.device
        return found

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """No dropout meanwhile; afterwards each module is in the mode that it was in."""
        training = [m for m in self.model.modules() if m.training]
        for m in training:
            m.training = False
        try:
            yield
        finally:
            for m in training:
                m.training = True

    @contextmanager
    def _head_in(self, dtype: torch.dtype, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """The last projection computed in a dtype: its input and weights are cast."""
        head = self._head
        whole = type(head).forward

        def forward(hidden: Tensor) -> Tensor:
            weight: Any = head.weight
            bias: Any = getattr(head, "bias", None)
            return nn.functional.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

        head.forward = forward
        try:
            yield
        finally:
            del head.forward
            assert head.forward.__func__ is whole  # type: ignore[attr-defined]


def _alike(samples: Sequence[Sample]) -> Iterator[list[int]]:
    """Indices of samples of equal length, a few at once: no padding, so no mask that rounds otherwise."""
    by_length: dict[int, list[int]] = {}
    for i, s in enumerate(samples):
        by_length.setdefault(len(s.prompt) + len(s.tokens), []).append(i)
    for indices in by_length.values():
        for start in range(0, len(indices), _AT_ONCE):
            yield indices[start : start + _AT_ONCE]
