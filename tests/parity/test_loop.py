"""The check in a training loop: when it is due, whom it asks, and what it tells. The engines are stood in for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from weightplane.inference_agent.spans import Span
from weightplane.parity import loop
from weightplane.parity.loop import LoopCheck
from weightplane.parity.probe import ProbeError
from weightplane.parity.samples import Plan, Sample, Sampling
from weightplane.v1 import fleet_pb2, update_pb2

OK, BAD, NOTHING = (
    update_pb2.PARITY_VERDICT_AT_PARITY,
    update_pb2.PARITY_VERDICT_NOT_AT_PARITY,
    update_pb2.PARITY_VERDICT_NOT_MEASURED,
)
PLAN = Plan(((1, 2, 3),), (Sampling(),), 1, 2)


@dataclass
class Fleet:
    """A publisher, and the engines behind it: what each is off by (nats), or why it does not answer."""

    off: dict[str, float | str]
    told: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def replicas(self, timeout: float = 10.0) -> list[fleet_pb2.ReplicaInfo]:
        return [fleet_pb2.ReplicaInfo(replica_id=r, serving_address="" if r == "mute" else r) for r in self.off]

    def tell_parity(self, update_id: str, results: Sequence[update_pb2.ParityResult], timeout: float = 10.0) -> None:
        self.told.append((update_id, tuple(p.verdict for p in results)))

    def sample(self, url: str, plan: Plan, *, version: int, timeout: float) -> tuple[int, tuple[Sample, ...]]:
        self.asked.append(url)
        off = self.off[url]
        if isinstance(off, str):
            raise ProbeError(off)
        served = Sample((1,), (5, 6), (-1.0 + off, -2.0 - off), Sampling(), (Span(0, 2, version),))
        return version, (served,)


@dataclass
class Receipt:
    version: int
    ready: tuple[str, ...]
    committed: bool = True

    @property
    def update_id(self) -> str:
        return f"u{self.version}"


def scorer(samples: Sequence[Sample]) -> list[list[float]]:
    return [[-1.0, -2.0] for _ in samples]


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    made = Fleet({"a": 0.0, "b": 0.0})
    monkeypatch.setattr(loop, "sample", made.sample)
    yield made


def verdicts(found: Sequence[update_pb2.ParityResult]) -> dict[str, int]:
    return {p.replica_id: p.verdict for p in found}


def test_it_is_made_at_the_first_version_and_one_of_every_n(fleet: Fleet) -> None:
    check = LoopCheck(scorer, every=3, plan=PLAN)
    made = [v for v in range(4, 12) if check(fleet, Receipt(v, ("a", "b")))]
    assert made == [4, 7, 10] and [u for u, _ in fleet.told] == ["u4", "u7", "u10"]
    assert check(fleet, Receipt(20, ("a",), committed=False)) == ()


def test_the_replica_that_is_off_is_named_and_checked_at_every_version_until_it_is_well(fleet: Fleet) -> None:
    fleet.off["b"] = 0.5
    check = LoopCheck(scorer, every=10, plan=PLAN)
    found = check(fleet, Receipt(1, ("a", "b")))
    assert verdicts(found) == {"a": OK, "b": BAD}
    assert found[1].mean_abs == pytest.approx(0.5) and "mean_abs 0.5 > 1e-05" in found[1].reason
    assert found[1].version == 1 and found[1].tokens == 2
    fleet.off["b"] = 0.0
    assert verdicts(check(fleet, Receipt(2, ("a", "b")))) == {"a": OK, "b": OK}
    assert check(fleet, Receipt(3, ("a", "b"))) == ()


def test_an_engine_that_does_not_answer_is_told_and_accused_of_nothing(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.off.update(b="it holds version 3", mute=0.0)
    found = LoopCheck(scorer, plan=PLAN)(fleet, Receipt(4, ("a", "b", "mute", "gone")))
    assert verdicts(found) == {"a": OK, "b": NOTHING, "mute": NOTHING}
    assert found[1].reason == "it holds version 3" and math.isnan(found[1].mean_abs)
    assert "serving_address" in found[2].reason
    assert "replica b was not checked" in caplog.text and "replica mute was not checked" in caplog.text
    again = LoopCheck(scorer, plan=PLAN, urls={"mute": "a"})(fleet, Receipt(5, ("mute",)))
    assert verdicts(again) == {"mute": OK}


def test_of_a_large_fleet_some_at_a_time_in_turn_and_those_that_failed_first(fleet: Fleet) -> None:
    fleet.off.update({f"r{i}": 0.0 for i in range(5)})
    ready = tuple(fleet.off)
    check = LoopCheck(scorer, every=1, plan=PLAN, at_most=3)
    fleet.off["b"] = 1.0
    rounds = [tuple(verdicts(check(fleet, Receipt(v, ready)))) for v in range(1, 5)]
    assert rounds == [("a", "b", "r0"), ("b", "r1", "r2"), ("b", "r3", "r4"), ("b", "a", "r0")]


def test_a_scorer_that_fails_is_the_trainers_own_and_raises(fleet: Fleet) -> None:
    def short(samples: Sequence[Sample]) -> list[list[float]]:
        return [[-1.0] for _ in samples]

    with pytest.raises(ProbeError, match="the scorer gave"):
        LoopCheck(short, plan=PLAN)(fleet, Receipt(1, ("a",)))
    assert not fleet.told
    with pytest.raises(ValueError, match="vocab"):
        LoopCheck(scorer)


def test_a_model_in_training_is_scored_as_it_is_and_left_in_its_mode() -> None:
    transformers = pytest.importorskip("transformers")
    from weightplane.parity.scorer import TransformersScorer

    config: Any = transformers.Qwen2Config(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, attention_dropout=0.5,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).train()
    model.model.norm.eval()
    scored = TransformersScorer.of(model)
    sample = Sample((1, 2, 3), (4, 5), (0.0, 0.0), Sampling())
    before = scored([sample])
    assert before == scored([sample]), "no dropout"
    assert model.training and not model.model.norm.training and model.model.layers[0].training
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert scored([sample]) != before and scored.vocab_size == 64
