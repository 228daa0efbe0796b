"""What a plan is made of, and plans that are made before anybody asks."""

from __future__ import annotations

from collections.abc import Collection

from .events import MakePlan, PlanMade
from .evolve import replace
from .model import Ahead, Channel, Trainer
from .tx import Tx

__all__ = ["asked", "made_ahead", "plan_ahead"]


def asked(tx: Tx, t: Trainer, c: Channel, manifest_id: str, taking: Collection[str], update_id: str) -> MakePlan:
    """The plan of one channel, for the replicas that take part. A placement that is not known is ``""``."""
    receivers = tuple((m, _layout(tx, m, manifest_id)) for m in c.receivers if _replica(m) in taking)
    placed = t.placements[manifest_id]
    senders = tuple((f"rank/{r}", placed[r]) for r in sorted(placed))
    return MakePlan(update_id, c.channel_id, manifest_id, senders, receivers, c.bucket_bytes)


def plan_ahead(tx: Tx) -> None:
    """Between updates: have the plans made that another update of the committed manifest would ask for, once everybody
    who is bound and may take part has said what it holds. A join then costs that update none of the time. Nobody waits
    for them; an update of other content, or without somebody, asks for its own. See ``made_ahead``."""
    from .members import may_join  # the two halves of one machine call each other

    s = tx.state
    t, manifest_id = s.trainer, s.committed_manifest
    if s.open is not None or t is None or len(t.placements.get(manifest_id, {})) != t.world_size:
        return
    able = {(r.replica_id, r.incarnation) for r in s.replicas.values() if not may_join(r, tx.now)}
    for c in t.channels:
        taking = {rid for rid, life in c.replicas if (rid, life) in able}  # who left is bound until its lease is over
        if taking and all(_layout(tx, m, manifest_id) for m in c.receivers if _replica(m) in taking):
            tx.effects.append(asked(tx, t, c, manifest_id, taking, ""))


def made_ahead(tx: Tx, e: PlanMade) -> None:
    """Those who will need such a plan are told of it, while there is time to fetch it."""
    t = tx.state.trainer
    channels = {c.channel_id: c for c in t.channels} if t is not None else {}
    if t is None or e.channel_id not in channels or e.summary is None or tx.state.open is not None:
        tx.quietly("a plan that was made ahead, too late or not at all")
        return
    made = {**t.ahead.plans, e.channel_id: e.summary.plan_id}
    plans = {c: p for c, p in made.items() if c in channels}
    if plans == t.ahead.plans:
        tx.quietly("a plan that was made ahead again")
        return
    of: dict[str, tuple[str, ...]] = {}
    for channel_id, plan_id in plans.items():
        for replica_id, _ in channels[channel_id].replicas:
            of[replica_id] = (*of.get(replica_id, ()), plan_id)
    tx.put_trainer(replace(t, ahead=Ahead(plans, of)))
    tx.push(r for r, _ in channels[e.channel_id].replicas)
    tx.push_trainers()
    tx.say(f"the plan of channel {e.channel_id} is made ahead of an update")


def _replica(member: str) -> str:
    return member.rpartition("/")[0]


def _layout(tx: Tx, member: str, manifest_id: str) -> str:
    """The placement id of a receiver; ``""`` if none is known."""
    replica_id, _, worker = member.rpartition("/")
    r = tx.state.replicas.get(replica_id)
    return r.placements.get(manifest_id, {}).get(int(worker), "") if r is not None else ""
