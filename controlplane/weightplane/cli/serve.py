"""``weightplane controlplane``: run a coordinator in this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from .client import DEFAULT_ADDRESS
from .exits import Exit
from .launched import AnnounceOption, ExitWithOption, announce, exit_with
from .output import complain, console

__all__ = ["configure_logging", "register"]

T = TypeVar("T")


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
_TOKENS = "one line each: ROLE[+ROLE...][@GROUP[,GROUP...]] TOKEN"
_FILES = "name files that this user may read; weightplane certs DIR makes a development authority and certificates"
_OWN_ADDRESS = "listen on an address of this host, and a port that you may take: --listen HOST:PORT"


def controlplane(
    listen: Annotated[
        str, typer.Option("--listen", envvar="WEIGHTPLANE_LISTEN", help="host:port; port 0 takes a free one.")
    ] = DEFAULT_ADDRESS,
    probes: Annotated[
        str, typer.Option("--probes", help="host:port for HTTP /livez, /readyz and /groups/G/routable; empty: none.")
    ] = "",
    gateway: Annotated[
        str, typer.Option("--gateway", help="host:port for the contract as HTTP and JSON (curl); empty: none.")
    ] = "",
    store: Annotated[
        str, typer.Option("--store", help="sqlite:PATH (survives restarts) or memory: (forgets everything).")
    ] = "sqlite:weightplane.db",
    beat_s: Annotated[float, typer.Option("--beat", min=0.05, help="Seconds between heartbeats.")] = 1.0,
    ttl_s: Annotated[float, typer.Option("--ttl", min=0.15, help="Seconds of silence that end a lease.")] = 3.0,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", help="PEM certificate chain; read anew.")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="PEM private key; read anew.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option("--tls-client-ca", help="PEM; demand client certificates signed by it. Read anew.")
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            "--tokens", help="File of lines ROLE[+ROLE...][@GROUP[,GROUP...]] TOKEN (or WEIGHTPLANE_TOKENS). Read anew."
        ),
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
    from weightplane.controlplane.ports import PortRefused
    from weightplane.controlplane.server.app import ServerConfig, serve, tune_collector
    from weightplane.controlplane.server.security import Security, Tls, parse_tokens
    from weightplane.controlplane.store import StoreError, open_store

    if ttl_s < 2 * beat_s:
        raise typer.BadParameter(
            f"--ttl {ttl_s} must be at least twice --beat {beat_s}: one lost beat would end a lease"
        )
    if (tls_cert is None) != (tls_key is None):
        raise typer.BadParameter("--tls-cert and --tls-key go together")
    if tls_client_ca is not None and tls_cert is None:
        raise typer.BadParameter("--tls-client-ca needs --tls-cert and --tls-key: clients are asked during TLS")
    tls = Tls(tls_cert, tls_key, tls_client_ca) if tls_cert is not None and tls_key is not None else None
    try:
        given = {} if tokens is not None else parse_tokens(os.environ.get("WEIGHTPLANE_TOKENS", ""))
        security = Security(tls=tls, tokens=given, token_file=tokens, insecure=insecure)
    except ValueError as error:
        complain(f"WEIGHTPLANE_TOKENS: {error}", "", Exit.USAGE, False, _TOKENS)
    http = {option: address for option, address in (("--probes", probes), ("--gateway", gateway)) if address}
    addresses = {"--listen": listen, **http}
    if gateway and not all(map(find_spec, ("starlette", "uvicorn"))):
        complain("--gateway needs starlette and uvicorn", "", Exit.USAGE, False, "pip install 'weightplane[gateway]'")
    for option, address in addresses.items():
        if not insecure and (problem := security.problem(address)):
            lacks = "--tls-client-ca or --tokens" if tls is not None else "--tls-cert and --tls-key"
            raise typer.BadParameter(
                f"{option} {address} is not loopback: {problem}: {lacks}; or, where the network is trusted, --insecure"
            )
    try:
        for address in addresses.values():
            check_port(address, 0)
        config = ServerConfig(
            store=open_store(store),
            address=listen,
            probes=probes,
            gateway=gateway,
            core=Config(beat_s=beat_s, ttl_s=ttl_s, routing_budget_s=5 * ttl_s),
            security=security,
        )
        security.read()  # before the store is opened: what cannot be used is named first
    except (StoreError, ValueError) as error:
        complain(str(error), "", Exit.USAGE, False, "weightplane controlplane --help")
    except OSError as error:
        complain(f"{error.filename}: {error.strerror}", "", Exit.USAGE, False, _FILES)

    async def run() -> None:
        tune_collector()
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, over.set)
        exit_with(parent)
        running = await unless(over, serve(config))
        if running is None:
            return
        if await unless(over, running.coordinator.led.wait()) is None:
            await running.stop()
            return
        also = {k: v for k, v in (("probes", running.probes), ("gateway", running.gateway)) if v}
        announce(to, address=running.address, store=store, **also)
        asked = "".join(f", {what} on {where}" for what, where in also.items())
        console.print(f"control plane listens on {running.address}{asked}, store {store}; stop it with Ctrl-C")
        await over.wait()
        with contextlib.suppress(asyncio.CancelledError):
            await running.stop()

    try:
        asyncio.run(run())
    except PortRefused as error:
        complain(str(error), "", Exit.REFUSED, False, _OTHER_PORT if error.taken else _OWN_ADDRESS)
    except (StoreError, ValueError, OSError, RuntimeError) as error:
        complain(str(error), "", Exit.REFUSED, False, "")


async def unless(over: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What ``work`` gives; None, and ``work`` is cancelled, if ``over`` comes first."""
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(over.wait())
    await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
    if not working.done():
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
        return None
    return working.result()


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(controlplane)
