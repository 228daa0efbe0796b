"""How the trainer reaches each worker of a replica, in words: for ``status`` and ``doctor``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weightplane.v1 import fleet_pb2, weight_transfer_pb2

from .output import table

__all__ = ["NOT_BOUND", "reached_by", "refusals", "transports_table", "workers"]

NOT_BOUND = "no trainer has bound to it yet"


def workers(c: weight_transfer_pb2.TransportChoice) -> str:
    """The workers that a choice is about: "worker 0", "workers 0, 2"."""
    return f"worker{'s' if len(c.workers) > 1 else ''} {', '.join(map(str, c.workers))}"


def refusals(c: weight_transfer_pb2.TransportChoice) -> str:
    """The transports passed over, and why; empty if there were none."""
    return "; ".join(f"{r.transport}: {r.reason}" for r in c.refusals)


def reached_by(r: fleet_pb2.ReplicaInfo) -> str:
    """One cell: "shm", "shm (0), grpc (1, 2)", "out of reach" or "-"."""
    if not r.transports:
        return "-"
    if any(not c.transport for c in r.transports):
        return "out of reach"
    by: dict[str, list[int]] = {}
    for c in r.transports:
        by.setdefault(c.transport, []).extend(c.workers)
    if len(by) == 1:
        return next(iter(by))
    return ", ".join(f"{name} ({', '.join(map(str, sorted(who)))})" for name, who in by.items())


def transports_table(replicas: Iterable[fleet_pb2.ReplicaInfo]) -> None:
    """Print each worker's transport, why it, and why not the ones before it."""
    table("transports", ["replica", "workers", "transport", "why", "passed over"], _rows(replicas))


def _rows(replicas: Iterable[fleet_pb2.ReplicaInfo]) -> Iterator[list[str]]:
    for r in replicas:
        if not r.transports:
            yield [r.replica_id, f"{r.workers} in all", "-", NOT_BOUND, "-"]
        for c in r.transports:
            who = ", ".join(map(str, c.workers))
            yield [r.replica_id, who, c.transport or "none", c.reason, refusals(c) or "-"]
