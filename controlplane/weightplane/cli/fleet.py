"""Commands for operators: status, watch, updates, abort, pause, resume, drain, activate, pin, unpin."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from weightplane.v1 import fleet_pb2, update_pb2, weight_transfer_pb2
from weightplane.v1.common_pb2 import PauseMode, Reason

from .client import DEFAULT_ADDRESS, AddressOption, Connection, GroupOption, JsonOption, connect, request_id
from .exits import Exit
from .output import console, emit_json, err, seconds, table
from .reach import reached_by, transports_table

__all__ = ["register"]

ReplicaArgument = Annotated[str, typer.Argument(help="The replica's id.")]
ReplicasArgument = Annotated[list[str] | None, typer.Argument(help="Replica ids; none = all.")]


def _short(name: str, prefix: str) -> str:
    return name.removeprefix(prefix + "_").lower()


def _weights(state: int) -> str:
    return _short(update_pb2.WeightsState.Name(state), "WEIGHTS_STATE")  # type: ignore[arg-type]


def _phase(phase: int) -> str:
    return _short(update_pb2.UpdatePhase.Name(phase), "UPDATE_PHASE")  # type: ignore[arg-type]


def status(
    group: Annotated[str, typer.Option("--group", "-g", help="Show this group's replicas; none = every group.")] = "",
    transports: Annotated[
        bool, typer.Option("--transports", "-t", help="With -g: also how each worker is reached, and why so.")
    ] = False,
    address: AddressOption = DEFAULT_ADDRESS,
    as_json: JsonOption = False,
) -> None:
    """Show groups, or one group's replicas: weights, liveness, what is routable and why not."""
    with connect(address, as_json=as_json) as c:
        if not group:
            listed = c.fleet.ListGroups(fleet_pb2.ListGroupsRequest(), timeout=c.timeout)
            if as_json:
                emit_json(listed)
                return
            rows = [
                [
                    g.group,
                    str(g.committed.version),
                    str(g.committed_step),
                    f"{g.routable}/{g.replicas}",
                    f"{g.trainer.trainer_id} (gen {g.trainer.generation})" if g.trainer.generation else "-",
                    f"v{g.open_update.version} {_phase(g.open_update.phase)}" if g.open_update.update_id else "-",
                ]
                for g in listed.groups
            ]
            table("groups", ["group", "version", "step", "routable", "trainer", "open update"], rows)
            return
        got = c.fleet.GetGroup(fleet_pb2.GetGroupRequest(group=group), timeout=c.timeout)
        replicas = c.fleet.ListReplicas(fleet_pb2.ListReplicasRequest(group=group, transports=True), timeout=c.timeout)
    if as_json:
        emit_json({"group": _dict(got.group), "replicas": [_dict(r) for r in replicas.replicas]})
        return
    g = got.group
    console.print(
        f"group [bold]{g.group}[/]: version {g.committed.version} (step {g.committed_step}), "
        f"epoch {g.epoch}, {g.routable}/{g.replicas} routable"
    )
    _replica_table(list(replicas.replicas))
    if transports:
        transports_table(replicas.replicas)


def _dict(message: object) -> dict[str, object]:
    from .output import message_dict

    return message_dict(message)  # type: ignore[arg-type]


def _replica_table(replicas: list[fleet_pb2.ReplicaInfo]) -> None:
    rows = [
        [
            r.replica_id,
            _weights(r.weights),
            str(r.held.version),
            _liveness(r),
            _short(fleet_pb2.AdminState.Name(r.admin), "ADMIN_STATE"),
            "yes" if r.routable else f"no: {r.reason}",
            ", ".join(r.pause_holders) or "-",
            reached_by(r),
        ]
        for r in replicas
    ]
    columns = ["replica", "weights", "version", "liveness", "admin", "routable", "paused by", "reached by"]
    table("replicas", columns, rows)


def _liveness(r: fleet_pb2.ReplicaInfo) -> str:
    """One that said goodbye is not lost: it left."""
    if r.admin == fleet_pb2.ADMIN_STATE_LEAVING and r.liveness != fleet_pb2.LIVENESS_LIVE:
        return "left"
    return _short(fleet_pb2.Liveness.Name(r.liveness), "LIVENESS")


