"""What a probe leaves behind: ``parity.json`` for machines, ``parity.png`` for people."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .diagnosis import Diagnosis
from .probe import ProbeResult
from .stats import Stats

__all__ = ["diagnosis_report", "draw", "report", "write_json"]


def report(result: ProbeResult, about: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON-ready data: every statistic by the names of ``Stats``; NaN and infinity as ``null``. ``about``: what was
    asked for (url, seed, dtype, …)."""
    told = [s.cached for s in result.samples if s.cached is not None]
    return {
        "ok": result.ok,
        "version": result.version,
        **about,
        "thresholds": {k: _finite(v) for k, v in asdict(result.thresholds).items()},
        "exceeded": list(result.exceeded),
        "whole": _plain(result.whole),
        "by_sampling": [{"sampling": asdict(s), **_plain(v)} for s, v in result.by_sampling.items()],
        "cached_tokens": sum(told) if len(told) == len(result.samples) else None,  # None: it does not tell
        "engine_seconds": result.seconds[0],
        "scorer_seconds": result.seconds[1],
    }


def diagnosis_report(found: Diagnosis, more: Mapping[str, Stats], about: Mapping[str, Any]) -> dict[str, Any]:
    """A diagnosis as JSON-ready data; ``candidates``: each hypothesis and what it leaves, the best first."""
    tried = sorted(found.candidates, key=lambda c: c.stats.mean_abs if c.stats.tokens else math.inf)
    return {
        "ok": found.kind == "none" or not found.fault,
        **about,
        **{k: _finite(getattr(found, k)) for k in ("kind", "cause", "text", "advice", "fault")},
        **{k: _finite(getattr(found, k)) for k in ("before", "left", "next_best", "separation")},
        "candidates": [{"kind": c.kind, "cause": c.cause, **_short(c.stats)} for c in tried],
        "reruns": {name: _short(stats) for name, stats in more.items()},
    }


def _short(stats: Stats) -> dict[str, Any]:
    names = ("tokens", "mean_abs", "p99_abs", "max_abs", "kl", "ess", "outside", "bad")
    return {k: _finite(getattr(stats, k)) for k in names}


def _plain(stats: Stats) -> dict[str, Any]:
    return {k: _finite(v) for k, v in asdict(stats).items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, found: Mapping[str, Any]) -> None:
    """Write it; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def draw(path: Path, result: ProbeResult, title: str) -> None:
    """The per-position curve, with the bound of the mean: mean |Δ| of each way to sample, and the largest of all.

    ``ModuleNotFoundError`` where matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    least = 1e-9  # equal to the bit has no place on a logarithmic axis
    for sampling, stats in result.by_sampling.items():
        x = [p.position for p in stats.curve]
        axes.plot(x, [max(p.mean_abs, least) for p in stats.curve], linewidth=1.4, label=f"mean, {sampling}")
    whole = result.whole.curve
    x, y = [p.position for p in whole], [max(p.max_abs, least) for p in whole]
    axes.plot(x, y, color="#43525f", linewidth=1, linestyle=":", label="largest of all")
    bound = result.thresholds.mean_abs
    if math.isfinite(bound):
        axes.axhline(bound, color="#c8562b", linestyle="--", label=f"bound of the mean, {bound:g}")
    axes.set_yscale("log")
    axes.set_xlabel("position of the token in its completion")
    axes.set_ylabel("|trainer − engine| log-probability, nats")
    axes.set_title(f"{title}: {'at parity' if result.ok else 'NOT at parity'}")
    axes.legend(fontsize="small", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
