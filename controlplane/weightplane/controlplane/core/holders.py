"""Who is behind the committed version, and who retains a copy of it that could be sent: what ``catching`` asks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from . import negotiate
from .evolve import replace
from .group_state import GroupState
from .model import Channel, Offer, Rank, Replica, Retained, Worker
from .states import Admin, Liveness, Process, Weights

__all__ = ["SERVES", "Holder", "behind", "channel_to", "holders", "lives", "patience", "reach", "waits"]

#: Transports by which a copy in host memory is sent to one replica, best first: those whose sender needs no endpoint.
SERVES = ("shm", "grpc")
_BUCKET = 16 << 20


def behind(state: GroupState, r: Replica, now: float) -> bool:
    """Whether ``r`` should be caught up now, if somebody can."""
    from .members import may_join  # the two halves of one machine call each other

    if not state.committed.version or state.rewinding or state.open is not None or r.replica_id in state.catch_ups:
        return False
    serves = r.weights is Weights.READY and r.admin is not Admin.QUARANTINED  # who is in quarantine is proven anew
    if serves and r.held == state.committed:
        return False
    if may_join(r, now) or now < r.catch_up_after:
        return False
    if serves:  # what it holds; the next update takes it along, if there is one soon
        last = state.history.get(next(reversed(list(state.history)), ""))
        return last is None or now - last.ended_at >= state.config.catch_up_idle_s
    return True


def waits(state: GroupState, r: Replica, now: float, could: Sequence[Holder]) -> bool:
    """Whether a replica that holds nothing yet is left to be caught up, rather than to take part in the next update:
    somebody can, it has not failed, and it did not have to wait for long (updates may leave no time)."""
    fresh = r.weights is Weights.JOINING and not r.catch_ups_failed and now - r.came_at < patience(state)
    return fresh and not state.rewinding and any(h.name != r.replica_id and reach(h, r) for h in could)


def patience(state: GroupState) -> float:
    """How long a catch-up may stand still, seconds. How long it takes is nobody's concern but its replica's."""
    return min(state.policy.update_timeout_s, state.config.catch_up_patience_s)


@dataclass(frozen=True)
class Holder:
    """Who could send the committed version: ``name`` "" is the trainer. ``senders``: as ``CatchUp`` has them."""

    name: str
    life: str
    senders: tuple[tuple[str, str], ...]
    ranks: tuple[Rank, ...]  # the same members as negotiation sees them


def holders(state: GroupState) -> list[Holder]:
    """Those that retain what is committed, peers first; nobody while nothing proves what that is, and no peer that is
    in quarantine: two that failed would bring each other back."""
    if state.unproven:
        return []
    wanted = Retained(state.committed, state.committed_manifest)
    out: list[Holder] = []
    for r in state.replicas.values():
        good = r.retained == wanted and r.admin is not Admin.QUARANTINED
        if good and lives(r) and r.replica_id not in state.catch_ups:
            placed = r.placements.get(wanted.manifest_id, {})
            if all(w.index in placed for w in r.workers):
                senders = tuple((f"{r.replica_id}/{w.index}", placed[w.index]) for w in r.workers)
                out.append(Holder(r.replica_id, r.incarnation, senders, tuple(_as_rank(w) for w in r.workers)))
    t = state.trainer
    if t is not None and not t.closed and len(t.ranks) == t.world_size:
        placed = t.placements.get(wanted.manifest_id, {})
        ranks = [t.ranks[i] for i in sorted(t.ranks)]
        if all(rank.retained == wanted and rank.rank in placed and not rank.lost for rank in ranks):
            senders = tuple((f"rank/{rank.rank}", placed[rank.rank]) for rank in ranks)
            out.append(Holder("", str(t.generation), senders, tuple(_on_host(rank) for rank in ranks)))
    return out


def lives(r: Replica) -> bool:
    """Whether it is there and runs."""
    return r.liveness is Liveness.LIVE and r.process is Process.RUNNING


def _as_rank(w: Worker) -> Rank:
    """A worker as a sender of host memory."""
    return Rank(w.index, w.host_id, "", w.offers, w.refusals)


def _on_host(rank: Rank) -> Rank:
    """A rank as a sender of host memory."""
    if rank.serve_offers:
        rank = replace(rank, host_id=rank.serve_host, offers=rank.serve_offers)
    return replace(rank, device_uuid="")


def reach(holder: Holder, r: Replica) -> str:
    """The first transport by which all of the holder reaches every worker of ``r``; empty if there is none."""
    for name in SERVES:
        if all(negotiate.choose(holder.ranks, w, name)[0] == name for w in r.workers):
            return name
    return ""


def channel_to(state: GroupState, catch_up_id: str, holder: Holder, transport: str, r: Replica) -> Channel:
    """A channel of its own for one catch-up, from all of the holder to every worker of ``r``."""

    def offer(member: Rank | Worker) -> Offer:
        return next(o for o in member.offers if o.transport == transport)

    receivers = [f"{r.replica_id}/{w.index}" for w in r.workers]
    offers = {member: offer(rank) for (member, _), rank in zip(holder.senders, holder.ranks, strict=True)}
    offers.update((member, offer(w)) for member, w in zip(receivers, r.workers, strict=True))
    return Channel(
        channel_id=f"c-{catch_up_id}",
        transport=transport,
        key=hashlib.sha256(b"catch-up key" + state.secret + catch_up_id.encode()).digest(),
        senders=tuple(member for member, _ in holder.senders),
        receivers=tuple(receivers),
        replicas=((r.replica_id, r.incarnation),),
        modes=r.modes,
        bucket_bytes=_BUCKET,
        offers=offers,
    )
