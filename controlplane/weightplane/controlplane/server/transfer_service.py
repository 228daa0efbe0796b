"""WeightTransferService: the trainers' calls. Validate, make the event, wait for the core's answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc

from weightplane.controlplane.core.events import (
    AbortUpdate,
    CloseTransfer,
    DigestsIn,
    FinishUpdate,
    RankPlacement,
    UpdateWeights,
)
from weightplane.controlplane.core.model import Trainer
from weightplane.controlplane.core.progress import live_channels
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import Phase
from weightplane.controlplane.core.update_state import Update
from weightplane.controlplane.failpoints import hit
from weightplane.v1 import agent_pb2
from weightplane.v1 import weight_transfer_pb2 as wt
from weightplane.v1 import weight_transfer_pb2_grpc as wt_grpc

from . import bindings, convert, fields, pages, project, watch
from .calls import CALLER, remaining_s
from .coordinator import Coordinator
from .errors import Refused
from .fields import between, invalid, refuse
from .identities import Role
from .runtime import Group

__all__ = ["TransferService"]

_Context = grpc.aio.ServicerContext[Any, Any]


class TransferService(wt_grpc.WeightTransferServiceServicer):
    """See weight_transfer.proto."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def _group(self, name: str) -> Group:
        return self._coordinator.group(fields.name("group", name))

    async def InitTransfer(self, request: wt.InitTransferRequest, context: _Context) -> wt.InitTransferResponse:
        """Take or renew the hold; answers once every rank has called."""
        fields.request_id(request.request_id)
        fields.name("group", request.group)
        convert.init_transfer(request, "", 0.0)  # a malformed call makes no group
        group = self._coordinator.ensure(request.group)
        earlier = group.answers.earlier("InitTransfer", request, wt.InitTransferResponse)
        if earlier is not None:
            return earlier
        deadline = _deadline(group, context)
        await group.call(lambda call: convert.init_transfer(request, call, deadline))
        answer = bindings.init_response(group.state, _holder(group, request))
        group.answers.keep("InitTransfer", request, answer)
        return answer

    async def PutManifest(self, request: wt.PutManifestRequest, context: _Context) -> wt.PutManifestResponse:
        """A page of a manifest."""
        group = self._group(request.group)
        group.answers.earlier("PutManifest", request, wt.PutManifestResponse)
        group.fence(request.generation)
        _id("manifest_id", request.manifest_id, "m-")
        complete, received = await group.artifacts.put_manifest(
            request.manifest_id, request.first, request.total, request.tensors
        )
        return wt.PutManifestResponse(complete=complete, received=received)

    async def PutPlacement(self, request: wt.PutPlacementRequest, context: _Context) -> wt.PutPlacementResponse:
        """A page of what one rank holds."""
        group = self._group(request.group)
        group.answers.earlier("PutPlacement", request, wt.PutPlacementResponse)
        group.fence(request.generation)
        rank = _rank(group, request.rank)
        placement_id = await group.artifacts.put_placement(
            request.manifest_id, f"rank/{rank}", request.placement, request.first, request.total
        )
        if placement_id:
            group.submit(RankPlacement(request.generation, rank, request.manifest_id, placement_id))
        return wt.PutPlacementResponse(placement_id=placement_id)

    async def StartUpdate(self, request: wt.StartUpdateRequest, context: _Context) -> wt.StartUpdateResponse:
        """Open an update; answers once every participant is ready to be armed."""
        group = self._group(request.group)
        fields.request_id(request.request_id)
        hit("server.start.received")
        group.fence(request.generation)
        if request.request_id not in group.state.requests:
            group.artifacts.manifest(request.manifest_id)
        event = convert.start_update(request, "", _deadline(group, context))
        reply = await group.call(lambda call: _named(event, call))
        return project.start_response(_found(group, reply.update_id), group.now())

    async def GetPlan(self, request: wt.GetPlanRequest, context: _Context) -> wt.GetPlanResponse:
        """A page of a plan."""
        page = await pages.plan_page(self._group(request.group).artifacts, request.plan_id, request.page)
        return wt.GetPlanResponse(page=page)

    async def UpdateWeights(self, request: wt.UpdateWeightsRequest, context: _Context) -> wt.UpdateWeightsResponse:
        """Declare buckets; answers once everyone is armed."""
        group = self._group(request.group)
        group.answers.earlier("UpdateWeights", request, wt.UpdateWeightsResponse)
        hit("server.update.received")
        between("seq", request.seq, 1, 1 << 31)
        deadline = _deadline(group, context)
        ranges = _ranges(group.find(request.update_id), request)
        reply = await group.call(
            lambda call: UpdateWeights(
                call,
                deadline,
                request.generation,
                request.update_id,
                request.epoch,
                request.rank,
                request.seq,
                ranges,
            )
        )
        hit("server.update.armed")
        u = _found(group, reply.update_id)
        live = live_channels(u)
        return wt.UpdateWeightsResponse(
            seq=request.seq,
            all_called=project.all_called(u),
            remaining_ms=max(0, int((u.deadline - group.now()) * 1000)),
            excluded_channels=[c for c in u.channels if c not in live],
        )

    async def PutDigests(self, request: wt.PutDigestsRequest, context: _Context) -> wt.PutDigestsResponse:
        """A page of a rank's expected digests."""
        group = self._group(request.group)
        group.answers.earlier("PutDigests", request, wt.PutDigestsResponse)
        group.fence(request.generation)
        rank = _rank(group, request.rank)
        u = _found(group, request.update_id)
        if u.failure is not None and u.phase in (Phase.ABORTING, Phase.ABORTED):
            raise group.refusal(u.failure, u.update_id)
        if u.generation != request.generation:
            refuse(Reason.TRAINER_FENCED, f"update {u.update_id} belongs to generation {u.generation}")
        if u.epoch != request.epoch:
            refuse(Reason.WRONG_PHASE, f"update {u.update_id}: expected epoch {u.epoch}, found {request.epoch}")
        if request.plan_id not in {p.plan_id for p in u.plans.values()}:
            message = f"plan_id: expected one of update {u.update_id}'s, found {request.plan_id!r}"
            refuse(Reason.UNKNOWN_PLAN, message)
        if u is not group.state.open:
            return wt.PutDigestsResponse(complete=True)  # a repeat: it is decided already
        complete = group.artifacts.put_digests(
            u.update_id, request.plan_id, rank, request.first, request.total, request.digests
        )
        if complete:
            group.submit(DigestsIn(request.generation, u.update_id, request.epoch, rank, request.plan_id))
        return wt.PutDigestsResponse(complete=complete)

    async def FinishUpdate(self, request: wt.FinishUpdateRequest, context: _Context) -> wt.FinishUpdateResponse:
        """Verify, decide, commit; answers once every participant flipped, or at the deadline."""
        group = self._group(request.group)
        group.answers.earlier("FinishUpdate", request, wt.FinishUpdateResponse)
        hit("server.finish.received")
        between("gather_s", request.gather_s, 0.0, 1e6)
        parity = convert.parity(request.parity)
        deadline = _deadline(group, context)
        reply = await group.call(
            lambda call: FinishUpdate(
                call,
                deadline,
                request.generation,
                request.update_id,
                request.epoch,
                request.rank,
                request.gather_s,
                parity,
            )
        )
        return wt.FinishUpdateResponse(update=_info(group, _found(group, reply.update_id)))

    async def AbortUpdate(self, request: wt.AbortUpdateRequest, context: _Context) -> wt.AbortUpdateResponse:
        """Abort; answers once members are drained or listed as unquiesced."""
        group = self._group(request.group)
        group.answers.earlier("AbortUpdate", request, wt.AbortUpdateResponse)
        CALLER.get().require(Role.TRAINER if request.generation else Role.OPERATOR, "AbortUpdate")
        if not request.generation and request.rank > 0:
            invalid("rank", "0 or -1 from an operator (generation 0)", request.rank)
        between("rank", request.rank, -1, 65535)
        message = fields.text("reason", request.reason, 2048, empty=True, lines=True)
        deadline = _deadline(group, context)
        reply = await group.call(
            lambda call: AbortUpdate(call, deadline, request.generation, request.update_id, message, request.rank)
        )
        return wt.AbortUpdateResponse(update=_info(group, _found(group, reply.update_id)))

    async def CloseTransfer(self, request: wt.CloseTransferRequest, context: _Context) -> wt.CloseTransferResponse:
        """Give up the hold."""
        group = self._group(request.group)
        group.answers.earlier("CloseTransfer", request, wt.CloseTransferResponse)
        between("rank", request.rank, 0, 65535)
        await group.call(lambda call: CloseTransfer(call, request.generation, request.rank))
        return wt.CloseTransferResponse()

    async def GetUpdate(self, request: wt.GetUpdateRequest, context: _Context) -> wt.GetUpdateResponse:
        """What became of an update."""
        group = self._group(request.group)
        key = request.WhichOneof("key")
        if key == "request_id":
            update_id = group.state.requests.get(request.request_id, "")
            if not update_id:
                message = f"no StartUpdate with request_id {request.request_id!r} began an update here"
                refuse(Reason.UNKNOWN_UPDATE, message)
        elif key == "update_id":
            update_id = request.update_id
        else:
            invalid("key", "update_id or request_id", "nothing")
        return wt.GetUpdateResponse(update=_info(group, _found(group, update_id)))

    async def WatchUpdate(  # type: ignore[override]  # by the context, as every stream here
        self, request: wt.WatchUpdateRequest, context: _Context
    ) -> None:
        """Follow updates; with a generation, hold the rank's lease."""
        group = self._group(request.group)
        between("generation", request.generation, 0, 1 << 62)
        if request.generation:
            CALLER.get().require(Role.TRAINER, "WatchUpdate with a generation")
        elif request.rank:
            invalid("rank", "0, since without a generation no lease is held", request.rank)
        await watch.updates(group, request.generation, request.rank, request.update_id, context.write)


