"""Between the contract's messages and the core's values, on the agent's side. Pure; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from weightplane.controlplane.core.desired import ArmedCall, DesiredChannel, DesiredReplica, DesiredUpdate
from weightplane.controlplane.core.events import Report
from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.model import Channel, Condition, Declaration, Held, Offer, SleepOrder
from weightplane.controlplane.core.placement import Box, Placement, full_box
from weightplane.controlplane.core.plan import Bucket, Plan, PlanError, Region, Segment
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import CachePolicy, Evidence, Mode, PauseMode, Stage, Verify
from weightplane.v1 import agent_pb2, common_pb2, tensor_pb2, transport_pb2, update_pb2

__all__ = [
    "conditions_message",
    "declaration",
    "desired",
    "enum",
    "failure",
    "failure_message",
    "manifest",
    "number",
    "placement_pages",
    "plan",
    "report_message",
    "short",
]

_PAGE_PIECES = 20_000
_MESSAGE_BYTES = 2048

_PROTO: dict[Any, tuple[Any, str]] = {
    Mode: (common_pb2.Mode, "MODE_"),
    PauseMode: (common_pb2.PauseMode, "PAUSE_MODE_"),
    CachePolicy: (common_pb2.CachePolicy, "CACHE_POLICY_"),
    Verify: (common_pb2.VerifyLevel, "VERIFY_LEVEL_"),
    Evidence: (common_pb2.Evidence, "EVIDENCE_"),
    Reason: (common_pb2.Reason, "REASON_"),
    Stage: (agent_pb2.ReplicaStage, "REPLICA_STAGE_"),
}


def number(value: Any) -> Any:
    """The contract's number of a core enum's value; 0 where the contract says UNSPECIFIED."""
    proto, prefix = _PROTO[type(value)]
    name = prefix + str(value.name)
    return proto.Value(name) if name in proto.keys() else 0  # noqa: SIM118 - an enum wrapper, not a dict


def enum(kind: Any, value: int, default: Any) -> Any:
    """The core's value of a contract's number; ``default`` for UNSPECIFIED or a number of a newer contract."""
    proto, prefix = _PROTO[kind]
    if not value or value not in proto.values():
        return default
    return kind[str(proto.Name(value)).removeprefix(prefix)]


# --- out ------------------------------------------------------------------------------------------------------------


def _held(h: Held) -> common_pb2.HeldVersion:
    return common_pb2.HeldVersion(version=h.version, update_id=h.update_id)


def short(text: str, limit: int) -> str:
    """Text that can be sent and logged: UTF-8, at most ``limit`` bytes of it."""
    raw = text.encode("utf-8", "replace")
    return raw.decode() if len(raw) <= limit else raw[: limit - 3].decode("utf-8", "ignore") + "..."


def failure_message(f: Failure) -> common_pb2.Failure:
    """A failure, bounded as the contract asks."""
    return common_pb2.Failure(
        reason=number(f.reason),
        message=short(f.message, _MESSAGE_BYTES),
        member=f.member,
        phase=f.phase,
        tensors=[short(t, 1024) for t in f.tensors[:5]],
        tensor_count=f.tensor_count or len(f.tensors),
    )


def report_message(
    r: Report, desired_revision: int, receipts: Sequence[update_pb2.Receipt] = ()
) -> agent_pb2.ReplicaReport:
    """A report as it goes on the stream (under 64 KiB, whatever it says)."""
    m = agent_pb2.ReplicaReport(
        sequence=r.sequence,
        desired_revision=desired_revision,
        held=[_held(h) for h in r.held],
        dirty=r.dirty,
        update_id=r.update_id,
        stage=number(r.stage),
        armed_seq=r.armed_seq,
        bytes_received=r.bytes_received,
        timings=update_pb2.ReplicaTimings(
            wire_s=r.timings.wire_s,
            verify_s=r.timings.verify_s,
            pause_s=r.timings.pause_s,
            apply_s=r.timings.apply_s,
        ),
        pause_holders=r.pause_holders,
        updates_since_start=r.updates_since_start,
        leaving=r.leaving,
        running_requests=r.running_requests,
        asleep=r.asleep,
        sleep_order=r.sleep_order,
        receipts=receipts,
    )
    if r.retained is not None:
        m.retained.held.CopyFrom(_held(r.retained.held))
        m.retained.manifest_id = r.retained.manifest_id
    for catch_up_id, why in r.serve_failures:
        m.serve_failures.add(catch_up_id=catch_up_id, failure=failure_message(why))
    if r.sleep_failure is not None:
        m.sleep_failure.CopyFrom(failure_message(r.sleep_failure))
    if r.dirty_reason is not None:
        m.dirty_reason.CopyFrom(failure_message(r.dirty_reason))
    if r.failure is not None:
        m.failure.CopyFrom(failure_message(r.failure))
    return m


def conditions_message(conditions: Sequence[Condition]) -> agent_pb2.EngineConditions:
    """Conditions, bounded as the contract asks."""
    return agent_pb2.EngineConditions(
        conditions=[
            common_pb2.Condition(
                type=c.type,
                status=common_pb2.ConditionStatus.Value(f"CONDITION_STATUS_{c.status.upper()}"),
                reason=c.reason,
                message=short(c.message, 1024),
                setting=short(c.setting, 256),
            )
            for c in conditions
        ]
    )


def declaration(m: agent_pb2.Declaration) -> Declaration:
    """What the group declares of its engines."""
    cache, pause = enum(CachePolicy, m.cache, CachePolicy.CLEAR), enum(PauseMode, m.pause, PauseMode.KEEP)
    return Declaration(dict(m.declared), cache, pause)


def _ranges(box: Box) -> list[tensor_pb2.Range]:
    return [tensor_pb2.Range(start=a, stop=b) for a, b in box]


def placement_pages(p: Placement, manifest: Manifest) -> Iterator[tuple[tensor_pb2.Placement, int, int]]:
    """(page, index of its first piece, pieces in all). A full copy is one short page."""
    whole = [full_box(t.shape) for t in manifest]
    if len(p.pieces) == len(whole) and all(q.tensor == i and q.box == whole[i] for i, q in enumerate(p.pieces)):
        yield tensor_pb2.Placement(member=p.member, full=True), 0, len(p.pieces)
        return
    for first in range(0, max(1, len(p.pieces)), _PAGE_PIECES):
        pieces = [
            tensor_pb2.Piece(tensor=q.tensor, box=[] if q.box == whole[q.tensor] else _ranges(q.box))
            for q in p.pieces[first : first + _PAGE_PIECES]
        ]
        yield tensor_pb2.Placement(member=p.member, pieces=pieces), first, len(p.pieces)


# --- in -------------------------------------------------------------------------------------------------------------


def failure(m: common_pb2.Failure) -> Failure:
    """A failure as told."""
    reason = enum(Reason, m.reason, Reason.INTERNAL)
    return Failure(reason, m.message, m.member, m.phase, tuple(m.tensors), m.tensor_count)


def desired(m: agent_pb2.DesiredReplica) -> DesiredReplica:
    """The desired state. Unset enums become the contract's defaults."""
    mode = enum(PauseMode, m.pause_mode, PauseMode.KEEP)
    return DesiredReplica(
        replica_id="",
        incarnation=m.incarnation,
        epoch=m.epoch,
        cluster_id=m.cluster_id,
        committed=Held(m.committed.version, m.committed.update_id),
        update=_update(m.update) if m.HasField("update") else None,
        resolutions=tuple((r.update_id, _decision(r.decision)) for r in m.resolutions),
        pauses=tuple((h, mode) for h in m.pause_holders),
        sleep=SleepOrder(m.sleep.order, m.sleep.level, tuple(m.sleep.asleep)) if m.HasField("sleep") else None,
    )


