"""What a plan is made of, and plans that are made before anybody asks."""

from __future__ import annotations

from collections.abc import Collection

from .events import MakePlan
from .model import Channel, Trainer
from .tx import Tx

__all__ = ["asked", "plan_ahead"]


def asked(tx: Tx, t: Trainer, c: Channel, manifest_id: str, taking: Collection[str], update_id: str) -> MakePlan:
    """The plan of one channel, for the replicas that take part. A placement that is not known is ``""``."""
    receivers = tuple((m, _layout(tx, m, manifest_id)) for m in c.receivers if _replica(m) in taking)
    placed = t.placements[manifest_id]
    senders = tuple((f"rank/{r}", placed[r]) for r in sorted(placed))
    return MakePlan(update_id, c.channel_id, manifest_id, senders, receivers, c.bucket_bytes)


def plan_ahead(tx: Tx) -> None:
    """Between updates: have the plans made that another update of the committed manifest would ask for, once everybody
    who is bound has said what it holds. A join then costs that update none of the time. Nobody waits for them; an
    update of other content, or without somebody, asks for its own."""
    s = tx.state
    t, manifest_id = s.trainer, s.committed_manifest
    if s.open is not None or t is None or len(t.placements.get(manifest_id, {})) != t.world_size:
        return
    for c in t.channels:
        if all(_layout(tx, m, manifest_id) for m in c.receivers):
            tx.effects.append(asked(tx, t, c, manifest_id, set(map(_replica, c.receivers)), ""))


def _replica(member: str) -> str:
    return member.rpartition("/")[0]


def _layout(tx: Tx, member: str, manifest_id: str) -> str:
    """The placement id of a receiver; ``""`` if none is known."""
    replica_id, _, worker = member.rpartition("/")
    r = tx.state.replicas.get(replica_id)
    return r.placements.get(manifest_id, {}).get(int(worker), "") if r is not None else ""
