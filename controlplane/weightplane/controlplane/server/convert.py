"""From the contract's requests to the core's events. Every field is used or refused."""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from weightplane.controlplane.core import events
from weightplane.controlplane.core.manifest import TensorMeta
from weightplane.controlplane.core.model import (
    SLEEP_TAGS,
    Condition,
    Held,
    Offer,
    Policy,
    Replica,
    Retained,
    Timings,
    Worker,
)
from weightplane.controlplane.core.reasons import Failure
from weightplane.controlplane.core.states import CachePolicy, Mode, PauseMode, Phase, Verdict
from weightplane.controlplane.core.update_state import Parity
from weightplane.v1 import agent_pb2, common_pb2, fleet_pb2, tensor_pb2, transport_pb2, update_pb2
from weightplane.v1 import weight_transfer_pb2 as wt

from . import fields
from .enums import (
    CACHE,
    CONDITION,
    EVIDENCE,
    FAILURE_POLICY,
    MODE,
    ON_BUSY,
    PARITY_POLICY,
    PAUSE,
    PROCESS,
    REASON,
    STAGE,
    VERDICT,
    VERIFY,
)
from .fields import between, invalid, not_built

__all__ = [
    "beat",
    "conditions",
    "failure",
    "init_transfer",
    "parity",
    "policy",
    "rank_report",
    "replica_hello",
    "report",
    "sleep_tags",
    "start_update",
    "tensors",
]

_DAY_MS = 24 * 3600 * 1000
_MAX_OFFER = 1 << 20
_MOST_PARITY = 4096


# --- agents ---------------------------------------------------------------------------------------------------------


def replica_hello(hello: agent_pb2.Hello, session: int) -> events.ReplicaHello:
    """A replica's hello."""
    said = hello.replica
    if not said.workers:
        invalid("hello.replica.workers", "at least one worker", "none")
    if [w.index for w in said.workers] != list(range(len(said.workers))):
        invalid("hello.replica.workers", "indices 0, 1, 2, ... in order", [w.index for w in said.workers])
    modes = tuple(_set(MODE.core, "hello.replica.modes", said.modes))
    if Mode.ANY in modes:
        invalid("hello.replica.modes", "STAGED, IN_PLACE or both", "UNSPECIFIED")
    if Mode.STAGED in modes and said.staging_refusal:
        invalid("hello.replica.staging_refusal", "nothing, since STAGED is among the modes", said.staging_refusal)
    pauses = tuple(_set(PAUSE.core, "hello.replica.pause_modes", said.pause_modes))
    caches = tuple(_set(CACHE.core, "hello.replica.cache_policies", said.cache_policies))
    if PauseMode.DEFAULT in pauses:
        invalid("hello.replica.pause_modes", "KEEP, WAIT or ABORT", "UNSPECIFIED")
    if CachePolicy.DEFAULT in caches:
        invalid("hello.replica.cache_policies", "CLEAR, KEEP or SALT", "UNSPECIFIED")
    replica = Replica(
        replica_id=hello.agent_id,
        incarnation=hello.incarnation,
        labels=fields.labels("hello.replica.labels", said.labels),
        workers=tuple(_worker(w) for w in said.workers),
        modes=modes,
        staging_refusal=fields.text(
            "hello.replica.staging_refusal", said.staging_refusal, 1024, empty=True, lines=True
        ),
        pause_modes=pauses,
        cache_policies=caches,
        engine=fields.text("hello.replica.engine", said.engine, 256, empty=True),
        evidence=EVIDENCE.core("hello.replica.evidence", said.evidence),
        serving_address=fields.text("hello.replica.serving_address", said.serving_address, 256, empty=True),
        sleep_levels=tuple(sorted({int(between("hello.replica.sleep_levels", n, 1, 2)) for n in said.sleep_levels})),
        sleep_refusal=fields.text("hello.replica.sleep_refusal", said.sleep_refusal, 1024, empty=True, lines=True),
    )
    return events.ReplicaHello(session, replica)


