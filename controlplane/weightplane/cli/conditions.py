"""What ``status`` shows of conditions: an engine's settings against what its group declares."""

from __future__ import annotations

from collections.abc import Iterable

from weightplane.v1 import common_pb2, fleet_pb2

from .output import console, short_name, table

__all__ = ["show_conditions"]


def show_conditions(replicas: Iterable[fleet_pb2.ReplicaInfo], whole: bool) -> None:
    """A line for each replica with a setting that is not as declared; ``whole``: every condition, as a table."""
    rows = []
    for r in replicas:
        wrong = [c for c in r.conditions if c.status == common_pb2.CONDITION_STATUS_FALSE]
        if wrong and not whole:
            named = ", ".join(f"{c.type} ({c.setting})" if c.setting else c.type for c in wrong)
            console.print(f"{r.replica_id}: not as declared: {named}", markup=False)
        rows += [[r.replica_id, c.type, _status(c), c.message, c.setting] for c in r.conditions]
    if whole:
        table("conditions", ["replica", "condition", "", "found, and why it matters", "set"], rows)


def _status(c: common_pb2.Condition) -> str:
    name = short_name(common_pb2.ConditionStatus.Name(c.status), "CONDITION_STATUS")
    return {"true": "ok", "false": "NO"}.get(name.lower(), "?")
