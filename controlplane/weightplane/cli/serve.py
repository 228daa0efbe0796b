"""``weightplane controlplane``: run a coordinator in this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from .client import DEFAULT_ADDRESS
from .exits import Exit
from .launched import AnnounceOption, ExitWithOption, announce, exit_with
from .output import console, err

__all__ = ["configure_logging", "register"]


def configure_logging(level: str, as_json: bool) -> None:
    """Log to standard error, one line or one JSON object per record."""
    handler = logging.StreamHandler(sys.stderr)
    if as_json:
        from weightplane.controlplane.server.logs import JsonFormatter

        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


LogLevelOption = Annotated[
    str, typer.Option("--log-level", envvar="WEIGHTPLANE_LOG_LEVEL", help="debug | info | warning | error.")
]
LogJsonOption = Annotated[bool, typer.Option("--log-json", help="Structured logs: a JSON object per line.")]


def controlplane(
    listen: Annotated[str, typer.Option("--listen", help="host:port; port 0 takes a free one.")] = DEFAULT_ADDRESS,
    store: Annotated[
        str, typer.Option("--store", help="sqlite:PATH (survives restarts) or memory: (forgets everything).")
    ] = "sqlite:weightplane.db",
    beat_s: Annotated[float, typer.Option("--beat", min=0.05, help="Seconds between heartbeats.")] = 1.0,
    ttl_s: Annotated[float, typer.Option("--ttl", min=0.15, help="Seconds of silence that end a lease.")] = 3.0,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", help="PEM certificate chain.")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="PEM private key.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option("--tls-client-ca", help="PEM; demand client certificates signed by it.")
    ] = None,
    tokens: Annotated[Path | None, typer.Option("--tokens", help="File of lines: ROLE[+ROLE...] TOKEN.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow plaintext off loopback. Anyone in reach can change weights.")
    ] = False,
    log_level: LogLevelOption = "info",
    log_json: LogJsonOption = False,
    to: AnnounceOption = None,
    parent: ExitWithOption = 0,
) -> None:
    """Run the control plane until SIGTERM or Ctrl-C. Agents reconnect after a restart; decided updates complete."""
    configure_logging(log_level, log_json)
    from weightplane.controlplane.core.model import Config
    from weightplane.controlplane.server.app import ServerConfig, serve, tune_collector
    from weightplane.controlplane.server.security import Security, Tls, parse_tokens
    from weightplane.controlplane.store import StoreError, open_store

    if ttl_s < 2 * beat_s:
        raise typer.BadParameter(
            f"--ttl {ttl_s} must be at least twice --beat {beat_s}: one lost beat would end a lease"
        )
    if (tls_cert is None) != (tls_key is None):
        raise typer.BadParameter("--tls-cert and --tls-key go together")
    token_text = tokens.read_text(encoding="utf-8") if tokens is not None else os.environ.get("WEIGHTPLANE_TOKENS", "")
    try:
        tls = Tls(tls_cert, tls_key, tls_client_ca) if tls_cert is not None and tls_key is not None else None
        config = ServerConfig(
            store=open_store(store),
            address=listen,
            core=Config(beat_s=beat_s, ttl_s=ttl_s, routing_budget_s=5 * ttl_s),
            security=Security(tls=tls, tokens=parse_tokens(token_text), insecure=insecure),
        )
    except (StoreError, ValueError) as error:
        err.print(f"[bold red]error[/] {error}")
        raise typer.Exit(Exit.USAGE) from None

    async def run() -> None:
        tune_collector()
        running = await serve(config)
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, over.set)
        exit_with(parent)
        announce(to, address=running.address, store=store)
        console.print(f"control plane listens on {running.address}, store {store}; stop it with Ctrl-C")
        await over.wait()
        with contextlib.suppress(asyncio.CancelledError):
            await running.stop()

    try:
        asyncio.run(run())
    except (StoreError, ValueError, OSError, RuntimeError) as error:
        err.print(f"[bold red]error[/] {error}")
        raise typer.Exit(Exit.REFUSED) from None


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(controlplane)
