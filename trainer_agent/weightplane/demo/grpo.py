"""Group-relative policy optimisation (GRPO) on rollouts that another process generated.

The rollouts bring the log-probabilities under the policy that generated them (the behaviour policy). The loss uses the
ratio of the trainer's policy to that one, clipped, so it stays right when the generating weights are a little older.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weightplane.demo.config import DemoConfig

__all__ = ["GRPOTrainer", "LossStats", "Rollouts", "UpdateStats", "group_advantages", "grpo_loss", "token_logprobs"]


@dataclass(frozen=True)
class Rollouts:
    """One step's rollouts as plain arrays; ``n`` sequences, right-padded to ``t + 1`` tokens.

    Attributes:
        tokens: int64 ``[n, t + 1]``, prompt and completion.
        behaviour: float32 ``[n, t]``, log-probability of ``tokens[:, 1:]`` when it was generated; 0 elsewhere.
        mask: bool ``[n, t]``, True where ``tokens[:, 1:]`` was generated (neither prompt nor padding).
        rewards: float32 ``[n]``; the completions of one prompt are neighbours, ``group_size`` of them.
        group_size: completions per prompt; divides ``n``.
    """

    tokens: Tensor
    behaviour: Tensor
    mask: Tensor
    rewards: Tensor
    group_size: int

    @classmethod
    def from_lists(
        cls,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
        rewards: Sequence[float],
        group_size: int,
    ) -> Rollouts:
        """Build the arrays from one entry per completion (a prompt is repeated for each of its group)."""
        n = len(prompts)
        if not n or n % group_size or not n == len(completions) == len(logprobs) == len(rewards):
            raise ValueError(
                f"{n} prompts, {len(completions)} completions, {len(logprobs)} log-probability lists and "
                f"{len(rewards)} rewards must be equally many, and a multiple of the group size {group_size}"
            )
        width = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
        tokens = torch.zeros(n, width, dtype=torch.int64)
        behaviour = torch.zeros(n, width - 1)
        mask = torch.zeros(n, width - 1, dtype=torch.bool)
        for row, (p, c, logp) in enumerate(zip(prompts, completions, logprobs, strict=True)):
            end = len(p) + len(c)
            tokens[row, :end] = torch.tensor([*p, *c])
            behaviour[row, len(p) - 1 : end - 1] = torch.tensor(logp)
            mask[row, len(p) - 1 : end - 1] = True
        return cls(tokens, behaviour, mask, torch.tensor(rewards, dtype=torch.float32), group_size)


@dataclass(frozen=True)
class LossStats:
    """Of one loss: `clip_fraction` and `gap` are means over generated tokens.

    Attributes:
        clip_fraction: share of tokens whose gradient the clip removed.
        gap: mean absolute difference between the trainer's and the behaviour policy's log-probability.
    """

    clip_fraction: float
    gap: float


@dataclass(frozen=True)
class UpdateStats:
    """Of one training step.

    Attributes:
        loss: mean over the minibatches.
        reward: mean reward of the rollouts.
        grad_norm: largest gradient norm, before scaling.
        clip_fraction: mean over the minibatches.
        gap: `LossStats.gap` of the first minibatch, before any change of weights: about 1e-6 when the replicas
            generated with the trainer's own weights; it tells stale weights at once.
    """

    loss: float
    reward: float
    grad_norm: float
    clip_fraction: float
    gap: float


def group_advantages(rewards: Tensor, group_size: int, eps: float = 1e-4) -> Tensor:
    """Rewards normalised within their group: ``(r - mean) / (std + eps)``, with the sample standard deviation.

    Args:
        rewards: float32 ``[n]``, groups are neighbours.
        group_size: at least 2.
        eps: keeps a group whose rewards are all equal at 0.

    Returns:
        float32 ``[n]``.
    """
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + eps)).reshape(-1)


def token_logprobs(model: nn.Module, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each token given those before it.

    Args:
        model: token ids in, logits out; run on ``tokens[:, :-1]`` without a cache; gradients flow.
        tokens: int64 ``[n, t + 1]``.
        temperature: logits are divided by it, as in generation; above 0.

    Returns:
        float32 ``[n, t]``, of ``tokens[:, 1:]``.
    """
    logits = model(tokens[:, :-1]) / temperature
    picked: Tensor = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    return picked


def grpo_loss(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, LossStats]:
    """The clipped surrogate, averaged over generated tokens.

    Per token ``-min(ratio * A, clamp(ratio, 1 - clip_low, 1 + clip_high) * A)``, with
    ``ratio = exp(logprobs - behaviour)``.

    Args:
        logprobs: float32 ``[n, t]`` of the policy being trained; gradients flow.
        behaviour: float32 ``[n, t]`` of the policy that generated.
        advantages: float32 ``[n]``, one per sequence.
        mask: bool ``[n, t]``, which entries count.
        clip_low: how far the ratio may fall below 1 before its gradient stops.
        clip_high: how far it may rise above 1.

    Returns:
        A float32 scalar and its statistics.
    """
    delta = torch.where(mask, logprobs - behaviour, 0.0)
    ratio = delta.exp()
    scale = advantages[:, None]
    plain, clipped = ratio * scale, ratio.clamp(1 - clip_low, 1 + clip_high) * scale
    count = mask.sum().clamp(min=1)
    loss = -(torch.min(plain, clipped) * mask).sum() / count
    with torch.no_grad():
        cut = float(((clipped < plain) & mask).sum() / count)
        gap = float(delta.abs().sum() / count)
    return loss, LossStats(clip_fraction=cut, gap=gap)


class GRPOTrainer:
    """Holds the optimiser; `update` turns one step's rollouts into new weights, written in place."""

    def __init__(self, model: nn.Module, config: DemoConfig) -> None:
        self.model = model
        self.config = config
        self.optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.99))
        self._shuffle = torch.Generator().manual_seed(config.seed)

    def update(self, rollouts: Rollouts) -> UpdateStats:
        """One pass over the rollouts in shuffled minibatches, an optimiser step each."""
        advantages = group_advantages(rollouts.rewards, rollouts.group_size)
        order = torch.randperm(len(rollouts.tokens), generator=self._shuffle)
        losses: list[float] = []
        norms: list[float] = []
        stats: list[LossStats] = []
        for rows in order.chunk(self.config.minibatches):
            loss, stat = grpo_loss(
                token_logprobs(self.model, rollouts.tokens[rows], self.config.temperature),
                rollouts.behaviour[rows],
                advantages[rows],
                rollouts.mask[rows],
                self.config.clip_low,
                self.config.clip_high,
            )
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
            self.optimizer.step()
            losses.append(float(loss.detach()))
            norms.append(float(norm))
            stats.append(stat)
        return UpdateStats(
            loss=sum(losses) / len(losses),
            reward=float(rollouts.rewards.mean()),
            grad_norm=max(norms),
            clip_fraction=sum(stat.clip_fraction for stat in stats) / len(stats),
            gap=stats[0].gap,
        )
