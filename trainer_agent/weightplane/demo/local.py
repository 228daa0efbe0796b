"""The demo's loop in one process: the replicas are copies of the model, synchronised or not.

``python -m weightplane.demo.local --seeds 0 1 2`` prints the table of seeds, with the control beside each; it is how
the defaults in `DemoConfig` were tuned.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from rich.console import Console
from torch import nn

from weightplane.demo.config import DemoConfig
from weightplane.demo.loop import RolloutRequest, RunResult, run
from weightplane.demo.model import build_model
from weightplane.demo.sampling import Completion, generate

__all__ = ["LocalFleet", "run_local"]


class LocalFleet:
    """``config.replicas`` modules that start from the trainer's initial weights; `publish` copies, or does nothing."""

    def __init__(self, config: DemoConfig, *, sync: bool) -> None:
        self.sync = sync
        self.replicas = [build_model(config.model, config.seed) for _ in range(config.replicas)]

    def generate(self, requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
        """Answer request ``i`` with replica ``i``, one after the other."""
        return [
            generate(
                replica,
                request.prompts,
                max_new_tokens=request.max_new_tokens,
                temperature=request.temperature,
                seed=request.seed,
            )
            for replica, request in zip(self.replicas, requests, strict=True)
        ]

    def publish(self, model: nn.Module, step: int) -> None:
        """Copy the weights into every replica, in place."""
        if self.sync:
            for replica in self.replicas:
                replica.load_state_dict(model.state_dict())


def run_local(config: DemoConfig, *, sync: bool = True) -> RunResult:
    """Run the whole loop in this process; ``sync=False`` is the control."""
    return run(config, LocalFleet(config, sync=sync))


def main(argv: Sequence[str] | None = None) -> int:
    """Print one row per seed; 0 when every seed learned and no control rose."""
    parser = argparse.ArgumentParser(description="Train without any process but this one; compare with the control.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=DemoConfig.steps)
    parser.add_argument("--no-control", action="store_true", help="leave the control runs out")
    args = parser.parse_args(argv)
    console = Console(highlight=False, width=120)
    columns = ["seed", "reward_first", "reward_last", "exact_last", "control_first", "control_last"]
    columns += ["seconds", "rollout_s", "train_s"]
    console.print("  ".join(columns))
    good = True
    for seed in args.seeds:
        config = replace(DemoConfig(), seed=seed, steps=args.steps)
        start = time.perf_counter()
        result = run_local(config)
        seconds = time.perf_counter() - start
        control = None if args.no_control else run_local(config, sync=False)
        values = [result.reward_first, result.reward_last, result.steps[-1].exact]
        values += [control.reward_first, control.reward_last] if control is not None else [math.nan, math.nan]
        values += [seconds, median(s.rollout_s for s in result.steps), median(s.train_s for s in result.steps)]
        cells = [f"{value:.3f}" for value in values]
        console.print(
            "  ".join(f"{cell:>{len(column)}}" for column, cell in zip(columns, [str(seed), *cells], strict=True))
        )
        good = good and result.learned and not (control is not None and control.rose)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
