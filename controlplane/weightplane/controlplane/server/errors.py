"""The one table of errors, and how a refusal travels: ``google.rpc.Status`` with ErrorInfo, Failure and UpdateInfo.

``TRAINER_FENCED`` is PERMISSION_DENIED: ABORTED would invite a retry at a higher level, and a fenced trainer must not
try again by itself. A failure that ended an update is ABORTED whatever its own code (its reason tells what happened),
except a deadline, which stays DEADLINE_EXCEEDED.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.v1 import common_pb2, update_pb2

__all__ = ["CODES", "DOMAIN", "MAX_DETAILS", "Refused", "code_of", "failure_to_proto", "shorten", "status_of"]

DOMAIN = "weightplane"

#: Bytes of the serialised status. Trailers are base64 and clients refuse more than 8 KiB of them by default, so this is
#: well below the 16 KiB that the contract allows; GetUpdate has the whole picture.
MAX_DETAILS = 4352
_MAX_MESSAGE = 600
_MAX_FAILURE = 2048

_C = grpc.StatusCode
#: Reason -> gRPC code. Every reason has one.
CODES: Mapping[Reason, grpc.StatusCode] = {
    Reason.INVALID_ARGUMENT: _C.INVALID_ARGUMENT,
    Reason.DEADLINE_REQUIRED: _C.INVALID_ARGUMENT,
    Reason.REQUEST_ID_REUSED: _C.INVALID_ARGUMENT,
    Reason.NOT_IMPLEMENTED: _C.UNIMPLEMENTED,
    Reason.UNKNOWN_GROUP: _C.NOT_FOUND,
    Reason.UNKNOWN_REPLICA: _C.NOT_FOUND,
    Reason.UNKNOWN_UPDATE: _C.NOT_FOUND,
    Reason.UNKNOWN_MANIFEST: _C.NOT_FOUND,
    Reason.UNKNOWN_PLAN: _C.NOT_FOUND,
    Reason.GROUP_EXISTS: _C.ALREADY_EXISTS,
    Reason.TRAINER_HELD: _C.ALREADY_EXISTS,
    Reason.TRAINER_FENCED: _C.PERMISSION_DENIED,
    Reason.SESSION_SUPERSEDED: _C.ABORTED,
    Reason.UPDATE_IN_PROGRESS: _C.FAILED_PRECONDITION,
    Reason.WRONG_PHASE: _C.FAILED_PRECONDITION,
    Reason.NOT_ENOUGH_REPLICAS: _C.FAILED_PRECONDITION,
    Reason.REBIND_REQUIRED: _C.FAILED_PRECONDITION,
    Reason.MANIFEST_MISMATCH: _C.FAILED_PRECONDITION,
    Reason.PLACEMENT_MISMATCH: _C.FAILED_PRECONDITION,
    Reason.NO_TRANSPORT: _C.FAILED_PRECONDITION,
    Reason.CAPABILITY: _C.FAILED_PRECONDITION,
    Reason.DIGESTS_REQUIRED: _C.FAILED_PRECONDITION,
    Reason.BASE_MISMATCH: _C.FAILED_PRECONDITION,
    Reason.INCOMPLETE: _C.FAILED_PRECONDITION,
    Reason.DIGEST_MISMATCH: _C.ABORTED,
    Reason.DEADLINE: _C.DEADLINE_EXCEEDED,
    Reason.MEMBER_LOST: _C.ABORTED,
    Reason.MEMBER_RESTARTED: _C.ABORTED,
    Reason.TRANSPORT: _C.ABORTED,
    Reason.ENGINE: _C.ABORTED,
    Reason.ABORTED_BY_CALLER: _C.ABORTED,
    Reason.SUPERSEDED: _C.ABORTED,
    Reason.COORDINATOR_RESTARTED: _C.ABORTED,
    Reason.PEER_RANK_FAILED: _C.ABORTED,
    Reason.UNKNOWN_OUTCOME: _C.UNKNOWN,
    Reason.UNAUTHENTICATED: _C.UNAUTHENTICATED,
    Reason.PERMISSION_DENIED: _C.PERMISSION_DENIED,
    Reason.RESOURCE: _C.RESOURCE_EXHAUSTED,
    Reason.LIMIT: _C.RESOURCE_EXHAUSTED,
    Reason.INTERNAL: _C.INTERNAL,
}


class Refused(Exception):
    """A call is answered with a failure. ``update`` is attached; ``ended``: the failure is why that update ended.

    ``code`` overrides the table for a stream that must simply be dialled again (UNAVAILABLE).
    """

    def __init__(
        self,
        failure: Failure,
        update: update_pb2.UpdateInfo | None = None,
        ended: bool = False,
        code: grpc.StatusCode | None = None,
    ) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.update = update
        self.code = code or code_of(failure.reason, ended)


def code_of(reason: Reason, ended: bool = False) -> grpc.StatusCode:
    """The gRPC code of a reason; ``ended``: the reason why an update was aborted."""
    code = CODES[reason]
    return code if not ended or code is _C.DEADLINE_EXCEEDED else _C.ABORTED


def shorten(text: str, nbytes: int) -> str:
    """``text`` cut to at most ``nbytes`` of UTF-8, never in the middle of a character."""
    raw = text.encode("utf-8", "replace")
    return text if len(raw) <= nbytes else raw[: nbytes - 3].decode("utf-8", "ignore") + "..."


def failure_to_proto(f: Failure, limit: int = _MAX_FAILURE) -> common_pb2.Failure:
    """A failure as the contract says it, bounded."""
    return common_pb2.Failure(
        reason=common_pb2.Reason.Value(f"REASON_{f.reason}"),
        message=shorten(f.message, limit),
        member=shorten(f.member, 256),
        phase=f.phase,
        tensors=[shorten(t, limit // 8) for t in f.tensors[:5]],
        tensor_count=f.tensor_count or len(f.tensors),
    )


def status_of(refused: Refused) -> status_pb2.Status:
    """The whole answer: ErrorInfo, Failure, and as much of the update as fits."""
    f = refused.failure
    metadata = {"member": shorten(f.member, 256), "phase": f.phase}
    if refused.update is not None:
        metadata["update_id"] = refused.update.update_id
    info = error_details_pb2.ErrorInfo(
        reason=f.reason.value, domain=DOMAIN, metadata={k: v for k, v in metadata.items() if v}
    )
    status = status_pb2.Status(code=refused.code.value[0], message=_one_line(f.message))
    status.details.append(_any(info))
    status.details.append(_any(failure_to_proto(f, 1024)))
    if refused.update is not None:
        status.details.append(_any(_bounded(refused.update, MAX_DETAILS - status.ByteSize() - 128)))
    while status.ByteSize() > MAX_DETAILS and len(status.details) > 1:
        del status.details[-1]
    return status


def _one_line(message: str) -> str:
    """A message for grpc-message, which is percent-encoded: non-ASCII text counts threefold."""
    shown = shorten(" ".join(message.split()), _MAX_MESSAGE)
    return shown if shown.isascii() else shorten(shown, _MAX_MESSAGE // 3)


def _any(message: common_pb2.Failure | update_pb2.UpdateInfo | error_details_pb2.ErrorInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _bounded(update: update_pb2.UpdateInfo, room: int) -> update_pb2.UpdateInfo:
    """The update cut to ``room`` bytes: of a large fleet the outcomes that went wrong, as many as fit."""
    if update.ByteSize() <= room:
        return update
    cut = update_pb2.UpdateInfo()
    cut.CopyFrom(update)
    for field in ("participants", "absent", "outcomes"):
        cut.ClearField(field)
    if cut.HasField("failure"):
        cut.failure.message = shorten(cut.failure.message, 256)
        del cut.failure.tensors[:]
    left = room - cut.ByteSize()
    for outcome in update.outcomes:
        if not (outcome.HasField("failure") or outcome.excluded or outcome.unquiesced):
            continue
        brief = update_pb2.ReplicaOutcome()
        brief.CopyFrom(outcome)
        if brief.HasField("failure"):
            brief.failure.message = shorten(outcome.failure.message, 160)
            del brief.failure.tensors[:]
        left -= brief.ByteSize() + 4
        if left < 0:
            break
        cut.outcomes.append(brief)
    return cut
