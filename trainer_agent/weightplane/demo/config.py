"""Every number of the demo in one place, with the thresholds that its run is judged by."""

from __future__ import annotations

from dataclasses import dataclass, field

from weightplane.demo.model import ModelConfig

__all__ = ["DemoConfig"]


@dataclass(frozen=True)
class DemoConfig:
    """Recommended defaults, tuned on 2 CPU cores; ``python -m weightplane.demo.local`` measures them.

    Attributes:
        seed: of the initial weights, the prompts and the samplers.
        steps: training steps; the weights are published once before the first and once after each.
        replicas: into how many requests the rollouts of a step are split.
        prompts_per_step: distinct prompts of a step, each answered `group_size` times.
        group_size: completions per prompt; advantages are normalised within them.
        temperature: of the rollouts and of the evaluation.
        learning_rate: of Adam, constant.
        minibatches: optimiser steps per training step; from the second on the ratio to the policy that generated, and
            so the clip, is at work.
        clip_low: the ratio is clipped to ``[1 - clip_low, 1 + clip_high]``.
        clip_high: see `clip_low`.
        max_grad_norm: gradients are scaled down to this norm.
        threads: torch's CPU threads in the trainer while it runs. With one the numbers do not depend on the machine's
            cores, and a busy machine does not stall it (two threads on two loaded cores took ten times as long).
        eval_prompts: size of the evaluation set, which no seed changes.
        symbols: of the task, how many digits there are.
        length: of the task, how many digits are to be sorted.
        model: its ``vocab_size`` is ``symbols + 1``, and a prompt with its answer fits its ``max_len``.
        reward_first_max: before training, the mean evaluation reward must be at most this.
        reward_last_min: after training, it must be at least this.
        control_rise_max: without synchronisation, it must not rise by more than this.
        gap_max: the mean distance between the log-probabilities that the replicas gave for their rollouts and the
            trainer's own, at the same weights, must be at most this in every step (stale weights miss it by far).
    """

    seed: int = 0
    steps: int = 40
    replicas: int = 2
    prompts_per_step: int = 128
    group_size: int = 16
    temperature: float = 1.0
    learning_rate: float = 7e-4
    minibatches: int = 8
    clip_low: float = 0.2
    clip_high: float = 0.2
    max_grad_norm: float = 1.0
    threads: int = 1
    eval_prompts: int = 128
    symbols: int = 10
    length: int = 4
    model: ModelConfig = field(default_factory=lambda: ModelConfig(vocab_size=11, d_model=96, max_len=32))
    reward_first_max: float = 0.2
    reward_last_min: float = 0.8
    control_rise_max: float = 0.05
    gap_max: float = 1e-3

    def __post_init__(self) -> None:
        needed = 2 * self.length + 1
        if self.model.vocab_size != self.symbols + 1 or self.model.max_len < needed:
            raise ValueError(f"the task needs a model with vocab_size {self.symbols + 1} and max_len {needed} or more")
        if not 1 <= self.length <= self.symbols or self.group_size < 2 or self.temperature <= 0:
            raise ValueError("needed: 1 <= length <= symbols, group_size >= 2, temperature > 0")
        if not self.replicas <= min(self.prompts_per_step, self.eval_prompts):
            raise ValueError("every replica needs at least one prompt of a step and of the evaluation set")
