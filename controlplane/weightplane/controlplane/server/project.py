"""From the core's state to the contract's messages: pure views."""

from __future__ import annotations

from collections.abc import Iterable

from weightplane.controlplane.core import desired as core_desired
from weightplane.controlplane.core.members import may_join, routable
from weightplane.controlplane.core.model import (
    Admin,
    CachePolicy,
    Channel,
    GroupState,
    Held,
    Liveness,
    Part,
    PauseMode,
    Phase,
    Policy,
    Rank,
    Replica,
    Stage,
    Trainer,
    Update,
    Weights,
)
from weightplane.controlplane.core.progress import covered, live_channels
from weightplane.controlplane.core.trainers import rank_lives
from weightplane.v1 import agent_pb2, common_pb2, fleet_pb2, transport_pb2, update_pb2
from weightplane.v1 import weight_transfer_pb2 as wt

from .enums import ADMIN, CACHE, EVIDENCE, FAILURE_POLICY, LIVENESS, MODE, PAUSE, PHASE, STAGE, VERIFY, WEIGHTS
from .errors import failure_to_proto

__all__ = [
    "Desired",
    "all_called",
    "armed_calls",
    "channel",
    "desired_trainer",
    "group_info",
    "init_response",
    "newest_update",
    "policy",
    "progress",
    "replica_info",
    "start_response",
    "update_info",
]

_STRENGTH = {PauseMode.KEEP: 0, PauseMode.WAIT: 1, PauseMode.ABORT: 2}


def held(h: Held) -> common_pb2.HeldVersion:
    """A held version."""
    return common_pb2.HeldVersion(version=h.version, update_id=h.update_id)


# --- updates --------------------------------------------------------------------------------------------------------


def update_info(state: GroupState, u: Update, now: float) -> update_pb2.UpdateInfo:
    """Everything known of one update."""
    o = u.options
    info = update_pb2.UpdateInfo(
        update_id=u.update_id,
        group=state.group,
        version=u.version,
        trainer_step=o.trainer_step,
        lineage=u.lineage,
        manifest_id=o.manifest_id,
        phase=PHASE.proto(u.phase),
        participants=[_participant(p) for p in u.parts.values()],
        absent=[update_pb2.Absent(replica_id=rid, reason=why) for rid, why in u.absent],
        outcomes=[_outcome(state, u, p) for p in u.parts.values()],
        timings=_timings(u, now),
        source_free=source_free(u),
        request_id=u.request_id,
        remaining_ms=0 if u.closed else max(0, int((u.deadline - now) * 1000)),
        generation=u.generation,
        epoch=u.epoch,
        started_unix_ms=u.started_unix_ms,
    )
    if u.failure is not None:
        info.failure.CopyFrom(failure_to_proto(u.failure))
    return info


def _participant(p: Part) -> update_pb2.Participant:
    return update_pb2.Participant(
        replica_id=p.replica_id,
        incarnation=p.incarnation,
        mode=MODE.proto(p.mode),
        mode_reason=p.mode_reason,
        channel_id=p.channel_id,
    )


def _outcome(state: GroupState, u: Update, p: Part) -> update_pb2.ReplicaOutcome:
    r = state.replicas.get(p.replica_id)
    weights, holds = _came_out(u, p, r)
    outcome = update_pb2.ReplicaOutcome(
        replica_id=p.replica_id,
        incarnation=p.incarnation,
        state=WEIGHTS.proto(weights),
        held=held(holds),
        excluded=p.excluded,
        unquiesced=p.unquiesced,
        evidence=EVIDENCE.proto(p.evidence),
        bytes_received=p.bytes_received,
        timings=update_pb2.ReplicaTimings(
            wire_s=p.timings.wire_s,
            verify_s=p.timings.verify_s,
            pause_s=p.timings.pause_s,
            apply_s=p.timings.apply_s,
        ),
    )
    if p.failure is not None:
        outcome.failure.CopyFrom(failure_to_proto(p.failure, 512))
    return outcome


def _came_out(u: Update, p: Part, r: Replica | None) -> tuple[Weights, Held]:
    """A participant's weights as this update left them. Later updates do not rewrite the history of earlier ones."""
    same_life = r is not None and r.incarnation == p.incarnation
    if p.dirty:
        return Weights.DIRTY, Held()
    if u.phase is Phase.COMMITTED and not p.excluded:
        if p.stage is Stage.APPLIED:
            return Weights.READY, u.held
        return (Weights.PENDING if same_life else Weights.JOINING), Held()
    if r is None or not same_life:
        return Weights.JOINING, Held()
    return r.weights, r.held


