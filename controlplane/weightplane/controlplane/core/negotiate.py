"""Which transport reaches which worker: a pure choice from what both sides offer, with every refusal explained.

**Worker by worker.** Each gets the first transport, in order of preference, that every rank of the trainer and it can
use. One replica's workers may end up on several transports, and one update then goes over all of them.

**Channels.** One for each transport and set of modes (a channel never mixes modes); its receivers are the workers
chosen for it, by replica and index. Where all members of a channel act together, one may keep another out: ``nccl``
takes no GPU twice. Workers are asked by replica and index, and who comes later goes on to its next choice.

**A replica takes part whole or not at all.** If one worker is out of reach, none of that replica's is bound, and what
the others would have taken in a channel is free for those who come after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from .model import Channel, Choice, Offer, Rank, Replica, Worker
from .states import Mode, Verify

__all__ = ["PREFERENCE", "PREFERENCE_ON_CPU", "bind", "choose", "members_of", "out_of_reach", "verify_by_default"]

#: Best first. A third party's transport comes after ours unless it is forced; ``external`` only when it is forced.
PREFERENCE = ("cuda_ipc", "nccl", "ucx", "shm", "grpc")
#: The same where neither side uses a GPU: one send of ``shm`` serves every receiver, and it needs no library.
PREFERENCE_ON_CPU = ("shm", "ucx", "grpc", "cuda_ipc", "nccl")
_SAME_HOST = frozenset({"cuda_ipc", "shm"})
_LOOPBACK = "is offered to its own host only (a data port on loopback: set WEIGHTPLANE_DATA_BIND at the replica)"
#: Bytes of a bucket where the trainer asks for none. Each costs every member about 0.1 ms of Python; with the larger
#: ones that passes while bytes move.
_BUCKET = 16 << 20
_BUCKETS = {"ucx": 64 << 20}
_BUCKETS_ON_GPU = {"cuda_ipc": 1 << 30, "nccl": 1 << 30, "ucx": 256 << 20}
#: All members of such a channel act together, each with a GPU of its own.
_DISTINCT_DEVICES = frozenset({"nccl"})

_FIRST = "the first in order of preference that both sides can use"
_FORCED = "forced by the trainer"
_NONE = "no transport that both sides can use"

#: (transport or "", reason, refusals of the others).
Pick = tuple[str, str, tuple[tuple[str, str], ...]]
#: GPUs in use in a channel, by whom.
Taken = Mapping[str, str]


@dataclass(frozen=True)
class _Senders:
    """The trainer's ranks, who all take part in every channel; what they mean for a transport is worked out once."""

    ranks: tuple[Rank, ...]
    _known: dict[str, tuple[tuple[Offer, ...], str]] = field(default_factory=dict)

    @cached_property
    def names(self) -> frozenset[str]:
        """Transports that some rank offers."""
        return frozenset(o.transport for r in self.ranks for o in r.offers)

    @cached_property
    def hosts(self) -> frozenset[str]:
        """Where they are."""
        return frozenset(r.host_id for r in self.ranks)

    @cached_property
    def on_gpu(self) -> bool:
        """Whether any of them sends from a GPU."""
        return any(r.device_uuid for r in self.ranks)

    @cached_property
    def gpus(self) -> dict[str, str]:
        """Their GPUs, each with the first rank that uses it."""
        out: dict[str, str] = {}
        for r in self.ranks:
            if r.device_uuid:
                out.setdefault(r.device_uuid, f"rank/{r.rank}")
        return out

    def look(self, name: str) -> tuple[tuple[Offer, ...], str]:
        """Every rank's offer of ``name``, and why it cannot be used whoever receives (empty if it can)."""
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = self._look(name)
        return known

    def _look(self, name: str) -> tuple[tuple[Offer, ...], str]:
        offers: list[Offer] = []
        for r in self.ranks:
            offer = _offer(r, name)
            if offer is None:
                return (), f"rank/{r.rank}: {dict(r.refusals).get(name, 'not offered')}"
            offers.append(offer)
            holder = self.gpus.get(r.device_uuid, f"rank/{r.rank}")
            if name in _DISTINCT_DEVICES and holder != f"rank/{r.rank}":
                return (), _twice(r.device_uuid, holder, f"rank/{r.rank}")
        return tuple(offers), ""

    @cached_property
    def same_host(self) -> frozenset[str]:
        """Transports that some rank offers to its own host only."""
        return frozenset(o.transport for r in self.ranks for o in r.offers if o.same_host)

    @cached_property
    def limited(self) -> frozenset[str]:
        """Transports by which some rank cannot address every GPU."""
        return frozenset(o.transport for r in self.ranks for o in r.offers if o.reaches)


def _offer(member: Rank | Worker, name: str) -> Offer | None:
    return next((o for o in member.offers if o.transport == name), None)


def _twice(gpu: str, one: str, other: str) -> str:
    return f"GPU {gpu} would be used by two members, {one} and {other}: use cuda_ipc"


