"""The verifiable task: write the given distinct digits in ascending order."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["SortTask", "derive_seed"]


@dataclass(frozen=True)
class SortTask:
    """``3 8 1 >`` is to be continued by ``1 3 8``.

    Tokens ``0 … symbols - 1`` are the digits, token ``symbols`` is the separator that ends a prompt. A prompt holds
    `length` distinct digits, so the answer is unique and the reward needs no judge: a random policy gets about
    ``1 / (symbols + 1)``.
    """

    symbols: int = 10
    length: int = 4

    @property
    def separator(self) -> int:
        """The token that ends a prompt."""
        return self.symbols

    @property
    def vocab_size(self) -> int:
        """How many tokens the model must know."""
        return self.symbols + 1

    @property
    def max_new_tokens(self) -> int:
        """Length of an answer."""
        return self.length

    def prompts(self, count: int, seed: int) -> list[list[int]]:
        """`count` prompts of ``length + 1`` tokens, drawn from a generator of this `seed` alone."""
        rng = random.Random(seed)
        return [[*rng.sample(range(self.symbols), self.length), self.separator] for _ in range(count)]

    def eval_prompts(self, count: int) -> list[list[int]]:
        """The first `count` prompts of the evaluation set: the same in every run, whatever its seed."""
        return self.prompts(count, derive_seed("eval"))

    def answer(self, prompt: Sequence[int]) -> list[int]:
        """The right completion of a prompt."""
        return sorted(prompt[: self.length])

    def reward(self, prompt: Sequence[int], completion: Sequence[int]) -> float:
        """Share of the answer's positions that the completion has right, from 0 to 1; surplus tokens are ignored."""
        hits = sum(got == want for got, want in zip(completion, self.answer(prompt), strict=False))
        return hits / self.length

    def render(self, tokens: Sequence[int]) -> str:
        """Tokens as text, ``>`` for the separator; for tables and logs."""
        return " ".join(">" if token == self.separator else str(token) for token in tokens)


def derive_seed(*parts: int | str) -> int:
    """A seed below 2**63 that depends on all `parts` and on nothing else (the same in every process)."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