def _timings(u: Update, now: float) -> update_pb2.PhaseTimings:
    def between(start: float, stop: float) -> float:
        return max(0.0, stop - start) if start and stop else 0.0

    parts = u.active()
    return update_pb2.PhaseTimings(
        gather_s=u.gather_s,
        wire_s=between(u.armed_at, u.received_at),
        verify_s=between(max(u.verify_at, u.received_at), u.decide_at),
        decide_s=between(u.decide_at, u.decided_at),
        pause_s=max((p.timings.pause_s for p in parts), default=0.0),
        apply_s=max((p.timings.apply_s for p in parts), default=0.0),
        total_s=between(u.started_at, u.ended_at or (0.0 if u.closed else now)),
        start_s=between(u.started_at, u.ready_at),
    )


def source_free(u: Update) -> bool:
    """Every participant has read everything, or can never vote (rule 9)."""
    if u.closed or u.phase in (Phase.COMMITTED, Phase.DECIDING):
        return True
    return all_called(u) and all(p.stage >= Stage.RECEIVED for p in u.active())


def all_called(u: Update) -> bool:
    """Whether the calls so far declare every bucket of every channel that still has a participant."""
    return all(covered(u, c) for c in live_channels(u))


def progress(u: Update) -> list[wt.MemberProgress]:
    """Bytes in place at each participant."""
    planned: dict[str, int] = {}
    for plan in u.plans.values():
        for member, nbytes in plan.bytes_for.items():
            rid = member.rpartition("/")[0]
            planned[rid] = planned.get(rid, 0) + nbytes
    return [
        wt.MemberProgress(
            replica_id=p.replica_id,
            stage=STAGE.proto(p.stage),
            bytes=p.bytes_received,
            bytes_planned=planned.get(p.replica_id, 0),
        )
        for p in u.parts.values()
    ]


def armed_calls(u: Update) -> list[agent_pb2.ArmedCall]:
    """The UpdateWeights calls known so far, all channels."""
    return [
        agent_pb2.ArmedCall(seq=c.seq, buckets=[_range(ch, first, n) for ch, first, n in c.ranges])
        for c in sorted(u.calls, key=lambda c: c.seq)
    ]


def _range(channel_id: str, first: int, count: int) -> agent_pb2.BucketRange:
    return agent_pb2.BucketRange(channel_id=channel_id, first=first, count=count)


def start_response(u: Update, now: float) -> wt.StartUpdateResponse:
    """The answer to StartUpdate, with the options in force."""
    modes = {p.channel_id: p.mode for p in u.parts.values()}
    return wt.StartUpdateResponse(
        update_id=u.update_id,
        version=u.version,
        epoch=u.epoch,
        participants=[_participant(p) for p in u.parts.values()],
        absent=[update_pb2.Absent(replica_id=rid, reason=why) for rid, why in u.absent],
        channels=[
            wt.UpdateChannel(
                channel_id=c,
                plan_id=u.plans[c].plan_id,
                buckets=u.plans[c].buckets,
                mode=MODE.proto(modes[c]),
                nbytes=u.plans[c].nbytes,
            )
            for c in u.channels
            if c in u.plans
        ],
        commit_policy=_commit_policy(u.options.at_least),
        pause_mode=PAUSE.proto(u.options.pause),
        cache_policy=CACHE.proto(u.options.cache),
        verify=VERIFY.proto(u.options.verify),
        remaining_ms=max(0, int((u.deadline - now) * 1000)),
    )


def _commit_policy(at_least: int) -> common_pb2.CommitPolicy:
    return common_pb2.CommitPolicy(at_least=at_least) if at_least else common_pb2.CommitPolicy(all=True)


# --- channels and trainers ------------------------------------------------------------------------------------------


def channel(c: Channel, members: Iterable[str] | None = None) -> transport_pb2.ChannelBinding:
    """A channel; with ``members``, only their offers."""
    names = c.offers.keys() if members is None else members
    return transport_pb2.ChannelBinding(
        channel_id=c.channel_id,
        transport=c.transport,
        senders=c.senders,
        receivers=c.receivers,
        key=c.key,
        bucket_bytes=c.bucket_bytes,
        offers={m: transport_pb2.Rendezvous.FromString(c.offers[m].data) for m in names if m in c.offers},
    )


