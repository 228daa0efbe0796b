"""`weightplane parity` against a real vLLM on CPU and a real trainer's weights in transformers: what is healthy is at
parity, and what was planted is named from measurements alone. One float32 engine serves all cases."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.inference_agent.server import Server, eventually
from weightplane.cli.main import app
from weightplane.inference_agent.engines.vllm.audit import audit
from weightplane.inference_agent.engines.vllm.reading import read_server
from weightplane.inference_agent.engines.vllm.settings import Declared
from weightplane.parity.diagnosing import Evidence, diagnose
from weightplane.parity.diagnosis import Diagnosis
from weightplane.parity.loop import LoopCheck
from weightplane.parity.probe import sample
from weightplane.parity.samples import Plan, Sample, Sampling, draw_prompts
from weightplane.parity.stats import compare
from weightplane.parity.thresholds import BY_DTYPE
from weightplane.parity.variants import Variants
from weightplane.v1 import common_pb2, fleet_pb2, update_pb2

from .parity_engine import ENVIRONMENT, OPTIONS, ParityEngine
from .parity_fresh import standing_in
from .servers import VllmServer

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm sets up .venv-vllm for it"),
    pytest.mark.timeout(400),
]
SEED = 7
HEALTHY = 20
SAMPLINGS = (Sampling(1.0), Sampling(0.7, top_k=20), Sampling(1.3, top_p=0.9))
BOUNDS = BY_DTYPE["float32"].at(0.7)
DOCS = Path(__file__).parents[2] / "docs" / "parity.md"
#: What is planted (``ParityPlants.plant``, or how it is published) and the cause that must be named; a star: drawn.
PLANTS = {
    "raw": ("semantic", "raw-logprobs"),
    "temperature": ("semantic", "temperature-ignored"),
    "prefix": ("inference-path", "prefix-cache"),
    "flight": ("inference-path", "stale-kv-in-flight"),
    "tied": ("inference-path", "stale-tied-head"),
    "q_proj": ("inference-path", "stale:model.layers.*.self_attn.q_proj"),
    "head16": ("inference-path", "head-bfloat16"),
    "behind": ("inference-path", "version-behind"),
    "nan": ("inference-path", "nan"),
}


@dataclass
class Row:
    """A planted run: what was planted, what was measured before (same prompts, no plant) and what was concluded."""

    plant: str
    cause: str
    healthy: float
    found: Diagnosis


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    """One thread of torch: with the engine beside it on the same cores, two wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def half(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """An engine in bfloat16 with settings that are not as declared. Not awaited."""
    options = {
        **{k: v for k, v in OPTIONS.items() if k != "--worker-extension-cls"},
        "--override-generation-config": json.dumps({"repetition_penalty": 1.1}),
        "--no-enable-prefix-caching": "",
    }
    log = tmp_path_factory.mktemp("half") / "half.log"
    server = VllmServer(folders["A16"], log, environment=ENVIRONMENT, options=options).launch()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def engine(
    quiet: None, half: VllmServer, folders: dict[str, Path], plane: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ParityEngine]:
    with ParityEngine(plane, {n: folders[n] for n in ("TA", "TB")}, tmp_path_factory.mktemp("parity")) as made:
        yield made


def plan_of(seed: int) -> Plan:
    return Plan(draw_prompts(seed, 3, 256, 512), SAMPLINGS, 1, 24, seed)


def evidence(engine: ParityEngine, **options: Any) -> Evidence:
    """Of what it holds now; it knows neither settings nor plants."""
    variants = Variants(
        engine.scorers[engine.held], engine.version, engine.scorers[engine.before], engine.version_before
    )
    return Evidence(variants, BOUNDS, engine.url, **options)


def played(engine: ParityEngine, plant: str, rng: random.Random) -> tuple[list[Sample], float, str]:
    """An update with something wrong about it ("": nothing): the samples after it, mean |Δ| of the same prompts before
    it, and which tensor was drawn."""
    seed = rng.randrange(1 << 20)
    plan, layer = plan_of(seed), rng.randrange(3)
    tensor = {"q_proj": f"layers.{layer}.self_attn.q_proj", "nan": f"layers.{layer}.mlp.down_proj"}.get(plant, "")
    _, before = sample(engine.url, plan, version=engine.version)
    right = compare([s.served for s in before], engine.scorers[engine.held].score(before)).mean_abs
    if plant not in ("", "prefix", "flight"):
        engine.plant({"q_proj": "tensors", "behind": "tensors"}.get(plant, plant), tensor)
    cache = "keep" if plant in ("prefix", "flight") else "clear"
    flown = []
    if plant == "flight" or (not plant and rng.random() < 0.25):
        flown = [engine.publish_under(draw_prompts(seed + 1, 1, 230, 512)[0], seed, engine.other, cache)]
    else:
        engine.publish(engine.other, cache)
    if plant == "flight":
        engine.clear_cache()
    _, after = sample(engine.url, plan, version=engine.version)
    return [*after, *flown], right, tensor


def healed(engine: ParityEngine) -> None:
    engine.plant()
    engine.publish(engine.other)


@pytest.fixture(scope="module")
def rows(engine: ParityEngine) -> list[Row]:
    """Every plant once, in an order, with prompts, layers and tensors that the seed draws."""
    rng = random.Random(SEED)
    order = sorted(PLANTS)
    rng.shuffle(order)
    found = []
    for plant in order:
        samples, right, tensor = played(engine, plant, rng)
        cause = PLANTS[plant][1]
        if "*" in cause:
            cause = f"stale:model.{tensor}"
        found.append(Row(plant, cause, right, diagnose(samples, evidence(engine))[0]))
        healed(engine)
    return found


def cli(*words: str) -> tuple[int, Any]:
    done = CliRunner().invoke(app, ["parity", *words, "--json"])
    return done.exit_code, json.loads(done.stdout)


def test_a_healthy_float32_engine_is_at_parity_before_and_after_an_update(engine: ParityEngine, tmp_path: Path) -> None:
    for n in range(2):
        words = [
            "--url",
            engine.url,
            "--checkpoint",
            str(engine.folders[engine.held]),
            "--version",
            str(engine.version),
        ]
        code, found = cli("check", *words, "--report", str(tmp_path / str(n)), "--completions", "1")
        assert code == 0 and found["ok"], found["exceeded"]
        whole = found["whole"]
        assert whole["tokens"] == 4 * 6 * 32 and whole["bad"] == whole["outside"] == 0
        assert whole["mean_abs"] <= 1e-5 and whole["ess"] >= 0.999 and whole["clip_fraction"] == 0
        assert found["cached_tokens"] > 0, "the cache is a part of what is judged"
        assert json.loads((tmp_path / str(n) / "parity.json").read_text())["version"] == engine.version
        assert (tmp_path / str(n) / "parity.png").read_bytes()[:4] == b"\x89PNG"
        engine.publish(engine.other)


def test_nothing_is_compared_at_another_version(engine: ParityEngine, tmp_path: Path) -> None:
    words = ["--url", engine.url, "--checkpoint", str(engine.folders[engine.held]), "--report", str(tmp_path)]
    code, found = cli("check", *words, "--version", str(engine.version + 1))
    assert code == 4 and f"holds version {engine.version}" in found["error"]["message"]
    assert not list(tmp_path.iterdir())


def test_the_wrong_checkpoint_is_not_at_parity(engine: ParityEngine, tmp_path: Path) -> None:
    words = ["--url", engine.url, "--checkpoint", str(engine.folders[engine.other]), "--report", str(tmp_path)]
    code, found = cli("check", *words, "--prompts", "1", "--completions", "1")
    assert code == 4 and not found["ok"] and found["whole"]["mean_abs"] > 1


def test_what_was_planted_is_what_is_named(rows: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["| planted | healthy, mean |Δ| | planted | diagnosed | the cause leaves | the next best leaves |"]
    for row in sorted(rows, key=lambda r: list(PLANTS).index(r.plant)):
        f = row.found
        figures = [f"{v:.1e}" if not math.isnan(v) else "–" for v in (row.healthy, f.before, f.left, f.next_best)]
        lines.append(
            f"| {row.plant} | {figures[0]} | {figures[1]} | {f.kind}: {f.cause} | {figures[2]} | {figures[3]} |"
        )
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert {r.plant: (r.found.kind, r.found.cause) for r in rows} == {
        r.plant: (PLANTS[r.plant][0], r.cause) for r in rows
    }
    assert all(r.found.fault for r in rows)


def test_every_plant_is_larger_than_noise(rows: list[Row]) -> None:
    for row in rows:
        assert row.healthy <= BOUNDS.mean_abs
        assert row.plant == "nan" or row.found.before > 100 * row.healthy, row
        assert row.plant == "nan" or row.found.separation > 10, row
        # Explained to the last bit, but for a head whose rounding two kernels do not share.
        assert row.plant in ("nan", "head16") or row.found.left <= BOUNDS.mean_abs, row


def test_the_table_of_the_docs_has_every_plant() -> None:
    text = DOCS.read_text()
    for plant, (kind, cause) in PLANTS.items():
        pattern = re.escape(cause).replace("\\*", "[0-9]")
        assert re.search(rf"^\| `{plant}`.*{kind}: `?{pattern}", text, re.M), plant


def test_no_healthy_run_is_accused(engine: ParityEngine) -> None:
    rng = random.Random(SEED + 1)
    flown = 0
    for _ in range(HEALTHY):
        samples, _, _ = played(engine, "", rng)
        flown += any(len(s.spans) > 1 for s in samples)
        found, _ = diagnose(samples, evidence(engine))
        assert (found.kind, found.fault) == ("none", False), found
    assert flown, "requests that were computed again under new weights are among them"


def test_stale_keys_are_no_fault_where_the_group_asked_for_them(engine: ParityEngine) -> None:
    samples, _, _ = played(engine, "prefix", random.Random(SEED + 2))
    found, _ = diagnose(samples, evidence(engine, cache_policy="keep"))
    healed(engine)
    assert (found.cause, found.fault) == ("prefix-cache", False)
    assert found.before > 0.1 and "declared" in found.text


def test_a_training_job_that_forgets_the_temperature_is_told_from_its_engine(engine: ParityEngine) -> None:
    scorer = engine.scorers[engine.held]

    def own(samples: Sequence[Sample]) -> list[list[float]]:
        return scorer.score([replace(s, sampling=replace(s.sampling, temperature=1.0)) for s in samples])

    _, samples = sample(engine.url, plan_of(SEED), version=engine.version)
    found, _ = diagnose(samples, evidence(engine, own=own))
    assert (found.kind, found.cause) == ("objective", "trainer")
    assert diagnose(samples, evidence(engine, own=scorer))[0].kind == "none"


def test_without_the_version_before_nothing_is_guessed(engine: ParityEngine) -> None:
    rng = random.Random(SEED + 3)
    samples, _, _ = played(engine, "prefix", rng)
    alone = replace(evidence(engine), variants=Variants(engine.scorers[engine.held], engine.version))
    found, more = diagnose(samples, alone)
    healed(engine)
    assert (found.kind, found.cause) == ("inference-path", "unknown"), "wrong at temperature 1 too: not by serving"
    assert "cache is likely stale" in found.text
    assert more["rescored"].mean_abs <= BOUNDS.mean_abs, "asked again without its cache it is right"
    samples, _, _ = played(engine, "q_proj", rng)
    alone = replace(evidence(engine), variants=Variants(engine.scorers[engine.held], engine.version))
    found, more = diagnose(samples, alone)
    healed(engine)
    assert (found.kind, found.cause) == ("inference-path", "unknown")
    assert more["rescored"].mean_abs > 100 * BOUNDS.mean_abs


def test_the_command_names_the_cause(engine: ParityEngine, tmp_path: Path) -> None:
    engine.plant("tensors", "layers.2.mlp.up_proj")
    engine.publish(engine.other)
    words = ["--url", engine.url, "--checkpoint", str(engine.folders[engine.held]), "--report", str(tmp_path)]
    words += ["--previous", str(engine.folders[engine.before]), "--prompts", "2", "--sampling", "1", "--tokens", "24"]
    code, found = cli("diagnose", *words)
    healed(engine)
    assert code == 4 and found["cause"] == "stale:model.layers.2.mlp.up_proj"
    assert json.loads((tmp_path / "diagnosis.json").read_text()) == found
    words[3] = str(engine.folders[engine.held])
    code, found = cli("diagnose", *words)
    assert code == 0 and found["kind"] == "none"


@pytest.mark.parametrize(("cache", "cause"), [("clear", "none"), ("keep", "stale-kv-in-flight")])
def test_the_command_keeps_a_request_in_flight_through_an_update(
    engine: ParityEngine, tmp_path: Path, cache: str, cause: str
) -> None:
    before, after = engine.held, engine.other
    words = ["--url", engine.url, "--checkpoint", str(engine.folders[after]), "--report", str(tmp_path)]
    words += ["--previous", str(engine.folders[before]), "--prompts", "1", "--sampling", "1", "--tokens", "32"]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(cli, "diagnose", *words, "--in-flight", "240", "--seed", str(SEED))
        eventually(lambda: engine.requests > 0 or running.done(), 120, "a request is in flight")
        engine.publish(after, cache)
        code, found = running.result(240)
    healed(engine)
    assert found.get("cause") == cause, found
    assert code == (0 if cause == "none" else 4) and found["in_flight"] >= 1


def test_a_fresh_engine_is_asked_for_the_same_tokens(engine: ParityEngine, tmp_path: Path) -> None:
    engine.plant("tensors", "layers.0.self_attn.q_proj")
    engine.publish(engine.other)
    words = ["--url", engine.url, "--checkpoint", str(engine.folders[engine.held]), "--report", str(tmp_path)]
    words += ["--prompts", "1", "--sampling", "1", "--tokens", "24"]
    with standing_in(engine.scorers[engine.held]) as fresh:  # for an engine that was just started from it
        code, found = cli("diagnose", *words, "--fresh", fresh)
    healed(engine)
    assert code == 4 and found["cause"] == "unknown" and found["kind"] == "inference-path"
    reruns = {name: stats["mean_abs"] for name, stats in found["reruns"].items()}
    assert reruns["fresh"] <= BOUNDS.mean_abs < 100 * BOUNDS.mean_abs < reruns["rescored"]


def test_a_replica_tells_its_conditions_as_it_joins_and_one_may_block_it(engine: ParityEngine) -> None:
    def told() -> dict[str, str]:
        return {c.type: c.status for c in engine.replica.conditions}

    eventually(lambda: bool(told()), 60, "conditions are told")
    assert set(told().values()) == {"True"} and {"Audit", "LogprobsMode", "HeadDtype", "CachePolicy"} <= set(told())
    if not engine.version:
        engine.publish(engine.other)
    assert engine.routable
    engine.policy(declared={"dtype": "bfloat16"}, cache=common_pb2.CACHE_POLICY_KEEP, blocking=["Dtype"])
    eventually(lambda: told()["Dtype"] == "False", 60, "judged anew")
    assert {k for k, v in told().items() if v == "False"} == {"Dtype", "PrefixCaching", "CachePolicy"}
    assert not engine.routable
    engine.policy(declared={"engine_colour": "blue"})
    eventually(lambda: told()["Audit"] == "Unknown", 60, "what is not understood is told")
    assert engine.routable
    engine.policy()
    eventually(lambda: set(told().values()) == {"True"}, 60, "all as declared")


def test_a_check_in_the_loop_that_fails_keeps_its_replica_out_until_the_next_update(engine: ParityEngine) -> None:
    check = LoopCheck(lambda samples: engine.scorers[engine.held].score(samples), every=100, vocab=512)
    engine.policy(parity=fleet_pb2.PARITY_POLICY_QUARANTINE)
    engine.plant("tensors", "layers.1.self_attn.q_proj")
    engine.publish(engine.other)
    (found,) = check(engine.publisher, engine.receipt)
    assert found.verdict == update_pb2.PARITY_VERDICT_NOT_AT_PARITY and found.mean_abs > 0.01
    assert engine.replica.admin == "QUARANTINED" and "mean_abs" in engine.replica.failure.message
    (kept,) = engine.publisher.outcome(engine.receipt.update_id).parity
    assert kept == found
    healed(engine)
    (found,) = check(engine.publisher, engine.receipt)
    engine.policy()
    assert found.verdict == update_pb2.PARITY_VERDICT_AT_PARITY and found.mean_abs <= 1e-5 and found.ess >= 0.999
    assert engine.replica.admin == "ACTIVE" and engine.replica.held.version == engine.version
    assert check(engine.publisher, engine.receipt) == (), "all is well, so it is not due"


def test_the_audit_finds_what_a_real_engine_was_started_with(engine: ParityEngine, half: VllmServer) -> None:
    declared = Declared(dtype="float32", prefix_caching=True, weight_version=engine.version)
    settings = replace(read_server(engine.url), cache_policy="clear", pause_mode="keep")
    assert {c.type: c.message for c in audit(settings, declared) if c.status != "True"} == {}
    other = replace(read_server(half.wait_healthy().url), cache_policy="clear", pause_mode="keep")
    wrong = {c.type for c in audit(other, replace(declared, weight_version=0)) if c.status == "False"}
    assert wrong == {"Dtype", "HeadDtype", "PrefixCaching", "SamplingDefaults"}


def test_bfloat16_is_within_its_bounds_and_they_bound(
    half: VllmServer, quiet: None, folders: dict[str, Path], tmp_path: Path
) -> None:
    half.wait_healthy()
    words = ["--url", half.url, "--dtype", "bfloat16", "--head-dtype", "bfloat16", "--report", str(tmp_path)]
    small = ["--prompts", "2", "--completions", "2"]
    code, found = cli("check", "--checkpoint", str(folders["A16"]), *words, *small)
    assert code == 0, found["exceeded"]
    assert 1e-3 < found["whole"]["mean_abs"] < 0.14 and found["whole"]["ess"] > 0.96
    code, found = cli("check", "--checkpoint", str(folders["B16"]), *words, *small)
    assert code == 4
