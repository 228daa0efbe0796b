"""Commands for operators: status, updates, abort, pause, resume, drain, activate, pin, unpin."""

from __future__ import annotations

from typing import Annotated

import typer

from weightplane.v1 import fleet_pb2, update_pb2, weight_transfer_pb2
from weightplane.v1.common_pb2 import PauseMode

from .client import DEFAULT_ADDRESS, AddressOption, Connection, GroupOption, JsonOption, connect, request_id
from .conditions import show_conditions
from .exits import Exit
from .output import console, emit_json, err, message_dict, phase_name, reason_name, seconds, short_name, table
from .reach import reached_by, transports_table
from .waiting import told_meanwhile

__all__ = ["ReplicaArgument", "print_replicas", "register"]

ReplicaArgument = Annotated[str, typer.Argument(help="The replica's id.")]
ReplicasArgument = Annotated[list[str] | None, typer.Argument(help="Replica ids; none = all.")]


def _weights(state: int) -> str:
    return short_name(update_pb2.WeightsState.Name(state), "WEIGHTS_STATE")  # type: ignore[arg-type]


def status(
    group: Annotated[str, typer.Option("--group", "-g", help="Show this group's replicas; none = every group.")] = "",
    transports: Annotated[
        bool, typer.Option("--transports", "-t", help="With -g: also how each worker is reached, and why so.")
    ] = False,
    conditions: Annotated[
        bool, typer.Option("--conditions", "-c", help="With -g: also each condition of each engine's settings.")
    ] = False,
    address: AddressOption = DEFAULT_ADDRESS,
    as_json: JsonOption = False,
) -> None:
    """Show groups, or one group's replicas: weights, liveness, what is routable and why not."""
    with connect(address, as_json=as_json, group=group) as c:
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
                    f"v{g.open_update.version} {phase_name(g.open_update.phase)}" if g.open_update.update_id else "-",
                ]
                for g in listed.groups
            ]
            table("groups", ["group", "version", "step", "routable", "trainer", "open update"], rows)
            return
        got = c.fleet.GetGroup(fleet_pb2.GetGroupRequest(group=group), timeout=c.timeout)
        ask = fleet_pb2.ListReplicasRequest(group=group, transports=True, conditions=True)
        replicas = c.fleet.ListReplicas(ask, timeout=c.timeout)
    if as_json:
        emit_json({"group": message_dict(got.group), "replicas": [message_dict(r) for r in replicas.replicas]})
        return
    g = got.group
    console.print(
        f"group [bold]{g.group}[/]: version {g.committed.version} (step {g.committed_step}), "
        f"epoch {g.epoch}, {g.routable}/{g.replicas} routable"
    )
    _replica_table(list(replicas.replicas), reached=True)
    show_conditions(replicas.replicas, conditions)
    if transports:
        transports_table(replicas.replicas)


def _replica_table(replicas: list[fleet_pb2.ReplicaInfo], reached: bool = False) -> None:
    """``reached``: the answers say how each replica is reached; those to a change of it do not."""
    rows = [
        [
            r.replica_id,
            _weights(r.weights),
            str(r.held.version),
            _liveness(r),
            short_name(fleet_pb2.AdminState.Name(r.admin), "ADMIN_STATE"),
            _routable(r),
            ", ".join(r.pause_holders) or "-",
            *([reached_by(r)] if reached else []),
        ]
        for r in replicas
    ]
    columns = ["replica", "weights", "version", "liveness", "admin", "routable", "paused by"]
    table("replicas", [*columns, "reached by"] if reached else columns, rows)
    for r in replicas:
        if r.catch_up:
            console.print(f"{r.replica_id}: {r.catch_up}", markup=False)
        if r.admin == fleet_pb2.ADMIN_STATE_QUARANTINED and r.failure.message:
            console.print(f"{r.replica_id}: {r.failure.message}", markup=False)


def _routable(r: fleet_pb2.ReplicaInfo) -> str:
    """One that fell silent or was stopped is routable for a while yet; that no update waits for it is told here.

    What other columns tell (pinned, updating) is not told again.
    """
    if not r.routable:
        heals = r.weights == update_pb2.WEIGHTS_STATE_DIRTY and "DIRTY" in r.reason
        return f"no: {r.reason}{': publish again, a full update heals it' if heals else ''}"
    admin = short_name(fleet_pb2.AdminState.Name(r.admin), "ADMIN_STATE")
    told = r.may_not_join.startswith((f"it is {admin.upper()}", f"it is {_weights(r.weights).upper()}"))
    return "yes" if told or not r.may_not_join else f"yes, but joins no update: {r.may_not_join}"


def _liveness(r: fleet_pb2.ReplicaInfo) -> str:
    """One that said goodbye is not lost: it left."""
    if r.admin == fleet_pb2.ADMIN_STATE_LEAVING and r.liveness != fleet_pb2.LIVENESS_LIVE:
        return "left"
    return short_name(fleet_pb2.Liveness.Name(r.liveness), "LIVENESS")


def updates(
    group: GroupOption,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="At most this many.")] = 20,
    address: AddressOption = DEFAULT_ADDRESS,
    as_json: JsonOption = False,
) -> None:
    """List a group's updates, newest first: outcome, timings, and why one was aborted."""
    with connect(address, as_json=as_json, group=group) as c:
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
            told.append(f"v{u.version}: {reason_name(u.failure.reason)}: {u.failure.message}")
        told += [f"v{u.version}: {o.replica_id}: {reason_name(o.failure.reason)}: {o.failure.message}" for o in bad]
        why = reason_name(u.failure.reason) if u.failure.reason else ", ".join(o.replica_id for o in bad)
        times = [seconds(s) for s in (t.wire_s, t.pause_s, t.apply_s, t.total_s)]
        told += [f"v{u.version}: {p.replica_id}: {_verdict(p)}" for p in u.parity if p.verdict != _AT_PARITY]
        rows.append([str(u.version), str(u.trainer_step), phase_name(u.phase), *times, why or "-", _parity(u)])
    table("updates", ["version", "step", "phase", "wire", "pause", "apply", "total", "failed by", "parity"], rows)
    for line in told:
        console.print(line, markup=False)


