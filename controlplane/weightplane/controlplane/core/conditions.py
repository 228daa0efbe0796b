"""Conditions: how each engine's settings compare with what the group declares, and which of them keep it from READY."""

from __future__ import annotations

from .events import Conditions
from .evolve import replace
from .model import Declaration, Policy, Replica
from .tx import Tx

__all__ = ["blocked", "declaration", "take"]


def declaration(policy: Policy) -> Declaration:
    """What engines are judged against."""
    return Declaration(policy.declared, policy.cache, policy.pause)


def blocked(policy: Policy, r: Replica) -> str:
    """Which condition keeps ``r`` from being ready, and why; empty if none. One that is not told is not True."""
    for kind in policy.blocking:
        found = next((c for c in r.conditions if c.type == kind), None)
        if found is None:
            return f"condition {kind} is not told, and it must be True"
        if found.status != "True":
            return f"condition {kind} is {found.status}: {found.message}"
    return ""


def take(tx: Tx, e: Conditions) -> None:
    """A replica told its conditions."""
    r = tx.state.replicas.get(e.replica_id)
    if r is None or r.incarnation != e.incarnation:
        tx.quietly(f"conditions of a former life of {e.replica_id}")
        return
    if r.conditions == e.conditions:
        tx.quietly(f"conditions of {e.replica_id}, as before")
        return
    tx.put_replica(replace(r, conditions=e.conditions))
    tx.push_trainers()
    wrong = [f"{c.type} ({c.setting})" if c.setting else c.type for c in e.conditions if c.status == "False"]
    why = blocked(tx.state.policy, tx.state.replicas[e.replica_id])
    said = f"not as declared: {', '.join(wrong)}" if wrong else "none is other than declared"
    tx.say(f"replica {r.replica_id} told its conditions: {said}" + (f"; it is not ready: {why}" if why else ""))