def init_response(state: GroupState, t: Trainer) -> wt.InitTransferResponse:
    """The answer to InitTransfer."""
    return wt.InitTransferResponse(
        generation=t.generation,
        epoch=state.epoch,
        cluster_id=state.cluster_id,
        lineage=t.lineage,
        channels=[channel(c) for c in t.channels],
        choices=[
            wt.TransportChoice(
                replica_id=rid,
                transport=transport,
                reason=reason,
                refusals=[agent_pb2.TransportRefusal(transport=n, reason=w) for n, w in refusals],
                channel_id=channel_id,
            )
            for rid, transport, reason, refusals, channel_id in t.choices
        ],
        committed=held(state.committed),
        committed_step=state.committed_step,
        ttl_ms=int(state.config.ttl_s * 1000),
        heartbeat_ms=int(state.config.beat_s * 1000),
    )


def needs_rebind(state: GroupState, t: Trainer, now: float) -> bool:
    """Whether a replica that could join the next update is bound to no channel of this generation."""
    bound = {rid: inc for c in t.channels for rid, inc in c.replicas}
    unreachable = {c[0] for c in t.choices if not c[1]}
    return any(
        bound.get(r.replica_id) != r.incarnation and r.replica_id not in unreachable and not may_join(r, now)
        for r in state.replicas.values()
    )


def desired_trainer(state: GroupState, generation: int, revision: int, now: float) -> agent_pb2.DesiredTrainer:
    """What a rank of ``generation`` should know."""
    t = state.trainer
    fenced = t is None or t.generation != generation or t.closed
    message = agent_pb2.DesiredTrainer(revision=revision, epoch=state.epoch, cluster_id=state.cluster_id, fenced=fenced)
    u = newest_update(state, generation)
    if u is not None:
        message.update.CopyFrom(small(update_info(state, u, now)))
        if not u.closed:
            message.calls.extend(armed_calls(u))
    if t is not None and not fenced:
        message.rebind = needs_rebind(state, t, now)
    return message


def newest_update(state: GroupState, generation: int = 0) -> Update | None:
    """The open or last update (of a generation; 0 = of any)."""
    if state.open is not None and generation in (0, state.open.generation):
        return state.open
    last = next(reversed(list(state.history.values())), None)
    return last if last is not None and generation in (0, last.generation) else None


def small(info: update_pb2.UpdateInfo, room: int = 48 << 10) -> update_pb2.UpdateInfo:
    """An update that fits a session's message: of a large fleet only the failed outcomes travel; GetUpdate has all."""
    if info.ByteSize() <= room:
        return info
    del info.participants[:]
    if info.ByteSize() > room:
        failed = [o for o in info.outcomes if o.HasField("failure") or o.excluded or o.unquiesced]
        del info.outcomes[:]
        info.outcomes.extend(failed[:32])
        del info.absent[32:]
    return info


# --- replicas -------------------------------------------------------------------------------------------------------


class Desired:
    """Makes replicas' desired state; keeps the binding of each channel, which is the same for a thousand receivers."""

    def __init__(self) -> None:
        self._bindings: dict[str, transport_pb2.ChannelBinding] = {}

    def message(self, state: GroupState, replica_id: str, revision: int, now: float) -> agent_pb2.DesiredReplica | None:
        """The desired state of a replica, or ``None`` if it is unknown."""
        d = core_desired.desired_replica(state, replica_id, now)
        if d is None:
            return None
        pause = max((m for _, m in d.pauses), key=lambda m: _STRENGTH[m], default=PauseMode.DEFAULT)
        message = agent_pb2.DesiredReplica(
            revision=revision,
            epoch=d.epoch,
            cluster_id=d.cluster_id,
            incarnation=d.incarnation,
            committed=held(d.committed),
            resolutions=[
                agent_pb2.Resolution(update_id=uid, decision=_DECISIONS[outcome]) for uid, outcome in d.resolutions
            ],
            pause_holders=[holder for holder, _ in d.pauses],
            pause_mode=PAUSE.proto(pause),
        )
        if d.update is not None:
            self._update(message.update, d.update, state.replicas[replica_id])
        return message

    def _update(self, m: agent_pb2.DesiredUpdate, u: core_desired.DesiredUpdate, r: Replica) -> None:
        m.update_id = u.update_id
        m.version = u.version
        m.trainer_step = u.trainer_step
        m.lineage = u.lineage
        m.generation = u.generation
        m.manifest_id = u.manifest_id
        m.plan_id = u.plan_id
        m.mode = MODE.proto(u.mode)
        m.pause_mode = PAUSE.proto(u.pause)
        m.cache_policy = CACHE.proto(u.cache)
        m.verify = VERIFY.proto(u.verify)
        m.all_called = u.all_called
        m.decision = _DECISIONS[u.decision]
        m.remaining_ms = int(u.remaining_s * 1000)
        if u.failure is not None:
            m.failure.CopyFrom(failure_to_proto(u.failure))
        if u.channel is None or u.decision or not u.calls:
            return  # nothing to arm: the binding, which is most of the message, stays out
        self._channel(m.channel, u.channel, r)
        for call in u.calls:
            ranges = [_range(u.channel.channel_id, first, n) for first, n in call.ranges]
            m.calls.append(agent_pb2.ArmedCall(seq=call.seq, buckets=ranges))

    def _channel(self, m: transport_pb2.ChannelBinding, c: Channel, r: Replica) -> None:
        """A receiver gets the senders' offers and its own: a thousand others' would burst the message."""
        binding = self._bindings.get(c.channel_id)
        if binding is None:
            if len(self._bindings) > 64:
                self._bindings.clear()
            binding = self._bindings[c.channel_id] = channel(c, c.senders)
        m.CopyFrom(binding)
        for w in r.workers:
            member = f"{r.replica_id}/{w.index}"
            if member in c.offers:
                m.offers[member].ParseFromString(c.offers[member].data)