def _decision(value: int) -> str:
    if value == agent_pb2.DECISION_COMMIT:
        return "COMMIT"
    return "ABORT" if value == agent_pb2.DECISION_ABORT else ""


def _update(m: agent_pb2.DesiredUpdate) -> DesiredUpdate:
    return DesiredUpdate(
        update_id=m.update_id,
        version=m.version,
        trainer_step=m.trainer_step,
        lineage=m.lineage,
        generation=m.generation,
        manifest_id=m.manifest_id,
        channels=tuple(
            DesiredChannel(
                c.channel_id, _channel(c.binding) if c.HasField("binding") else None, c.plan_id, tuple(c.workers)
            )
            for c in m.channels
        ),
        mode=enum(Mode, m.mode, Mode.STAGED),
        pause=enum(PauseMode, m.pause_mode, PauseMode.KEEP),
        cache=enum(CachePolicy, m.cache_policy, CachePolicy.CLEAR),
        verify=enum(Verify, m.verify, Verify.FULL),
        calls=tuple(ArmedCall(c.seq, tuple((b.channel_id, b.first, b.count) for b in c.buckets)) for c in m.calls),
        all_called=m.all_called,
        decision=_decision(m.decision),
        failure=failure(m.failure) if m.HasField("failure") else None,
        remaining_s=m.remaining_ms / 1000,
        holds=Held(m.holds.version, m.holds.update_id) if m.HasField("holds") else None,
    )


