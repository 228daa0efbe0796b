"""Unary calls of the agent: deadlines, retries where they are safe (all of these are), refusals as values.

Any thread. UNAVAILABLE and a call's own DEADLINE_EXCEEDED are tried again, with jitter, until the call's time is over
or ``cancelled`` says that nobody wants the answer any more.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.placement import Placement
from weightplane.controlplane.core.plan import Plan
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.dial import Dial
from weightplane.v1 import agent_pb2, agent_pb2_grpc, update_pb2

from . import codec

__all__ = ["Abandoned", "AgentCalls", "CallFailed", "reason_of"]

_CALL_S = 10.0
_BACKOFF_S = (0.05, 0.5)


class CallFailed(Exception):
    """A call was refused or never answered; ``failure`` says it in the core's words."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class Abandoned(Exception):
    """The update that a call belonged to was dropped meanwhile."""


def reason_of(error: Any) -> Reason | None:
    """The reason in an RPC error's rich status, if it has one of ours."""
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        return None
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.reason in Reason.__members__:
            return Reason[info.reason]
    return None


class AgentCalls:
    """The unary half of ``AgentService`` for one replica. Thread-safe."""

    def __init__(self, dial: Dial, channel: grpc.Channel, group: str, replica_id: str) -> None:
        self._metadata = dial.metadata
        self._stub = agent_pb2_grpc.AgentServiceStub(channel)
        self._group, self._replica_id = group, replica_id

    def manifest(self, manifest_id: str, end: float, cancelled: Callable[[], bool]) -> Manifest:
        """Fetch a manifest, page by page. Raises ``CallFailed``, ``Abandoned``, ``ManifestError``, ``ValueError``."""
        pages: list[agent_pb2.GetManifestResponse] = []
        have, total = 0, 1
        while have < total or not pages:
            request = agent_pb2.GetManifestRequest(group=self._group, manifest_id=manifest_id, first=have)
            page = self._call(self._stub.GetManifest, request, end, cancelled)
            if not page.tensors and page.total > have:
                raise ValueError(f"manifest {manifest_id}: an empty page at {have} of {page.total}")
            pages.append(page)
            have, total = have + len(page.tensors), page.total
        return codec.manifest(pages, manifest_id)

    def plan(self, plan_id: str, manifest: Manifest, end: float, cancelled: Callable[[], bool]) -> Plan:
        """Fetch a plan, page by page. Raises ``CallFailed``, ``Abandoned``, ``PlanError``."""
        pages: list[Any] = []
        while not pages or len(pages) < pages[0].pages:
            request = agent_pb2.AgentServiceGetPlanRequest(group=self._group, plan_id=plan_id, page=len(pages))
            pages.append(self._call(self._stub.GetPlan, request, end, cancelled).page)
        return codec.plan(pages, manifest)

    def put_placement(
        self, incarnation: str, placement: Placement, manifest: Manifest, end: float, cancelled: Callable[[], bool]
    ) -> None:
        """Deliver one worker's placement. Raises ``CallFailed``, ``Abandoned``."""
        answer = None
        for page, first, total in codec.placement_pages(placement, manifest):
            request = agent_pb2.PutWorkerPlacementRequest(
                group=self._group,
                replica_id=self._replica_id,
                incarnation=incarnation,
                manifest_id=manifest.id,
                placement=page,
                first=first,
                total=total,
            )
            answer = self._call(self._stub.PutWorkerPlacement, request, end, cancelled)
        if answer is None or not answer.placement_id:
            message = f"{placement.member}: the placement was sent whole and is not complete"
            raise CallFailed(Failure(Reason.INTERNAL, message, self._replica_id))

    def put_receipt(
        self,
        incarnation: str,
        epoch: int,
        pages: Sequence[update_pb2.Receipt],
        end: float,
        cancelled: Callable[[], bool],
    ) -> None:
        """Deliver one worker's receipt. Raises ``CallFailed``, ``Abandoned``."""
        complete = False
        for page in pages:
            request = agent_pb2.PutReceiptRequest(
                group=self._group, replica_id=self._replica_id, incarnation=incarnation, epoch=epoch, receipt=page
            )
            complete = self._call(self._stub.PutReceipt, request, end, cancelled).complete
        if not complete:
            message = f"{pages[0].member}: the receipt was sent whole and is not complete"
            raise CallFailed(Failure(Reason.INCOMPLETE, message, self._replica_id))

    def _call(self, method: Any, request: Any, end: float, cancelled: Callable[[], bool]) -> Any:
        backoff = _BACKOFF_S[0]
        while True:
            if cancelled():
                raise Abandoned
            left = end - time.monotonic()
            try:
                return method(request, timeout=max(0.05, min(_CALL_S, left)), metadata=self._metadata)
            except grpc.RpcError as e:
                error: Any = e
                again = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
                if not again or time.monotonic() + backoff >= end:
                    raise CallFailed(self._failure(request, error)) from e
            time.sleep(backoff * random.uniform(0.5, 1.5))
            backoff = min(_BACKOFF_S[1], backoff * 2)

    def _failure(self, request: Any, error: Any) -> Failure:
        reason = reason_of(error)
        if reason is None:
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            reason = Reason.DEADLINE if late else Reason.INTERNAL
        what = type(request).__name__.removesuffix("Request")
        return Failure(reason, f"{what}: {error.code().name}: {error.details()}", self._replica_id)
