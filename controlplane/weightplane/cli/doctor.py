"""``weightplane transports`` and ``weightplane doctor``: what works here, what does not, why, and what to do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from typing import Annotated, Any

import typer

from . import copies
from .client import DEFAULT_ADDRESS, AddressOption, JsonOption
from .exits import Exit
from .output import console, emit_json, table

__all__ = ["register"]


def transports(as_json: JsonOption = False) -> None:
    """List the transports registered here: which work, which do not and why."""
    from weightplane.transports import registry

    found = registry.available()
    if as_json:
        emit_json({"transports": [_probe(name, probe) for name, probe in found.items()]})
        return
    rows = []
    for name, probe in found.items():
        details = ", ".join(f"{k}={v}" for k, v in probe.details.items())
        rows.append([name, "yes" if probe.ok else "no", probe.reason or details or "-"])
    table("transports", ["transport", "works here", "why not / details"], rows)


def _probe(name: str, probe: Any) -> dict[str, Any]:
    return {"name": name, "ok": probe.ok, "reason": probe.reason, "details": dict(probe.details)}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def doctor(
    address: AddressOption = DEFAULT_ADDRESS,
    group: Annotated[str, typer.Option("--group", "-g", help="Also explain how each replica is reached.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Examine this host and the control plane.

    Exit 3 if none answers, 7 if it has no such group, 4 if something else will not work.
    """
    from weightplane.transports import registry

    checks: list[dict[str, Any]] = []

    absent: set[str] = set()  # not here, and need not be

    def check(name: str, ok: bool, found: str, todo: str = "") -> None:
        checks.append({"check": name, "ok": ok, "found": found, "next": todo})

    check("python", sys.version_info >= (3, 11), platform.python_version(), "use Python 3.11 or newer")
    for name, need in (("grpcio", True), ("protobuf", True), ("torch", False)):
        version = _version(name)
        todo = f"pip install {name}" if need else "agents need it: pip install weightplane[torch]"
        check(name, bool(version) or not need, version or "not installed", "" if version else todo)
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    enough = shm is not None and shm.free >= 64 << 20
    free = f"{shm.free >> 20} MiB free in /dev/shm" if shm is not None else "no /dev/shm"
    check("shared memory", enough, free, "the shm transport wants 64 MiB: raise --shm-size of the container")
    if _version("torch"):  # members run here
        try:
            check("copying memory", True, copies.advice(*copies.measure()))
        except OSError as error:
            check("copying memory", True, f"not measured, for want of 512 MiB: {error}")
        usable = False
        for name, probe in registry.available().items():
            # One that cannot work here is no fault of this host's, as long as another does.
            check(f"transport {name}", True, "works" if probe.ok else f"not here: {probe.reason}")
            absent |= set() if probe.ok else {f"transport {name}"}
            usable = usable or (probe.ok and name != "external")
        check(
            "a transport", usable, "at least one works here" if usable else "none works here", "mend one of the above"
        )
    told = _control_plane(check, address, group)
    bad = [c for c in checks if not c["ok"]]
    if as_json:
        emit_json({"ok": not bad, "checks": checks})
    else:
        rows = []
        for c in checks:
            mark = "NO" if not c["ok"] else "-" if c["check"] in absent else "ok"
            rows.append([c["check"], mark, c["found"], "" if c["ok"] else c["next"]])
        table("doctor", ["check", "", "found", "what to do"], rows)
        console.print("all is well" if not bad else f"{len(bad)} problem(s)")
    if bad:
        raise typer.Exit(told or Exit.REFUSED)


def _control_plane(check: Any, address: str, group: str) -> Exit:
    """How the command ends, as far as the control plane has a say: by another problem it is REFUSED."""
    import grpc

    from weightplane.controlplane.handshake import trouble
    from weightplane.v1 import fleet_pb2
    from weightplane.v1.fleet_pb2_grpc import FleetServiceStub

    from .client import LEADS, START_ONE, advice_on, dial, open_channel, said_of, words

    with open_channel(address) as channel:
        stub = FleetServiceStub(channel)
        about, groups = "control plane", []
        try:
            groups = [g.group for g in stub.ListGroups(fleet_pb2.ListGroupsRequest(), timeout=3).groups]
            check("control plane", True, f"{address} answers, {len(groups)} group(s)")
            if group:
                about = f"group {group}"
                request = fleet_pb2.ListReplicasRequest(group=group, transports=True)
                replicas = stub.ListReplicas(request, timeout=3).replicas
                check(about, True, f"{len(replicas)} replica(s)")
                for r in replicas:
                    found = "routable" if r.routable else r.reason
                    check(f"replica {r.replica_id}", r.routable, found, f"weightplane status -g {group}")
                    _reach(check, r)
        except grpc.RpcError as error:
            reason, failure = said_of(error)
            if reason == "UNKNOWN_GROUP":
                there = "make one by starting a replica or a trainer of it" if not groups else "name one of these"
                check(about, False, f"no group {group!r} at {address}; it has {_named(groups)}", there)
                return Exit.NOT_FOUND
            silent = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            answers = isinstance(error, grpc.Call) and error.code() not in silent
            found = trouble(dial(address)) if not answers and not reason else ""
            refused = advice_on(reason, failure.message if failure is not None else "", group)
            todo = refused or "the message says what it refuses"
            if not answers and not found:
                todo = LEADS if reason else START_ONE
            check(about, False, f"{address}: {found or words(error)}", todo)
            return Exit.REFUSED if answers else Exit.UNREACHABLE
    return Exit.OK


def _named(groups: list[str]) -> str:
    """The groups that are there; of many the first."""
    more = f" and {len(groups) - 20} more" if len(groups) > 20 else ""
    return f"{', '.join(sorted(groups)[:20])}{more}" if groups else "none yet"


def _reach(check: Any, r: Any) -> None:
    """How the trainer reaches each worker of a replica; out of reach is a problem, not yet bound is none."""
    from . import reach

    if not r.transports:
        check(f"reaching {r.replica_id}", True, reach.NOT_BOUND)
    for c in r.transports:
        passed = reach.refusals(c)
        found = f"{c.transport or 'no transport'}: {c.reason}{f'. Passed over: {passed}' if passed else ''}"
        check(f"reaching {r.replica_id}, {reach.workers(c)}", bool(c.transport), found, "mend one of those passed over")


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command()(transports)
    app.command()(doctor)
