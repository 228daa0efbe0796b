"""What a plan is made of, and plans that are made before anybody asks."""

from __future__ import annotations

from collections.abc import Collection

from .events import MakePlan, PlanMade
from .evolve import replace
from .group_state import GroupState
from .model import Ahead, Channel, Trainer
from .tx import Tx

__all__ = ["asked", "made_ahead", "plan_ahead", "plans_ahead"]


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
    s = tx.state
    t, manifest_id = s.trainer, s.committed_manifest
    if s.open is not None or t is None or len(t.placements.get(manifest_id, {})) != t.world_size:
        return
    a = t.ahead if t.ahead.manifest_id == manifest_id else Ahead(manifest_id, t.ahead.last)
    for c in t.channels:
        if taking := _taking(tx, c, manifest_id):
            a = replace(a, last=a.last + 1, asked={**a.asked, c.channel_id: a.last + 1})
            tx.effects.append(replace(asked(tx, t, c, manifest_id, taking, ""), ahead=a.last))
    tx.put_trainer(replace(t, ahead=a))


def made_ahead(tx: Tx, e: PlanMade) -> None:
    """Those who will need such a plan are told of it, while there is time to fetch it."""
    t = tx.state.trainer
    if t is None or tx.state.open is not None or t.ahead.asked.get(e.channel_id) != e.ahead:
        tx.quietly("a plan that was made ahead, too late")
        return
    if e.summary is None:
        tx.say(f"the plan of channel {e.channel_id} cannot be made ahead of an update: {e.failure}")
        return
    if t.ahead.plans.get(e.channel_id) == e.summary.plan_id:
        tx.quietly("a plan that was made ahead again")
        return
    plans = {**t.ahead.plans, e.channel_id: e.summary.plan_id}
    of: dict[str, tuple[str, ...]] = {}
    for c in t.channels:
        for replica_id, _ in c.replicas if c.channel_id in plans else ():
            of[replica_id] = (*of.get(replica_id, ()), plans[c.channel_id])
    tx.put_trainer(replace(t, ahead=replace(t.ahead, plans=plans, of=of)))
    tx.push(r for c in t.channels if c.channel_id == e.channel_id for r, _ in c.replicas)
    tx.push_trainers()
    tx.say(f"the plan of channel {e.channel_id} is made ahead of an update")


def plans_ahead(state: GroupState) -> Ahead:
    """Those of the committed manifest that were made ahead of its next update."""
    t = state.trainer
    return t.ahead if t is not None and t.ahead.manifest_id == state.committed_manifest else Ahead()


def _taking(tx: Tx, c: Channel, manifest_id: str) -> set[str]:
    """The replicas of a channel that may join an update; nobody while one of them has not said what it holds. Who left
    is bound until its lease is over."""
    from .members import may_join  # the two halves of one machine call each other

    found: set[str] = set()
    lives = dict(c.replicas)
    for member in c.receivers:
        r = tx.state.replicas.get(_replica(member))
        if r is None or r.incarnation != lives[r.replica_id] or may_join(r, tx.now):
            continue
        if not _layout(tx, member, manifest_id):
            return set()
        found.add(r.replica_id)
    return found


def _replica(member: str) -> str:
    return member.rpartition("/")[0]


def _layout(tx: Tx, member: str, manifest_id: str) -> str:
    """The placement id of a receiver; ``""`` if none is known."""
    replica_id, _, worker = member.rpartition("/")
    r = tx.state.replicas.get(replica_id)
    return r.placements.get(manifest_id, {}).get(int(worker), "") if r is not None else ""
