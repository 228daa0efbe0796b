"""Enums of the contract and of the core, paired by name."""

from __future__ import annotations

from typing import Any

from weightplane.controlplane.core.reasons import Reason
from weightplane.controlplane.core.states import (
    Admin,
    CachePolicy,
    Evidence,
    Liveness,
    Mode,
    ParityPolicy,
    PauseMode,
    Phase,
    Process,
    Stage,
    Verdict,
    Verify,
    Weights,
)
from weightplane.v1 import agent_pb2, common_pb2, fleet_pb2, update_pb2

from .fields import invalid

__all__ = [
    "ADMIN",
    "CACHE",
    "CONDITION",
    "EVIDENCE",
    "FAILURE_POLICY",
    "LIVENESS",
    "MODE",
    "ON_BUSY",
    "PARITY_POLICY",
    "PAUSE",
    "PHASE",
    "PROCESS",
    "REASON",
    "STAGE",
    "VERDICT",
    "VERIFY",
    "WEIGHTS",
    "Pairs",
]


class Pairs:
    """One enum of the contract beside the core's, by the names that both use. ``zero``: what UNSPECIFIED
    means. Without a core enum the names themselves stand for it.
    """

    def __init__(self, proto: Any, prefix: str, core: Any, zero: Any = None) -> None:
        self._to_core: dict[int, Any] = {}
        self._to_proto: dict[Any, int] = {}
        self._names = []
        for proto_name, number in proto.items():
            short = proto_name.removeprefix(prefix)
            if short == "UNSPECIFIED":
                continue
            value = short if core is None else core[short]
            self._names.append(short)
            self._to_core[number] = value
            self._to_proto[value] = number
        if zero is not None:
            self._to_core[0] = zero
            self._to_proto.setdefault(zero, 0)

    def core(self, field: str, number: int) -> Any:
        """The core's value; an unset one where none is meant, or a number of a newer contract, is refused."""
        value = self._to_core.get(number)
        if value is None:
            invalid(field, f"one of {', '.join(self._names)}", number or "nothing")
        return value

    def proto(self, value: Any) -> Any:
        """The contract's number."""
        return self._to_proto[value]


MODE = Pairs(common_pb2.Mode, "MODE_", Mode, Mode.ANY)
PAUSE = Pairs(common_pb2.PauseMode, "PAUSE_MODE_", PauseMode, PauseMode.DEFAULT)
CACHE = Pairs(common_pb2.CachePolicy, "CACHE_POLICY_", CachePolicy, CachePolicy.DEFAULT)
VERIFY = Pairs(common_pb2.VerifyLevel, "VERIFY_LEVEL_", Verify, Verify.DEFAULT)
EVIDENCE = Pairs(common_pb2.Evidence, "EVIDENCE_", Evidence, Evidence.NONE)
REASON = Pairs(common_pb2.Reason, "REASON_", Reason)
ON_BUSY = Pairs(common_pb2.OnBusy, "ON_BUSY_", None, "REFUSE")
PHASE = Pairs(update_pb2.UpdatePhase, "UPDATE_PHASE_", Phase)
WEIGHTS = Pairs(update_pb2.WeightsState, "WEIGHTS_STATE_", Weights)
STAGE = Pairs(agent_pb2.ReplicaStage, "REPLICA_STAGE_", Stage, Stage.NONE)
PROCESS = Pairs(agent_pb2.ProcessState, "PROCESS_STATE_", Process, Process.RUNNING)
ADMIN = Pairs(fleet_pb2.AdminState, "ADMIN_STATE_", Admin)
LIVENESS = Pairs(fleet_pb2.Liveness, "LIVENESS_", Liveness)
FAILURE_POLICY = Pairs(fleet_pb2.FailurePolicy, "FAILURE_POLICY_", None, "RAISE")
PARITY_POLICY = Pairs(fleet_pb2.ParityPolicy, "PARITY_POLICY_", ParityPolicy, ParityPolicy.RECORD)
VERDICT = Pairs(update_pb2.ParityVerdict, "PARITY_VERDICT_", Verdict)
CONDITION = Pairs(common_pb2.ConditionStatus, "CONDITION_STATUS_", None)
