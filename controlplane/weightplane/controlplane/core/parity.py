"""Parity checks that a trainer made in its loop: kept with the update whose version they are of, and what a failed one
means to its replica."""

from __future__ import annotations

from collections.abc import Iterable

from .evolve import replace
from .group_state import GroupState
from .reasons import Failure, Reason
from .states import Admin, ParityPolicy, Phase, Verdict
from .tx import Tx
from .update_state import Parity, Update

__all__ = ["condemned", "newest", "record"]


def record(tx: Tx, results: Iterable[Parity]) -> Failure | None:
    """Keep them; all or none. Why not, if one is of a version that was not committed or is forgotten, or of a replica
    that is not known: what callers make up would stay with the update for good."""
    known = {u.version: u for u in (*tx.state.history.values(), tx.state.open) if u is not None}
    found: dict[int, list[Parity]] = {}
    for p in results:
        u = known.get(p.version)
        if u is None or u.phase is not Phase.COMMITTED:
            text = f"parity: expected a version that group {tx.state.group!r} committed, found {p.version}"
            return Failure(Reason.INVALID_ARGUMENT, text, p.replica_id)
        if p.replica_id not in u.parts and p.replica_id not in tx.state.replicas:
            text = f"parity: expected a replica of group {tx.state.group!r} or of {u.update_id}, found {p.replica_id!r}"
            return Failure(Reason.UNKNOWN_REPLICA, text, p.replica_id)
        found.setdefault(p.version, []).append(p)
    for version, new in found.items():
        u = known[version]
        told = {p.replica_id: p for p in (*u.parity, *new)}
        u = tx.put_update(replace(u, parity=tuple(told.values())))
        if u.closed:
            tx.write("close", u)  # else what closes it writes it
        for p in new:
            _judge(tx, u, p)
        tx.push_trainers(u.update_id)
    return None


def _judge(tx: Tx, u: Update, p: Parity) -> None:
    """A failed check puts the replica in quarantine where the policy says so. Only one that still holds what was
    checked: another life, or another version, was not."""
    figures = f"mean {p.mean_abs:.3g}, p99 {p.p99_abs:.3g}, ESS {p.ess:.6g} of {p.tokens} tokens"
    tx.say(f"replica {p.replica_id} is {p.verdict} at version {p.version}: {p.reason or figures}", u.update_id)
    r = tx.state.replicas.get(p.replica_id)
    if p.verdict is not Verdict.NOT_AT_PARITY or tx.state.policy.parity is not ParityPolicy.QUARANTINE or r is None:
        return
    if r.held != u.held or r.admin is not Admin.ACTIVE:
        tx.say(f"replica {r.replica_id} is left as it is: it is {r.admin} and holds version {r.held.version}")
        return
    why = f"engine and trainer are not at parity at version {p.version}: {p.reason or figures}"
    tx.put_replica(replace(r, admin=Admin.QUARANTINED, failure=Failure(Reason.ENGINE, why, r.replica_id)))
    tx.write_roster(r.replica_id, Admin.QUARANTINED)
    tx.say(f"replica {r.replica_id} is QUARANTINED: not at parity")


def condemned(state: GroupState, u: Update, replica_id: str) -> bool:
    """Whether a check of ``u``'s own version put the replica in quarantine: the end of ``u`` is no reason to bring it
    back."""
    if state.policy.parity is not ParityPolicy.QUARANTINE:
        return False
    return any(p.replica_id == replica_id and p.verdict is Verdict.NOT_AT_PARITY for p in u.parity)


def newest(state: GroupState) -> dict[str, Parity]:
    """The newest check of each replica that is known, by its id."""
    updates = sorted((u for u in (*state.history.values(), state.open) if u is not None), key=lambda u: u.version)
    return {p.replica_id: p for u in updates for p in u.parity if p.replica_id in state.replicas}