def _set(convert: Callable[[str, int], Any], field: str, values: Sequence[int]) -> list[Any]:
    """A repeated enum that must not be empty, without repeats."""
    if not values:
        invalid(field, "at least one", "none")
    return list(dict.fromkeys(convert(field, v) for v in values))


def _worker(w: agent_pb2.WorkerInfo) -> Worker:
    where = f"hello.replica.workers[{w.index}]"
    return Worker(
        w.index,
        fields.text(f"{where}.host_id", w.host_id, 256, empty=True),
        fields.text(f"{where}.device_uuid", w.device_uuid, 256, empty=True),
        _offers(f"{where}.offers", w.offers),
        _refusals(f"{where}.refusals", w.refusals),
    )


def _offers(field: str, offers: Iterable[transport_pb2.Rendezvous]) -> tuple[Offer, ...]:
    out: dict[str, Offer] = {}
    for o in offers:
        fields.text(f"{field}.transport", o.transport, 64)
        if o.transport in out:
            invalid(field, "each transport once", f"{o.transport!r} twice")
        kind = o.WhichOneof("data")
        if kind not in (None, "any", o.transport):
            invalid(f"{field}[{o.transport!r}].data", f"{o.transport} (or any, for a third party's)", kind)
        data = o.SerializeToString(deterministic=True)
        if len(data) > _MAX_OFFER:
            invalid(f"{field}[{o.transport!r}]", f"at most {_MAX_OFFER} bytes", len(data))
        reaches = tuple(fields.text(f"{field}[{o.transport!r}].reaches", uuid, 64) for uuid in o.reaches)
        out[o.transport] = Offer(o.transport, data, o.same_host, reaches, o.collective)
    return tuple(out.values())


def _refusals(field: str, refusals: Iterable[agent_pb2.TransportRefusal]) -> tuple[tuple[str, str], ...]:
    return tuple(
        (
            fields.text(f"{field}.transport", r.transport, 64),
            fields.text(f"{field}.reason", r.reason, 1024, empty=True, lines=True),
        )
        for r in refusals
    )


def beat(hello: agent_pb2.Hello, message: agent_pb2.Heartbeat) -> events.Beat:
    """A heartbeat on the stream that ``hello`` opened."""
    process = PROCESS.core("heartbeat.process", message.process)
    return events.Beat(hello.agent_id, hello.incarnation, hello.trainer.generation, message.progress, process)


def report(hello: agent_pb2.Hello, m: agent_pb2.ReplicaReport, epoch: int) -> events.Report:
    """A replica's report; the stream that it came by stands for the epoch."""
    if m.HasField("sleep_failure") and not m.sleep_order:
        invalid("report.sleep_order", "the order that sleep_failure is about", 0)
    return events.Report(
        replica_id=hello.agent_id,
        incarnation=hello.incarnation,
        sequence=between("report.sequence", m.sequence, 0, 1 << 62),
        held=tuple(held("report.held", h) for h in m.held),
        epoch=epoch,
        dirty=m.dirty,
        dirty_reason=failure("report.dirty_reason", m.dirty_reason) if m.HasField("dirty_reason") else None,
        update_id=m.update_id,
        stage=STAGE.core("report.stage", m.stage),
        armed_seq=between("report.armed_seq", m.armed_seq, 0, 1 << 31),
        bytes_received=between("report.bytes_received", m.bytes_received, 0, 1 << 62),
        failure=failure("report.failure", m.failure) if m.HasField("failure") else None,
        timings=Timings(m.timings.wire_s, m.timings.verify_s, m.timings.pause_s, m.timings.apply_s),
        pause_holders=tuple(sorted({fields.text("report.pause_holders", h, 64) for h in m.pause_holders})),
        updates_since_start=m.updates_since_start,
        leaving=m.leaving,
        running_requests=m.running_requests,
        asleep=sleep_tags("report.asleep", m.asleep),
        sleep_order=between("report.sleep_order", m.sleep_order, 0, 1 << 62),
        sleep_failure=failure("report.sleep_failure", m.sleep_failure) if m.HasField("sleep_failure") else None,
        retained=_retained("report.retained", m.retained) if m.HasField("retained") else None,
        serve_failures=_serve_failures("report.serve_failures", m.serve_failures),
    )


