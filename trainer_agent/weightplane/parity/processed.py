"""Log-probabilities of the policy that sampled: temperature, top-k and top-p applied as vLLM's sampler applies them.

The order is that of vLLM 0.32 (``v1/sample/sampler.py``, ``v1/sample/ops/topk_topp_sampler.py``): logits as float32,
divided by the temperature; top-k, with what is equal to the k-th; top-p over what is left, the least likely dropped
while their sum is at most ``1 - top_p``, the likeliest never; then the logarithm of the softmax of what is left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .samples import Sampling

__all__ = ["GREEDY_BELOW", "processed_logprobs", "truncated"]

#: A temperature below this is greedy to vLLM, which then uses no temperature, no top-k and no top-p.
GREEDY_BELOW = 1e-5


def truncated(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits of the policy that samples: float32 ``[t, vocab]``, minus infinity where a token cannot be sampled.

    Args:
        logits: any float dtype, ``[t, vocab]``; not changed.
        sampling: greedy leaves them as they are.
    """
    scaled = logits.to(torch.float32)
    if sampling.temperature < GREEDY_BELOW:
        return scaled
    scaled = scaled / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[-1]:
        least = scaled.topk(sampling.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, places = scaled.sort(dim=-1)
        below = ordered.softmax(dim=-1).cumsum(dim=-1)
        drop = below <= 1 - torch.tensor(sampling.top_p, dtype=torch.float32, device=below.device)
        drop[..., -1] = False
        scaled = scaled.masked_fill(torch.zeros_like(drop).scatter(-1, places, drop), -torch.inf)
    return scaled


def processed_logprobs(logits: Tensor, tokens: Tensor, sampling: Sampling) -> Tensor:
    """Log-probability of each token under the policy that samples; minus infinity for one that it cannot sample.

    Args:
        logits: any float dtype, ``[t, vocab]``: row i is what token i was sampled from.
        tokens: int64 ``[t]``.
        sampling: how they were sampled.

    Returns:
        float32 ``[t]``, nats.
    """
    logs = truncated(logits, sampling).log_softmax(dim=-1)
    return logs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