def _refusal(name: str, senders: _Senders, worker: Worker, taken: Taken) -> str:
    """Why ``name`` cannot join the ranks and this worker; empty if it can. ``taken``: GPUs in its channel."""
    _, why = senders.look(name)
    if why:
        return why
    offer = _offer(worker, name)
    if offer is None:
        return f"the worker: {dict(worker.refusals).get(name, 'not offered')}"
    if name in _SAME_HOST or offer.same_host or name in senders.same_host:
        hosts = senders.hosts | {worker.host_id}
        if len(hosts) > 1 or "" in hosts:
            more = f" and {len(hosts) - 5} more" if len(hosts) > 5 else ""
            what = "needs one host" if name in _SAME_HOST else _LOOPBACK
            return f"{what}, and the members are on {sorted(hosts)[:5]}{more}"
    return _devices(name, senders, worker, offer, taken)


def _devices(name: str, senders: _Senders, worker: Worker, offer: Offer, taken: Taken) -> str:
    """What stands against ``name`` in the members' GPUs; empty if nothing does."""
    gpu = worker.device_uuid
    if name in _DISTINCT_DEVICES and gpu:
        holder = senders.gpus.get(gpu) or taken.get(gpu)
        if holder is not None:
            return _twice(gpu, holder, "the worker")
    if not offer.reaches and name not in senders.limited:
        return ""
    for rank, theirs in zip(senders.ranks, senders.look(name)[0], strict=True):
        said, other = f"rank/{rank.rank}", rank.device_uuid
        if theirs.reaches and gpu not in (*theirs.reaches, other):
            return f"{said} (GPU {other}) cannot address the memory of the worker ({_memory(gpu)})"
        if offer.reaches and other not in (*offer.reaches, gpu):
            return f"the worker (GPU {gpu}) cannot address the memory of {said} ({_memory(other)})"
    return ""


def _memory(gpu: str) -> str:
    return f"GPU {gpu}" if gpu else "host memory"


def _choose(senders: _Senders, worker: Worker, forced: str, taken: Mapping[str, Taken]) -> Pick:
    names: tuple[str, ...] = (forced,)
    if not forced:
        offered = senders.names.union(o.transport for o in worker.offers)
        others = sorted(offered.difference(PREFERENCE, ("external",)))
        names = (*(PREFERENCE if senders.on_gpu or worker.device_uuid else PREFERENCE_ON_CPU), *others)
    refusals: list[tuple[str, str]] = []
    for name in names:
        why = _refusal(name, senders, worker, taken.get(name, {}))
        if not why:
            return name, _FORCED if forced else _FIRST, tuple(refusals)
        refusals.append((name, why))
    return "", _NONE, tuple(refusals)


def choose(ranks: Sequence[Rank], worker: Worker, forced: str = "", taken: Mapping[str, Taken] | None = None) -> Pick:
    """The transport for one worker: (name or "", reason, refusals of the others).

    ``taken``: for a transport, the GPUs that are in use in the channel that the worker would join, and by whom.
    """
    return _choose(_Senders(tuple(ranks)), worker, forced, taken or {})


def bind(
    ranks: Mapping[int, Rank],
    replicas: Iterable[Replica],
    forced: str,
    bucket_bytes: int,
    old: Sequence[Channel],
    seed: bytes,
    outside: Mapping[str, str] | None = None,
) -> tuple[tuple[Channel, ...], tuple[Choice, ...]]:
    """Bind every worker of every replica that can be reached whole to a channel, and say why of each.

    A channel whose members, offers and bucket size are unchanged is kept (same id, same key); every other gets an id
    and a secret derived from ``seed``, 32 secret random bytes used for one bind. ``bucket_bytes`` 0: as suits each.
    ``outside``: replicas that take no part in updates now, and why: no collective channel takes them in.
    """
    senders = _Senders(tuple(ranks[r] for r in sorted(ranks)))
    seats: dict[tuple[str, tuple[Mode, ...]], list[tuple[Replica, Worker]]] = {}
    taken: dict[tuple[Mode, ...], dict[str, dict[str, str]]] = {}
    picked: list[tuple[Replica, list[Pick]]] = []
    for r in sorted(replicas, key=lambda r: r.replica_id):
        why = (outside or {}).get(r.replica_id, "")
        picks = _seat(senders, r, forced, taken.setdefault(tuple(r.modes), {}), why)
        picked.append((r, picks))
        if all(transport for transport, _, _ in picks):
            for worker, (transport, _, _) in zip(r.workers, picks, strict=True):
                seats.setdefault((transport, tuple(r.modes)), []).append((r, worker))
    channels: list[Channel] = []
    for (transport, _), members in sorted(seats.items()):
        ordinal = sum(c.transport == transport for c in channels)
        made = _channel(senders, transport, members, bucket_bytes, ordinal)
        channels.append(_kept(made, old) or _named(made, *_fresh(seed, len(channels))))
    by_member = members_of(channels)
    return tuple(channels), tuple(c for r, picks in picked for c in _choices(r, picks, by_member))


