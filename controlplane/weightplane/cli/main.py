"""The ``weightplane`` command. Each command's module is one file; heavy imports happen inside commands."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from . import agent, certs, demo, doctor, fleet, parity, policy, publish, serve, sleeping, watch

__all__ = ["app"]

app = typer.Typer(
    name="weightplane",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"weightplane {metadata.version('weightplane')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_tell_version)
    ] = False,
) -> None:
    """Keep a fleet of inference engines on the trainer's newest weights."""


for module in (serve, agent, publish, fleet, policy, sleeping, watch, certs, doctor, parity, demo):
    module.register(app)