def conditions(hello: agent_pb2.Hello, m: agent_pb2.EngineConditions) -> events.Conditions:
    """What a replica finds of its engine's settings."""
    _types("conditions.conditions.type", [c.type for c in m.conditions], 64)
    said = tuple(
        Condition(
            type=c.type,
            status=CONDITION.core(f"conditions[{c.type!r}].status", c.status).capitalize(),
            reason=fields.text(f"conditions[{c.type!r}].reason", c.reason, 64, empty=True),
            message=fields.text(f"conditions[{c.type!r}].message", c.message, 1024, empty=True, lines=True),
            setting=fields.text(f"conditions[{c.type!r}].setting", c.setting, 256, empty=True),
        )
        for c in m.conditions
    )
    return events.Conditions(hello.agent_id, hello.incarnation, said)


def _types(field: str, said: Sequence[str], most: int) -> tuple[str, ...]:
    """Types of conditions, each once."""
    between(field, len(said), 0, most)
    if len(set(said)) < len(said):
        invalid(field, "each type once", sorted(said))
    return tuple(fields.text(field, t, 64) for t in said)


def rank_report(hello: agent_pb2.Hello, m: agent_pb2.TrainerReport) -> events.RankReport:
    """A trainer rank's report on the stream that ``hello`` opened."""
    return events.RankReport(
        generation=hello.trainer.generation,
        rank=hello.trainer.rank,
        retained=_retained("trainer.retained", m.retained) if m.HasField("retained") else None,
        serve_failures=_serve_failures("trainer.serve_failures", m.serve_failures),
        host_id=fields.text("trainer.host_id", m.host_id, 256, empty=True),
        offers=_offers("trainer.offers", m.offers),
    )


def _retained(field: str, m: agent_pb2.RetainedCopy) -> Retained:
    said = held(f"{field}.held", m.held)
    if not said.version:
        invalid(f"{field}.held", "a version with its update_id", "neither")
    return Retained(said, fields.text(f"{field}.manifest_id", m.manifest_id, 64))


def _serve_failures(field: str, said: Sequence[agent_pb2.ServeFailure]) -> tuple[tuple[str, Failure], ...]:
    return tuple(
        (fields.text(f"{field}.catch_up_id", f.catch_up_id, 64), failure(f"{field}.failure", f.failure)) for f in said
    )


def sleep_tags(field: str, tags: Iterable[str]) -> tuple[str, ...]:
    """What sleeps or wakes, each named once, in the core's order."""
    said = set(tags)
    if unknown := sorted(said - set(SLEEP_TAGS)):
        invalid(field, " or ".join(SLEEP_TAGS), unknown[0])
    return tuple(t for t in SLEEP_TAGS if t in said)


def held(field: str, h: common_pb2.HeldVersion) -> Held:
    """What a worker holds."""
    if (h.version == 0) != (not h.update_id) or h.version < 0:
        invalid(field, "a version with its update_id, or neither", f"version {h.version}, update_id {h.update_id!r}")
    return Held(h.version, h.update_id)


def failure(field: str, f: common_pb2.Failure) -> Failure:
    """A failure as a member tells it."""
    reason = REASON.core(f"{field}.reason", f.reason)
    if f.phase and f.phase not in set(Phase):
        invalid(f"{field}.phase", f"nothing, or one of {', '.join(Phase)}", f.phase)
    return Failure(reason, f.message, f.member, f.phase, tuple(f.tensors[:5]), f.tensor_count)


# --- trainers -------------------------------------------------------------------------------------------------------


