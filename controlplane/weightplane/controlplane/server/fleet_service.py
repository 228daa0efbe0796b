"""FleetService: operators and routers."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import grpc

from weightplane.controlplane.core.events import Event, SetAdmin, SetAwake, SetPause, SetPolicy, SetSleep
from weightplane.controlplane.core.members import routable
from weightplane.controlplane.core.reasons import Reason
from weightplane.controlplane.core.states import Admin, PauseMode
from weightplane.v1 import fleet_pb2 as fl
from weightplane.v1 import fleet_pb2_grpc

from . import convert, feed, fields, fleet_view, project
from .calls import CALLER, remaining_s
from .coordinator import Coordinator
from .enums import PAUSE
from .fields import between, invalid, refuse
from .identities import Role
from .runtime import Group

__all__ = ["FleetService"]

_Context = grpc.aio.ServicerContext[Any, Any]
_PAGE_BYTES = 2 << 20
_OneReplica = fl.DrainReplicaRequest | fl.ActivateReplicaRequest | fl.PinReplicaRequest | fl.UnpinReplicaRequest
A = TypeVar("A", fl.DrainReplicaResponse, fl.ActivateReplicaResponse, fl.PinReplicaResponse, fl.UnpinReplicaResponse)

#: What ends an administrative state, for who tries something else.
_ENDS = {
    Admin.PINNED: "UnpinReplica ends that",
    Admin.DRAINING: "ActivateReplica ends that",
    Admin.QUARANTINED: "ActivateReplica ends that",
    Admin.ASLEEP: "WakeReplica ends that",
    Admin.LEAVING: "it is on its way out, and is ACTIVE when it comes again",
}


class FleetService(fleet_pb2_grpc.FleetServiceServicer):
    """See fleet.proto."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def _group(self, name: str) -> Group:
        return self._coordinator.group(fields.name("group", name))

    async def CreateGroup(self, request: fl.CreateGroupRequest, context: _Context) -> fl.CreateGroupResponse:
        """Make a group."""
        fields.request_id(request.request_id)
        name, policy = fields.name("group", request.group), convert.policy(request.policy)
        known = {g.name: g for g in self._coordinator.groups()}.get(name)
        if known is not None and known.state.policy != policy:
            message = f"group {name!r} exists with other policies: expected {policy}, found {known.state.policy}"
            refuse(Reason.GROUP_EXISTS, message)
        group = self._coordinator.ensure(name)
        group.answers.earlier("CreateGroup", request, fl.CreateGroupResponse)
        if known is None:
            await group.call(lambda call: SetPolicy(call, policy))
        return fl.CreateGroupResponse(group=fleet_view.group_info(group.state, group.now()))

    async def UpdateGroup(self, request: fl.UpdateGroupRequest, context: _Context) -> fl.UpdateGroupResponse:
        """Replace a group's policies."""
        group, policy = self._group(request.group), convert.policy(request.policy)
        earlier = group.answers.earlier("UpdateGroup", request, fl.UpdateGroupResponse)
        if earlier is not None:
            return earlier
        await group.call(lambda call: SetPolicy(call, policy))
        answer = fl.UpdateGroupResponse(group=fleet_view.group_info(group.state, group.now()))
        group.answers.keep("UpdateGroup", request, answer)
        return answer

    async def PauseGeneration(
        self, request: fl.PauseGenerationRequest, context: _Context
    ) -> fl.PauseGenerationResponse:
        """Pause; answers once generation stands still."""
        group = self._group(request.group)
        earlier = group.answers.earlier("PauseGeneration", request, fl.PauseGenerationResponse)
        if earlier is not None:
            return earlier
        mode = PAUSE.core("mode", request.mode)
        mode = group.state.policy.pause if mode is PauseMode.DEFAULT else mode
        replicas = await _pause(group, request, context, on=True, mode=mode)
        answer = fl.PauseGenerationResponse(replicas=replicas)
        group.answers.keep("PauseGeneration", request, answer)
        return answer

    async def ResumeGeneration(
        self, request: fl.ResumeGenerationRequest, context: _Context
    ) -> fl.ResumeGenerationResponse:
        """Remove one holder's pause."""
        group = self._group(request.group)
        earlier = group.answers.earlier("ResumeGeneration", request, fl.ResumeGenerationResponse)
        if earlier is not None:
            return earlier
        replicas = await _pause(group, request, context, on=False, mode=PauseMode.KEEP)
        answer = fl.ResumeGenerationResponse(replicas=replicas)
        group.answers.keep("ResumeGeneration", request, answer)
        return answer

    async def SleepReplica(self, request: fl.SleepReplicaRequest, context: _Context) -> fl.SleepReplicaResponse:
        """Free a replica's device memory; answers once it is free."""
        group, rid = self._group(request.group), fields.name("replica_id", request.replica_id)
        earlier = group.answers.earlier("SleepReplica", request, fl.SleepReplicaResponse)
        if earlier is not None:
            return earlier
        group.replica(rid)
        level, deadline = int(between("level", request.level, 0, 2)) or 1, group.deadline(remaining_s(context) or 0.0)
        await group.call(lambda call: SetSleep(call, deadline, rid, level))
        answer = fl.SleepReplicaResponse(replica=fleet_view.replica_info(group.state, group.replica(rid)))
        group.answers.keep("SleepReplica", request, answer)
        return answer

    async def WakeReplica(self, request: fl.WakeReplicaRequest, context: _Context) -> fl.WakeReplicaResponse:
        """Wake a replica, or part of it; answers once that is awake."""
        group, rid = self._group(request.group), fields.name("replica_id", request.replica_id)
        earlier = group.answers.earlier("WakeReplica", request, fl.WakeReplicaResponse)
        if earlier is not None:
            return earlier
        group.replica(rid)
        tags, deadline = convert.sleep_tags("tags", request.tags), group.deadline(remaining_s(context) or 0.0)
        await group.call(lambda call: SetAwake(call, deadline, rid, tags))
        answer = fl.WakeReplicaResponse(replica=fleet_view.replica_info(group.state, group.replica(rid)))
        group.answers.keep("WakeReplica", request, answer)
        return answer

    async def ListGroups(self, request: fl.ListGroupsRequest, context: _Context) -> fl.ListGroupsResponse:
        """Every group that the caller may name."""
        caller = CALLER.get()
        groups = [g for g in self._coordinator.groups() if caller.may_see(g.name)]
        return fl.ListGroupsResponse(groups=[fleet_view.group_info(g.state, g.now()) for g in groups])

    async def GetGroup(self, request: fl.GetGroupRequest, context: _Context) -> fl.GetGroupResponse:
        """One group."""
        group = self._group(request.group)
        return fl.GetGroupResponse(group=fleet_view.group_info(group.state, group.now()))

    async def ListReplicas(self, request: fl.ListReplicasRequest, context: _Context) -> fl.ListReplicasResponse:
        """The replicas of a group."""
        group, selector = self._group(request.group), fields.labels("selector", request.selector)
        state = group.state
        reached = fleet_view.choices(state) if request.transports else {}
        return fl.ListReplicasResponse(
            replicas=[
                fleet_view.replica_info(state, r, reached.get((r.replica_id, r.incarnation), ()), request.conditions)
                for _, r in sorted(state.replicas.items())
                if all(r.labels.get(k) == v for k, v in selector.items())
            ]
        )

    async def ListUpdates(self, request: fl.ListUpdatesRequest, context: _Context) -> fl.ListUpdatesResponse:
        """Updates, newest first. The token is the version that the next page lies below."""
        group = self._group(request.group)
        size = int(between("page_size", request.page_size, 0, 1000)) or 50
        below = 1 << 62
        if request.page_token:
            if not re.fullmatch("[0-9]{1,19}", request.page_token):
                invalid("page_token", "next_page_token of the page before", request.page_token)
            below = int(request.page_token)
        answer = fl.ListUpdatesResponse()
        known = [*group.state.history.values(), *([group.state.open] if group.state.open is not None else [])]
        room = _PAGE_BYTES
        for u in sorted(known, key=lambda u: -u.version):
            if u.version >= below:
                continue
            info = project.update_info(group.state, u, group.now())
            room -= info.ByteSize()
            if answer.updates and (len(answer.updates) >= size or room < 0):
                answer.next_page_token = str(answer.updates[-1].version)
                break
            answer.updates.append(info)
        return answer

    async def WatchGroup(self, request: fl.WatchGroupRequest, context: _Context) -> None:  # type: ignore[override]
        """Follow a group."""
        group = self._group(request.group)
        between("after_revision", request.after_revision, 0, 1 << 62)
        await feed.follow(group, request.after_revision, context.write)

    async def DrainReplica(self, request: fl.DrainReplicaRequest, context: _Context) -> fl.DrainReplicaResponse:
        """Take a replica out of service."""
        return await self._set_admin(request, fl.DrainReplicaResponse, Admin.DRAINING)

    async def ActivateReplica(
        self, request: fl.ActivateReplicaRequest, context: _Context
    ) -> fl.ActivateReplicaResponse:
        """Put a draining or quarantined replica back to work."""
        return await self._set_admin(
            request, fl.ActivateReplicaResponse, Admin.ACTIVE, refused=(Admin.PINNED, Admin.ASLEEP)
        )

    async def PinReplica(self, request: fl.PinReplicaRequest, context: _Context) -> fl.PinReplicaResponse:
        """Hold a replica at its version."""
        return await self._set_admin(request, fl.PinReplicaResponse, Admin.PINNED)

    async def UnpinReplica(self, request: fl.UnpinReplicaRequest, context: _Context) -> fl.UnpinReplicaResponse:
        """End a pin."""
        return await self._set_admin(
            request,
            fl.UnpinReplicaResponse,
            Admin.ACTIVE,
            refused=(Admin.DRAINING, Admin.QUARANTINED, Admin.ASLEEP, Admin.LEAVING),
        )

    async def CheckReplica(self, request: fl.CheckReplicaRequest, context: _Context) -> fl.CheckReplicaResponse:
        """Alive, ready, routable."""
        group = self._group(request.group)
        r = group.replica(request.replica_id)
        between("min_version", request.min_version, 0, 1 << 62)
        live, ready, route, why = routable(group.state, r, request.min_version)
        reached = fleet_view.choices(group.state).get((r.replica_id, r.incarnation), ())
        info = fleet_view.replica_info(group.state, r, reached, conditions=True)
        return fl.CheckReplicaResponse(live=live, ready=ready, routable=route, reason=why, replica=info)

    async def _set_admin(
        self, request: _OneReplica, response: type[A], admin: Admin, refused: tuple[Admin, ...] = ()
    ) -> A:
        group = self._group(request.group)
        method = response.__name__.removesuffix("Response")
        earlier = group.answers.earlier(method, request, response)
        if earlier is not None:
            return earlier
        r = group.replica(fields.name("replica_id", request.replica_id))
        if r.admin in refused:
            refuse(Reason.WRONG_PHASE, f"{method}: replica {r.replica_id} is {r.admin}: {_ENDS[r.admin]}", r.replica_id)
        await group.call(lambda call: SetAdmin(call, request.replica_id, admin))
        answer = response(replica=fleet_view.replica_info(group.state, group.replica(request.replica_id)))
        group.answers.keep(method, request, answer)
        return answer


async def _pause(
    group: Group,
    request: fl.PauseGenerationRequest | fl.ResumeGenerationRequest,
    context: _Context,
    on: bool,
    mode: PauseMode,
) -> list[fl.ReplicaInfo]:
    holder = request.holder or "operator"
    if holder not in ("operator", "trainer"):
        invalid("holder", "operator or trainer", request.holder)
    CALLER.get().require(Role(holder), f"a pause held by {holder}")
    ids = tuple(dict.fromkeys(request.replica_ids))
    deadline = group.deadline(remaining_s(context) or 0.0)

    def event(call: str) -> Event:
        return SetPause(call, deadline, ids, holder, on, mode)

    await group.call(event)
    state = group.state
    return [fleet_view.replica_info(state, state.replicas[rid]) for rid in ids or sorted(state.replicas)]
