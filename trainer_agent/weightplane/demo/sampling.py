"""Batched generation whose every forward pass goes through a gate.

The engine that serves the model owns the gate: entering it may block (a pause) and yields a tag that names the
weights in use; leaving it says that no weight is being read any more. So no forward pass ever straddles an update,
and each generated token is labelled with the weights that produced it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from weightplane.demo.model import DecoderLM

__all__ = ["Completion", "Gate", "StopGeneration", "TokenTag", "generate"]

TokenTag: TypeAlias = Hashable
"""What the gate yields; opaque here, only compared with ``==``."""

Gate: TypeAlias = Callable[[], AbstractContextManager[TokenTag]]


class StopGeneration(Exception):
    """Raised by a gate on entry to end the generation early; what was generated so far is returned."""


@dataclass
class Completion:
    """What was generated for one prompt; the three lists have one entry per generated token.

    Attributes:
        tokens: token ids, the prompt excluded.
        logprobs: log-probability of each token under the distribution it was drawn from (temperature applied; for
            greedy decoding that of temperature 1).
        tags: what the gate yielded for the forward pass that produced the token; None without a gate.
        finished: False when a gate ended the generation before ``max_new_tokens``.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tags: list[TokenTag] = field(default_factory=list)
    finished: bool = True


@torch.no_grad()
def generate(
    model: DecoderLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    gate: Gate | None = None,
    on_tag_change: Literal["recompute", "keep"] = "recompute",
    use_cache: bool = True,
) -> list[Completion]:
    """Generate `max_new_tokens` tokens for each prompt, all prompts in one batch.

    Args:
        model: read only inside the gate.
        prompts: token ids, each prompt at least one; unequal lengths are padded on the left.
        max_new_tokens: tokens per completion; prompt plus completion must fit ``model.config.max_len``.
        temperature: 0 is greedy; otherwise logits are divided by it before sampling.
        seed: of the sampler; the same seed, prompts and weights give the same tokens.
        gate: entered once per forward pass (also one that recomputes); the whole batch shares the tag it yields. An
            exception on entry propagates, except `StopGeneration`, which ends the generation.
        on_tag_change: when the tag differs from the previous pass, the KV cache belongs to older weights.
            ``"recompute"`` drops it and computes the whole prefix again in that same pass; ``"keep"`` goes on with it.
        use_cache: False computes the whole prefix in every pass (slow; the reference that tests compare with).

    Returns:
        One `Completion` per prompt, in order.
    """
    if temperature < 0:
        raise ValueError(f"temperature must be 0 or more, got {temperature}")
    if not prompts or max_new_tokens < 1:
        return [Completion() for _ in prompts]
    longest, limit = max(map(len, prompts)), model.config.max_len
    if longest + max_new_tokens > limit:
        raise ValueError(f"a prompt of {longest} and {max_new_tokens} new tokens exceed the model's max_len {limit}")
    vocab = model.config.vocab_size
    if not all(0 <= token < vocab for prompt in prompts for token in prompt):
        raise ValueError(f"the prompts hold a token id outside 0 ... {vocab - 1}")
    prefix, pad = _left_pad(prompts, model.embed.weight.device)
    generator = torch.Generator().manual_seed(seed)
    cache = model.new_cache(len(prompts)) if use_cache else None
    enter: Gate = gate if gate is not None else _no_gate
    tags: list[TokenTag] = []
    logprobs: list[Tensor] = []
    width = prefix.shape[1]
    for step in range(max_new_tokens):
        try:
            with enter() as tag:
                stale = step > 0 and tag != tags[-1] and on_tag_change == "recompute"
                if cache is not None and stale:
                    cache.reset()
                unseen = prefix if cache is None or cache.length == 0 else prefix[:, -1:]
                logits = model(unseen, cache, pad)[:, -1]
        except StopGeneration:
            break
        token, logprob = _sample(logits, temperature, generator)
        tags.append(tag)
        logprobs.append(logprob)
        prefix = torch.cat((prefix, token[:, None]), dim=1)
    done = len(tags)
    rows = prefix[:, width:].tolist()
    values = torch.stack(logprobs, dim=1).tolist() if done else [[] for _ in prompts]
    return [
        Completion(tokens=row, logprobs=value, tags=list(tags), finished=done == max_new_tokens)
        for row, value in zip(rows, values, strict=True)
    ]


def _no_gate() -> AbstractContextManager[TokenTag]:
    return nullcontext()


def _sample(logits: Tensor, temperature: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw from float32 logits ``[batch, vocab]``: token int64 ``[batch]``, log-probability float32 ``[batch]``."""
    logp = torch.log_softmax(logits / temperature if temperature > 0 else logits, dim=-1)
    if temperature == 0:
        token = logp.argmax(-1)
    else:  # on the CPU, so that a seed means the same on every device
        token = torch.multinomial(logp.exp().cpu(), 1, generator=generator)[:, 0].to(logp.device)
    return token, logp.gather(1, token[:, None])[:, 0]


def _left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Token ids int64 ``[batch, longest]`` and padding counts int64 ``[batch]`` (None when lengths are equal)."""
    longest = max(len(prompt) for prompt in prompts)
    if min(len(prompt) for prompt in prompts) == 0:
        raise ValueError("an empty prompt has no position to predict from; give it at least one token")
    counts = [longest - len(prompt) for prompt in prompts]
    rows = [[0] * count + list(prompt) for count, prompt in zip(counts, prompts, strict=True)]
    pad = torch.tensor(counts, device=device) if any(counts) else None
    return torch.tensor(rows, device=device), pad
