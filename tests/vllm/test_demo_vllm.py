"""``weightplane demo --engine vllm`` as a user runs it, cut short: two real servers, every step published."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weightplane.demo.fleet import FleetError
from weightplane.demo.loop import RolloutRequest
from weightplane.demo.vllm_fleet import VllmFleet
from weightplane.inference_agent.engines.vllm.rollouts import VllmOutput
from weightplane.inference_agent.spans import Span

from .models import ENVIRONMENT

STEPS = 2


ONE_SERVER = """
from weightplane.cli.main import app
from weightplane.demo import vllm_main

vllm_main.REPLICAS = vllm_main.REPLICAS[:1]
app(prog_name="weightplane")
"""


@dataclass
class Demo:
    status: int
    said: str
    folder: Path

    @property
    def report(self) -> dict[str, Any]:
        assert (self.folder / "report.json").exists(), self.said
        return dict(json.loads((self.folder / "report.json").read_text()))


def demo(folder: Path, *command: str) -> Demo:
    done = subprocess.run(
        [sys.executable, *command, "--engine", "vllm", "--steps", str(STEPS), "--report", str(folder)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return Demo(done.returncode, done.stdout + done.stderr, folder)


def test_every_step_is_published_to_both_servers_and_their_log_probabilities_are_the_trainers(
    golden: object, tmp_path: Path
) -> None:
    found = demo(tmp_path, "-m", "weightplane.cli", "demo")
    report = found.report
    assert report["engine"] == "vllm" and report["digests_match"] is True
    assert report["versions"] == {"replica-a": STEPS + 1, "replica-b": STEPS + 1}
    assert [p["version"] for p in report["publishes"]] == list(range(1, STEPS + 2))
    assert all(p["pause_s"] > 0 for p in report["publishes"])
    assert 0 < report["logprob_gap_most"] < 1e-5, "vLLM does not compute with the trainer's weights"
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    # Before training and after each step an evaluation, a batch a step, and the last evaluation once more.
    assert len(report["batches"]) == 2 * STEPS + 2
    assert report["ess_least"] >= 0.999 and all(b["lag"] == 0 for b in report["batches"])
    # Two steps do not learn to sort: the verdict and the exit status say so.
    assert report["learned"] is False and found.status == 5 and "did NOT learn" in found.said


def test_the_control_publishes_nothing_and_its_reward_does_not_rise(golden: object, tmp_path: Path) -> None:
    """``--no-sync``: the same loop; what is served gets stale, as the log-probabilities tell. Nothing is published, so
    one server shows as much as two."""
    control = demo(tmp_path, "-c", ONE_SERVER, "demo", "--no-sync")
    report = control.report
    assert control.status == 0, control.said
    assert report["sync"] is False and report["publishes"] == [] and report["digests_match"] is None
    assert report["versions"] == {"replica-a": 0} and report["rose"] is False
    assert report["batches"][0]["mean_abs"] < 1e-5 < report["batches"][-1]["mean_abs"]
    assert report["batches"][0]["ess"] > report["ess_least"]
    assert report["logprob_gap_most"] > 1e-4, "the servers' weights followed the trainer's, and nobody published"


@pytest.mark.parametrize(
    "spans", [(Span(0, 4, version=6),), (Span(0, 2, version=7), Span(2, 4, version=6)), (Span(0, 4, known=False),), ()]
)
def test_tokens_of_another_version_end_the_demo(spans: tuple[Span, ...]) -> None:
    fleet = VllmFleet({"a": "http://127.0.0.1:1"}, None)
    receipt: Any = SimpleNamespace(version=7, committed=True, replicas=())
    fleet.receipts.append(receipt)
    server: Any = SimpleNamespace(generate=lambda *a, **k: [VllmOutput([1, 2, 3, 4], [0.0] * 4, spans, "length")])
    fleet.servers["a"] = server
    with pytest.raises(FleetError, match="version 7 is published"):
        fleet.generate([RolloutRequest([[1, 2]], 4, 1.0, 0)])
    assert not fleet.digests_match(), "a replica that is not in the receipt does not count as equal"
    fleet.close()
