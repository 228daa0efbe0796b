"""The one table of who may call what. What is not here is refused; a test walks the contract and this table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .identities import Role

__all__ = ["RPC_TABLE", "Row", "Scope"]


class Scope(StrEnum):
    """How a call is confined to its caller's groups."""

    REQUEST = "REQUEST"  # by the request's field `group`, in the interceptor
    HELLO = "HELLO"  # by the first message's, in Session
    ANSWER = "ANSWER"  # no group is named: the answer holds the caller's only


@dataclass(frozen=True, slots=True)
class Row:
    """``roles``: any one of them will do. ``note``: what is asked besides, inside the call."""

    roles: frozenset[Role]
    scope: Scope = Scope.REQUEST
    note: str = ""


_T, _I, _O = Role.TRAINER, Role.INFERENCE, Role.OPERATOR
_TRAINER = Row(frozenset({_T}))
_INFERENCE = Row(frozenset({_I}))
_OPERATOR = Row(frozenset({_O}))
_ALL = Row(frozenset(Role))


def _rows(service: str, **rows: Row) -> dict[str, Row]:
    return {f"/weightplane.v1.{service}/{name}": row for name, row in rows.items()}


#: Method -> its row.
RPC_TABLE: dict[str, Row] = {
    **_rows(
        "WeightTransferService",
        InitTransfer=_TRAINER,
        PutManifest=_TRAINER,
        PutPlacement=_TRAINER,
        StartUpdate=_TRAINER,
        GetPlan=_TRAINER,
        UpdateWeights=_TRAINER,
        PutDigests=_TRAINER,
        FinishUpdate=_TRAINER,
        CloseTransfer=_TRAINER,
        AbortUpdate=Row(frozenset({_T, _O}), note="generation 0 needs the operator, any other the trainer"),
        GetUpdate=_ALL,
        WatchUpdate=Row(_ALL.roles, note="a generation holds a lease, which needs the trainer"),
    ),
    **_rows(
        "FleetService",
        CreateGroup=_OPERATOR,
        UpdateGroup=_OPERATOR,
        SleepReplica=_OPERATOR,
        WakeReplica=_OPERATOR,
        DrainReplica=_OPERATOR,
        ActivateReplica=_OPERATOR,
        PinReplica=_OPERATOR,
        UnpinReplica=_OPERATOR,
        PauseGeneration=Row(frozenset({_T, _O}), note="each holder is a role"),
        ResumeGeneration=Row(frozenset({_T, _O}), note="each holder is a role"),
        ListGroups=Row(_ALL.roles, Scope.ANSWER),
        GetGroup=_ALL,
        ListReplicas=_ALL,
        ListUpdates=_ALL,
        WatchGroup=_ALL,
        CheckReplica=_ALL,
    ),
    **_rows(
        "AgentService",
        Session=Row(frozenset({_T, _I}), Scope.HELLO, note="the hello's kind names which"),
        GetManifest=_INFERENCE,
        GetPlan=_INFERENCE,
        PutWorkerPlacement=_INFERENCE,
        PutReceipt=_INFERENCE,
    ),
}
