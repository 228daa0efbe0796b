"""The demo, end to end: processes, training with a publish at every step, the comparison of digests, the report."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import nn

from weightplane.demo.config import DemoConfig
from weightplane.demo.fleet import FleetError, HttpFleet
from weightplane.demo.loop import Fleet, RunResult, StepResult, run
from weightplane.demo.model import DecoderLM, build_model
from weightplane.demo.processes import Processes, ProcessFailed
from weightplane.demo.report import summarise, write_report
from weightplane.trainer_agent.errors import PublishError
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.receipt import PublishReceipt
from weightplane.trainer_agent.sources import ModuleSource, module_tensors
from weightplane.transports.digest import digest_tensor, hex_digest

__all__ = ["DemoFailed", "run_demo", "train", "verdict"]

GROUP = "demo"
REPLICAS = ("replica-a", "replica-b")
_ROWS = 12


class DemoFailed(RuntimeError):
    """The demo could not go on; says which part and why."""


class PublishingFleet(Fleet, Protocol):
    """A fleet that keeps its receipts."""

    receipts: list[PublishReceipt]


def run_demo(
    *, sync: bool = True, seed: int = 0, steps: int = 0, transport: str = "", report: Path, quiet: bool = False
) -> dict[str, Any]:
    """Run it; the summary that ``report.json`` holds. ``passed`` is the verdict. Raises ``DemoFailed``."""
    config = DemoConfig(seed=seed)
    if steps:
        config = replace(config, steps=steps)
    console = Console(highlight=False, quiet=quiet, width=None if sys.stdout.isatty() else 120)
    began = time.monotonic()
    threads = torch.get_num_threads()
    try:
        with Processes() as processes:
            address = processes.control_plane()
            unsynced = [] if sync else ["--serve-unsynced", "--engine-option", f"seed={seed}"]
            generate = processes.replicas(address, GROUP, REPLICAS, unsynced)
            console.print(f"control plane {address}; replicas {', '.join(f'{n} at {a}' for n, a in generate.items())}")
            model = build_model(config.model, seed)
            source = ModuleSource(model)
            with Publisher(address, GROUP, source, trainer_id="demo", transport=transport) as publisher:
                publisher.wait_for_replicas(len(REPLICAS), timeout=60)
                fleet = HttpFleet(generate, publisher if sync else None)
                result = train(config, fleet, model, console)
                match = _digests_match(model, fleet, console) if sync else None
                versions = fleet.versions()
                fleet.close()
    except (ProcessFailed, FleetError, PublishError, TimeoutError) as error:
        raise DemoFailed(f"{type(error).__name__}: {error}") from error
    finally:
        torch.set_num_threads(threads)
    summary = summarise(
        result,
        fleet.receipts,
        sync=sync,
        seed=seed,
        replicas=list(REPLICAS),
        versions=versions,
        digests_match=match,
        seconds=time.monotonic() - began,
    )
    write_report(report, summary)
    verdict(console, summary, report)
    return summary


def train(config: DemoConfig, fleet: PublishingFleet, model: nn.Module, console: Console) -> RunResult:
    """Run the loop; a table of its steps meanwhile."""
    rows: list[tuple[str, ...]] = []

    def grid() -> Table:
        table = Table(title=f"sorting {config.length} digits, learnt from a reward", title_justify="left")
        for column in ("step", "reward", "version", "wire", "pause", "apply", "update", "GB/s", "rollout", "train"):
            table.add_column(column, justify="right")
        for row in rows[-_ROWS:]:
            table.add_row(*row)
        return table

    interactive = console.is_terminal and not console.quiet
    with Live(grid(), console=console, auto_refresh=False, transient=True) if interactive else _Silent() as live:

        def on_step(step: StepResult) -> None:
            rows.append(_row(step, fleet))
            if interactive:
                live.update(grid(), refresh=True)
            elif step.step % 10 == 0 or step.step == config.steps:
                console.print("step {} reward {} version {} wire {} pause {} apply {} update {}".format(*rows[-1]))

        return run(config, fleet, model, on_step)


class _Silent:
    """Stands in for the live table where there is no terminal."""

    def __enter__(self) -> Any:
        return None

    def __exit__(self, *exc: object) -> None:
        return None


def _row(step: StepResult, fleet: PublishingFleet) -> tuple[str, ...]:
    spent = (f"{step.rollout_s:.2f} s", f"{step.train_s:.2f} s")
    if not fleet.receipts:
        return (str(step.step), f"{step.reward:.3f}", "none", "-", "-", "-", "-", "-", *spent)
    m = fleet.receipts[-1].metrics()
    times = (f"{1000 * m[name]:.1f} ms" for name in ("wire_s", "pause_s", "apply_s", "total_s"))
    return (str(step.step), f"{step.reward:.3f}", str(fleet.receipts[-1].version), *times, f"{m['gbps']:.2f}", *spent)


def _digests_match(model: DecoderLM, fleet: HttpFleet, console: Console) -> bool:
    """Whether every tensor in every replica's live memory is the trainer's, bit for bit."""
    ours = {name: hex_digest(digest_tensor(tensor)) for name, tensor in module_tensors(model)}
    match = True
    for replica, theirs in fleet.digests().items():
        wrong = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        match = match and not wrong
        what = f"differ: {', '.join(wrong[:5])}" if wrong else f"all {len(ours)} LIVE digests equal the trainer's"
        console.print(f"{replica}: {what}")
    return match


def verdict(console: Console, summary: dict[str, Any], report: Path) -> None:
    """Say how it went."""
    first, last = summary["reward_first"], summary["reward_last"]
    if summary["sync"]:
        want = summary["thresholds"]["reward_last_min"]
        word = "learnt" if summary["learned"] else "did NOT learn"
        console.print(
            f"the policy {word}: reward {first:.3f} -> {last:.3f} (threshold {want}) in {summary['seconds']:.0f} s"
        )
    else:
        word = "ROSE, though nothing was published" if summary["rose"] else "did not rise, as nothing was published"
        console.print(f"control: reward {first:.3f} -> {last:.3f}: it {word} ({summary['seconds']:.0f} s)")
    console.print(f"report: {report / 'report.png'}, {report / 'report.json'}")
