"""From the core's state to the contract's messages: updates. Pure views, as ``bindings`` and ``fleet_view`` are."""

from __future__ import annotations

from weightplane.controlplane.core.group_state import GroupState
from weightplane.controlplane.core.model import Held, Replica
from weightplane.controlplane.core.progress import covered, live_channels
from weightplane.controlplane.core.states import Phase, Stage, Weights
from weightplane.controlplane.core.update_state import Parity, Part, Update
from weightplane.v1 import agent_pb2, common_pb2, update_pb2
from weightplane.v1 import weight_transfer_pb2 as wt

from .enums import CACHE, EVIDENCE, MODE, PAUSE, PHASE, STAGE, VERDICT, VERIFY, WEIGHTS
from .errors import failure_to_proto

__all__ = [
    "all_called",
    "armed_calls",
    "bucket_range",
    "commit_policy",
    "held",
    "newest_update",
    "progress",
    "small",
    "source_free",
    "start_response",
    "update_info",
]


def held(h: Held) -> common_pb2.HeldVersion:
    """A held version."""
    return common_pb2.HeldVersion(version=h.version, update_id=h.update_id)


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
        parity=[_parity(p) for p in u.parity],
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
        channel_ids=dict.fromkeys(p.channels),
    )


def _parity(p: Parity) -> update_pb2.ParityResult:
    return update_pb2.ParityResult(
        replica_id=p.replica_id,
        version=p.version,
        verdict=VERDICT.proto(p.verdict),
        tokens=p.tokens,
        mean_abs=p.mean_abs,
        p99_abs=p.p99_abs,
        max_abs=p.max_abs,
        kl=p.kl,
        ess=p.ess,
        clip_fraction=p.clip_fraction,
        reason=p.reason,
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
        agent_pb2.ArmedCall(seq=c.seq, buckets=[bucket_range(ch, first, n) for ch, first, n in c.ranges])
        for c in sorted(u.calls, key=lambda c: c.seq)
    ]


def bucket_range(channel_id: str, first: int, count: int) -> agent_pb2.BucketRange:
    """A range of a channel's buckets."""
    return agent_pb2.BucketRange(channel_id=channel_id, first=first, count=count)


def start_response(u: Update, now: float) -> wt.StartUpdateResponse:
    """The answer to StartUpdate, with the options in force."""
    modes = {c: p.mode for p in u.parts.values() for c in p.channels}
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
        commit_policy=commit_policy(u.options.at_least),
        pause_mode=PAUSE.proto(u.options.pause),
        cache_policy=CACHE.proto(u.options.cache),
        verify=VERIFY.proto(u.options.verify),
        remaining_ms=max(0, int((u.deadline - now) * 1000)),
    )


def commit_policy(at_least: int) -> common_pb2.CommitPolicy:
    """When an update commits; 0 = all."""
    return common_pb2.CommitPolicy(at_least=at_least) if at_least else common_pb2.CommitPolicy(all=True)


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
    del info.parity[:]
    if info.ByteSize() > room:
        failed = [o for o in info.outcomes if o.HasField("failure") or o.excluded or o.unquiesced]
        del info.outcomes[:]
        info.outcomes.extend(failed[:32])
        del info.absent[32:]
    return info
