"""Statistics of two sets of log-probabilities: hand calculations, properties, and values that are none."""

from __future__ import annotations

import math
import random

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightplane.inference_agent.spans import Span
from weightplane.parity.batch import batch_parity
from weightplane.parity.stats import SERVED_FLOOR, Bad, compare, ess, k3, percentile

LOGPROBS = st.floats(-30, 0, allow_nan=False)
PAIRS = st.lists(st.lists(st.tuples(LOGPROBS, LOGPROBS), min_size=1, max_size=12), min_size=1, max_size=8)


def split(pairs: list[list[tuple[float, float]]]) -> tuple[list[list[float]], list[list[float]]]:
    return [[b for b, _ in row] for row in pairs], [[t for _, t in row] for row in pairs]


def test_by_hand() -> None:
    # Weights 2, 1/2 and 1, 1: d = ln 2, -ln 2, 0, 0.
    ln2 = math.log(2)
    s = compare([[-2.0, -1.0], [-3.0, -0.5]], [[-2.0 + ln2, -1.0 - ln2], [-3.0, -0.5]])
    assert (s.tokens, s.sequences, s.bad) == (4, 2, 0)
    assert s.mean == pytest.approx(0, abs=1e-15)
    assert s.mean_abs == pytest.approx(ln2 / 2)
    assert s.max_abs == pytest.approx(ln2)
    assert s.p50_abs == pytest.approx(ln2 / 2)
    assert s.kl == pytest.approx((2 - 1 - ln2 + 0.5 - 1 + ln2) / 4)
    assert s.clip_fraction == 0.5
    assert s.ess == pytest.approx(4.5**2 / (4 * (4 + 0.25 + 1 + 1)))
    assert s.ess_sequences == pytest.approx(1)  # 2 * 1/2 and 1 * 1
    assert [(p.position, p.count) for p in s.curve] == [(0, 2), (1, 2)]
    assert [p.max_abs for p in s.curve] == pytest.approx([ln2, ln2])
    assert [p.mean for p in s.curve] == pytest.approx([ln2 / 2, -ln2 / 2])


@pytest.mark.parametrize(("weight", "clipped"), [(1.19, 0), (1.21, 1), (0.81, 0), (0.79, 1)])
def test_the_clip_counts_both_sides(weight: float, clipped: int) -> None:
    assert compare([[-3.0]], [[-3.0 + math.log(weight)]]).clip_fraction == clipped


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(float(numpy.percentile(values, q)), rel=1e-9, abs=1e-9)


@given(PAIRS)
def test_properties(pairs: list[list[tuple[float, float]]]) -> None:
    behaviour, trainer = split(pairs)
    s = compare(behaviour, trainer)
    slack = 1 + 1e-12
    assert abs(s.mean) <= s.mean_abs * slack and s.mean_abs <= s.max_abs * slack
    assert s.p50_abs <= s.p99_abs <= s.max_abs
    assert s.kl >= 0 and 0 <= s.clip_fraction <= 1
    assert 1 / s.tokens <= s.ess * slack and s.ess <= 1
    assert 1 / s.sequences <= s.ess_sequences * slack and s.ess_sequences <= 1
    assert sum(p.count for p in s.curve) == s.tokens
    assert sum(p.count * p.mean_abs for p in s.curve) / s.tokens == pytest.approx(s.mean_abs, abs=1e-12)
    # The same with the sides exchanged.
    other = compare(trainer, behaviour)
    assert other.mean == pytest.approx(-s.mean, abs=1e-12) and other.max_abs == s.max_abs


@given(PAIRS, st.randoms(use_true_random=False))
def test_the_order_of_sequences_means_nothing(pairs: list[list[tuple[float, float]]], rng: random.Random) -> None:
    shuffled = pairs[:]
    rng.shuffle(shuffled)
    a, b = compare(*split(pairs)), compare(*split(shuffled))
    assert (a.mean_abs, a.kl, a.p99_abs) == pytest.approx((b.mean_abs, b.kl, b.p99_abs))
    assert (a.ess, a.ess_sequences, a.clip_fraction) == pytest.approx((b.ess, b.ess_sequences, b.clip_fraction))


@given(st.lists(st.floats(-700, 700), min_size=1, max_size=30), st.floats(-500, 500))
def test_ess_does_not_depend_on_the_weights_scale(logs: list[float], shift: float) -> None:
    assert ess([v + shift for v in logs]) == pytest.approx(ess(logs), rel=1e-6)


def test_ess_of_one_weight_that_carries_all() -> None:
    assert ess([5000.0, 0.0, 0.0, 0.0]) == 0.25  # and nothing overflows
    assert ess([-9000.0] * 3) == 1


