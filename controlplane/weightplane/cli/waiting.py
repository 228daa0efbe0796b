"""What is said while a call is waited for that answers only once replicas have done what it asks for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import grpc

from weightplane.v1 import fleet_pb2

from .client import Connection
from .output import err

__all__ = ["told_meanwhile"]

_LOOK_S = 2.0  # a replica that runs answers in far less, and nobody wants to hear of it


@contextmanager
def told_meanwhile(
    c: Connection,
    group: str,
    named: Sequence[str],
    what: str,
    late: Callable[[fleet_pb2.ReplicaInfo], bool],
    as_json: bool,
) -> Iterator[None]:
    """While the block waits, say on standard error which replicas it waits for, and again whenever these change.

    ``named``: those that were asked, none for all. ``late``: whether one has not done it yet. With ``as_json`` nothing
    is said.
    """
    over = threading.Event()

    def look() -> None:
        told = ""
        while not over.wait(_LOOK_S):
            try:
                asked = fleet_pb2.ListReplicasRequest(group=group)
                replicas = c.fleet.ListReplicas(asked, timeout=_LOOK_S).replicas
            except grpc.RpcError:  # the call that is waited for tells what is wrong
                continue
            waited = [_about(r) for r in replicas if _asked(r, named) and late(r)]
            text = ", ".join(waited[:8]) + (f" and {len(waited) - 8} more" if len(waited) > 8 else "")
            if text not in ("", told) and not over.is_set():
                told = text
                err.print(f"waiting up to {c.timeout:g} s in all until {what}: {text}", markup=False, soft_wrap=True)

    # A thread, for the call is made again if its connection breaks, and so is waited for where it is made.
    thread = threading.Thread(target=look, daemon=True)
    if not as_json:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread.is_alive():  # else it would speak after the answer, of a channel that is closed
            thread.join()


def _asked(r: fleet_pb2.ReplicaInfo, named: Sequence[str]) -> bool:
    """Whether the call waits for ``r``: a lost one is waited for by nobody."""
    return (not named or r.replica_id in named) and r.liveness != fleet_pb2.LIVENESS_LOST


def _about(r: fleet_pb2.ReplicaInfo) -> str:
    """Its name, and what may be why: of one that is silent or stopped, this is."""
    return f"{r.replica_id} ({r.may_not_join})" if r.may_not_join else r.replica_id
