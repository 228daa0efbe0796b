"""Log-probabilities of the policy that sampled: temperature, top-k and top-p applied as vLLM's sampler applies them.

The order is that of vLLM 0.32 (``v1/sample/sampler.py``, ``v1/sample/ops/topk_topp_sampler.py``): logits as float32,
divided by the temperature; top-k, with what is equal to the k-th; top-p over what is left, the least likely dropped
while their sum is at most ``1 - top_p``, the likeliest never; then the logarithm of the softmax of what is left.

Where a logit, or a sum, lies within rounding of its border, one side keeps a token that the other drops, and all others
differ by that token's share, which may be a hundred times what rounding does elsewhere. Both are right, and
``processed_logprobs`` gives the value that is nearest to what was ``served``. So too among logits that are equal on one
side: the other's rounding may put them in an order, of which top-k then keeps the first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .samples import Sampling

__all__ = ["GREEDY_BELOW", "processed_logprobs", "truncated"]

#: A temperature below this is greedy to vLLM, which then uses no temperature, no top-k and no top-p.
GREEDY_BELOW = 1e-5
#: Logits at temperature 1 that differ by less may change places: float32's bound of 99 in 100 (``thresholds``).
_SLACK = 1e-4
_MOST_SLACK = 0.01  # below a temperature of 0.01 rounding may move a border anywhere: it is left where it was computed


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


def processed_logprobs(logits: Tensor, tokens: Tensor, sampling: Sampling, served: Tensor | None = None) -> Tensor:
    """Log-probability of each token under the policy that samples; minus infinity for one that it cannot sample.

    Args:
        logits: any float dtype, ``[t, vocab]``: row i is what token i was sampled from.
        tokens: int64 ``[t]``.
        sampling: how they were sampled.
        served: float32 ``[t]``, nats: what the engine says, which decides where a border of top-k or top-p lies within
            rounding, and nowhere else. ``None``: the border lies where it was computed.

    Returns:
        float32 ``[t]``, nats.
    """
    left = truncated(logits, sampling)
    at = tokens.unsqueeze(-1)
    logs = left.log_softmax(dim=-1).gather(-1, at).squeeze(-1)
    filtered = 0 < sampling.top_k < logits.shape[-1] or sampling.top_p < 1
    slack = _SLACK / min(max(sampling.temperature, GREEDY_BELOW), 1.0)
    if served is None or not filtered or slack > _MOST_SLACK:
        return logs
    scaled, served = logits.to(torch.float32) / sampling.temperature, served.to(logs.device)
    ordered, own = scaled.sort(dim=-1, descending=True).values, scaled.gather(-1, at).squeeze(-1)
    found = torch.stack([logs, *(_at_border(ordered, own, sampling, slack, wide) for wide in (False, True))])
    off = torch.where(found == served, 0.0, (found - served).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    # The first of equals: as computed, unless another is nearer.
    return found.gather(0, off.argmin(dim=0, keepdim=True)).squeeze(0)


def _at_border(ordered: Tensor, own: Tensor, sampling: Sampling, slack: float, wide: bool) -> Tensor:
    """Log-probabilities of tokens of logits ``own`` ``[t]`` if what lies at a border is kept (``wide``), or dropped.

    ``ordered``: all logits over the temperature, ``[t, vocab]``, the greatest first.
    """
    kept = torch.ones_like(ordered, dtype=torch.bool)
    if 0 < sampling.top_k < ordered.shape[-1]:
        kept[:, sampling.top_k :] = False
        if wide:
            kept |= ordered >= ordered[:, sampling.top_k - 1, None] - slack
    if sampling.top_p < 1:
        below = ordered.masked_fill(~kept, -torch.inf).softmax(dim=-1).flip(-1).cumsum(dim=-1).flip(-1)
        # A sum of probabilities that are each off by a factor of exp(slack), and so is what they are divided by.
        kept &= below > (1 - sampling.top_p) * (1 + 2 * (-slack if wide else slack))
        kept[:, 0] = True
    left = ordered.masked_fill(~kept, -torch.inf)
    least = ordered.masked_fill(~kept, torch.inf).amin(dim=-1)
    return (own - left.logsumexp(dim=-1)).masked_fill(own < least - slack, -torch.inf)