def test_k3_estimates_the_divergence_and_has_less_spread_than_k1() -> None:
    q, p = [0.5, 0.3, 0.2], [0.45, 0.35, 0.2]
    exact = sum(a * math.log(a / b) for a, b in zip(q, p, strict=True))
    assert sum(a * k3(math.log(b / a)) for a, b in zip(q, p, strict=True)) == pytest.approx(exact)
    assert k3(0.0) == 0 and k3(1e-9) >= 0 and k3(-1000.0) == pytest.approx(999) and k3(1000.0) == math.inf


def test_what_is_no_logprob_is_left_out_and_named() -> None:
    nan, inf = math.nan, math.inf
    s = compare([[nan, -1.0, SERVED_FLOOR], [-1.0, -1.0, 0.5]], [[-1.0, -inf, -1.0], [-1.5, inf, -1.0]])
    assert (s.tokens, s.sequences, s.bad, s.outside) == (1, 1, 4, 1)
    assert s.mean_abs == 0.5 and s.ess == 1
    assert s.named == (
        Bad(0, 0, "behaviour", "nan"),
        Bad(0, 2, "behaviour", "floor"),
        Bad(1, 1, "trainer", "+inf"),
        Bad(1, 2, "behaviour", "positive"),
        Bad(0, 1, "trainer", "-inf"),
    )


def test_a_token_that_only_the_engine_cannot_sample_is_bad() -> None:
    s = compare([[-math.inf, -1.0]], [[-1.0, -1.0]])
    assert (s.bad, s.outside) == (1, 0)
    both = compare([[-math.inf, -1.0]], [[-math.inf, -1.0]])
    assert (both.bad, both.outside) == (1, 0), "it was sampled, so one of them is wrong"


def test_nothing_to_compare_is_no_parity() -> None:
    s = compare([[math.nan] * 40], [[-1.0] * 40])
    assert (s.tokens, s.bad, len(s.named)) == (0, 40, 16)
    assert math.isnan(s.mean_abs) and math.isnan(s.ess)
    assert not s.mean_abs <= 1e9, "no threshold is met"


@pytest.mark.parametrize(("b", "t"), [([[-1.0]], []), ([[-1.0], [-1.0]], [[-1.0], [-1.0, -2.0]])])
def test_shapes_must_be_equal(b: list[list[float]], t: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="as many"):
        compare(b, t)


def test_a_batch_by_hand() -> None:
    # Two tokens of version 3 off by ln 2, the rest of version 5 exact; trained at 5.
    ln2 = math.log(2)
    behaviour = [[-1.0, -2.0, -3.0], [-1.0]]
    recomputed = [[-1.0 + ln2, -2.0 + ln2, -3.0], [-1.0]]
    spans = [(Span(0, 2, 3), Span(2, 3, 5)), (Span(0, 1, 5),)]
    found = batch_parity(behaviour, spans, recomputed, 5)
    assert found.ess == pytest.approx(6**2 / (4 * (4 + 4 + 1 + 1)))  # 0.9
    assert (found.lag.least, found.lag.most, found.lag.mean) == (0, 2, 1.0)
    assert found.by_version[3].mean_abs == pytest.approx(ln2) and found.by_version[3].ess == 1
    assert found.by_version[5].max_abs == 0 and found.by_version[5].tokens == 2
    assert found.stats.ess_sequences == pytest.approx(5**2 / (2 * (16 + 1)))
    assert batch_parity(behaviour, spans, recomputed, 5, committed=[3, 5]).lag.most == 1


def test_tokens_of_unknown_version_count_in_the_whole_alone() -> None:
    found = batch_parity([[-1.0, -2.0]], [(Span(0, 1, known=False), Span(1, 2, 4))], [[-1.5, -2.0]], 4)
    assert found.stats.tokens == 2 and found.lag.unknown_tokens == 1
    assert found.by_version[4].tokens == 1 and found.by_version[4].max_abs == 0


@pytest.mark.parametrize(
    "spans", [[], [Span(0, 1, 1)], [Span(1, 2, 1)], [Span(0, 2, 1), Span(1, 2, 1)], [Span(0, 3, 1)]]
)
def test_spans_must_cover_every_token_once(spans: list[Span]) -> None:
    with pytest.raises(ValueError, match="sequence 0"):
        batch_parity([[-1.0, -2.0]], [spans], [[-1.0, -2.0]], 1)


def test_a_token_newer_than_the_trainer_is_an_error() -> None:
    with pytest.raises(ValueError, match="newer"):
        batch_parity([[-1.0]], [[Span(0, 1, 9)]], [[-1.0]], 8)