def updates(
    group: GroupOption,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="At most this many.")] = 20,
    address: AddressOption = DEFAULT_ADDRESS,
    as_json: JsonOption = False,
) -> None:
    """List a group's updates, newest first: outcome, timings, and why one was aborted."""
    with connect(address, as_json=as_json) as c:
        got = c.fleet.ListUpdates(fleet_pb2.ListUpdatesRequest(group=group, page_size=limit), timeout=c.timeout)
    if as_json:
        emit_json(got)
        return
    rows = []
    told: list[str] = []
    for u in got.updates:
        t = u.timings
        bad = [o for o in u.outcomes if o.failure.reason]
        if u.failure.reason:
            told.append(f"v{u.version}: {_reason(u.failure.reason)}: {u.failure.message}")
        told += [f"v{u.version}: {o.replica_id}: {_reason(o.failure.reason)}: {o.failure.message}" for o in bad]
        why = _reason(u.failure.reason) if u.failure.reason else ", ".join(o.replica_id for o in bad)
        wire, pause, apply = seconds(t.wire_s), seconds(t.pause_s), seconds(t.apply_s)
        rows.append(
            [str(u.version), str(u.trainer_step), _phase(u.phase), wire, pause, apply, seconds(t.total_s), why or "-"]
        )
    table("updates", ["version", "step", "phase", "wire", "pause", "apply", "total", "failed by"], rows)
    for line in told:
        console.print(line, markup=False)


def _reason(reason: int) -> str:
    return _short(Reason.Name(reason), "REASON").upper()  # type: ignore[arg-type]


def watch(
    group: GroupOption,
    address: AddressOption = DEFAULT_ADDRESS,
    as_json: JsonOption = False,
    once: Annotated[bool, typer.Option("--once", help="End with the first update that ends.")] = False,
) -> None:
    """Follow a group's updates live: phase, bytes per replica, GB/s, ETA. Ctrl-C ends it and changes nothing."""
    with connect(address, as_json=as_json) as c:
        request = weight_transfer_pb2.WatchUpdateRequest(group=group)
        stream = c.transfer.WatchUpdate(request)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, disable=as_json) as bars:
            tasks: dict[tuple[str, str], int] = {}
            ended: set[str] = set()
            old: str | None = None  # the update that was over when we came
            for event in stream:
                phase = event.update.phase
                over = phase in (update_pb2.UPDATE_PHASE_COMMITTED, update_pb2.UPDATE_PHASE_ABORTED)
                if old is None:
                    old = event.update.update_id if over else ""
                if event.update.update_id in ("", old):
                    continue
                if as_json:
                    emit_json(event)
                else:
                    _draw(bars, tasks, ended, event)
                if once and over:
                    stream.cancel()
                    break


def _draw(
    bars: Progress, tasks: dict[tuple[str, str], int], ended: set[str], event: weight_transfer_pb2.WatchUpdateResponse
) -> None:
    u = event.update
    for p in event.progress:
        key = (u.update_id, p.replica_id)
        if key not in tasks:
            tasks[key] = bars.add_task(f"v{u.version} {p.replica_id}", total=p.bytes_planned or None)
        bars.update(tasks[key], completed=p.bytes, total=p.bytes_planned or None)  # type: ignore[arg-type]
    over = u.phase in (update_pb2.UPDATE_PHASE_COMMITTED, update_pb2.UPDATE_PHASE_ABORTED)
    if over and u.update_id not in ended:
        ended.add(u.update_id)
        why = f": {_reason(u.failure.reason)} {u.failure.message}" if u.failure.reason else ""
        bars.console.print(f"v{u.version} (step {u.trainer_step}) {_phase(u.phase)}{why}", markup=False)
        for key in [k for k in tasks if k[0] == u.update_id]:
            bars.remove_task(tasks.pop(key))  # type: ignore[arg-type]


def abort(
    group: GroupOption,
    update: Annotated[str, typer.Option("--update", help="Its id; none = whatever is open.")] = "",
    reason: Annotated[
        str, typer.Option("--reason", help="Why, for the log and the trainer.")
    ] = "aborted by an operator",
    address: AddressOption = DEFAULT_ADDRESS,
    as_json: JsonOption = False,
) -> None:
    """Abort the open update. Replicas keep the version they serve (staged) or stay fenced (in place, bytes written)."""
    with connect(address, timeout=30, as_json=as_json) as c:
        request = weight_transfer_pb2.AbortUpdateRequest(
            request_id=request_id(), group=group, update_id=update, reason=reason, rank=-1
        )
        got = c.transfer.AbortUpdate(request, timeout=c.timeout)
    if as_json:
        emit_json(got)
    else:
        console.print(f"update {got.update.update_id} (version {got.update.version}) is {_phase(got.update.phase)}")
    if got.update.phase == update_pb2.UPDATE_PHASE_COMMITTED:
        err.print("it was decided before: nothing was aborted")
        raise typer.Exit(Exit.REFUSED)


