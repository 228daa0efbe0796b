"""The learning part of the demo: task, requests, loss; and that it learns, synchronised only."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.demo.models import SMALL, lively
from weightplane.demo.config import DemoConfig
from weightplane.demo.grpo import GRPOTrainer, Rollouts, group_advantages, grpo_loss, token_logprobs
from weightplane.demo.local import LocalFleet, run_local
from weightplane.demo.loop import eval_requests, rollout_requests, run
from weightplane.demo.model import build_model
from weightplane.demo.task import SortTask, derive_seed

# --- task


def test_reward_counts_right_positions() -> None:
    task = SortTask(symbols=10, length=4)
    prompt = [7, 2, 9, 4, task.separator]
    assert task.answer(prompt) == [2, 4, 7, 9]
    cases = [
        ([2, 4, 7, 9], 1.0),
        ([2, 4, 9, 7], 0.5),
        ([9, 7, 4, 2], 0.0),
        ([2], 0.25),
        ([], 0.0),
        ([2, 4, 7, 9, 1], 1.0),
    ]
    for completion, reward in cases:
        assert task.reward(prompt, completion) == reward, completion
    assert task.render(prompt) == "7 2 9 4 >"


def test_prompts_are_seeded_distinct_digits() -> None:
    task = SortTask()
    prompts = task.prompts(200, seed=3)
    assert prompts == task.prompts(200, seed=3) != task.prompts(200, seed=4)
    assert all(len(set(p[:-1])) == task.length and max(p[:-1]) < 10 and p[-1] == task.separator for p in prompts)
    assert derive_seed(1, "a") != derive_seed(1, "b") and 0 <= derive_seed(1, "a") < 2**63
    assert derive_seed(0, "prompts", 1) == 8160003293126371007  # every machine draws the same prompts


def test_evaluation_set_is_the_same_for_every_seed() -> None:
    task = SortTask()
    first, second = (eval_requests(replace(DemoConfig(), seed=seed), task) for seed in (0, 1))
    assert first == second
    assert sum(len(request.prompts) for request in first) == DemoConfig.eval_prompts


def test_requests_split_whole_groups_and_differ_by_step_and_seed() -> None:
    config = replace(DemoConfig(), prompts_per_step=5, group_size=3)
    task = SortTask()
    requests = rollout_requests(config, task, step=1)
    assert [len(request.prompts) for request in requests] == [6, 9]
    for request in requests:
        for start in range(0, len(request.prompts), 3):
            assert len({tuple(p) for p in request.prompts[start : start + 3]}) == 1
    assert len({request.seed for request in requests}) == 2
    assert requests == rollout_requests(config, task, step=1)
    assert requests != rollout_requests(config, task, step=2)
    assert requests != rollout_requests(replace(config, seed=1), task, step=1)


def test_default_request_fits_the_generate_endpoint() -> None:
    requests = rollout_requests(DemoConfig(), SortTask(), step=1)
    assert max(len(request.prompts) for request in requests) <= 1024


def test_a_model_that_does_not_fit_the_task_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size 11"):
        replace(DemoConfig(), model=replace(SMALL, vocab_size=12))
    with pytest.raises(ValueError, match="max_len 9"):
        replace(DemoConfig(), model=replace(DemoConfig().model, max_len=8))
    with pytest.raises(ValueError, match="group_size"):
        replace(DemoConfig(), group_size=1)


# --- loss


def test_group_advantages_by_hand() -> None:
    got = group_advantages(torch.tensor([0.0, 1.0, 0.5, 0.5, 1.0, 1.0]), 2)
    a = 0.5 / (math.sqrt(0.5) + 1e-4)  # sample deviation of (0, 1): sqrt((0.25 + 0.25) / 1)
    assert got.tolist() == pytest.approx([-a, a, 0, 0, 0, 0])


def test_loss_by_hand() -> None:
    """Two sequences, five counted tokens, every case of the clip; 0.2 below, 0.3 above."""
    ratios = torch.tensor([[1.0, 1.5, 0.5], [1.5, 0.5, 7.0]])
    behaviour = torch.full((2, 3), -2.0)
    logprobs = (behaviour + ratios.log()).requires_grad_()
    advantages = torch.tensor([2.0, -1.0])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    loss, stats = grpo_loss(logprobs, behaviour, advantages, mask, 0.2, 0.3)
    # A = 2: 1.0 -> 2; 1.5 -> clipped to 1.3 -> 2.6; 0.5 -> 1 (the smaller).  A = -1: 1.5 -> -1.5; 0.5 -> clipped -0.8
    assert loss.item() == pytest.approx(-(2 + 2.6 + 1 - 1.5 - 0.8) / 5)
    assert stats.clip_fraction == pytest.approx(2 / 5)
    assert stats.gap == pytest.approx((0 + math.log(1.5) + math.log(2) + math.log(1.5) + math.log(2)) / 5)
    loss.backward()
    # d loss / d logprob = -ratio * A / count where not clipped
    want = [[-2 / 5, 0, -1 / 5], [1.5 / 5, 0, 0]]
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor(want))


def test_on_policy_gradient_is_reinforce() -> None:
    """With the behaviour policy equal to the trainer's, the gradient is that of ``-mean(A * logp)``."""
    model = lively().double()
    tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(4, 5, dtype=torch.bool)
    mask[:, 2:] = True
    advantages = torch.tensor([1.0, -1.0, 0.5, 0.0], dtype=torch.float64)
    logprobs = token_logprobs(model, tokens)
    loss, stats = grpo_loss(logprobs, logprobs.detach(), advantages, mask, 0.2, 0.2)
    reference = -(advantages[:, None] * logprobs * mask).sum() / mask.sum()
    names = [name for name, _ in model.named_parameters()]
    got = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    want = torch.autograd.grad(reference, list(model.parameters()))
    assert stats.gap == 0 and stats.clip_fraction == 0
    for name, a, b in zip(names, got, want, strict=True):
        assert torch.allclose(a, b), name
    assert any(float(a.abs().max()) > 1e-6 for a in got)