def init_transfer(m: wt.InitTransferRequest, call_id: str, deadline: float) -> events.InitTransfer:
    """InitTransfer; the randomness that the core needs is drawn here."""
    world = m.world_size or 1
    between("world_size", world, 1, 65536)
    between("rank", m.rank, 0, world - 1)
    between("generation", m.generation, 0, 1 << 62)
    if m.HasField("resume_step"):
        between("resume_step", m.resume_step, 0, 1 << 62)
    bucket = between("bucket_bytes", m.bucket_bytes, 4096, 1 << 30) if m.bucket_bytes else 0
    offers = _offers("offers", m.offers)
    if m.transport and m.transport not in {o.transport for o in offers}:
        invalid("transport", f"one that this rank offers ({[o.transport for o in offers]})", m.transport)
    return events.InitTransfer(
        call_id=call_id,
        deadline=deadline,
        request_id=m.request_id,
        trainer_id=fields.text("trainer_id", m.trainer_id, 128),
        incarnation=fields.text("incarnation", m.incarnation, 128),
        rank=m.rank,
        world_size=world,
        generation=m.generation,
        lineage=secrets.token_hex(8),
        seed=secrets.token_bytes(32),
        takeover=m.takeover,
        resume_step=m.resume_step if m.HasField("resume_step") else None,
        host_id=fields.text("host_id", m.host_id, 256, empty=True),
        device_uuid=fields.text("device_uuid", m.device_uuid, 256, empty=True),
        offers=offers,
        refusals=_refusals("refusals", m.refusals),
        transport=m.transport,
        bucket_bytes=bucket,
    )


def start_update(m: wt.StartUpdateRequest, call_id: str, deadline: float) -> events.StartUpdate:
    """StartUpdate. The fingerprint covers everything but the request_id, to tell a repeat from a reused id."""
    if m.target not in (common_pb2.TARGET_UNSPECIFIED, common_pb2.TARGET_MODEL):
        not_built(f"target {_enum_name(common_pb2.Target, m.target)}")
    if m.coverage not in (common_pb2.COVERAGE_UNSPECIFIED, common_pb2.COVERAGE_FULL):
        not_built(f"coverage {_enum_name(common_pb2.Coverage, m.coverage)}")
    if m.encoding not in (common_pb2.ENCODING_UNSPECIFIED, common_pb2.ENCODING_DENSE):
        not_built(f"encoding {_enum_name(common_pb2.Encoding, m.encoding)}")
    if m.HasField("base"):
        not_built("base (of a SUBSET or DELTA update)")
    between("update_timeout_ms", m.update_timeout_ms, 0, _DAY_MS)
    most = m.update_timeout_ms or _DAY_MS
    between("prepare_timeout_ms", m.prepare_timeout_ms, 0, most)
    return events.StartUpdate(
        call_id=call_id,
        deadline=deadline,
        request_id=m.request_id,
        generation=m.generation,
        manifest_id=m.manifest_id,
        trainer_step=m.trainer_step,
        update_id=f"u-{secrets.token_hex(12)}",
        fingerprint=start_fingerprint(m),
        selector=fields.labels("replica_selector", m.replica_selector),
        exclude=tuple(fields.name("exclude", rid) for rid in m.exclude),
        at_least=_at_least("commit_policy", m.commit_policy) if m.HasField("commit_policy") else None,
        on_busy=ON_BUSY.core("on_busy", m.on_busy),
        mode=MODE.core("mode", m.mode),
        pause=PAUSE.core("pause_mode", m.pause_mode),
        cache=CACHE.core("cache_policy", m.cache_policy),
        verify=VERIFY.core("verify", m.verify),
        update_timeout_s=m.update_timeout_ms / 1000,
        prepare_timeout_s=m.prepare_timeout_ms / 1000,
        unix_ms=int(time.time() * 1000),
    )


def start_fingerprint(m: wt.StartUpdateRequest) -> str:
    """Hash of a StartUpdate without its request_id."""
    copy = wt.StartUpdateRequest()
    copy.CopyFrom(m)
    copy.request_id = ""
    return hashlib.sha256(copy.SerializeToString(deterministic=True)).hexdigest()


def _enum_name(enum: object, number: int) -> str:
    for name, value in enum.items():  # type: ignore[attr-defined]
        if value == number:
            return str(name).partition("_")[2]
    return str(number)


def _at_least(field: str, m: common_pb2.CommitPolicy) -> int:
    kind = m.WhichOneof("policy")
    if kind == "all" and not m.all:
        invalid(f"{field}.all", "true, or at_least instead", "false")
    if kind == "at_least":
        return int(between(f"{field}.at_least", m.at_least, 1, 1 << 20))
    return 0


