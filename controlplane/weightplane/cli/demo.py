"""``weightplane demo``: reinforcement learning through Weightplane, on this machine, in a few minutes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from .client import JsonOption
from .exits import Exit
from .output import emit_json, err

__all__ = ["register"]


def demo(
    sync: Annotated[
        bool, typer.Option("--sync/--no-sync", help="--no-sync: the control; trains, but publishes nothing.")
    ] = True,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of weights, prompts and samplers.")] = 0,
    steps: Annotated[int, typer.Option("--steps", min=0, help="Training steps; 0 = the recommended number.")] = 0,
    engine: Annotated[
        str,
        typer.Option("--engine", help="torch_module, or vllm: two stock vLLM servers (in an environment with vLLM)."),
    ] = "torch_module",
    transport: Annotated[str, typer.Option("--transport", help="Force one: shm or grpc; none = negotiated.")] = "",
    report: Annotated[
        Path | None,
        typer.Option("--report", help="Folder of report.json and report.png; none = demo-report[/control]."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Watch a policy learn: a trainer, a control plane and two replicas as processes; every step is published."""
    if engine not in ("torch_module", "vllm"):
        raise typer.BadParameter(f"--engine {engine!r}: expected torch_module or vllm")
    try:
        from weightplane.demo.main import DemoFailed, run_demo

        if engine == "vllm":
            import transformers  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
            import vllm  # noqa: F401

            from weightplane.demo.vllm_main import run_vllm_demo as run_demo
    except ModuleNotFoundError as error:
        extras = "vllm,demo" if engine == "vllm" else "torch,demo"
        err.print(f"[bold red]error[/] {error.name} is missing: pip install 'weightplane[{extras}]'")
        raise typer.Exit(Exit.REFUSED) from None
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        folder = report or (Path("demo-report") if sync else Path("demo-report", "control"))
        summary = run_demo(sync=sync, seed=seed, steps=steps, transport=transport, report=folder, quiet=as_json)
    except DemoFailed as error:
        err.print(f"[bold red]error[/] {error}")
        raise typer.Exit(Exit.FAILED) from None
    except KeyboardInterrupt:
        err.print("interrupted; every process of the demo was ended")
        raise typer.Exit(Exit.INTERRUPTED) from None
    if as_json:
        emit_json(summary)
    if not summary["passed"]:
        raise typer.Exit(Exit.FAILED)


def _interrupt(number: int, frame: object) -> None:
    """SIGTERM ends the demo as Ctrl-C does: in order."""
    raise KeyboardInterrupt


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(demo)
