"""What a publish may raise. Each carries the coordinator's words: who, which phase, expected, found, what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.v1 import common_pb2, update_pb2

__all__ = [
    "CallRefused",
    "CoordinatorUnreachable",
    "ForkedProcessError",
    "OutcomeUnknown",
    "PublishError",
    "PublisherClosed",
    "TrainerFenced",
    "TrainerHeld",
    "Unanswered",
    "UpdateFailed",
    "UpdateRefused",
    "error_from_rpc",
    "failure_from_proto",
]

_ENDS_IN = re.compile(r"its lease ends in ([0-9.]+) s")  # the coordinator's words


class PublishError(RuntimeError):
    """Base of all that a Publisher raises for reasons outside the caller's code. ``failure``: what and why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure

    @property
    def reason(self) -> Reason:
        """The kind."""
        return self.failure.reason


class CallRefused(PublishError):
    """The coordinator refused a call that opens no update (a wrong argument, a missing right, ...)."""


class TrainerHeld(CallRefused):
    """Another trainer holds the group and its lease lives. Wait, or ask with ``takeover=True``."""

    @property
    def ends_in(self) -> float | None:
        """Seconds until the lease ends unless it is renewed; ``None`` if it holds for as long as a connection does."""
        found = _ENDS_IN.search(self.failure.message)
        return float(found[1]) if found is not None else None


class TrainerFenced(PublishError):
    """Another trainer took the group over. This publisher is over; nothing re-inits by itself."""


class CoordinatorUnreachable(PublishError):
    """No coordinator answered within the time there was; nothing was begun."""


class PublisherClosed(PublishError):
    """The publisher was closed."""

    def __init__(self, why: str = "the publisher is closed") -> None:
        super().__init__(Failure(Reason.ABORTED_BY_CALLER, why))


class ForkedProcessError(RuntimeError):
    """A publisher was used in a child that ``os.fork`` made: gRPC and its threads do not survive a fork."""


class UpdateFailed(PublishError):
    """An update did not commit: no replica serves its version. ``failures``: by replica (or rank), each one's reason.

    ``update_id`` is empty and ``version`` 0 if none was opened. ``update``: the coordinator's last word of it.
    """

    def __init__(
        self,
        failure: Failure,
        failures: Mapping[str, Failure] | None = None,
        update: update_pb2.UpdateInfo | None = None,
        *,
        update_id: str = "",
        version: int = 0,
    ) -> None:
        self.failures: dict[str, Failure] = dict(failures or {})
        again = [m for m, f in self.failures.items() if _says_the_same(f, failure)]
        longest = max([failure.message, *(self.failures[m].message for m in again)], key=len)
        failure = replace(failure, message=longest)
        self.failures |= {m: replace(self.failures[m], message=longest) for m in again}
        if failure.member and failure.member.rpartition("/")[0] not in self.failures:  # a worker of one named already
            self.failures.setdefault(failure.member, failure)
        super().__init__(failure)
        self.update = update
        self.update_id = update.update_id if update is not None else update_id
        self.version = update.version if update is not None else version

    def __str__(self) -> str:
        what = f"update {self.update_id} (version {self.version}) failed" if self.update_id else "no update was opened"
        others = [
            str(f if f.member else replace(f, member=m))
            for m, f in self.failures.items()
            if f.message != self.failure.message
        ]
        more = "".join(f"; {text}" for text in others[:5]) + (
            f"; and {len(others) - 5} more" if len(others) > 5 else ""
        )
        return f"{what}: {self.failure}{more}"


def _says_the_same(a: Failure, b: Failure) -> bool:
    """Whether two records are of one failure: a longer text is cut here and there, to different lengths."""
    if a.message == b.message:
        return True
    short, long = sorted((a.message, b.message), key=len)
    return a.reason is b.reason and short.endswith("...") and long.startswith(short.removesuffix("..."))


class UpdateRefused(UpdateFailed):
    """StartUpdate was refused: too few replicas, a policy that some replica lacks, ranks that disagree, ..."""


class OutcomeUnknown(UpdateFailed):
    """Whether the update committed could not be learnt in time. Ask again with ``Publisher.outcome(update_id)``."""


class Unanswered(Exception):
    """A call got no answer (its time ran out, or the connection broke): the outcome is not known. Internal.

    ``said``: the words of a control plane that does not lead, if there are any.
    """

    def __init__(self, method: str, code: grpc.StatusCode, text: str, said: str = "") -> None:
        super().__init__(f"{method}: {code.name}: {text}")
        self.method, self.code, self.said = method, code, said


class RpcRefused(Exception):
    """The coordinator's typed answer to a call. Internal: the publisher decides which exception it becomes."""

    def __init__(
        self, method: str, failure: Failure, update: update_pb2.UpdateInfo | None, code: grpc.StatusCode
    ) -> None:
        super().__init__(f"{method}: {failure}")
        self.method, self.failure, self.update, self.code = method, failure, update, code


def failure_from_proto(f: common_pb2.Failure) -> Failure:
    """The core's view of a failure; a reason this build does not know is INTERNAL."""
    try:
        reason = Reason(common_pb2.Reason.Name(f.reason).removeprefix("REASON_"))
    except ValueError:
        reason = Reason.INTERNAL
    return Failure(reason, f.message, f.member, f.phase, tuple(f.tensors), f.tensor_count)


def error_from_rpc(method: str, error: grpc.RpcError) -> RpcRefused | Unanswered:
    """What a failed call says: a refusal with its details, or that there was no answer."""
    call: Any = error
    code = call.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    text = (call.details() if isinstance(error, grpc.Call) else "") or "without a word of details"
    details = _details(error)
    info = error_details_pb2.ErrorInfo()
    failure = common_pb2.Failure()
    update = update_pb2.UpdateInfo()
    has_info, has_failure, has_update = (_unpack(details, m) for m in (info, failure, update))
    if code is grpc.StatusCode.UNAVAILABLE and (has_info or has_failure):  # it does not lead: another does, or will
        return Unanswered(method, code, text, failure.message or text)
    if has_failure:
        return RpcRefused(method, failure_from_proto(failure), update if has_update else None, code)
    if has_info and info.reason in Reason.__members__:
        found = Failure(Reason(info.reason), text, info.metadata.get("member", ""), info.metadata.get("phase", ""))
        return RpcRefused(method, found, update if has_update else None, code)
    if code in _REFUSALS:
        return RpcRefused(method, Failure(_REFUSALS[code], text), None, code)
    return Unanswered(method, code, text)


#: Codes without our details (a proxy's, gRPC's own) that are answers all the same.
_REFUSALS = {
    grpc.StatusCode.UNAUTHENTICATED: Reason.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED: Reason.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED: Reason.NOT_IMPLEMENTED,
    grpc.StatusCode.INVALID_ARGUMENT: Reason.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Reason.LIMIT,
}


def _details(error: grpc.RpcError) -> list[Any]:
    if not isinstance(error, grpc.Call):
        return []
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # trailers that contradict the call: not ours
        return []
    return list(status.details) if status is not None else []


def _unpack(details: list[Any], into: Message) -> bool:
    return any(d.Is(into.DESCRIPTOR) and d.Unpack(into) for d in details)