def parity(said: Sequence[update_pb2.ParityResult]) -> tuple[Parity, ...]:
    """Parity checks, each of its own replica and version."""
    between("parity", len(said), 0, _MOST_PARITY)
    out = []
    for i, m in enumerate(said):
        where = f"parity[{i}]"
        figures = {n: getattr(m, n) for n in ("mean_abs", "p99_abs", "max_abs", "kl", "ess", "clip_fraction")}
        for name, value in figures.items():
            most = 1.0 if name in ("ess", "clip_fraction") else math.inf
            if not (0 <= value <= most or math.isnan(value)):
                invalid(f"{where}.{name}", "0 to 1, or NaN" if most == 1 else "0 or more, or NaN", value)
        if VERDICT.core(f"{where}.verdict", m.verdict) is Verdict.AT_PARITY and (
            not m.tokens or math.isnan(m.mean_abs)
        ):
            found = f"{m.tokens} tokens, mean_abs {m.mean_abs:g}"
            invalid(f"{where}.verdict", "NOT_MEASURED where nothing was compared", f"AT_PARITY of {found}")
        out.append(
            Parity(
                replica_id=fields.name(f"{where}.replica_id", m.replica_id),
                version=between(f"{where}.version", m.version, 1, 1 << 62),
                verdict=VERDICT.core(f"{where}.verdict", m.verdict),
                tokens=between(f"{where}.tokens", m.tokens, 0, 1 << 62),
                reason=fields.text(f"{where}.reason", m.reason, 1024, empty=True, lines=True),
                **figures,
            )
        )
    if len({(p.replica_id, p.version) for p in out}) < len(out):
        invalid("parity", "each replica and version once", "one of them twice")
    return tuple(out)


def tensors(first: int, page: Iterable[tensor_pb2.TensorMeta]) -> list[TensorMeta]:
    """A page of a manifest. What is wrong with it as a whole is for ``Manifest`` to say."""
    out: list[TensorMeta] = []
    for i, t in enumerate(page, first):
        if len(t.name) > 1024 or len(t.name.encode()) > 1024:
            invalid(f"tensors[{i}].name", "at most 1024 bytes of UTF-8", f"{len(t.name.encode())} bytes")
        if len(t.shape) > 64:
            invalid(f"tensors[{i}].shape", "at most 64 dimensions", len(t.shape))
        out.append(TensorMeta(t.name, t.dtype, tuple(t.shape), t.alias_of))
    return out


# --- operators ------------------------------------------------------------------------------------------------------


def policy(m: fleet_pb2.GroupPolicy) -> Policy:
    """A group's policies; zero values mean the defaults."""
    default = Policy()
    between("policy.min_replicas", m.min_replicas, 0, 1 << 20)
    between("policy.max_stale_versions", m.max_stale_versions, 0, 1 << 30)
    between("policy.update_timeout_ms", m.update_timeout_ms, 0, _DAY_MS)
    cache, pause = CACHE.core("policy.cache", m.cache), PAUSE.core("policy.pause", m.pause)
    verify = VERIFY.core("policy.verify", m.verify)
    if m.failure == fleet_pb2.FAILURE_POLICY_CONTINUE_STALE and not m.max_stale_versions:  # none forgiven: it is RAISE
        invalid("policy.max_stale_versions", "at least 1 with FAILURE_POLICY_CONTINUE_STALE", 0)
    return Policy(
        min_replicas=m.min_replicas or default.min_replicas,
        at_least=_at_least("policy.commit", m.commit),
        cache=default.cache if cache is CachePolicy.DEFAULT else cache,
        pause=default.pause if pause is PauseMode.DEFAULT else pause,
        failure=FAILURE_POLICY.core("policy.failure", m.failure),
        max_stale_versions=m.max_stale_versions,
        verify=verify,
        update_timeout_s=m.update_timeout_ms / 1000 or default.update_timeout_s,
        parity=PARITY_POLICY.core("policy.parity", m.parity),
        declared=fields.labels("policy.declared", m.declared),
        blocking=_types("policy.blocking", m.blocking, 32),
    )