def _channel(m: transport_pb2.ChannelBinding) -> Channel:
    return Channel(
        channel_id=m.channel_id,
        transport=m.transport,
        key=m.key,
        senders=tuple(m.senders),
        receivers=tuple(m.receivers),
        replicas=(),
        modes=(),
        bucket_bytes=m.bucket_bytes,
        offers={
            member: Offer(o.transport, o.SerializeToString(), o.same_host, tuple(o.reaches), o.collective)
            for member, o in m.offers.items()
        },
        ordinal=m.ordinal,
    )


def manifest(pages: Iterable[agent_pb2.GetManifestResponse], manifest_id: str) -> Manifest:
    """A manifest from its pages, in order. ``ManifestError`` if it is not sound, ``ValueError`` if it is another."""
    made = Manifest.of(TensorMeta(t.name, t.dtype, tuple(t.shape), t.alias_of) for page in pages for t in page.tensors)
    if made.id != manifest_id:
        raise ValueError(f"manifest {manifest_id} arrived as {made.id}: its pages are not one manifest")
    return made


def plan(pages: Sequence[tensor_pb2.PlanPage], manifest: Manifest) -> Plan:
    """A plan from its pages. ``PlanError`` if its content is not what its id says."""
    head = pages[0]
    members = tuple(head.members)
    sets = [tuple(members[i] for i in s.members) for s in head.receiver_sets]

    def box(ranges: Any, tensor: int) -> Box:
        return tuple((r.start, r.stop) for r in ranges) or full_box(manifest.tensors[tensor].shape)

    regions = tuple(
        Region(
            r.tensor,
            box(r.piece_box, r.tensor),
            box(r.box, r.tensor),
            members[r.sender],
            sets[r.receiver_set],
            r.nbytes,
        )
        for page in pages
        for r in page.regions
    )
    buckets: list[Bucket] = []
    for b in (b for page in pages for b in page.buckets):
        segments = tuple(Segment(s.region, s.offset, s.nbytes) for s in b.segments)
        nbytes = sum(s.nbytes for s in segments)
        buckets.append(Bucket(len(buckets), members[b.sender], sets[b.receiver_set], segments, nbytes))
    made = Plan.of(head.manifest_id, head.bucket_bytes, regions, buckets)
    if made.id != head.plan_id:
        raise PlanError([f"plan {head.plan_id} arrived as {made.id}"])
    return made
