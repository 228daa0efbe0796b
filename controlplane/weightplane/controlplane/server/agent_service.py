"""AgentService: sessions of replicas and trainer ranks, and what they fetch and deliver by id."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import grpc

from weightplane.controlplane.core.events import Leave, RankHello, WorkerPlacement
from weightplane.controlplane.core.reasons import Reason
from weightplane.v1 import agent_pb2, agent_pb2_grpc

from . import bindings, convert, fields, pages, receipts
from .calls import CALLER, Undecodable
from .coordinator import Coordinator
from .fields import between, invalid, refuse
from .identities import Role
from .pacing import Pace
from .runtime import Group
from .sessions import Session
from .watch import paced

__all__ = ["MAX_MESSAGE", "AgentService"]

log = logging.getLogger("weightplane.controlplane")

#: A session's messages are small: what is large travels by id.
MAX_MESSAGE = 64 << 10
_MESSAGES_S, _MESSAGES = 200.0, 1000  # of a session: messages a second, and in a burst; the sender of more is held back

_Context = grpc.aio.ServicerContext[Any, Any]


class AgentService(agent_pb2_grpc.AgentServiceServicer):
    """See agent.proto."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    # --- sessions ---

    async def Session(  # type: ignore[override]  # by the context: half the cost of iterators
        self, _requests: AsyncIterator[agent_pb2.SessionRequest], context: _Context
    ) -> None:
        """One stream of one member, from hello to the end."""
        first = await _read(context)
        if first is None:
            return
        hello = _hello(first)
        group = self._coordinator.ensure(hello.group)
        if hello.kind == agent_pb2.SESSION_KIND_HEARTBEAT:
            session = _open_heartbeat(group, hello)
            serve = [partial(_beats, group, hello, context)]
        elif hello.HasField("trainer"):
            session = await _open_rank(group, hello)
            told = partial(_tell_rank, group, hello, session, context)
            serve = [partial(_beats, group, hello, context, reports=True), told]
        else:
            session = _open_replica(group, hello)
            told = partial(_tell_replica, group, hello, session, context)
            serve = [partial(_reports, group, hello, session, context), told]
        try:
            await context.write(_welcome(group, session))
            await _first_to_end(session, serve)
        finally:
            group.close_session(session)

    # --- by id ---

    async def GetManifest(
        self, request: agent_pb2.GetManifestRequest, context: _Context
    ) -> agent_pb2.GetManifestResponse:
        """A page of a manifest."""
        manifest = self._group(request.group).artifacts.manifest(request.manifest_id)
        between("first", request.first, 0, max(len(manifest) - 1, 0))
        return pages.manifest_page(manifest, request.first)

    async def GetPlan(
        self, request: agent_pb2.AgentServiceGetPlanRequest, context: _Context
    ) -> agent_pb2.AgentServiceGetPlanResponse:
        """A page of a plan."""
        page = await pages.plan_page(self._group(request.group).artifacts, request.plan_id, request.page)
        return agent_pb2.AgentServiceGetPlanResponse(page=page)

    async def PutWorkerPlacement(
        self, request: agent_pb2.PutWorkerPlacementRequest, context: _Context
    ) -> agent_pb2.PutWorkerPlacementResponse:
        """A page of what one worker holds of a manifest."""
        group = self._group(request.group)
        worker = receipts.worker_of(group, request.replica_id, request.incarnation, request.placement.member)
        placement_id = await group.artifacts.put_placement(
            request.manifest_id, request.placement.member, request.placement, request.first, request.total
        )
        if placement_id:
            group.submit(
                WorkerPlacement(request.replica_id, request.incarnation, request.manifest_id, worker, placement_id)
            )
        return agent_pb2.PutWorkerPlacementResponse(placement_id=placement_id)

    async def PutReceipt(self, request: agent_pb2.PutReceiptRequest, context: _Context) -> agent_pb2.PutReceiptResponse:
        """A page of what one worker received and applied."""
        group = self._group(request.group)
        if request.epoch != group.state.epoch:
            refuse(Reason.WRONG_PHASE, f"epoch: expected {group.state.epoch}, found {request.epoch}: resync first")
        complete = receipts.take(group, request.replica_id, request.incarnation, request.receipt)
        return agent_pb2.PutReceiptResponse(complete=complete)

    def _group(self, name: str) -> Group:
        return self._coordinator.group(fields.name("group", name))