def pause(
    group: GroupOption,
    replicas: ReplicasArgument = None,
    mode: Annotated[str, typer.Option("--mode", help="keep | wait | abort: requests in flight.")] = "keep",
    address: AddressOption = DEFAULT_ADDRESS,
    as_json: JsonOption = False,
) -> None:
    """Pause generation. Returns once it stands still. Resume with: weightplane resume."""
    name = f"PAUSE_MODE_{mode.upper()}"
    if name not in PauseMode.keys() or name == "PAUSE_MODE_UNSPECIFIED":  # noqa: SIM118 - an enum wrapper, not a dict
        raise typer.BadParameter(f"--mode: expected keep, wait or abort, found {mode!r}")
    with connect(address, timeout=60, as_json=as_json) as c:
        request = fleet_pb2.PauseGenerationRequest(
            request_id=request_id(),
            group=group,
            replica_ids=replicas or [],
            holder="operator",
            mode=PauseMode.Value(name),
        )
        got = c.fleet.PauseGeneration(request, timeout=c.timeout)
    _print_replicas(list(got.replicas), as_json)


def resume(
    group: GroupOption,
    replicas: ReplicasArgument = None,
    address: AddressOption = DEFAULT_ADDRESS,
    as_json: JsonOption = False,
) -> None:
    """Remove the operator's pause. A replica still paused names its other holders."""
    with connect(address, timeout=60, as_json=as_json) as c:
        request = fleet_pb2.ResumeGenerationRequest(
            request_id=request_id(), group=group, replica_ids=replicas or [], holder="operator"
        )
        got = c.fleet.ResumeGeneration(request, timeout=c.timeout)
    _print_replicas(list(got.replicas), as_json)


def _print_replicas(replicas: list[fleet_pb2.ReplicaInfo], as_json: bool) -> None:
    if as_json:
        emit_json({"replicas": [_dict(r) for r in replicas]})
    else:
        _replica_table(replicas)


def _one(c: Connection, verb: str, group: str, replica: str) -> fleet_pb2.ReplicaInfo:
    requests = {
        "drain": (c.fleet.DrainReplica, fleet_pb2.DrainReplicaRequest),
        "activate": (c.fleet.ActivateReplica, fleet_pb2.ActivateReplicaRequest),
        "pin": (c.fleet.PinReplica, fleet_pb2.PinReplicaRequest),
        "unpin": (c.fleet.UnpinReplica, fleet_pb2.UnpinReplicaRequest),
    }
    call, kind = requests[verb]
    got = call(kind(request_id=request_id(), group=group, replica_id=replica), timeout=c.timeout)  # type: ignore[operator]
    info = got.replica
    assert isinstance(info, fleet_pb2.ReplicaInfo)
    return info


def drain(
    group: GroupOption, replica: ReplicaArgument, address: AddressOption = DEFAULT_ADDRESS, as_json: JsonOption = False
) -> None:
    """Take a replica out of routing and of later updates. Back with: weightplane activate."""
    with connect(address, as_json=as_json) as c:
        _print_replicas([_one(c, "drain", group, replica)], as_json)


def activate(
    group: GroupOption, replica: ReplicaArgument, address: AddressOption = DEFAULT_ADDRESS, as_json: JsonOption = False
) -> None:
    """Put a draining or quarantined replica back to work."""
    with connect(address, as_json=as_json) as c:
        _print_replicas([_one(c, "activate", group, replica)], as_json)


def pin(
    group: GroupOption, replica: ReplicaArgument, address: AddressOption = DEFAULT_ADDRESS, as_json: JsonOption = False
) -> None:
    """Hold a replica at the version it has, out of updates (for evaluation)."""
    with connect(address, as_json=as_json) as c:
        _print_replicas([_one(c, "pin", group, replica)], as_json)


def unpin(
    group: GroupOption, replica: ReplicaArgument, address: AddressOption = DEFAULT_ADDRESS, as_json: JsonOption = False
) -> None:
    """End a pin; the replica takes part in the next update."""
    with connect(address, as_json=as_json) as c:
        _print_replicas([_one(c, "unpin", group, replica)], as_json)


def register(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (status, watch, updates, abort, pause, resume, drain, activate, pin, unpin):
        app.command()(command)
