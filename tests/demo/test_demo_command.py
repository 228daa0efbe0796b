"""``weightplane demo`` as a user runs it, cut short: processes, publishes, digests, report; and its control."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STEPS = 3


def demo(folder: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    command = [
        sys.executable,
        "-m",
        "weightplane.cli",
        "demo",
        "--steps",
        str(STEPS),
        "--report",
        str(folder),
        *options,
    ]
    done = subprocess.run(
        command, env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True, timeout=110, check=False
    )
    assert (folder / "report.json").exists(), done.stdout + done.stderr
    return done.returncode, done.stdout, json.loads((folder / "report.json").read_text())


def test_every_step_is_published_to_both_replicas_and_compared_bit_for_bit(tmp_path: Path) -> None:
    code, said, report = demo(tmp_path)
    assert report["digests_match"] is True
    assert report["steps"] == STEPS
    assert report["replicas"] == ["replica-a", "replica-b"]
    assert report["versions"] == {"replica-a": STEPS + 1, "replica-b": STEPS + 1}
    assert [p["version"] for p in report["publishes"]] == list(range(1, STEPS + 2))
    assert report["reward_first"] == report["rewards"][0] and report["reward_last"] == report["rewards"][-1]
    assert all(report["phases"][name] > 0 for name in ("wire_s", "pause_s", "apply_s", "total_s"))
    assert said.count("LIVE digests equal the trainer's") == 2
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    # Three steps do not learn to sort: the verdict and the exit status say so.
    assert report["learned"] is False and code == 5 and "did NOT learn" in said


@pytest.mark.parametrize("seed", [0])
def test_the_control_publishes_nothing_and_its_reward_does_not_move(tmp_path: Path, seed: int) -> None:
    code, said, report = demo(tmp_path, "--no-sync", "--seed", str(seed))
    assert code == 0, said
    assert report["publishes"] == [] and report["versions"] == {"replica-a": 0, "replica-b": 0}
    assert len(set(report["rewards"])) == 1, "the replicas never changed, so neither did what they generate"
    assert report["rose"] is False and report["digests_match"] is None
