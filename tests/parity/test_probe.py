"""The probe's parts that need no engine: processed log-probabilities, plans, bounds, verdicts, the command's words."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from weightplane.cli.main import app
from weightplane.inference_agent.spans import Span
from weightplane.parity.probe import ProbeError, checked, judge
from weightplane.parity.processed import processed_logprobs, truncated
from weightplane.parity.report import draw, report, write_json
from weightplane.parity.running import Asked, prepare
from weightplane.parity.samples import DEFAULT_SAMPLINGS, Plan, Sample, Sampling, draw_prompts, sampling_from
from weightplane.parity.stats import compare
from weightplane.parity.thresholds import BY_DTYPE, calibrated, exceeded, thresholds_of

FLOAT32 = BY_DTYPE["float32"]
SAMPLINGS = st.builds(
    Sampling,
    st.one_of(st.just(0.0), st.floats(0.05, 3)),
    st.integers(0, 12),
    st.floats(0.01, 1),
)


def logs(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor([[math.log(p) for p in probabilities]])


def test_processed_by_hand() -> None:
    logits, tokens = logs([0.1, 0.4, 0.3, 0.2]), torch.tensor([1])
    assert processed_logprobs(logits, tokens, Sampling()).exp().item() == pytest.approx(0.4)
    # Temperature 1/2 squares: .01 .16 .09 .04 of .30.
    assert processed_logprobs(logits, tokens, Sampling(0.5)).exp().item() == pytest.approx(16 / 30)
    assert processed_logprobs(logits, tokens, Sampling(1, top_k=2)).exp().item() == pytest.approx(4 / 7)
    # 0.1 and 0.1 + 0.2 are at most 1 - 0.65: two are left, of 0.7.
    assert processed_logprobs(logits, tokens, Sampling(1, top_p=0.65)).exp().item() == pytest.approx(4 / 7)
    # Top-k first: of 4/9, 3/9, 2/9 the last goes with top-p 0.7.
    assert processed_logprobs(logits, tokens, Sampling(1, 3, 0.7)).exp().item() == pytest.approx(4 / 7)
    # Temperature before top-p: at 1/2 the shares are 1/30, 16/30, 9/30, 4/30.
    assert processed_logprobs(logits, tokens, Sampling(0.5, top_p=0.8)).exp().item() == pytest.approx(16 / 25)
    # However small, top-p keeps the likeliest.
    assert processed_logprobs(logits, tokens, Sampling(1, top_p=1e-9)).item() == 0
    # Greedy: vLLM applies neither temperature nor filters.
    assert processed_logprobs(logits, tokens, Sampling(0.0, 1, 0.1)).exp().item() == pytest.approx(0.4)
    assert processed_logprobs(logits, torch.tensor([0]), Sampling(1, top_k=2)).item() == -math.inf


@settings(max_examples=60)
@given(st.lists(st.floats(-8, 8), min_size=2, max_size=12), SAMPLINGS)
def test_what_is_left_is_a_distribution_of_the_likeliest(values: list[float], sampling: Sampling) -> None:
    logits = torch.tensor([values])
    before = logits.clone()
    left = truncated(logits, sampling)
    assert torch.equal(logits, before), "the caller's logits are not changed"
    all_of_it = [processed_logprobs(logits, torch.tensor([i]), sampling).exp().item() for i in range(len(values))]
    assert sum(all_of_it) == pytest.approx(1, abs=1e-5)
    kept = ~left[0].isinf()
    scaled = truncated(logits, Sampling(sampling.temperature))[0].tolist()  # rounded: may be equal
    assert logits[0][kept].max() == logits.max()
    if (~kept).any():
        assert logits[0][kept].min() >= logits[0][~kept].max()
    if sampling.temperature and 0 < sampling.top_k < len(values) and len(set(scaled)) == len(scaled):
        assert kept.sum() <= sampling.top_k


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from([k / 8 for k in range(-24, 25)]), min_size=2, max_size=12, unique=True),
    st.lists(st.floats(-1e-5, 1e-5), min_size=13, max_size=13),
    st.builds(Sampling, st.floats(0.5, 2), st.integers(0, 8), st.sampled_from([0.5, 0.75, 0.9, 1.0])),
)
def test_rounding_at_a_border_is_no_difference(values: list[float], rounding: list[float], sampling: Sampling) -> None:
    """Two equal logits on one side, of which rounding makes an order on the other."""
    values = [*values, values[0]]
    trainer = torch.tensor([values])
    engine = trainer + torch.tensor([rounding[: len(values)]])
    for i in truncated(engine, sampling)[0].isfinite().nonzero().flatten():
        token = torch.tensor([int(i)])
        served = processed_logprobs(engine, token, sampling)
        assert abs(processed_logprobs(trainer, token, sampling, served) - served) < 1e-4


def test_the_border_of_top_p_may_lie_on_either_side() -> None:
    logits, token = logs([0.1, 0.4, 0.3, 0.2]), torch.tensor([1])
    for top_p in (0.9 - 1e-6, 0.9 + 1e-6):  # the least likely is dropped, is kept
        for keeps, served in ((3, math.log(4 / 9)), (4, math.log(0.4))):
            found = processed_logprobs(logits, token, Sampling(1, top_p=top_p), torch.tensor([served]))
            assert found.item() == pytest.approx(served, abs=1e-6), (top_p, keeps)


def test_what_is_served_decides_nothing_where_no_border_is_near() -> None:
    logits, token = logs([0.1, 0.4, 0.3, 0.2]), torch.tensor([1])
    for sampling in (
        Sampling(),
        Sampling(0.7),
        Sampling(1, 2),
        Sampling(1, 0, 0.8),
        Sampling(1, 3, 0.7),
        Sampling(0.0),
    ):
        alone = processed_logprobs(logits, token, sampling)
        for served in (alone.item() + 0.01, -5.0, -9999.0, math.nan, -math.inf):
            found = processed_logprobs(logits, token, sampling, torch.tensor([served]))
            assert found.item() == pytest.approx(alone.item(), abs=1e-6), (sampling, served)
    for served in (-2.0, -math.inf):
        outside = processed_logprobs(logits, torch.tensor([0]), Sampling(1, top_k=2), torch.tensor([served]))
        assert outside.item() == -math.inf, "a token far outside stays so, whatever the engine says"
    for i in (1, 2):  # one of which is dropped
        alone = processed_logprobs(logs([0.4, 0.3, 0.3]), torch.tensor([i]), Sampling(1, 0, 0.6))
        found = processed_logprobs(logs([0.4, 0.3, 0.3]), torch.tensor([i]), Sampling(1, 0, 0.6), alone)
        assert found.item() == alone.item(), "agreement, also that it cannot be sampled, is agreement"
    for temperature in (1e-4, 5e-3):
        right = processed_logprobs(logits, token, Sampling(temperature, 0, 0.6))
        found = processed_logprobs(logits, token, Sampling(temperature, 0, 0.6), torch.tensor([-0.4]))
        assert found.item() == right.item() == 0, "rounding is no excuse where all that is left is one token"


def test_prompts_come_from_the_seed_and_share_a_beginning() -> None:
    a, b = draw_prompts(3, 4, 40, 512), draw_prompts(3, 4, 40, 512)
    assert a == b and a != draw_prompts(4, 4, 40, 512)
    assert len({p[:30] for p in a}) == 1 and len(set(a)) == 4
    assert all(5 <= t < 512 for p in a for t in p)


def test_ways_to_sample_are_read_from_words() -> None:
    assert sampling_from("0.7") == Sampling(0.7)
    assert sampling_from("1,top_k=20,top_p=0.9") == Sampling(1.0, 20, 0.9)
    for text in ("", "x", "1,top_k", "1,top_p=0", "-1", "1,min_p=0.1", "1,top_k=2.5"):
        with pytest.raises(ValueError, match="expected"):
            sampling_from(text)


def samples(d: float, temperatures: tuple[float, ...] = (1.0,)) -> tuple[list[Sample], list[list[float]]]:
    """Two completions of each temperature, all of whose tokens are off by ``d`` now up, now down."""
    found = [Sample((1,), (5, 6), (-1.0, -2.0), Sampling(t), (Span(0, 2, 3),)) for t in temperatures for _ in range(2)]
    return found, [[-1.0 + d, -2.0 - d] for _ in found]


def test_a_verdict_names_what_does_not_hold() -> None:
    assert judge(3, *samples(9e-6), FLOAT32).ok
    found = judge(3, *samples(2e-5), FLOAT32)
    assert not found.ok and "mean_abs 2e-05 > 1e-05" in found.exceeded
    assert "at temperature 1: mean_abs 2e-05 > 1e-05" in found.exceeded
    far = judge(3, *samples(0.5), FLOAT32)
    assert {t.split()[0] for t in far.exceeded if ":" not in t} == {"mean_abs", "p99_abs", "kl", "clip_fraction", "ess"}


def test_one_way_to_sample_that_is_wrong_does_not_hide_among_others() -> None:
    good, right = samples(0.0, (1.0, 0.8, 1.2, 1.4))
    off, wrong = samples(1.5e-5, (1.3,))
    found = judge(3, good + off, right + wrong, FLOAT32)
    assert found.exceeded == ("at temperature 1.3: mean_abs 1.5e-05 > 1e-05",)


def test_bounds_grow_as_the_temperature_falls() -> None:
    assert judge(3, *samples(1.8e-5, (0.5,)), FLOAT32).ok
    assert not judge(3, *samples(1.8e-5, (1.0,)), FLOAT32).ok
    assert FLOAT32.at(2.0) == FLOAT32.at(1.0) == FLOAT32.at(0.0) == FLOAT32


def test_values_that_are_none_and_tokens_outside_are_no_parity() -> None:
    nan = compare([[-1.0, -9999.0]], [[-1.0, -2.0]])
    assert exceeded(nan, FLOAT32) == (
        "1 values are no log-probabilities: floor of the behaviour at token 1 of sequence 0",
    )
    outside = compare([[-1.0, -1.0]], [[-1.0, -math.inf]])
    assert exceeded(outside, FLOAT32) == ("outside 1 of 2 tokens: the trainer cannot sample them",)
    assert len(exceeded(compare([], []), FLOAT32)) == 5, "nothing was compared, so no bound holds"


def test_bounds_from_the_trainers_own_rounding() -> None:
    exact = [[-1.0] * 100 for _ in range(4)]
    scored = [[-1.0 + 0.1 * (-1) ** i for i in range(100)] for _ in range(4)]
    bounds = calibrated(scored, exact)
    assert bounds.mean_abs == pytest.approx(0.2) and bounds.p99_abs == pytest.approx(0.2)
    # The engine rounds the other way: twice as far, and still within.
    other = [[-1.0 - 0.099 * (-1) ** i for i in range(100)] for _ in range(4)]
    assert exceeded(compare(other, scored), bounds) == ()
    assert exceeded(compare([[v * 1.5 for v in row] for row in other], scored), bounds)
    result = judge(3, *samples(0.01), FLOAT32, exact=[[-1.0 + 0.02, -2.0 - 0.02]] * 2)
    assert result.ok and result.thresholds.source.startswith("twice the trainer's own")


def test_bounds_may_be_the_callers() -> None:
    assert thresholds_of("float32", {"mean_abs": 0.5}) == replace(
        FLOAT32, mean_abs=0.5, source=FLOAT32.source + "; mean_abs as the caller says"
    )
    with pytest.raises(ValueError, match="mean_ab"):
        thresholds_of("float32", {"mean_ab": 1})
    with pytest.raises(ValueError, match="bfloat16"):
        thresholds_of("int8")
    for bounds in BY_DTYPE.values():
        assert bounds.source


def test_a_scorer_of_other_shape_is_an_error() -> None:
    found, _ = samples(0.0)
    with pytest.raises(ProbeError, match="2 samples of 4 tokens"):
        checked(found, [[-1.0, -2.0]])


def test_the_report_is_json_and_a_picture(tmp_path: Path) -> None:
    result = judge(3, *samples(0.1, (1.0, 0.7)), FLOAT32)
    write_json(tmp_path / "r" / "parity.json", report(result, {"seed": 5}))
    found = json.loads((tmp_path / "r" / "parity.json").read_text())
    assert found["ok"] is False and found["version"] == 3 and found["seed"] == 5
    assert found["whole"]["mean_abs"] == pytest.approx(0.1)
    assert [s["sampling"]["temperature"] for s in found["by_sampling"]] == [1.0, 0.7]
    assert [p["position"] for p in found["whole"]["curve"]] == [0, 1]
    assert found["cached_tokens"] is None, "an engine that does not tell has not said none"
    told = [replace(s, cached=3) for s in samples(0.1)[0]]
    assert report(judge(3, told, samples(0.1)[1], FLOAT32), {})["cached_tokens"] == 6
    draw(tmp_path / "parity.png", result, "t")
    assert (tmp_path / "parity.png").read_bytes()[:4] == b"\x89PNG"
    empty = report(judge(3, *(samples(0.0)[0], [[math.nan] * 2] * 2), FLOAT32), {})
    assert json.loads(json.dumps(empty, allow_nan=False))["whole"]["mean_abs"] is None


def test_the_command_refuses_what_cannot_be() -> None:
    def run(*words: str) -> int:
        return CliRunner().invoke(app, ["parity", "check", *words]).exit_code

    assert run() == 2  # neither checkpoint nor scorer
    assert run("--scorer", "math:exp") == 2  # no vocabulary
    assert run("--scorer", "math:exp", "--vocab", "9", "--sampling", "hot") == 2
    assert run("--scorer", "math:exp", "--vocab", "9", "--bound", "mean_abs") == 2
    assert run("--scorer", "math", "--vocab", "9") == 2
    assert run("--scorer", "math:pi", "--vocab", "9") == 2
    assert run("--checkpoint", "/not/here") == 2
    assert run("--scorer", "math:exp", "--vocab", "9", "--url", "http://127.0.0.1:9") == 3


def test_a_plan_is_made_from_what_was_asked() -> None:
    job = prepare(Asked("u", scorer="math:exp", vocab=99, prompts=3, prompt_tokens=7, tokens=5, completions=4, seed=2))
    assert job.plan == Plan(draw_prompts(2, 3, 7, 99), DEFAULT_SAMPLINGS, 4, 5, 2)
    assert job.scorer is math.exp and job.thresholds == FLOAT32


def test_every_option_of_the_commands_arrives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from weightplane.parity import running

    seen: list[Asked] = []

    def stop(asked: Asked, *_: object) -> None:
        seen.append(asked)
        raise running.ProbeError("enough")

    monkeypatch.setattr(running, "prepare", stop)
    monkeypatch.setattr(running, "diagnosed", stop)
    both = {
        "url": "http://h:1", "checkpoint": tmp_path, "scorer": "m:f", "version": 3, "dtype": "bfloat16",
        "head_dtype": "float16", "seed": 5, "prompts": 6, "prompt_tokens": 7, "tokens": 8, "completions": 9,
    }  # fmt: skip
    own: dict[str, dict[str, object]] = {
        "check": {"vocab": 10},
        "diagnose": {"previous": tmp_path, "fresh": "http://h:2", "in_flight": 11.0, "cache": "keep"},
    }
    for command, more in own.items():
        words = [w for k, v in {**both, **more}.items() for w in (f"--{k.replace('_', '-')}", str(v))]
        words += ["--sampling", "0.7", "--sampling", "1", "--bound", "ess=0.5", "--json"]
        assert CliRunner().invoke(app, ["parity", command, *words]).exit_code == 4
        others = {"cache_policy": more["cache"]} if "cache" in more else {}
        wanted = {**both, **{k: v for k, v in more.items() if k != "cache"}, **others}
        asked = Asked(samplings=["0.7", "1"], bounds=["ess=0.5"], **wanted)  # type: ignore[arg-type]
        assert seen.pop() == asked
        CliRunner().invoke(app, ["parity", command])
        plain = seen.pop()
        assert (plain.version, plain.checkpoint, tuple(plain.samplings)) == (None, None, ())
