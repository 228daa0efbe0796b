"""Which transport reaches which replica: a pure choice from what both sides offer, with every refusal explained."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from .model import Channel, Offer, Rank, Replica, Worker

__all__ = ["PREFERENCE", "PREFERENCE_ON_CPU", "bind", "choose"]

#: Best first. A third party's transport comes after ours unless it is forced; ``external`` only when it is forced.
PREFERENCE = ("cuda_ipc", "nccl", "ucx", "shm", "grpc")
#: The same where no member uses a GPU: one send of ``shm`` serves every receiver, and it needs no library.
PREFERENCE_ON_CPU = ("shm", "ucx", "grpc", "cuda_ipc", "nccl")
_SAME_HOST = frozenset({"cuda_ipc", "shm"})
_DISTINCT_DEVICES = frozenset({"nccl"})

Choice = tuple[str, str, str, tuple[tuple[str, str], ...], str]


def _refusal(name: str, ranks: Sequence[Rank], workers: Sequence[Worker]) -> str:
    """Why ``name`` cannot join these ranks and workers; empty if it can."""
    members: list[tuple[str, Rank | Worker]] = [
        *((f"rank/{r.rank}", r) for r in ranks),
        *((f"worker {w.index}", w) for w in workers),
    ]
    offers: dict[str, Offer] = {}
    for said, member in members:
        offer = next((o for o in member.offers if o.transport == name), None)
        if offer is None:
            return f"{said}: {dict(member.refusals).get(name, 'not offered')}"
        offers[said] = offer
    if name in _SAME_HOST or any(o.same_host for o in offers.values()):
        hosts = {m.host_id for _, m in members}
        if len(hosts) > 1 or "" in hosts:
            return f"needs one host, and the members are on {sorted(hosts)}"
    return _devices(name, members, offers)


def _devices(name: str, members: Sequence[tuple[str, Rank | Worker]], offers: Mapping[str, Offer]) -> str:
    """What stands against ``name`` in the members' GPUs; empty if nothing does."""
    if name in _DISTINCT_DEVICES:
        uuids = [m.device_uuid for _, m in members]
        twice = sorted({u for u in uuids if u and uuids.count(u) > 1})
        if twice:
            return f"GPU {twice[0]} would be used by two members: use cuda_ipc"
    for said, member in members:
        reaches = offers[said].reaches
        for other, them in members:
            across = isinstance(member, Rank) is not isinstance(them, Rank)
            if reaches and across and them.device_uuid not in (*reaches, member.device_uuid):
                device = f"GPU {them.device_uuid}" if them.device_uuid else "host memory"
                return f"{said} (GPU {member.device_uuid}) cannot address the memory of {other} ({device})"
    return ""


def choose(ranks: Sequence[Rank], replica: Replica, forced: str = "") -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """The transport for one replica: (name or "", reason, refusals of the others)."""
    offered = {o.transport for r in ranks for o in r.offers} | {o.transport for w in replica.workers for o in w.offers}
    others = sorted(offered - set(PREFERENCE) - {"external"})
    on_gpu = any(r.device_uuid for r in ranks) or any(w.device_uuid for w in replica.workers)
    names = (forced,) if forced else (*(PREFERENCE if on_gpu else PREFERENCE_ON_CPU), *others)
    refusals: list[tuple[str, str]] = []
    for name in names:
        why = _refusal(name, ranks, replica.workers)
        if not why:
            reason = "forced by the trainer" if forced else "the first in order of preference that both sides can use"
            return name, reason, tuple(refusals)
        refusals.append((name, why))
    return "", "no transport that both sides can use", tuple(refusals)


def bind(
    ranks: Mapping[int, Rank],
    replicas: Iterable[Replica],
    forced: str,
    bucket_bytes: int,
    old: Sequence[Channel],
    seed: bytes,
) -> tuple[tuple[Channel, ...], tuple[Choice, ...]]:
    """Bind every replica to a channel: one per transport and set of modes, so that a channel never mixes modes.

    A channel whose members, offers and bucket size are unchanged is kept (same id, same key); every other gets an id
    and a secret derived from ``seed``, 32 secret random bytes used for one bind.
    """
    ordered = [ranks[r] for r in sorted(ranks)]
    chosen: dict[tuple[str, tuple[str, ...]], list[Replica]] = {}
    picks: dict[str, tuple[str, str, tuple[tuple[str, str], ...]]] = {}
    for replica in sorted(replicas, key=lambda r: r.replica_id):
        pick = choose(ordered, replica, forced)
        picks[replica.replica_id] = pick
        if pick[0]:
            chosen.setdefault((pick[0], tuple(replica.modes)), []).append(replica)
    channels: list[Channel] = []
    channel_of: dict[str, str] = {}
    for (transport, _), members in sorted(chosen.items()):
        offers: dict[str, Offer] = {}
        for rank in ordered:
            offers[f"rank/{rank.rank}"] = next(o for o in rank.offers if o.transport == transport)
        for replica in members:
            for worker in replica.workers:
                offer = next(o for o in worker.offers if o.transport == transport)
                offers[f"{replica.replica_id}/{worker.index}"] = offer
        made = Channel(
            channel_id="",
            transport=transport,
            key=b"",
            senders=tuple(f"rank/{r.rank}" for r in ordered),
            receivers=tuple(f"{r.replica_id}/{w.index}" for r in members for w in r.workers),
            replicas=tuple((r.replica_id, r.incarnation) for r in members),
            modes=members[0].modes,
            bucket_bytes=bucket_bytes,
            offers=offers,
            ordinal=sum(c.transport == transport for c in channels),
        )
        channel = _kept(made, old) or _named(made, *_fresh(seed, len(channels)))
        channels.append(channel)
        channel_of.update((r.replica_id, channel.channel_id) for r in members)
    choices = tuple((rid, p[0], p[1], p[2], channel_of.get(rid, "")) for rid, p in sorted(picks.items()))
    return tuple(channels), choices


def _named(made: Channel, channel_id: str, key: bytes) -> Channel:
    return replace(made, channel_id=channel_id, key=key)


def _fresh(seed: bytes, n: int) -> tuple[str, bytes]:
    """An unused channel id, and a key that does not follow from it."""
    name = hashlib.sha256(b"channel id" + n.to_bytes(4, "little") + seed).hexdigest()[:24]
    return f"c-{name}", hashlib.sha256(b"channel key" + n.to_bytes(4, "little") + seed).digest()


def _kept(made: Channel, old: Sequence[Channel]) -> Channel | None:
    for channel in old:
        if _named(made, channel.channel_id, channel.key) == channel:
            return channel
    return None
