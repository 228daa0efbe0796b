"""The judgement of a diagnosis, from measurements alone. Real engines: tests/vllm/test_parity.py."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weightplane.cli.main import app
from weightplane.parity import running
from weightplane.parity.diagnosis import Candidate, choose
from weightplane.parity.stats import SERVED_FLOOR, Stats, compare
from weightplane.parity.thresholds import BY_DTYPE

FLOAT32 = BY_DTYPE["float32"]


def off(d: float, outside: int = 0) -> Stats:
    """40 tokens off by ``d``, and some that cannot be sampled."""
    return compare([[-1.0] * (40 + outside)], [[-1.0 + d * (-1) ** i for i in range(40)] + [-math.inf] * outside])


def candidate(cause: str, stats: Stats, kind: str = "inference-path", fault: bool = True) -> Candidate:
    return Candidate(kind, cause, stats, f"it is {cause}", "set it", fault)


def test_at_parity_nothing_is_accused_however_well_a_cause_fits() -> None:
    found = choose(off(4e-6), FLOAT32, [candidate("a", off(0.0))])
    assert (found.kind, found.cause, found.fault) == ("none", "none", False)


def test_the_cause_that_leaves_least_is_named_with_the_next_best() -> None:
    tried = [candidate("a", off(0.3)), candidate("b", off(5e-6), "semantic"), candidate("c", off(0.02))]
    found = choose(off(0.5), FLOAT32, tried)
    assert (found.kind, found.cause, found.fault) == ("semantic", "b", True)
    assert found.before == pytest.approx(0.5) and found.left == pytest.approx(5e-6)
    assert found.next_best == pytest.approx(0.02) and found.separation == pytest.approx(4000)


def test_a_cause_that_leaves_a_tenth_is_believed_and_one_that_leaves_more_is_not() -> None:
    assert choose(off(0.5), FLOAT32, [candidate("a", off(0.049))]).cause == "a"
    assert choose(off(0.5), FLOAT32, [candidate("a", off(0.051))]).cause == "unknown"
    assert choose(off(2e-5), FLOAT32, [candidate("a", off(9e-6))]).cause == "a", "within the bounds"


def test_tokens_that_cannot_be_sampled_under_a_cause_speak_against_it() -> None:
    found = choose(off(0.5), FLOAT32, [candidate("a", off(0.0, outside=4)), candidate("b", off(0.01))])
    assert found.cause == "b"


def test_where_no_cause_is_believed_the_engines_own_rerun_says_on_which_side() -> None:
    wrong = [candidate("a", off(0.4))]
    assert choose(off(0.5), FLOAT32, wrong, rescored=off(4e-6)).kind == "semantic"
    computed = choose(off(0.5), FLOAT32, wrong, rescored=off(0.5))
    assert computed.kind == "inference-path" and "--dtype here is to be the engine's" in computed.advice
    assert choose(off(0.5), FLOAT32, wrong).kind == "inference-path"
    assert choose(off(0.5), FLOAT32, []).cause == "unknown"


def test_a_stale_cache_of_which_the_engine_does_not_tell_is_no_way_to_serve() -> None:
    """Weights before are there and so are old keys, but vLLM runs without --enable-prompt-tokens-details."""
    wrong = [candidate("version-behind", off(0.4))]
    found = choose(off(0.5), FLOAT32, wrong, rescored=off(4e-6), neutral=off(0.5), untold=True)
    assert (found.kind, found.cause) == ("inference-path", "unknown") and "cache is likely stale" in found.text
    assert "--enable-prompt-tokens-details" in found.advice and "--previous" not in found.advice
    found = choose(off(0.5), FLOAT32, wrong, rescored=off(4e-6), neutral=off(4e-6))
    assert found.kind == "semantic" and "--enable" not in found.advice


def test_values_that_are_not_finite_are_named_before_all_else() -> None:
    served = compare([[-1.0, SERVED_FLOOR, math.nan, -1.0]], [[-1.0] * 4])
    found = choose(served, FLOAT32, [candidate("a", off(0.0))], rescored=compare([[math.nan]], [[-1.0]]))
    assert (found.kind, found.cause) == ("inference-path", "nan")
    assert "2 of its" in found.text and "50%" in found.text and "without its cache" in found.text


def test_a_trainer_that_is_not_finite_is_not_blamed_on_the_engine() -> None:
    served = compare([[-1.0] * 4], [[-1.0, math.nan, -1.0, -1.0]])
    assert choose(served, FLOAT32, []).cause == "trainer-nan"


def test_what_the_group_asked_for_is_reported_and_no_fault() -> None:
    found = choose(off(0.5), FLOAT32, [candidate("prefix-cache", off(5e-6), fault=False)])
    assert (found.cause, found.fault, found.before) == ("prefix-cache", False, pytest.approx(0.5))


def test_the_command_prints_cause_and_figures_as_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "ok": False, "kind": "inference-path", "cause": "prefix-cache", "text": "old keys", "advice": "clear",
        "candidates": [], "reruns": {"rescored": {"mean_abs": 5.39654865860939e-06}, "fresh": {"mean_abs": None}},
        "in_flight": 1,
    }  # fmt: skip
    monkeypatch.setattr(running, "diagnosed", lambda *_: found)
    done = CliRunner().invoke(app, ["parity", "diagnose", "--in-flight", "5"])
    assert done.exit_code == 4
    assert "inference-path: prefix-cache: old keys" in done.stdout and "mean |Δ| 5.40e-06" in done.stdout
    assert "mean |Δ| not finite" in done.stdout and "1 request(s) in flight met an update" in done.stdout


def test_who_keeps_requests_in_flight_is_told_when_to_publish(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(running, "ride_through", lambda *_, **__: ())
    with caplog.at_level(logging.WARNING, "weightplane.parity"):
        running._flown(running.Asked("u", previous=Path("b"), in_flight=5.0), 99)
    assert "publish the version of --checkpoint now" in caplog.text
