"""What a publish returns: what became of the update, replica by replica, and how long each phase took."""

from __future__ import annotations

from dataclasses import dataclass, field

from weightplane.controlplane.core.reasons import Failure
from weightplane.v1 import common_pb2, update_pb2

from .errors import failure_from_proto

__all__ = ["PublishReceipt", "ReplicaResult"]


@dataclass(frozen=True, slots=True)
class ReplicaResult:
    """How one replica came out. ``state``: READY, PENDING, DIRTY, JOINING or UPDATING, as its workers say.

    ``held``: the version it holds (0 = none of ours, or not known). ``evidence``: RECEIVED, CONSUMED, LIVE or "".
    """

    replica_id: str
    state: str
    held: int
    mode: str
    excluded: bool
    unquiesced: bool
    evidence: str
    bytes_received: int
    wire_s: float
    verify_s: float
    pause_s: float
    apply_s: float
    failure: Failure | None


@dataclass(frozen=True)
class PublishReceipt:
    """One publish. ``committed`` is False only under CONTINUE_STALE: ``failure`` says why, ``stale`` how many in a row.

    ``total_s``: from the call of StartUpdate to the answer of FinishUpdate, on this clock (of all attempts).
    ``bytes``: payload that left all senders, once per receiver set. ``absent``: replicas that did not take part, and
    why. ``retries``: attempts beyond the first. ``mirror_bytes``, ``mirror_s``: what this rank copied from its devices
    to the host for transports that read nothing else (part of ``wire_s``), by the devices' clocks.
    """

    step: int
    version: int
    update_id: str
    committed: bool
    replicas: tuple[ReplicaResult, ...]
    absent: dict[str, str] = field(default_factory=dict)
    lineage: str = ""
    manifest_id: str = ""
    failure: Failure | None = None
    bytes: int = 0
    gather_s: float = 0.0
    wire_s: float = 0.0
    verify_s: float = 0.0
    decide_s: float = 0.0
    pause_s: float = 0.0
    apply_s: float = 0.0
    total_s: float = 0.0
    retries: int = 0
    stale: int = 0
    mirror_s: float = 0.0
    mirror_bytes: int = 0

    @property
    def ready(self) -> tuple[str, ...]:
        """Replicas that serve this version."""
        return tuple(r.replica_id for r in self.replicas if r.state == "READY" and r.held == self.version)

    @property
    def gbps(self) -> float:
        """Payload through the wire, in gigabytes (10⁹ bytes) per second; 0 if it was not measured."""
        return self.bytes / self.wire_s / 1e9 if self.wire_s > 0 else 0.0

    @property
    def lag_versions(self) -> int:
        """Versions by which the hindmost participant trails this one; when stale, publishes in a row that failed."""
        if not self.committed:
            return self.stale
        held = [r.held for r in self.replicas if r.state != "DIRTY"]
        return max((self.version - h for h in held if h), default=0)

    def metrics(self) -> dict[str, float]:
        """Flat, stable names: gather_s, mirror_s, wire_s, pause_s, apply_s, verify_s, total_s, bytes, mirror_bytes,
        gbps, lag_versions, retries. ``gbps`` is 10⁹ bytes per second."""
        return {
            "gather_s": self.gather_s,
            "mirror_s": self.mirror_s,
            "wire_s": self.wire_s,
            "pause_s": self.pause_s,
            "apply_s": self.apply_s,
            "verify_s": self.verify_s,
            "total_s": self.total_s,
            "bytes": float(self.bytes),
            "mirror_bytes": float(self.mirror_bytes),
            "gbps": self.gbps,
            "lag_versions": float(self.lag_versions),
            "retries": float(self.retries),
        }


def replica_results(update: update_pb2.UpdateInfo) -> tuple[ReplicaResult, ...]:
    """The outcomes of an update."""
    modes = {p.replica_id: common_pb2.Mode.Name(p.mode).removeprefix("MODE_") for p in update.participants}
    return tuple(
        ReplicaResult(
            replica_id=o.replica_id,
            state=update_pb2.WeightsState.Name(o.state).removeprefix("WEIGHTS_STATE_"),
            held=o.held.version,
            mode=modes.get(o.replica_id, ""),
            excluded=o.excluded,
            unquiesced=o.unquiesced,
            evidence=common_pb2.Evidence.Name(o.evidence).removeprefix("EVIDENCE_") if o.evidence else "",
            bytes_received=o.bytes_received,
            wire_s=o.timings.wire_s,
            verify_s=o.timings.verify_s,
            pause_s=o.timings.pause_s,
            apply_s=o.timings.apply_s,
            failure=failure_from_proto(o.failure) if o.HasField("failure") else None,
        )
        for o in update.outcomes
    )


def receipt_of(
    update: update_pb2.UpdateInfo,
    *,
    nbytes: int,
    total_s: float,
    retries: int,
    committed: bool = True,
    failure: Failure | None = None,
    stale: int = 0,
    mirrored: tuple[int, float] = (0, 0.0),
) -> PublishReceipt:
    """The receipt of an update that is over."""
    t = update.timings
    return PublishReceipt(
        step=update.trainer_step,
        version=update.version,
        update_id=update.update_id,
        committed=committed,
        replicas=replica_results(update),
        absent={a.replica_id: a.reason for a in update.absent},
        lineage=update.lineage,
        manifest_id=update.manifest_id,
        failure=failure,
        bytes=nbytes,
        gather_s=t.gather_s,
        wire_s=t.wire_s,
        verify_s=t.verify_s,
        decide_s=t.decide_s,
        pause_s=t.pause_s,
        apply_s=t.apply_s,
        total_s=total_s,
        retries=retries,
        stale=stale,
        mirror_s=mirrored[1],
        mirror_bytes=mirrored[0],
    )