def test_gradient_agrees_with_finite_differences() -> None:
    model = lively().double()
    tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(4, 5, dtype=torch.bool)
    behaviour = token_logprobs(model, tokens).detach() + 0.05
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.2], dtype=torch.float64)

    def loss() -> torch.Tensor:
        return grpo_loss(token_logprobs(model, tokens), behaviour, advantages, mask, 0.2, 0.2)[0]

    for parameter, index in ((model.embed.weight, (3, 5)), (model.norm.bias, (2,))):
        (gradient,) = torch.autograd.grad(loss(), [parameter])
        with torch.no_grad():
            parameter[index] += 1e-6
            up = loss()
            parameter[index] -= 2e-6
            down = loss()
            parameter[index] += 1e-6
        assert float(gradient[index]) == pytest.approx(float((up - down) / 2e-6), rel=1e-4)


def test_rollouts_from_lists_aligns_and_refuses() -> None:
    rollouts = Rollouts.from_lists([[7, 8], [7, 8]], [[1, 2, 3], [4]], [[-1.0, -2.0, -3.0], [-4.0]], [0.5, 0.0], 2)
    assert rollouts.tokens.tolist() == [[7, 8, 1, 2, 3], [7, 8, 4, 0, 0]]
    assert rollouts.behaviour.tolist() == [[0, -1, -2, -3], [0, -4, 0, 0]]
    assert rollouts.mask.tolist() == [[False, True, True, True], [False, True, False, False]]
    with pytest.raises(ValueError, match="group size 2"):
        Rollouts.from_lists([[1]], [[2]], [[-1.0]], [0.0], 2)


# --- learning


def small_config(steps: int = 14) -> DemoConfig:
    """Learns a good part of the way within seconds."""
    model = replace(SMALL, d_model=64)
    return replace(DemoConfig(), model=model, prompts_per_step=48, learning_rate=2e-3, steps=steps)


def test_it_learns_synchronised_and_only_so() -> None:
    learned, control = run_local(small_config()), run_local(small_config(steps=5), sync=False)
    assert learned.reward_first == control.reward_first <= learned.config.reward_first_max
    assert learned.reward_last > learned.reward_first + 0.2 and learned.rose
    assert {step.reward for step in control.steps} == {control.reward_first} and not control.rose
    assert len(learned.steps) == learned.config.steps + 1 and learned.steps[0].update is None
    gaps, stale = ([step.update.gap for step in r.steps if step.update] for r in (learned, control))
    assert max(gaps) < 1e-4, "synchronised replicas generate with the trainer's weights"
    assert max(stale) > 0.05, "stale replicas do not, and it shows"


def test_a_run_repeats_itself_however_many_threads_the_caller_uses() -> None:
    config = small_config(steps=2)
    first = run_local(config)
    torch.set_num_threads(2)
    second = run_local(config)
    assert torch.get_num_threads() == 2, "the caller's setting is given back"
    assert [step.reward for step in first.steps] == [step.reward for step in second.steps]
    assert [step.update for step in first.steps] == [step.update for step in second.steps]


def test_update_writes_in_place_and_keeps_the_tie() -> None:
    config = small_config(steps=1)
    model = build_model(config.model, 0)
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    rope = model.rope_cos.clone()
    run(config, LocalFleet(config, sync=True), model)
    assert all(p.data_ptr() == before[name][0] for name, p in model.named_parameters())
    assert all(not torch.equal(p, before[name][1]) for name, p in model.named_parameters())
    assert model.lm_head.weight is model.embed.weight and torch.equal(model.rope_cos, rope)


def test_equal_rewards_change_nothing() -> None:
    config = small_config()
    model = build_model(config.model, 0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    prompts = [[1, 2, 3, 4, 10]] * 16
    rollouts = Rollouts.from_lists(prompts, [[1, 2, 3, 4]] * 16, [[-2.0] * 4] * 16, [0.5] * 16, 8)
    stats = GRPOTrainer(model, config).update(rollouts)
    assert stats.loss == 0 and stats.grad_norm == 0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
