"""The training loop: rollouts from a fleet, a GRPO update, a publish, an evaluation by the fleet; once per step.

`run` is the whole of it, the same in one process (`weightplane.demo.local`) and in the real demo, where the fleet is
two replica processes and publishing is a Weightplane update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

import torch
from torch import nn

from weightplane.demo.config import DemoConfig
from weightplane.demo.grpo import GRPOTrainer, Rollouts, UpdateStats
from weightplane.demo.model import build_model
from weightplane.demo.sampling import Completion
from weightplane.demo.task import SortTask, derive_seed

__all__ = ["Fleet", "RolloutRequest", "RunResult", "StepResult", "eval_requests", "rollout_requests", "run"]

T = TypeVar("T")


@dataclass(frozen=True)
class RolloutRequest:
    """What one replica is asked to generate; any replica at the same weights answers it alike."""

    prompts: list[list[int]]
    max_new_tokens: int
    temperature: float
    seed: int


class Fleet(Protocol):
    """The replicas, as the trainer sees them."""

    def generate(self, requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
        """Answer all requests, in order; different requests may run on different replicas at once."""
        ...

    def publish(self, model: nn.Module, step: int) -> None:
        """Put the trainer's weights on every replica (the control run does nothing); step 0 is before training."""
        ...


@dataclass(frozen=True)
class StepResult:
    """What one step did; step 0 is the evaluation before training, without `update`.

    Attributes:
        step: 0 … steps.
        reward: mean reward on the evaluation set, of what the replicas generated after this step's publish.
        exact: share of the evaluation set answered without any mistake.
        update: statistics of the training step, None for step 0.
        rollout_s: seconds until the rollouts were back.
        train_s: seconds of the optimiser steps.
        publish_s: seconds in `Fleet.publish`.
        eval_s: seconds of the evaluation.
    """

    step: int
    reward: float
    exact: float
    update: UpdateStats | None
    rollout_s: float
    train_s: float
    publish_s: float
    eval_s: float


@dataclass(frozen=True)
class RunResult:
    """All steps of a run, and what they say about the thresholds."""

    config: DemoConfig
    steps: list[StepResult]

    @property
    def reward_first(self) -> float:
        """Evaluation reward before training."""
        return self.steps[0].reward

    @property
    def reward_last(self) -> float:
        """Evaluation reward after the last step."""
        return self.steps[-1].reward

    @property
    def learned(self) -> bool:
        """Whether the reward rose from at most `reward_first_max` to at least `reward_last_min`."""
        return self.reward_first <= self.config.reward_first_max and self.reward_last >= self.config.reward_last_min

    @property
    def rose(self) -> bool:
        """Whether the reward rose at all, beyond `control_rise_max`; the control run must not."""
        return self.reward_last - self.reward_first > self.config.control_rise_max


def rollout_requests(config: DemoConfig, task: SortTask, step: int) -> list[RolloutRequest]:
    """The requests of a training step, one per replica: whole groups, neighbours, each prompt `group_size` times."""
    prompts = task.prompts(config.prompts_per_step, derive_seed(config.seed, "prompts", step))
    grouped = [[list(prompt) for _ in range(config.group_size)] for prompt in prompts]
    shares = _split(grouped, config.replicas)
    return [
        RolloutRequest(
            prompts=[prompt for group in share for prompt in group],
            max_new_tokens=task.max_new_tokens,
            temperature=config.temperature,
            seed=derive_seed(config.seed, "sample", step, part),
        )
        for part, share in enumerate(shares)
    ]


def eval_requests(config: DemoConfig, task: SortTask) -> list[RolloutRequest]:
    """The evaluation set, one request per replica; always the same prompts and the same sampler seeds."""
    shares = _split(task.eval_prompts(config.eval_prompts), config.replicas)
    return [
        RolloutRequest(share, task.max_new_tokens, config.temperature, derive_seed("eval", part))
        for part, share in enumerate(shares)
    ]


def run(
    config: DemoConfig,
    fleet: Fleet,
    model: nn.Module | None = None,
    on_step: Callable[[StepResult], None] | None = None,
) -> RunResult:
    """Train for ``config.steps`` steps; torch computes on ``config.threads`` threads meanwhile.

    Args:
        config: all numbers.
        fleet: generates and takes weights.
        model: trained in place; built from the config and its seed when None.
        on_step: called with each result as it comes, for a live table.

    Returns:
        ``config.steps + 1`` results, the first from before training.
    """
    model = model if model is not None else build_model(config.model, config.seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        return RunResult(config, _steps(config, fleet, model, on_step))
    finally:
        torch.set_num_threads(threads)


def _steps(
    config: DemoConfig, fleet: Fleet, model: nn.Module, on_step: Callable[[StepResult], None] | None
) -> list[StepResult]:
    task = SortTask(config.symbols, config.length)
    trainer = GRPOTrainer(model, config)
    results: list[StepResult] = []
    for step in range(config.steps + 1):
        marks = [time.perf_counter()]
        rollouts = _collect(config, task, fleet, step) if step else None
        marks.append(time.perf_counter())
        update = trainer.update(rollouts) if rollouts is not None else None
        marks.append(time.perf_counter())
        fleet.publish(model, step)
        marks.append(time.perf_counter())
        reward, exact = _evaluate(config, task, fleet)
        marks.append(time.perf_counter())
        spent = [end - start for start, end in pairwise(marks)]
        results.append(StepResult(step, reward, exact, update, *spent))
        if on_step is not None:
            on_step(results[-1])
    return results


def _collect(config: DemoConfig, task: SortTask, fleet: Fleet, step: int) -> Rollouts:
    requests = rollout_requests(config, task, step)
    prompts, completions = _answers(fleet, requests)
    rewards = [task.reward(prompt, done.tokens) for prompt, done in zip(prompts, completions, strict=True)]
    tokens, logprobs = [done.tokens for done in completions], [done.logprobs for done in completions]
    return Rollouts.from_lists(prompts, tokens, logprobs, rewards, config.group_size)


def _evaluate(config: DemoConfig, task: SortTask, fleet: Fleet) -> tuple[float, float]:
    prompts, completions = _answers(fleet, eval_requests(config, task))
    rewards = [task.reward(prompt, done.tokens) for prompt, done in zip(prompts, completions, strict=True)]
    return sum(rewards) / len(rewards), sum(reward == 1.0 for reward in rewards) / len(rewards)


def _answers(fleet: Fleet, requests: Sequence[RolloutRequest]) -> tuple[list[list[int]], list[Completion]]:
    """Prompts and their completions, in the order of the requests."""
    answers = fleet.generate(requests)
    if [len(answer) for answer in answers] != [len(request.prompts) for request in requests]:
        raise ValueError("the fleet must return one completion per prompt of each request")
    prompts = [prompt for request in requests for prompt in request.prompts]
    return prompts, [done for answer in answers for done in answer]


def _split(items: list[T], parts: int) -> list[list[T]]:
    bounds = [len(items) * part // parts for part in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]
