"""From the core's state to the contract's messages: replicas and groups, as operators and routers see them."""

from __future__ import annotations

from collections.abc import Iterable

from weightplane.controlplane.core.group_state import GroupState
from weightplane.controlplane.core.members import may_join, routable
from weightplane.controlplane.core.model import Choice, Policy, Rank, Replica, Trainer
from weightplane.controlplane.core.states import Admin, CachePolicy, Liveness
from weightplane.controlplane.core.trainers import rank_lives
from weightplane.v1 import fleet_pb2

from .bindings import choice
from .enums import ADMIN, CACHE, CONDITION, FAILURE_POLICY, LIVENESS, PARITY_POLICY, PAUSE, VERIFY, WEIGHTS
from .errors import failure_to_proto
from .project import commit_policy, held, small, update_info

__all__ = ["choices", "group_info", "policy", "replica_info"]

_LIVENESS_TELLS = float("-inf")  # whether a lease is over is in ``liveness``; a picture does not change by the clock


def choices(state: GroupState) -> dict[tuple[str, str], list[Choice]]:
    """How each life (replica_id, incarnation) is reached by the group's trainer, as it bound last."""
    out: dict[tuple[str, str], list[Choice]] = {}
    for c in state.trainer.choices if state.trainer is not None else ():
        out.setdefault((c.replica_id, c.incarnation), []).append(c)
    return out


def replica_info(
    state: GroupState, r: Replica, reached: Iterable[Choice] = (), conditions: bool = False
) -> fleet_pb2.ReplicaInfo:
    """One replica as operators and routers see it. ``reached``: its choices, where they were asked for; so
    ``conditions``."""
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
        may_not_join=may_join(r, _LIVENESS_TELLS),
        transports=[choice(c) for c in reached],
        asleep=r.asleep,
        catch_up=_catch_up(state, r),
        retains=r.retained.held.version if r.retained is not None else 0,
    )
    for c in r.conditions if conditions else ():
        status = CONDITION.proto(c.status.upper())
        info.conditions.add(type=c.type, status=status, reason=c.reason, message=c.message, setting=c.setting)
    if r.failure is not None:
        info.failure.CopyFrom(failure_to_proto(r.failure, 512))
    return info


def _catch_up(state: GroupState, r: Replica) -> str:
    c = state.catch_ups.get(r.replica_id)
    if c is not None:
        who = f"replica {c.holder}" if c.holder else "the trainer"
        return f"catching up to version {c.target.version}, from {who} by {c.channel.transport}"
    return f"was not caught up: {r.catch_up_refusal}" if r.catch_up_refusal else ""


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
    if state.trainer is not None and not state.trainer.closed:  # one that gave the group up is not its trainer
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
    """LIVE: every rank's lease lives. SUSPECT: some ranks'. LOST: none."""
    ranks: list[Rank] = list(t.ranks.values())
    alive = sum(rank_lives(r, now) for r in ranks)
    if not alive:
        return Liveness.LOST
    return Liveness.LIVE if alive >= t.world_size else Liveness.SUSPECT


def policy(p: Policy) -> fleet_pb2.GroupPolicy:
    """Policies in force, defaults filled in."""
    return fleet_pb2.GroupPolicy(
        min_replicas=p.min_replicas,
        commit=commit_policy(p.at_least),
        cache=CACHE.proto(p.cache if p.cache is not CachePolicy.DEFAULT else CachePolicy.CLEAR),
        pause=PAUSE.proto(p.pause),
        failure=FAILURE_POLICY.proto(p.failure),
        max_stale_versions=p.max_stale_versions,
        verify=VERIFY.proto(p.verify),
        update_timeout_ms=int(p.update_timeout_s * 1000),
        parity=PARITY_POLICY.proto(p.parity),
        declared=p.declared,
        blocking=p.blocking,
    )
