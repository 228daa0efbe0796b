"""``weightplane demo --engine vllm`` as a user runs it, cut short: two real servers, every step published."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weightplane.demo.fleet import FleetError
from weightplane.demo.loop import RolloutRequest
from weightplane.demo.vllm_fleet import VllmFleet
from weightplane.inference_agent.engines.vllm.rollouts import VllmOutput
from weightplane.inference_agent.spans import Span

STEPS = 2


def test_every_step_is_published_to_both_servers_and_their_log_probabilities_are_the_trainers(
    golden: object, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "weightplane.cli", "demo", "--engine", "vllm", "--steps", str(STEPS)]
    done = subprocess.run(
        [*command, "--report", str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (tmp_path / "report.json").exists(), done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["engine"] == "vllm" and report["digests_match"] is True
    assert report["versions"] == {"replica-a": STEPS + 1, "replica-b": STEPS + 1}
    assert [p["version"] for p in report["publishes"]] == list(range(1, STEPS + 2))
    assert all(p["pause_s"] > 0 for p in report["publishes"])
    assert 0 < report["logprob_gap_most"] < 1e-5, "vLLM does not compute with the trainer's weights"
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    # Two steps do not learn to sort: the verdict and the exit status say so.
    assert report["learned"] is False and done.returncode == 5 and "did NOT learn" in done.stdout


def test_the_control_publishes_nothing_and_its_reward_does_not_rise(golden: object, tmp_path: Path) -> None:
    """``--no-sync``: the same loop and the same servers; what they serve gets stale, as the log-probabilities tell."""
    command = [sys.executable, "-m", "weightplane.cli", "demo", "--engine", "vllm", "--no-sync", "--steps", str(STEPS)]
    done = subprocess.run(
        [*command, "--report", str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["sync"] is False and report["publishes"] == [] and report["digests_match"] is None
    assert report["versions"] == {"replica-a": 0, "replica-b": 0} and report["rose"] is False
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
