"""What the demo leaves behind: ``report.json`` for machines, ``report.png`` for people."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from weightplane.demo.loop import RunResult
from weightplane.trainer_agent.receipt import PublishReceipt

__all__ = ["summarise", "write_report"]

_PHASES = ("gather_s", "wire_s", "verify_s", "pause_s", "apply_s", "total_s")


def summarise(
    result: RunResult,
    receipts: list[PublishReceipt],
    *,
    sync: bool,
    seed: int,
    replicas: list[str],
    versions: dict[str, int],
    digests_match: bool | None,
    seconds: float,
    engine: str = "torch_module",
    gap_last: float | None = None,
) -> dict[str, Any]:
    """The numbers of one run. ``digests_match`` is None for the control, which publishes nothing.

    ``gap_last``: mean distance of the log-probabilities that the replicas gave and the trainer's, for what they
    generated after the last publish; None where it was not measured.
    """
    metrics = [r.metrics() for r in receipts]
    gaps = [s.update.gap for s in result.steps if s.update is not None] + ([] if gap_last is None else [gap_last])
    gap_most = max(gaps, default=0.0)
    return {
        "engine": engine,
        "steps": result.config.steps,
        "seed": seed,
        "sync": sync,
        "reward_first": result.reward_first,
        "reward_last": result.reward_last,
        "rewards": [s.reward for s in result.steps],
        "thresholds": {
            "reward_first_max": result.config.reward_first_max,
            "reward_last_min": result.config.reward_last_min,
            "control_rise_max": result.config.control_rise_max,
            "gap_max": result.config.gap_max,
        },
        "learned": result.learned,
        "rose": result.rose,
        "digests_match": digests_match,
        "logprob_gap_most": gap_most,
        "replicas": replicas,
        "versions": versions,
        "phases": {name: median(m[name] for m in metrics) for name in _PHASES} if metrics else {},
        "publishes": [{"step": r.step, "version": r.version, **r.metrics()} for r in receipts],
        "seconds": seconds,
        "passed": (result.learned and bool(digests_match) and gap_most <= result.config.gap_max)
        if sync
        else not result.rose,
    }


def write_report(folder: Path, summary: dict[str, Any]) -> None:
    """Write both files; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    _draw(folder / "report.png", summary)


def _draw(path: Path, summary: dict[str, Any]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True)
    steps = range(len(summary["rewards"]))
    top.plot(steps, summary["rewards"], color="#2f6fb0", linewidth=2, label="reward of what the replicas generate")
    top.axhline(summary["thresholds"]["reward_last_min"], color="#3c8a4c", linestyle="--", label="threshold")
    top.set_ylim(0, 1.02)
    top.set_ylabel("mean reward")
    kind = "every step published to both replicas" if summary["sync"] else "control: nothing is published"
    top.set_title(f"Online RL through Weightplane, {summary['engine']}, seed {summary['seed']}: {kind}")
    top.legend(loc="lower right" if summary["sync"] else "center right")  # a flat curve lies low
    publishes = summary["publishes"]
    if publishes:
        x = [p["step"] for p in publishes]
        parts = (("wire_s", "wire", "#c8562b"), ("pause_s", "pause", "#b8860b"), ("apply_s", "apply", "#3c8a4c"))
        bottom.plot(x, [1000 * p["total_s"] for p in publishes], color="#43525f", linewidth=1, label="whole update")
        for name, label, colour in parts:
            bottom.plot(x, [1000 * p[name] for p in publishes], color=colour, linewidth=1.4, label=label)
        bottom.set_yscale("log")
        bottom.legend(loc="upper right", ncols=4)
    else:
        bottom.text(0.5, 0.5, "nothing was published", ha="center", transform=bottom.transAxes)
        bottom.set_yticks([])
    bottom.set_ylabel("milliseconds per publish")
    bottom.set_xlabel("training step")
    figure.savefig(path, dpi=110)
