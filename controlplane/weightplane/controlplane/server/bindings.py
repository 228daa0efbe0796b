"""From the core's state to the contract's messages: channels, and what members should do."""

from __future__ import annotations

from collections.abc import Iterable

from weightplane.controlplane.core import desired as core_desired
from weightplane.controlplane.core.conditions import declaration
from weightplane.controlplane.core.group_state import GroupState
from weightplane.controlplane.core.members import may_join
from weightplane.controlplane.core.model import Channel, Choice, Policy, Replica, Trainer
from weightplane.controlplane.core.negotiate import out_of_reach
from weightplane.controlplane.core.planning import plans_ahead
from weightplane.controlplane.core.states import PauseMode
from weightplane.v1 import agent_pb2, transport_pb2
from weightplane.v1 import weight_transfer_pb2 as wt

from .enums import CACHE, MODE, PAUSE, VERIFY
from .errors import failure_to_proto
from .project import armed_calls, bucket_range, held, newest_update, small, update_info

__all__ = ["Desired", "channel", "choice", "desired_trainer", "init_response", "needs_rebind"]

_STRENGTH = {PauseMode.KEEP: 0, PauseMode.WAIT: 1, PauseMode.ABORT: 2}


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
        ordinal=c.ordinal,
    )


def init_response(state: GroupState, t: Trainer) -> wt.InitTransferResponse:
    """The answer to InitTransfer."""
    return wt.InitTransferResponse(
        generation=t.generation,
        epoch=state.epoch,
        cluster_id=state.cluster_id,
        lineage=t.lineage,
        channels=[channel(c) for c in t.channels],
        choices=[choice(c) for c in t.choices],
        committed=held(state.committed),
        committed_step=state.committed_step,
        ttl_ms=int(state.config.ttl_s * 1000),
        heartbeat_ms=int(state.config.beat_s * 1000),
    )


def choice(c: Choice) -> wt.TransportChoice:
    """How some workers of a replica are reached, and why so."""
    return wt.TransportChoice(
        replica_id=c.replica_id,
        workers=c.workers,
        transport=c.transport,
        reason=c.reason,
        refusals=[agent_pb2.TransportRefusal(transport=name, reason=why) for name, why in c.refusals],
        channel_id=c.channel_id,
    )


def needs_rebind(state: GroupState, t: Trainer, now: float) -> bool:
    """Whether a replica that could join the next update is bound to no channel of this generation."""
    settled = {life for c in t.channels for life in c.replicas}
    settled.update(out_of_reach(t.choices))
    return any((r.replica_id, r.incarnation) not in settled and not may_join(r, now) for r in state.replicas.values())


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
        message.plans_ahead.extend(plans_ahead(state).plans.values())
        message.serve.extend(_serve(order) for order in core_desired.serve_orders(state, ""))
    return message


def _declaration(policy: Policy) -> agent_pb2.Declaration:
    """What a group declares."""
    d = declaration(policy)
    return agent_pb2.Declaration(declared=d.values, cache=CACHE.proto(d.cache), pause=PAUSE.proto(d.pause))


def _serve(o: core_desired.ServeOrder) -> agent_pb2.ServeOrder:
    """A catch-up that a member is to send."""
    return agent_pb2.ServeOrder(
        catch_up_id=o.catch_up_id,
        held=held(o.held),
        manifest_id=o.manifest_id,
        plan_id=o.plan_id,
        binding=channel(o.channel),
        epoch=o.epoch,
        generation=o.generation,
        go=o.go,
        hold=o.hold,
    )


#: Of a fleet's replicas some are in the update, some are not, and their workers use different channels.
_TEMPLATES = 4


class Desired:
    """Makes replicas' desired state; keeps what is the same for a thousand: bindings, what the group declares, and the
    last few whole messages, each for all replicas that are alike."""

    def __init__(self) -> None:
        self._templates: list[tuple[tuple[object, ...], bytes]] = []
        self._bindings: dict[str, transport_pb2.ChannelBinding] = {}
        self._declared: tuple[Policy, agent_pb2.Declaration] | None = None

    def message(self, state: GroupState, replica_id: str, revision: int, now: float) -> agent_pb2.DesiredReplica | None:
        """The desired state of a replica, or ``None`` if it is unknown."""
        like = core_desired.likeness(state, replica_id)
        known = next((data for key, data in self._templates if key == like), None) if like is not None else None
        if known is not None:
            made = agent_pb2.DesiredReplica.FromString(known)
            made.revision, made.incarnation = revision, state.replicas[replica_id].incarnation
            if state.open is not None and made.HasField("update"):
                made.update.remaining_ms = int(core_desired.remaining_s(state.open, now) * 1000)
            return made
        fresh = self._fresh(state, replica_id, revision, now)
        if fresh is not None and like is not None:
            self._templates = [(like, fresh.SerializeToString()), *self._templates[: _TEMPLATES - 1]]
        return fresh

    def _fresh(self, state: GroupState, replica_id: str, revision: int, now: float) -> agent_pb2.DesiredReplica | None:
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
            committed_manifest_id=d.committed_manifest,
            declared=self._declaration(state.policy),
            plans_ahead=d.plans_ahead,
        )
        if d.sleep is not None:
            order = agent_pb2.SleepOrder(order=d.sleep.order, level=d.sleep.level, asleep=d.sleep.asleep)
            message.sleep.CopyFrom(order)
        if d.serve:
            message.serve.extend(_serve(order) for order in d.serve)
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
        m.mode = MODE.proto(u.mode)
        m.pause_mode = PAUSE.proto(u.pause)
        m.cache_policy = CACHE.proto(u.cache)
        m.verify = VERIFY.proto(u.verify)
        m.all_called = u.all_called
        m.decision = _DECISIONS[u.decision]
        m.remaining_ms = int(u.remaining_s * 1000)
        if u.failure is not None:
            m.failure.CopyFrom(failure_to_proto(u.failure))
        if u.holds is not None:
            m.holds.CopyFrom(held(u.holds))
        arms = bool(u.calls) and not u.decision and all(c.channel is not None for c in u.channels)
        for c in u.channels:
            told = m.channels.add(channel_id=c.channel_id, plan_id=c.plan_id, workers=c.workers)
            if arms and c.channel is not None:  # else the binding, which is most of the message, stays out
                self._binding(told.binding, c.channel, r)
        if arms:
            for call in u.calls:
                ranges = [bucket_range(*of_it) for of_it in call.ranges]
                m.calls.append(agent_pb2.ArmedCall(seq=call.seq, buckets=ranges))

    def _declaration(self, policy: Policy) -> agent_pb2.Declaration:
        """Made anew for each policy: one is replaced, never changed."""
        if self._declared is None or self._declared[0] is not policy:
            self._declared = policy, _declaration(policy)
        return self._declared[1]

    def _binding(self, m: transport_pb2.ChannelBinding, c: Channel, r: Replica) -> None:
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
