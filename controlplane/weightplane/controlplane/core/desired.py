"""What one replica should be and do now: a pure view of the group, sent whole whenever it changes."""

from __future__ import annotations

from dataclasses import dataclass

from .catching import holds_back, owns, serves
from .group_state import GroupState
from .model import Channel, Held, Replica, SleepOrder
from .planning import plans_ahead
from .progress import covered, gate_open
from .reasons import Failure
from .states import CachePolicy, Mode, PauseMode, Phase, Stage, Verify
from .update_state import CatchUp, Part, Update

__all__ = [
    "ArmedCall",
    "DesiredChannel",
    "DesiredReplica",
    "DesiredUpdate",
    "ServeOrder",
    "desired_replica",
    "likeness",
    "remaining_s",
    "resolve",
    "serve_orders",
]


@dataclass(frozen=True, slots=True)
class ArmedCall:
    """One call to arm: its buckets (channel_id, first, count) in the replica's own channels.

    A worker arms those of its channel; one whose channel the call does not name has nothing to arm.
    """

    seq: int
    ranges: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class DesiredChannel:
    """A channel by which some of the replica's workers receive. ``plan_id`` is empty until the plan is made.

    ``channel`` is ``None`` once it is no longer bound.
    """

    channel_id: str
    channel: Channel | None
    plan_id: str
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DesiredUpdate:
    """The update that the replica takes part in. ``decision``: "", "COMMIT" or "ABORT".

    ``channels``: each worker is in exactly one. ``all_called``: the calls cover every bucket of all of them. ``holds``:
    in a catch-up, what the replica holds once it is applied (the update that was committed).
    """

    update_id: str
    version: int
    trainer_step: int
    lineage: str
    generation: int
    manifest_id: str
    channels: tuple[DesiredChannel, ...]
    mode: Mode
    pause: PauseMode
    cache: CachePolicy
    verify: Verify
    calls: tuple[ArmedCall, ...]
    all_called: bool
    decision: str
    failure: Failure | None
    remaining_s: float
    holds: Held | None = None


@dataclass(frozen=True, slots=True)
class ServeOrder:
    """A catch-up that a member is to send from the copy of ``held`` that it retains: opened and armed at once, sent
    once ``go``, and no bucket begun while ``hold``. Over as soon as it is asked for no more."""

    catch_up_id: str
    held: Held
    manifest_id: str
    plan_id: str
    channel: Channel
    epoch: int
    generation: int
    go: bool
    hold: bool


@dataclass(frozen=True, slots=True)
class DesiredReplica:
    """The whole desired state of one life of one replica."""

    replica_id: str
    incarnation: str
    epoch: int
    cluster_id: str
    committed: Held
    update: DesiredUpdate | None
    resolutions: tuple[tuple[str, str], ...]
    pauses: tuple[tuple[str, PauseMode], ...]
    sleep: SleepOrder | None = None
    serve: tuple[ServeOrder, ...] = ()
    committed_manifest: str = ""
    plans_ahead: tuple[str, ...] = ()


def resolve(state: GroupState, update_id: str, replica_id: str) -> str:
    """The outcome, for one replica, of an update it is in doubt about: COMMIT, ABORT, or "" while it is undecided.

    Who was excluded drops, whatever became of the update: its bytes were never verified.
    """
    c = owns(state, replica_id, update_id)
    if c is not None:
        return c.decision
    u = state.open
    if u is None or u.update_id != update_id:
        u = state.history.get(update_id)
    part = u.parts.get(replica_id) if u is not None else None
    return _decision(u, part.excluded) if u is not None and part is not None else "ABORT"


def _decision(u: Update, excluded: bool) -> str:
    if excluded or u.phase in (Phase.ABORTING, Phase.ABORTED):
        return "ABORT"
    return "COMMIT" if u.phase is Phase.COMMITTED else ""


def desired_replica(state: GroupState, replica_id: str, now: float) -> DesiredReplica | None:
    """The desired state of a known replica; ``None`` for an unknown one."""
    r = state.replicas.get(replica_id)
    if r is None:
        return None
    u = state.open
    part = u.parts.get(replica_id) if u is not None else None
    if part is None or part.incarnation != r.incarnation:
        u = state.history.get(r.pending) if r.pending else None
    resolutions: tuple[tuple[str, str], ...] = ()
    if r.asked and (u is None or r.asked != u.update_id):
        resolutions = ((r.asked, resolve(state, r.asked, replica_id)),)
    update = _desired_update(state, r, u, now) if u is not None else None
    c = state.catch_ups.get(replica_id)
    if update is None and c is not None and c.incarnation == r.incarnation:
        update = _caught_up(state, c, now)
    pauses = tuple(sorted(r.pauses_wanted.items()))
    return DesiredReplica(
        r.replica_id,
        r.incarnation,
        state.epoch,
        state.cluster_id,
        state.committed,
        update,
        resolutions,
        pauses,
        r.sleep,
        serve_orders(state, replica_id) if state.catch_ups else (),
        state.committed_manifest,
        plans_ahead(state).of.get(replica_id, ()),
    )