# --- parts ----------------------------------------------------------------------------------------------------------


def _deadline(group: Group, context: _Context) -> float:
    return group.deadline(remaining_s(context) or 0.0)


def _named(event: Any, call_id: str) -> Any:
    """The event, made before the call had an id."""
    return replace(event, call_id=call_id)


def _id(field: str, value: str, prefix: str) -> None:
    if not value.startswith(prefix) or len(value) > 64:
        invalid(field, f"'{prefix}' and 32 hex digits", value)


def _rank(group: Group, rank: int) -> int:
    t = group.state.trainer
    return int(between("rank", rank, 0, t.world_size - 1 if t is not None else 0))


def _found(group: Group, update_id: str) -> Update:
    u = group.find(update_id)
    if u is None:
        refuse(Reason.UNKNOWN_UPDATE, f"no update {update_id!r} in group {group.name!r}")
    return u


def _info(group: Group, u: Update) -> Any:
    return project.update_info(group.state, u, group.now())


def _holder(group: Group, request: wt.InitTransferRequest) -> Trainer:
    """The trainer that was bound, unless another took over before we could say so."""
    t = group.state.trainer
    if t is None or t.closed or (t.trainer_id, t.incarnation) != (request.trainer_id, request.incarnation):
        raise Refused(Failure(Reason.TRAINER_FENCED, "another trainer took over at once: do not re-init by yourself"))
    return t


def _ranges(u: Update | None, request: wt.UpdateWeightsRequest) -> tuple[tuple[str, int, int], ...]:
    """Bucket ranges; (0, 0) is all of a channel's."""

    def count(r: agent_pb2.BucketRange) -> int:
        plan = u.plans.get(r.channel_id) if u is not None else None
        return plan.buckets if plan is not None and r.first == 0 and r.count == 0 else r.count

    return tuple((r.channel_id, r.first, count(r)) for r in request.buckets)