def _seat(senders: _Senders, r: Replica, forced: str, taken: dict[str, dict[str, str]], outside: str) -> list[Pick]:
    """A choice for each worker. The GPUs of a replica that can be reached whole are noted in ``taken``.

    ``outside``: why it takes no part now; then it is left unbound where a collective would take it.
    """
    picks: list[Pick] = []
    claims: list[tuple[str, str]] = []
    for worker in r.workers:
        pick = _choose(senders, worker, forced, taken)
        if outside and pick[0] and _collective(worker, pick[0]):
            pick = "", f"{pick[0]} takes it in once it takes part in updates: {outside}", pick[2]
        picks.append(pick)
        if pick[0] in _DISTINCT_DEVICES and worker.device_uuid:
            taken.setdefault(pick[0], {})[worker.device_uuid] = f"{r.replica_id}/{worker.index}"
            claims.append((pick[0], worker.device_uuid))
    if not all(transport for transport, _, _ in picks):
        for name, gpu in claims:
            del taken[name][gpu]
    return picks


def _collective(worker: Worker, transport: str) -> bool:
    offer = _offer(worker, transport)
    return offer is not None and offer.collective


def _channel(
    senders: _Senders, transport: str, members: Sequence[tuple[Replica, Worker]], bucket_bytes: int, ordinal: int
) -> Channel:
    offers = {f"rank/{r.rank}": o for r, o in zip(senders.ranks, senders.look(transport)[0], strict=True)}
    receivers: list[str] = []
    for r, worker in members:
        member = f"{r.replica_id}/{worker.index}"
        offer = _offer(worker, transport)
        assert offer is not None
        receivers.append(member)
        offers[member] = offer
    return Channel(
        channel_id="",
        transport=transport,
        key=b"",
        senders=tuple(f"rank/{r.rank}" for r in senders.ranks),
        receivers=tuple(receivers),
        replicas=tuple(dict.fromkeys((r.replica_id, r.incarnation) for r, _ in members)),
        modes=members[0][0].modes,
        bucket_bytes=bucket_bytes or _bucket_bytes(senders, transport, members),
        offers=offers,
        ordinal=ordinal,
    )


def _bucket_bytes(senders: _Senders, transport: str, members: Sequence[tuple[Replica, Worker]]) -> int:
    on_gpu = all(r.device_uuid for r in senders.ranks) and all(w.device_uuid for _, w in members)
    return (_BUCKETS_ON_GPU if on_gpu else _BUCKETS).get(transport, _BUCKET)


def _choices(r: Replica, picks: Sequence[Pick], by_member: Mapping[str, str]) -> list[Choice]:
    """One replica's choices; workers with equal ones share an entry, in the order of their first."""
    lost = [w.index for w, (transport, _, _) in zip(r.workers, picks, strict=True) if not transport]
    out: dict[tuple[Pick, str], list[int]] = {}
    for worker, pick in zip(r.workers, picks, strict=True):
        channel_id = ""
        if not lost:
            channel_id = by_member[f"{r.replica_id}/{worker.index}"]
        elif pick[0]:
            reason = f"{pick[0]} would do, but {_workers(lost)} of it cannot be reached, and a replica takes part whole"
            pick = ("", reason, pick[2])
        out.setdefault((pick, channel_id), []).append(worker.index)
    return [
        Choice(r.replica_id, r.incarnation, tuple(workers), transport, reason, refusals, channel_id)
        for ((transport, reason, refusals), channel_id), workers in out.items()
    ]


def members_of(channels: Iterable[Channel]) -> dict[str, str]:
    """The channel of each receiving member, by "<replica_id>/<worker>"."""
    return {member: c.channel_id for c in channels for member in c.receivers}


def verify_by_default(ranks: Mapping[int, Rank], replicas: Iterable[Replica], channels: Iterable[Channel]) -> Verify:
    """How much is hashed where nobody said: FULL, but a sample where every byte stays on one GPU (``cuda_ipc``): there
    a copy is as fast as a hash, and FULL would double the update."""
    by_ipc = {member for c in channels if c.transport == "cuda_ipc" for member in c.receivers}
    gpus = {r.device_uuid for r in ranks.values()}
    colocated = all(
        f"{r.replica_id}/{w.index}" in by_ipc and gpus == {w.device_uuid} for r in replicas for w in r.workers
    )
    return Verify.SAMPLED if colocated else Verify.FULL


def out_of_reach(choices: Iterable[Choice]) -> dict[tuple[str, str], str]:
    """Lives (replica_id, incarnation) that no transport reaches whole, each with why, its workers named."""
    told: dict[tuple[str, str], list[str]] = {}
    for c in choices:
        if not c.transport and c.reason == _NONE:
            why = "; ".join(f"{name}: {text}" for name, text in c.refusals) or "nothing is offered"
            told.setdefault((c.replica_id, c.incarnation), []).append(f"{_workers(c.workers)} ({why})")
    return {life: f"no transport reaches {', nor '.join(said)}" for life, said in told.items()}


def _workers(indices: Sequence[int]) -> str:
    return f"worker{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"


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
