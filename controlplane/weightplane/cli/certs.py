"""``weightplane certs``: a development authority, and certificates with roles."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .exits import Exit
from .output import complain, console, emit_json, table

__all__ = ["register"]


def certs(
    folder: Annotated[Path, typer.Argument(help="Where they lie; the authority there is used if there is one.")] = Path(
        "certs"
    ),
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="Name or IP address that others dial this machine by. Repeatable."),
    ] = None,
    role: Annotated[
        str, typer.Option("--role", help="ROLE[+ROLE...] of one certificate; none = the server's and one of each.")
    ] = "",
    name: Annotated[str, typer.Option("--name", help="Who it is for, as logs and refusals name it.")] = "dev",
    group: Annotated[
        list[str] | None, typer.Option("--group", help="Confine to this group; none = all groups. Repeatable.")
    ] = None,
    days: Annotated[int, typer.Option("--days", help="Until they expire.")] = 90,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
) -> None:
    """Make a development authority and certificates with roles, or renew them: run it again, nothing is restarted."""
    from weightplane.controlplane.certificates import Authority, CertificateError

    hosts, groups = host or [], group or []
    try:
        authority = Authority(folder, days)
        fresh = authority.ensure()
        if role:
            made = [authority.member(role.split("+"), name, groups, hosts)]
        else:
            roles = ("trainer", "inference", "operator", "viewer")
            made = [authority.server(hosts), *(authority.member([r], name, groups, hosts) for r in roles)]
    except CertificateError as error:
        complain(str(error), "", Exit.USAGE, as_json, "weightplane certs --help")
    if as_json:
        files = [{"certificate": str(m.certificate), "key": str(m.key), "subject": m.subject} for m in made]
        emit_json({"ca": str(authority.ca), "made": files, "days": days})
        return
    console.print(f"{'made the authority' if fresh else 'used the authority'} {authority.ca}", markup=False)
    table(f"certificates, {days} days", ["certificate", "key", "is"], ([*map(str, _row(m))] for m in made))
    for line in _next(folder, role, made[0].certificate):
        console.print(line, markup=False, soft_wrap=True)


def _row(made: object) -> tuple[object, object, object]:
    from weightplane.controlplane.certificates import Made

    assert isinstance(made, Made)
    return made.certificate, made.key, made.subject


def _next(folder: Path, role: str, certificate: Path) -> list[str]:
    """What to type now."""
    if role:
        key = certificate.with_suffix(".key")
        return [f"next: export WEIGHTPLANE_CA={folder}/ca.pem WEIGHTPLANE_CERT={certificate} WEIGHTPLANE_KEY={key}"]
    server = f"--tls-cert {folder}/server.pem --tls-key {folder}/server.key --tls-client-ca {folder}/ca.pem"
    return [
        f"next: weightplane controlplane --listen HOST:7450 {server}",
        f"then, in every other shell, with its role in place of operator: export WEIGHTPLANE_CA={folder}/ca.pem "
        f"WEIGHTPLANE_CERT={folder}/operator.pem WEIGHTPLANE_KEY={folder}/operator.key",
        "keep ca.key to yourself: who has it makes any identity",
    ]


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(certs)