_DECISIONS = {
    "": agent_pb2.DECISION_UNSPECIFIED,
    "COMMIT": agent_pb2.DECISION_COMMIT,
    "ABORT": agent_pb2.DECISION_ABORT,
}


def replica_info(state: GroupState, r: Replica) -> fleet_pb2.ReplicaInfo:
    """One replica as operators and routers see it."""
    _, _, route, why = routable(state, r)
    info = fleet_pb2.ReplicaInfo(
        replica_id=r.replica_id,
        incarnation=r.incarnation,
        weights=WEIGHTS.proto(r.weights),
        liveness=LIVENESS.proto(r.liveness),
        admin=ADMIN.proto(r.admin),
        held=held(r.held),
        pinned_version=r.held.version if r.admin is Admin.PINNED else 0,
        pause_holders=r.pause_holders,
        labels=r.labels,
        workers=len(r.workers),
        engine=r.engine,
        serving_address=r.serving_address,
        routable=route,
        reason=why,
        lag=max(0, state.committed.version - r.held.version),
        updates_since_start=r.updates_since_start,
        failures_in_a_row=r.failures_in_a_row,
    )
    if r.failure is not None:
        info.failure.CopyFrom(failure_to_proto(r.failure, 512))
    return info


# --- groups ---------------------------------------------------------------------------------------------------------


def group_info(state: GroupState, now: float) -> fleet_pb2.GroupInfo:
    """One group."""
    info = fleet_pb2.GroupInfo(
        group=state.group,
        policy=policy(state.policy),
        committed=held(state.committed),
        committed_step=state.committed_step,
        manifest_id=state.committed_manifest,
        epoch=state.epoch,
        cluster_id=state.cluster_id,
        revision=state.revision,
        replicas=len(state.replicas),
        routable=sum(routable(state, r)[2] for r in state.replicas.values()),
        rewinding=state.rewinding,
    )
    if state.open is not None:
        info.open_update.CopyFrom(small(update_info(state, state.open, now)))
    if state.trainer is not None:
        info.trainer.CopyFrom(_trainer_info(state.trainer, now))
    return info


def _trainer_info(t: Trainer, now: float) -> fleet_pb2.TrainerInfo:
    return fleet_pb2.TrainerInfo(
        trainer_id=t.trainer_id,
        generation=t.generation,
        world_size=t.world_size,
        liveness=LIVENESS.proto(_trainer_liveness(t, now)),
        lineage=t.lineage,
    )


def _trainer_liveness(t: Trainer, now: float) -> Liveness:
    """LIVE: every rank's lease lives. SUSPECT: some ranks'. LOST: none, or the hold was given up."""
    ranks: list[Rank] = list(t.ranks.values())
    alive = sum(rank_lives(r, now) for r in ranks)
    if t.closed or not alive:
        return Liveness.LOST
    return Liveness.LIVE if alive >= t.world_size else Liveness.SUSPECT


def policy(p: Policy) -> fleet_pb2.GroupPolicy:
    """Policies in force, defaults filled in."""
    return fleet_pb2.GroupPolicy(
        min_replicas=p.min_replicas,
        commit=_commit_policy(p.at_least),
        cache=CACHE.proto(p.cache if p.cache is not CachePolicy.DEFAULT else CachePolicy.CLEAR),
        pause=PAUSE.proto(p.pause),
        failure=FAILURE_POLICY.proto(p.failure),
        max_stale_versions=p.max_stale_versions,
        verify=VERIFY.proto(p.verify),
        update_timeout_ms=int(p.update_timeout_s * 1000),
    )
