"""Commands that give a replica's device memory to somebody else for a while: sleep, wake."""

from __future__ import annotations

from typing import Annotated

import typer

from weightplane.v1 import fleet_pb2

from .client import DEFAULT_ADDRESS, AddressOption, GroupOption, JsonOption, connect, request_id
from .fleet import ReplicaArgument, print_replicas
from .waiting import told_meanwhile

__all__ = ["register"]

_MOST_S = 300.0  # a large model's weights go to the host, or come back
TagsArgument = Annotated[list[str] | None, typer.Argument(help="weights, kv_cache; none = all that sleeps.")]


def sleep(
    group: GroupOption,
    replica: ReplicaArgument,
    level: Annotated[int, typer.Option("--level", min=1, max=2, help="1 keeps weights on the host, 2 drops them.")] = 1,
    address: AddressOption = DEFAULT_ADDRESS,
    as_json: JsonOption = False,
) -> None:
    """Free a replica's device memory. It takes no updates until its weights are awake: weightplane wake."""
    with connect(address, timeout=_MOST_S, as_json=as_json, group=group, changes=True) as c:
        request = fleet_pb2.SleepReplicaRequest(request_id=request_id(), group=group, replica_id=replica, level=level)
        with told_meanwhile(c, group, [replica], "its memory is free", lambda _: True, as_json):
            got = c.fleet.SleepReplica(request, timeout=c.timeout)
    print_replicas([got.replica], as_json)


def wake(
    group: GroupOption,
    replica: ReplicaArgument,
    tags: TagsArgument = None,
    address: AddressOption = DEFAULT_ADDRESS,
    as_json: JsonOption = False,
) -> None:
    """Wake a replica, or its weights first: after a sleep of level 2 publish before the rest."""
    with connect(address, timeout=_MOST_S, as_json=as_json, group=group, changes=True) as c:
        request = fleet_pb2.WakeReplicaRequest(
            request_id=request_id(), group=group, replica_id=replica, tags=tags or []
        )
        with told_meanwhile(c, group, [replica], "it is awake", lambda _: True, as_json):
            got = c.fleet.WakeReplica(request, timeout=c.timeout)
    print_replicas([got.replica], as_json)


def register(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (sleep, wake):
        app.command()(command)
