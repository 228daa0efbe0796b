"""``weightplane parity``: whether engine and trainer compute the same policy."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated

import typer

from .client import JsonOption, one_of
from .exits import Exit
from .output import complain, console, emit_json, table

__all__ = ["register"]

UrlOption = Annotated[str, typer.Option("--url", help="Where vLLM's server listens.")]
DEFAULT_URL = "http://127.0.0.1:8000"
_START = "start it with VLLM_SERVER_DEV_MODE=1, or name its address with --url"

app = typer.Typer(
    help="Whether engine and trainer compute the same policy.", no_args_is_help=True, rich_markup_mode=None
)


@app.command()
def audit(
    url: UrlOption = DEFAULT_URL,
    declare: Annotated[
        list[str] | None,
        typer.Option("--declare", help="name=value: what the group declares, where not the default. Repeatable."),
    ] = None,
    cache: Annotated[str, typer.Option("--cache", help="Cache policy that updates use: clear, keep or salt.")] = "",
    pause: Annotated[str, typer.Option("--pause", help="Pause mode that updates use: keep, wait or abort.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Judge an engine against what its group declares. Exit 4 if a setting is not as declared, 3 if none answers."""
    from weightplane.parity.audit import audit as judge
    from weightplane.parity.reading import EngineUnreadable, read_server
    from weightplane.parity.settings import declared_from

    one_of("--cache", cache, ("", "clear", "keep", "salt"))
    one_of("--pause", pause, ("", "keep", "wait", "abort"))
    try:
        declared = declared_from(declare or [])
    except ValueError as error:
        raise typer.BadParameter(f"--declare {error}") from None
    try:
        # What a publish does that does not say is the group's default: clear, keep.
        found = replace(read_server(url), cache_policy=cache or "clear", pause_mode=pause or "keep")
    except EngineUnreadable as error:
        code = Exit.REFUSED if error.reachable else Exit.UNREACHABLE
        complain(str(error), "" if error.reachable else "UNREACHABLE", code, as_json, _START)
    conditions = judge(found, declared)
    wrong = [c for c in conditions if c.status == "False"]
    unknown = [c for c in conditions if c.status == "Unknown"]
    if as_json:
        emit_json(
            {
                "ok": not wrong,
                "settings": asdict(found),
                "declared": asdict(declared),
                "conditions": [asdict(c) for c in conditions],
            }
        )
    else:
        rows = [[c.type, {"True": "ok", "False": "NO"}.get(c.status, "?"), c.message, c.setting] for c in conditions]
        table(f"parity audit of {url}", ["condition", "", "found, and why it matters", "set"], rows)
        console.print(f"{len(wrong)} not as declared, {len(unknown)} not known")
    if wrong:
        raise typer.Exit(Exit.REFUSED)


def register(root: typer.Typer) -> None:
    """Add these commands."""
    root.add_typer(app, name="parity")
