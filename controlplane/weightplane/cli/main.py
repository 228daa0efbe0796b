"""The ``weightplane`` command. Each command's module is one file; heavy imports happen inside commands."""

from __future__ import annotations

import typer

from . import agent, certs, demo, doctor, fleet, parity, policy, publish, serve, sleeping, watch

__all__ = ["app"]

app = typer.Typer(
    name="weightplane",
    help="Keep a fleet of inference engines on the trainer's newest weights.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for module in (serve, agent, publish, fleet, policy, sleeping, watch, certs, doctor, parity, demo):
    module.register(app)