# --- opening --------------------------------------------------------------------------------------------------------


def _hello(first: agent_pb2.SessionRequest) -> agent_pb2.Hello:
    """The first message of a stream, checked."""
    kind = first.WhichOneof("message")
    if kind != "hello":
        invalid("message", "hello first", kind or "nothing")
    hello = first.hello
    fields.name("hello.group", hello.group)
    CALLER.get().enter(hello.group, "Session")
    fields.name("hello.agent_id", hello.agent_id)
    fields.text("hello.incarnation", hello.incarnation, 128)
    fields.text("hello.software", hello.software, 256, empty=True)
    if hello.kind not in agent_pb2.SessionKind.values():
        invalid("hello.kind", "CONTROL or HEARTBEAT", hello.kind)
    beats = hello.kind == agent_pb2.SESSION_KIND_HEARTBEAT
    if hello.HasField("trainer"):
        CALLER.get().require(Role.TRAINER, "Session of a trainer rank")
        if hello.agent_id != f"rank/{hello.trainer.rank}":
            invalid("hello.agent_id", f"'rank/{hello.trainer.rank}', as hello.trainer.rank says", hello.agent_id)
        return hello
    CALLER.get().require(Role.INFERENCE, "Session of a replica")
    if hello.agent_id.startswith("rank/"):
        invalid("hello.trainer", "set, since agent_id names a rank", "nothing")
    if beats and hello.replica.ByteSize():
        invalid("hello.replica", "nothing on a HEARTBEAT stream", f"{hello.replica.ByteSize()} bytes")
    if not beats and not hello.HasField("replica"):
        invalid("hello.role", "replica or trainer", "nothing")
    return hello


def _open_replica(group: Group, hello: agent_pb2.Hello) -> Session:
    said = convert.replica_hello(hello, 0)  # refused before anything is superseded
    most, known = group.coordinator.limits.replicas, group.state.replicas
    if hello.agent_id not in known and len(known) >= most:
        refuse(Reason.LIMIT, f"hello.agent_id: expected at most {most} replicas in a group, found one more")
    session = group.open_session(hello.agent_id, "control")
    group.submit(type(said)(session.number, said.replica))
    _log_session(group, hello, session)
    return session


def _log_session(group: Group, hello: agent_pb2.Hello, session: Session) -> None:
    extra = {"group": group.name}
    log.info("session %d of %s (%s)", session.number, hello.agent_id, hello.software or "unnamed", extra=extra)


def _check_rank(group: Group, hello: agent_pb2.Hello) -> None:
    """Refuse a rank of a trainer that is fenced, or of another life: before anything is superseded."""
    said = hello.trainer
    t = group.state.trainer
    if t is not None and t.generation == said.generation and t.incarnation != hello.incarnation:
        invalid("hello.incarnation", f"{t.incarnation!r}, as InitTransfer said", hello.incarnation)
    group.fence(said.generation)


def _open_heartbeat(group: Group, hello: agent_pb2.Hello) -> Session:
    """One for each life: that of an older one, suspended for a while, ends nobody else's, and its beats count for
    nothing."""
    if hello.HasField("trainer"):
        _check_rank(group, hello)
    return group.open_session(hello.agent_id, f"heartbeat of {hello.incarnation}")


async def _open_rank(group: Group, hello: agent_pb2.Hello) -> Session:
    said = hello.trainer
    _check_rank(group, hello)
    session = group.open_session(hello.agent_id, "control", said.generation)
    _log_session(group, hello, session)
    try:
        await group.call(lambda call: RankHello(call, session.number, said.generation, said.rank))
    except BaseException:
        group.close_session(session)
        raise
    return session


def _welcome(group: Group, session: Session) -> agent_pb2.SessionResponse:
    s = group.state
    welcome = agent_pb2.Welcome(
        session=session.number,
        epoch=s.epoch,
        cluster_id=s.cluster_id,
        heartbeat_ms=int(s.config.beat_s * 1000),
        ttl_ms=int(s.config.ttl_s * 1000),
    )
    return agent_pb2.SessionResponse(welcome=welcome)


