"""The demo's model and its gated generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import pytest
import torch

from tests.demo.models import SMALL, lively
from weightplane.demo.grpo import token_logprobs
from weightplane.demo.model import build_model
from weightplane.demo.sampling import Completion, StopGeneration, generate

RAGGED = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [0, 10]]


class CountingGate:
    """Yields the tags it was given, one a pass; counts entries and exits, and runs a hook on entry."""

    def __init__(self, tags: list[object], on_enter: Callable[[int], object] | None = None, stop_at: int = -1) -> None:
        self.tags, self.stop_at = tags, stop_at
        self.entered = self.left = 0
        self.on_enter = on_enter

    @contextmanager
    def __call__(self) -> Iterator[object]:
        if self.entered == self.stop_at:
            raise StopGeneration
        index = self.entered
        self.entered += 1
        if self.on_enter is not None:
            self.on_enter(index)
        yield self.tags[index]
        self.left += 1


# --- model


def test_tied_and_unsent_tensors() -> None:
    model = build_model(SMALL, 0)
    state = model.state_dict()
    assert state["embed.weight"].data_ptr() == state["lm_head.weight"].data_ptr()
    assert {name for name, _ in model.named_buffers()} == {"rope_cos", "rope_sin"}
    assert not {"rope_cos", "rope_sin"} & state.keys()
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_build_model_depends_on_its_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = build_model(SMALL, 5).state_dict()
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(2)
    second, other = build_model(SMALL, 5).state_dict(), build_model(SMALL, 6).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])


def test_forward_is_causal() -> None:
    model = lively()
    a = torch.tensor([[1, 2, 3, 4, 5]])
    b = torch.tensor([[1, 2, 3, 9, 9]])
    with torch.no_grad():
        x, y = model(a), model(b)
    torch.testing.assert_close(x[:, :3], y[:, :3])
    assert not torch.allclose(x[:, 3:], y[:, 3:])


def test_limits_are_refused_with_a_reason() -> None:
    model = build_model(SMALL, 0)
    with pytest.raises(ValueError, match="max_len 24"):
        model(torch.zeros(1, 25, dtype=torch.int64))
    cache = model.new_cache(1)
    model(torch.zeros(1, 2, dtype=torch.int64), cache)
    with pytest.raises(ValueError, match="one position"):
        model(torch.zeros(1, 2, dtype=torch.int64), cache)
    with pytest.raises(ValueError, match="max_len 24"):
        generate(model, [[1]], max_new_tokens=24)
    with pytest.raises(ValueError, match="outside 0"):
        generate(model, [[11]], max_new_tokens=1)
    with pytest.raises(ValueError, match="empty prompt"):
        generate(model, [[1], []], max_new_tokens=1)
    with pytest.raises(ValueError, match="temperature"):
        generate(model, [[1]], max_new_tokens=1, temperature=-1)


# --- generation


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_cache_changes_nothing(temperature: float) -> None:
    model = lively()
    cached, plain = (
        generate(model, RAGGED, max_new_tokens=10, temperature=temperature, seed=3, use_cache=use)
        for use in (True, False)
    )
    for a, b in zip(cached, plain, strict=True):
        assert a.tokens == b.tokens
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    assert len({tuple(done.tokens) for done in cached}) == len(RAGGED), "the model ignores its context"


def test_padding_changes_nothing() -> None:
    model = lively()
    together = generate(model, RAGGED, max_new_tokens=6, temperature=0)
    for prompt, done in zip(RAGGED, together, strict=True):
        (alone,) = generate(model, [prompt], max_new_tokens=6, temperature=0)
        assert alone.tokens == done.tokens
        assert alone.logprobs == pytest.approx(done.logprobs, abs=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_those_the_trainer_computes(temperature: float) -> None:
    model = lively()
    prompts = [[1, 2, 3], [4, 5, 6]]
    made = generate(model, prompts, max_new_tokens=5, temperature=temperature, seed=1)
    tokens = torch.tensor([p + done.tokens for p, done in zip(prompts, made, strict=True)])
    ours = token_logprobs(model, tokens, temperature)[:, 2:]
    torch.testing.assert_close(torch.tensor([done.logprobs for done in made]), ours.detach(), atol=1e-4, rtol=1e-4)


def test_seed_decides_the_sample_and_frequencies_follow_the_policy() -> None:
    model = lively()
    prompts = [[3, 1, 2]] * 4000
    first, again, other = (generate(model, prompts, max_new_tokens=1, seed=seed) for seed in (5, 5, 6))
    assert first == again != other
    with torch.no_grad():
        want = model(torch.tensor([prompts[0]]))[0, -1].softmax(-1)
    got = torch.bincount(torch.tensor([done.tokens[0] for done in first]), minlength=11) / len(prompts)
    torch.testing.assert_close(got, want, atol=0.04, rtol=0)


def test_gate_is_entered_once_per_forward_pass() -> None:
    model = lively()
    gate = CountingGate(["v1", "v1", "v2", "v2", "v3"])
    forwards: list[tuple[int, int]] = []
    hook = model.register_forward_pre_hook(lambda _, args: forwards.append((gate.entered, gate.left)))
    made = generate(model, RAGGED, max_new_tokens=5, gate=gate)
    hook.remove()
    assert forwards == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)], "each pass inside one gate of its own"
    assert gate.left == 5
    assert all(done.tags == ["v1", "v1", "v2", "v2", "v3"] and done.finished for done in made)


@pytest.mark.parametrize("change", ["recompute", "keep"])
def test_new_weights_in_the_middle(change: Literal["recompute", "keep"]) -> None:
    new = lively(2).state_dict()
    model = lively(1)
    prompts = [[1, 2, 3], [4, 5, 6]]
    gate = CountingGate(
        [1, 1, 1, 2, 2, 2, 2], on_enter=lambda pass_: model.load_state_dict(new) if pass_ == 3 else None
    )
    widths: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    made = generate(model, prompts, max_new_tokens=7, gate=gate, temperature=0, on_tag_change=change)
    hook.remove()
    head = generate(lively(1), prompts, max_new_tokens=3, temperature=0)
    assert [done.tokens[:3] for done in made] == [done.tokens for done in head]
    extended = [[*prompt, *done.tokens] for prompt, done in zip(prompts, head, strict=True)]
    tail = generate(lively(2), extended, max_new_tokens=4, temperature=0)
    same = all(a.logprobs[3:] == pytest.approx(b.logprobs, abs=1e-4) for a, b in zip(made, tail, strict=True))
    if change == "recompute":
        assert widths == [3, 1, 1, 6, 1, 1, 1]
        assert [done.tokens[3:] for done in made] == [done.tokens for done in tail] and same
    else:
        assert widths == [3, 1, 1, 1, 1, 1, 1]
        assert not same, "a kept cache mixes versions; the test should be able to see it"


def test_gate_can_stop_a_generation() -> None:
    model = lively()
    gate = CountingGate(["v"] * 8, stop_at=3)
    made = generate(model, [[1, 2], [3, 4]], max_new_tokens=8, gate=gate, seed=2)
    whole = generate(model, [[1, 2], [3, 4]], max_new_tokens=8, seed=2)
    assert [done.tokens for done in made] == [done.tokens[:3] for done in whole]
    assert all(len(done.logprobs) == len(done.tags) == 3 and not done.finished for done in made)
    assert generate(model, [[1]], max_new_tokens=2, gate=CountingGate([], stop_at=0)) == [Completion(finished=False)]


def test_gate_errors_pass_through() -> None:
    def broken(index: int) -> None:
        raise RuntimeError("engine closed")

    with pytest.raises(RuntimeError, match="engine closed"):
        generate(lively(), [[1]], max_new_tokens=2, gate=CountingGate(["v"], on_enter=broken))
