"""``weightplane demo --engine vllm``: the same loop, served by two stock vLLM servers on CPU."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from weightplane.demo.config import DemoConfig
from weightplane.demo.fleet import FleetError
from weightplane.demo.loop import eval_requests
from weightplane.demo.main import REPLICAS, DemoFailed, train, verdict
from weightplane.demo.processes import Processes, ProcessFailed
from weightplane.demo.report import summarise, write_report
from weightplane.demo.task import SortTask
from weightplane.demo.vllm_fleet import Policy, VllmFleet
from weightplane.trainer_agent.errors import PublishError
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.sources import ModuleSource

__all__ = ["run_vllm_demo"]

_GROUP = "demo-vllm"
_ELSEWHERE = 1_000_003  # seed of the weights that the servers are born with: not the trainer's


def run_vllm_demo(
    *, sync: bool = True, seed: int = 0, steps: int = 0, transport: str = "", report: Path, quiet: bool = False
) -> dict[str, Any]:
    """As ``main.run_demo``; the servers start from a checkpoint of other weights (the control from the trainer's)."""
    config = DemoConfig(seed=seed)
    if steps:
        config = replace(config, steps=steps)
    console = Console(highlight=False, quiet=quiet, width=None if sys.stdout.isatty() else 120)
    began = time.monotonic()
    try:
        with Processes() as processes:
            model = Policy(config, seed)
            born = Policy(config, _ELSEWHERE) if sync else model
            address = processes.control_plane()
            console.print(f"control plane {address}; two vLLM servers start (half a minute or so) …")
            urls = processes.vllm_replicas(address, _GROUP, REPLICAS, born.save(processes.path / "checkpoint"))
            console.print(f"vLLM: {', '.join(f'{n} at {u}' for n, u in urls.items())}")
            with Publisher(
                address, _GROUP, ModuleSource(model.inner), trainer_id="demo", transport=transport
            ) as publisher:
                publisher.wait_for_replicas(len(REPLICAS), timeout=60)
                fleet = VllmFleet(urls, publisher if sync else None, model)
                result = train(config, fleet, model, console)
                versions = fleet.versions()
                fleet.generate(eval_requests(config, SortTask(config.symbols, config.length)))
                gap = fleet.batches[-1].stats.mean_abs  # once more, at the last weights
                fleet.close()
    except (ProcessFailed, FleetError, PublishError, TimeoutError) as error:
        raise DemoFailed(f"{type(error).__name__}: {error}") from error
    current = fleet.receipts[-1].version if fleet.receipts else 0
    match = fleet.digests_match() and set(versions.values()) == {current} if sync else None
    summary = summarise(
        result,
        fleet.receipts,
        sync=sync,
        seed=seed,
        replicas=list(REPLICAS),
        versions=versions,
        digests_match=match,
        seconds=time.monotonic() - began,
        engine="vllm",
        gap_last=gap if sync else None,
    )
    worth = [{"ess": b.ess, "lag": b.lag.mean, "mean_abs": b.stats.mean_abs} for b in fleet.batches]
    summary |= {"batches": worth, "ess_least": min(b.ess for b in fleet.batches)}
    write_report(report, summary)
    console.print(f"digests of every publish equal on both replicas: {match}; vLLM's own labels: {versions}")
    console.print(
        f"log-probabilities, vLLM's against the trainer's: at most {summary['logprob_gap_most']:.1e} apart on average; "
        f"a batch's effective sample size is at least {summary['ess_least']:.6f} of it"
    )
    verdict(console, summary, report)
    return summary