async def _first_to_end(session: Session, serve: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Serve both directions until one of them ends, or somebody ends the session."""
    tasks: list[asyncio.Future[Any]] = [asyncio.create_task(work()) for work in serve]
    try:
        await asyncio.wait([*tasks, session.ended], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    if session.ended.done():
        raise session.ended.result()
    for result in results:
        if isinstance(result, Exception):
            raise result


# --- in -------------------------------------------------------------------------------------------------------------


async def _read(context: _Context) -> agent_pb2.SessionRequest | None:
    message = await context.read()
    if isinstance(message, Undecodable):
        raise message.refusal("Session")
    if not isinstance(message, agent_pb2.SessionRequest):
        return None
    if message.ByteSize() > MAX_MESSAGE:
        refuse(Reason.LIMIT, f"a session's message: expected at most {MAX_MESSAGE} bytes, found {message.ByteSize()}")
    return message


async def _beats(group: Group, hello: agent_pb2.Hello, context: _Context, reports: bool = False) -> None:
    """Heartbeats; with ``reports``, on a trainer rank's control stream, what the rank retains too."""
    newest, pace = 0, Pace(_MESSAGES_S, _MESSAGES)
    while (message := await _read(context)) is not None:
        await pace.turn()
        kind = message.WhichOneof("message")
        if kind == "goodbye":
            return
        if kind == "trainer" and reports:
            group.submit(convert.rank_report(hello, message.trainer))
            continue
        if kind != "heartbeat":
            invalid("message", f"{'trainer, ' if reports else ''}heartbeat or goodbye", kind or "nothing")
        newest = _beat(group, hello, message.heartbeat, newest)


def _beat(group: Group, hello: agent_pb2.Hello, beat: agent_pb2.Heartbeat, newest: int) -> int:
    """Take a heartbeat unless it is an old one. Returns the newest sequence."""
    if beat.sequence <= newest:
        return newest
    group.submit(convert.beat(hello, beat))
    return beat.sequence


async def _reports(group: Group, hello: agent_pb2.Hello, session: Session, context: _Context) -> None:
    """What a replica says on its control stream."""
    newest, pace = 0, Pace(_MESSAGES_S, _MESSAGES)
    while (message := await _read(context)) is not None:
        await pace.turn()
        kind = message.WhichOneof("message")
        if kind == "report":
            sent = session.revision
            if message.report.desired_revision > sent:
                expected = f"at most {sent}, the newest sent on this session"
                invalid("report.desired_revision", expected, message.report.desired_revision)
            report = convert.report(hello, message.report, group.state.epoch)
            receipts.take_with_vote(group, report, message.report.receipts)
            group.submit(report)
        elif kind == "heartbeat":
            newest = _beat(group, hello, message.heartbeat, newest)
        elif kind == "conditions":
            group.submit(convert.conditions(hello, message.conditions))
        elif kind == "goodbye":
            reason = fields.text("goodbye.reason", message.goodbye.reason, 1024, empty=True, lines=True)
            log.info("%s says goodbye: %s", hello.agent_id, reason or "no reason", extra={"group": group.name})
            group.submit(Leave(hello.agent_id, hello.incarnation))
        else:
            invalid("message", "report, conditions, heartbeat or goodbye", kind or "nothing")


# --- out ------------------------------------------------------------------------------------------------------------


async def _tell_replica(group: Group, hello: agent_pb2.Hello, session: Session, context: _Context) -> None:
    """Send the newest desired state whenever it changed."""
    while True:
        await session.changed.wait()
        session.changed.clear()
        session.revision += 1
        message = group.desired.message(group.state, hello.agent_id, session.revision, group.now())
        if message is not None:
            await context.write(agent_pb2.SessionResponse(replica=message))


async def _tell_rank(group: Group, hello: agent_pb2.Hello, session: Session, context: _Context) -> None:
    """Send a rank the newest it should know."""
    session.wake()
    began = perf_counter()
    while True:
        await paced(session.changed, began)
        began = perf_counter()
        session.revision += 1
        message = bindings.desired_trainer(group.state, hello.trainer.generation, session.revision, group.now())
        await context.write(agent_pb2.SessionResponse(trainer=message))