def likeness(state: GroupState, replica_id: str) -> tuple[object, ...] | None:
    """All that a replica's desired state is made of, but for its own ids and the time left: where these are equal, so
    are those. So a thousand replicas' can be made as one. ``None`` where it has something of its own: a catch-up, an
    order to sleep, an outcome to learn, buckets to arm (its offers), or a gate that others open.

    Two of one group: compared while nothing changed, it costs identities alone.
    """
    r = state.replicas.get(replica_id)
    if r is None or r.pending or r.asked or r.sleep is not None or state.catch_ups:
        return None
    u, t = state.open, state.trainer
    group = (
        state.committed,
        state.committed_manifest,
        state.policy,
        state.epoch,
        state.cluster_id,
        tuple(sorted(r.pauses_wanted.items())),
        plans_ahead(state).of.get(replica_id, ()),
    )
    part = u.parts.get(replica_id) if u is not None else None
    if u is None or part is None or part.incarnation != r.incarnation or not u.frozen:
        return group
    decision = _decision(u, part.excluded)
    if part.mode is Mode.IN_PLACE or (u.calls and not decision):
        return None
    return (
        *group,
        u.update_id,
        u.version,
        u.lineage,
        u.generation,
        u.options,
        u.calls,
        u.plans,
        decision,
        part.mode,
        part.channels,
        part.failure or u.failure,
        t.channels if t is not None else None,
    )


def remaining_s(u: Update, now: float) -> float:
    """How long a participant has until the prepare deadline."""
    return max(0.0, u.prepare_deadline - now)


def serve_orders(state: GroupState, holder: str) -> tuple[ServeOrder, ...]:
    """What a replica, or ("") each rank of the trainer, is to send to replicas that are caught up."""
    hold = holds_back(state)
    return tuple(
        ServeOrder(
            c.catch_up_id,
            c.target,
            c.manifest_id,
            c.plan.plan_id if c.plan is not None else "",
            c.channel,
            state.epoch,
            c.generation,
            c.stage >= Stage.ARMED,
            hold,
        )
        for c in serves(state, holder).values()
    )


def _caught_up(state: GroupState, c: CatchUp, now: float) -> DesiredUpdate:
    """A catch-up, as the replica takes it: an update of its own that it alone is in, every bucket called at once."""
    channel_id, plan = c.channel.channel_id, c.plan
    of_it = DesiredChannel(
        channel_id, c.channel, plan.plan_id if plan is not None else "", tuple(range(len(c.members)))
    )
    calls = (ArmedCall(1, ((channel_id, 0, plan.buckets),)),) if plan is not None else ()
    return DesiredUpdate(
        update_id=c.catch_up_id,
        version=c.target.version,
        trainer_step=c.trainer_step,
        lineage=c.lineage,
        generation=c.generation,
        manifest_id=c.manifest_id,
        channels=(of_it,),
        mode=c.mode,
        pause=c.pause,
        cache=c.cache,
        verify=Verify.FULL,
        calls=calls,
        all_called=plan is not None,
        decision=c.decision,
        failure=c.failure,
        remaining_s=10 * max(state.policy.update_timeout_s, 1.0),  # ours to end: it may have to wait for updates
        holds=c.target,
    )


def _desired_update(state: GroupState, r: Replica, u: Update, now: float) -> DesiredUpdate | None:
    part = u.parts.get(r.replica_id)
    if part is None or not u.frozen:
        return None
    armed = part.mode is not Mode.IN_PLACE or gate_open(u)
    mine = set(part.channels)
    calls = tuple(
        ArmedCall(c.seq, tuple(r for r in c.ranges if r[0] in mine))
        for c in sorted(u.calls, key=lambda c: c.seq)
        if armed
    )
    return DesiredUpdate(
        update_id=u.update_id,
        version=u.version,
        trainer_step=u.options.trainer_step,
        lineage=u.lineage,
        generation=u.generation,
        manifest_id=u.options.manifest_id,
        channels=_channels(state, u, part),
        mode=part.mode,
        pause=u.options.pause,
        cache=u.options.cache,
        verify=u.options.verify,
        calls=calls,
        all_called=armed and all(covered(u, c) for c in mine),
        decision=_decision(u, part.excluded),
        failure=part.failure or u.failure,
        remaining_s=remaining_s(u, now),
    )


def _channels(state: GroupState, u: Update, part: Part) -> tuple[DesiredChannel, ...]:
    bound = {c.channel_id: c for c in state.trainer.channels} if state.trainer is not None else {}
    workers: dict[str, tuple[int, ...]] = {}
    for worker, channel_id in enumerate(part.channels):
        workers[channel_id] = (*workers.get(channel_id, ()), worker)
    return tuple(
        DesiredChannel(c, bound.get(c), u.plans[c].plan_id if c in u.plans else "", of_it)
        for c, of_it in workers.items()
    )