_AT_PARITY = update_pb2.PARITY_VERDICT_AT_PARITY


def _parity(u: update_pb2.UpdateInfo) -> str:
    """The worst that was measured of an update's version, and of how many replicas; "-": none was checked."""
    if not u.parity:
        return "-"
    good = sum(p.verdict == _AT_PARITY for p in u.parity)
    measured = [p.mean_abs for p in u.parity if p.verdict != update_pb2.PARITY_VERDICT_NOT_MEASURED]
    return f"{good}/{len(u.parity)} ok" + (f", {max(measured):.1e}" if measured else "")


def _verdict(p: update_pb2.ParityResult) -> str:
    name = short_name(update_pb2.ParityVerdict.Name(p.verdict), "PARITY_VERDICT")
    return f"{name}: {p.reason or f'mean {p.mean_abs:.2e}, p99 {p.p99_abs:.2e}, ESS {p.ess:.6f}'}"


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
    with connect(address, timeout=30, as_json=as_json, group=group, changes=True) as c:
        request = weight_transfer_pb2.AbortUpdateRequest(
            request_id=request_id(), group=group, update_id=update, reason=reason, rank=-1
        )
        got = c.transfer.AbortUpdate(request, timeout=c.timeout)
    if as_json:
        emit_json(got)
    else:
        console.print(f"update {got.update.update_id} (version {got.update.version}) is {phase_name(got.update.phase)}")
    if got.update.phase == update_pb2.UPDATE_PHASE_COMMITTED:
        err.print("it was decided before: nothing was aborted")
        raise typer.Exit(Exit.REFUSED)


def _held(r: fleet_pb2.ReplicaInfo) -> bool:
    return "operator" in r.pause_holders


def _runs(r: fleet_pb2.ReplicaInfo) -> bool:
    return not _held(r)


def pause(
    group: GroupOption,
    replicas: ReplicasArgument = None,
    mode: Annotated[str, typer.Option("--mode", help="keep | wait | abort: requests in flight.")] = "keep",
    address: AddressOption = DEFAULT_ADDRESS,
    as_json: JsonOption = False,
) -> None:
    """Pause generation. Returns once it stands still, at most a minute; it says whom it waits for meanwhile.

    Resume with: weightplane resume.
    """
    name = f"PAUSE_MODE_{mode.upper()}"
    if name not in PauseMode.keys() or name == "PAUSE_MODE_UNSPECIFIED":  # noqa: SIM118 - an enum wrapper, not a dict
        raise typer.BadParameter(f"--mode: expected keep, wait or abort, found {mode!r}")
    with connect(address, timeout=60, as_json=as_json, group=group, changes=True) as c:
        request = fleet_pb2.PauseGenerationRequest(
            request_id=request_id(),
            group=group,
            replica_ids=replicas or [],
            holder="operator",
            mode=PauseMode.Value(name),
        )
        with told_meanwhile(c, group, replicas or [], "generation stands still", _runs, as_json):
            got = c.fleet.PauseGeneration(request, timeout=c.timeout)
    print_replicas(list(got.replicas), as_json)


def resume(
    group: GroupOption,
    replicas: ReplicasArgument = None,
    address: AddressOption = DEFAULT_ADDRESS,
    as_json: JsonOption = False,
) -> None:
    """Remove the operator's pause. A replica still paused names its other holders."""
    with connect(address, timeout=60, as_json=as_json, group=group, changes=True) as c:
        request = fleet_pb2.ResumeGenerationRequest(
            request_id=request_id(), group=group, replica_ids=replicas or [], holder="operator"
        )
        with told_meanwhile(c, group, replicas or [], "the pause is gone", _held, as_json):
            got = c.fleet.ResumeGeneration(request, timeout=c.timeout)
    print_replicas(list(got.replicas), as_json)


def print_replicas(replicas: list[fleet_pb2.ReplicaInfo], as_json: bool) -> None:
    """As a table, or as JSON."""
    if as_json:
        emit_json({"replicas": [message_dict(r) for r in replicas]})
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
    with connect(address, as_json=as_json, group=group, changes=True) as c:
        print_replicas([_one(c, "drain", group, replica)], as_json)


def activate(
    group: GroupOption, replica: ReplicaArgument, address: AddressOption = DEFAULT_ADDRESS, as_json: JsonOption = False
) -> None:
    """Put a draining or quarantined replica back to work."""
    with connect(address, as_json=as_json, group=group, changes=True) as c:
        print_replicas([_one(c, "activate", group, replica)], as_json)


def pin(
    group: GroupOption, replica: ReplicaArgument, address: AddressOption = DEFAULT_ADDRESS, as_json: JsonOption = False
) -> None:
    """Hold a replica at the version it has, out of updates (for evaluation)."""
    with connect(address, as_json=as_json, group=group, changes=True) as c:
        print_replicas([_one(c, "pin", group, replica)], as_json)


def unpin(
    group: GroupOption, replica: ReplicaArgument, address: AddressOption = DEFAULT_ADDRESS, as_json: JsonOption = False
) -> None:
    """End a pin; the replica takes part in the next update."""
    with connect(address, as_json=as_json, group=group, changes=True) as c:
        print_replicas([_one(c, "unpin", group, replica)], as_json)


def register(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (status, updates, abort, pause, resume, drain, activate, pin, unpin):
        app.command()(command)
