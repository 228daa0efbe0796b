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
from .output import complain, console

__all__ = ["configure_logging", "register"]


def configure_logging(level: str, as_json: bool) -> None:
    """Log to standard error, one line or one JSON object per record."""
    if level.lower() not in _LEVELS:
        raise typer.BadParameter(f"--log-level: expected one of {', '.join(_LEVELS)}, found {level!r}")
    handler = logging.StreamHandler(sys.stderr)
    if as_json:
        from weightplane.controlplane.server.logs import JsonFormatter

        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


_LEVELS = ("debug", "info", "warning", "error")

LogLevelOption = Annotated[
    str, typer.Option("--log-level", envvar="WEIGHTPLANE_LOG_LEVEL", help="debug | info | warning | error.")
]
LogJsonOption = Annotated[bool, typer.Option("--log-json", help="Structured logs: a JSON object per line.")]


_OTHER_PORT = "stop the other (perhaps a control plane that runs already), or listen elsewhere: --listen HOST:PORT"
_OWN_ADDRESS = "listen on an address of this host, and a port that you may take: --listen HOST:PORT"


def controlplane(
    listen: Annotated[
        str, typer.Option("--listen", envvar="WEIGHTPLANE_LISTEN", help="host:port; port 0 takes a free one.")
    ] = DEFAULT_ADDRESS,
    store: Annotated[
        str, typer.Option("--store", help="sqlite:PATH (survives restarts) or memory: (forgets everything).")
    ] = "sqlite:weightplane.db",
    beat_s: Annotated[float, typer.Option("--beat", min=0.05, help="Seconds between heartbeats.")] = 1.0,
    ttl_s: Annotated[float, typer.Option("--ttl", min=0.15, help="Seconds of silence that end a lease.")] = 3.0,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", exists=True, help="PEM certificate chain.")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", exists=True, help="PEM private key.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option("--tls-client-ca", exists=True, help="PEM; demand client certificates signed by it.")
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option("--tokens", exists=True, dir_okay=False, help="File of lines: ROLE[+ROLE...] TOKEN."),
    ] = None,
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
    from weightplane.controlplane.dial import check_port
    from weightplane.controlplane.ports import PortRefused, check_free
    from weightplane.controlplane.server.app import ServerConfig, serve, tune_collector
    from weightplane.controlplane.server.security import Security, Tls, is_loopback, parse_tokens
    from weightplane.controlplane.store import StoreError, open_store

    if ttl_s < 2 * beat_s:
        raise typer.BadParameter(
            f"--ttl {ttl_s} must be at least twice --beat {beat_s}: one lost beat would end a lease"
        )
    if (tls_cert is None) != (tls_key is None):
        raise typer.BadParameter("--tls-cert and --tls-key go together")
    token_text = tokens.read_text(encoding="utf-8") if tokens is not None else os.environ.get("WEIGHTPLANE_TOKENS", "")
    if tls_cert is None and not insecure and not is_loopback(listen):
        raise typer.BadParameter(
            f"--listen {listen} is not loopback: give --tls-cert and --tls-key, or, where the network is trusted, "
            "--insecure (anyone who reaches the port could then replace the fleet's weights)"
        )
    try:
        check_port(listen, 0)
        tls = Tls(tls_cert, tls_key, tls_client_ca) if tls_cert is not None and tls_key is not None else None
        config = ServerConfig(
            store=open_store(store),
            address=listen,
            core=Config(beat_s=beat_s, ttl_s=ttl_s, routing_budget_s=5 * ttl_s),
            security=Security(tls=tls, tokens=parse_tokens(token_text), insecure=insecure),
        )
    except (StoreError, ValueError) as error:
        complain(str(error), "", Exit.USAGE, False, "weightplane controlplane --help")
    try:
        check_free(listen)  # before the store is opened: it must not lose its leader to one that cannot listen
    except PortRefused as error:
        complain(str(error), "", Exit.REFUSED, False, _OTHER_PORT if error.taken else _OWN_ADDRESS)

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
        complain(str(error), "", Exit.REFUSED, False, "")


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(controlplane)
