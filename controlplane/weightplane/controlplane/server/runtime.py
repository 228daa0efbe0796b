"""One group at run time: takes events one by one through the core's ``step`` and carries out the effects, in order."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from weightplane.controlplane.core import group as core
from weightplane.controlplane.core import trainers
from weightplane.controlplane.core.events import (
    CallGone,
    Compare,
    Effect,
    EndSession,
    Event,
    MakePlan,
    Note,
    PlanMade,
    Push,
    PushTrainers,
    ReadBack,
    Reply,
    StepDown,
    Stored,
    Verified,
    Write,
)
from weightplane.controlplane.core.evolve import replace
from weightplane.controlplane.core.group_state import GroupState
from weightplane.controlplane.core.model import Replica
from weightplane.controlplane.core.plan import PlanError
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import Evidence, Phase, Verify
from weightplane.controlplane.core.tx import Tx
from weightplane.controlplane.core.update_state import Update
from weightplane.controlplane.store.base import StoreError, StoreUnknown

from ..failpoints import hit
from . import bindings, project
from .artifacts import Artifacts
from .errors import Refused
from .fields import refuse
from .idempotency import Answers
from .sessions import Session, superseded

if TYPE_CHECKING:
    from .coordinator import Coordinator

__all__ = ["Group"]

log = logging.getLogger("weightplane.controlplane")

#: Write kinds by the phase that they end, for failpoints: ``server.decide.before_write`` and the like.
_PHASE_OF = {"freeze": "start", "decide": "decide", "close": "close", "group": "group", "roster": "roster"}
_READ_BACK_S = 0.1


class Group:
    """A group's state, its callers, its sessions, its artifacts. Everything here runs on one event loop."""

    def __init__(self, coordinator: Coordinator, state: GroupState) -> None:
        self.coordinator = coordinator
        self.state = replace(state, secret=secrets.token_bytes(32))
        self.artifacts = Artifacts(coordinator.workers, coordinator.limits, self._in_use, self._committed)
        self.answers = Answers()
        self.desired = bindings.Desired()
        self.sessions: dict[tuple[str, str], Session] = {}
        self.watchers: set[asyncio.Event] = set()
        self.over: Refused | None = None
        self._calls: dict[str, asyncio.Future[Reply]] = {}
        self._call_ids = itertools.count(1)
        self._session_ids = itertools.count((state.epoch << 32) + 1)
        self._events: deque[Event] = deque()
        self._stepping = False
        self._tasks: set[asyncio.Future[Any]] = set()

    @property
    def name(self) -> str:
        """Its name."""
        return self.state.group

    def now(self) -> float:
        """The core's clock."""
        return self.coordinator.clock()

    # --- events in ---

    def submit(self, event: Event) -> None:
        """Take one event. Effects that make new events have them taken after it, never inside it."""
        self._events.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._events:
                self._step(self._events.popleft())
        finally:
            self._stepping = False

    def _step(self, event: Event) -> None:
        try:
            self.state, effects, _ = core.step(self.state, event, self.now())
        except Exception as e:
            log.exception("the core refused %s", type(event).__name__, extra={"group": self.name})
            future = self._calls.get(getattr(event, "call_id", ""))
            if future is not None and not future.done():
                future.set_exception(e)
            return
        for effect in effects:
            self.carry_out(effect)

    def carry_out(self, effect: Effect) -> None:
        """Do what the core wants done."""
        _EFFECTS[type(effect)](self, effect)

    @property
    def busy(self) -> bool:
        """Whether time matters to the tenth of a second."""
        s = self.state
        held = s.trainer is not None and not s.trainer.closed
        return held or s.open is not None or bool(s.queue or s.waiters or s.replicas)

    async def call(self, make: Callable[[str], Event]) -> Reply:
        """Submit the event of a caller that waits; its answer, or the refusal as an exception."""
        if self.over is not None:
            raise self.over
        call_id = f"c{next(self._call_ids)}"
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self.submit(make(call_id))
            reply = await future
        except asyncio.CancelledError:
            self.submit(CallGone(call_id))
            raise
        finally:
            self._calls.pop(call_id, None)
        if reply.failure is not None:
            raise self.refusal(reply.failure, reply.update_id)
        return reply

    def deadline(self, remaining: float) -> float:
        """When a waiting caller must be answered: a little before its own deadline, so that it hears the reason."""
        return self.now() + remaining - min(0.3, remaining * 0.2)

    # --- views ---

    def find(self, update_id: str) -> Update | None:
        """The open update of that id, or a past one."""
        u = self.state.open
        return u if u is not None and u.update_id == update_id else self.state.history.get(update_id)

    def refusal(self, failure: Failure, update_id: str = "") -> Refused:
        """A failure with the update that it is about, if any."""
        u = self.find(update_id) if update_id else None
        if u is None:
            return Refused(failure)
        ended = u.phase in (Phase.ABORTING, Phase.ABORTED) and failure == u.failure
        return Refused(failure, project.update_info(self.state, u, self.now()), ended)

    def fence(self, generation: int) -> None:
        """Refuse a generation that is not the holder's, for calls that make no event."""
        failure = trainers.fence(Tx(self.state, self.now()), generation)
        if failure is not None:
            raise Refused(failure)

    def replica(self, replica_id: str) -> Replica:
        """A known replica, or a refusal."""
        r = self.state.replicas.get(replica_id)
        if r is None:
            refuse(Reason.UNKNOWN_REPLICA, f"no replica {replica_id!r} in group {self.name!r}", replica_id)
        return r

    def _in_use(self) -> set[str]:
        """Ids of artifacts that live state refers to."""
        s = self.state
        used = {s.committed_manifest}
        if s.open is not None:
            used.add(s.open.options.manifest_id)
            used.update(p.plan_id for p in s.open.plans.values())
        last = s.history.get(s.committed.update_id)
        if last is not None:  # its digests are what others are caught up against
            used.update(p.plan_id for p in last.plans.values())
        for c in s.catch_ups.values():
            used.add(c.manifest_id)
            used.update([c.plan.plan_id] if c.plan is not None else [])
            used.update(layout_id for _, layout_id in c.senders)
        holders: list[Any] = [*s.replicas.values(), *([s.trainer] if s.trainer is not None else [])]
        for holder in holders:
            for placed in holder.placements.values():
                used.update(placed.values())
        return used

    def _committed(self) -> str:
        return self.state.committed.update_id

    # --- sessions ---

    def open_session(self, agent_id: str, kind: str, generation: int = 0) -> Session:
        """Number a new stream of a member; the one before it is superseded. That of a trainer which was taken over from
        is told so: its successor's rank may be here before it was sent that it is fenced."""
        session = Session(agent_id, kind, next(self._session_ids), generation)
        old = self.sessions.get((agent_id, kind))
        if old is not None:
            failure = trainers.fence(Tx(self.state, self.now()), old.generation) if old.generation else None
            old.end(Refused(failure) if failure is not None else superseded(agent_id, session.number))
        self.sessions[agent_id, kind] = session
        return session

    def close_session(self, session: Session) -> None:
        """A stream ended. Its member's lease goes on until it runs out."""
        if self.sessions.get((session.agent_id, session.kind)) is session:
            del self.sessions[session.agent_id, session.kind]

    def stop(self, why: Refused) -> None:
        """Serve this group no more: streams end and callers are told."""
        self.over = why
        for session in list(self.sessions.values()):
            session.end(why)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(why)
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        for event in self.watchers:
            event.set()

    # --- effects out ---

    def _reply(self, e: Reply) -> None:
        future = self._calls.get(e.call_id)
        if future is not None and not future.done():
            future.set_result(e)

    def _push(self, e: Push) -> None:
        for rid in e.replica_ids:
            session = self.sessions.get((rid, "control"))
            if session is not None:
                session.wake()

    def _push_trainers(self, _: PushTrainers) -> None:
        t = self.state.trainer
        if t is not None:
            for rank in range(t.world_size):
                session = self.sessions.get((f"rank/{rank}", "control"))
                if session is not None:
                    session.wake()
        self._wake_watchers()

    def _end_session(self, e: EndSession) -> None:
        session = self.sessions.get((e.agent_id, "control"))
        if session is not None and session.number == e.session:
            session.end(superseded(e.agent_id, e.session))

    def _note(self, e: Note) -> None:
        u = self.find(e.update_id) if e.update_id else None
        extra = {"group": self.name, "update_id": e.update_id, "version": u.version if u is not None else 0}
        log.info("%s", e.text, extra=extra)

    def _step_down(self, e: StepDown) -> None:
        self.coordinator.step_down(e.message)

    def _make_plan(self, e: MakePlan) -> None:
        async def make() -> None:
            try:
                event = PlanMade(e.update_id, e.channel_id, await self.artifacts.make_plan(e), ahead=e.ahead)
            except PlanError as error:
                failure = Failure(Reason.PLACEMENT_MISMATCH, str(error))
                event = PlanMade(e.update_id, e.channel_id, None, failure, e.ahead)
            self.submit(event)

        self._background(make(), lambda why: PlanMade(e.update_id, e.channel_id, None, why, e.ahead))

    def _compare(self, e: Compare) -> None:
        past = self.state.history.get(e.against)
        committed_under = past.options.verify if past is not None else Verify.FULL

        async def verify() -> None:
            try:
                if e.against:
                    evidence, failure = await self.artifacts.compare_catch_up(e, committed_under)
                else:
                    evidence, failure = await self.artifacts.compare(e)
            except Refused as error:
                evidence, failure = Evidence.NONE, error.failure
            self.submit(Verified(e.update_id, e.replica_id, e.incarnation, evidence, failure))

        self._background(verify(), lambda why: Verified(e.update_id, e.replica_id, e.incarnation, Evidence.NONE, why))

    def _write(self, e: Write) -> None:
        state, store, name = self.state, self.coordinator.store, self.name
        kept = self.artifacts.kept(e.update) if e.kind == "decide" and e.update is not None else None

        def write() -> Stored:
            phase = _PHASE_OF[e.kind]
            hit(f"server.{phase}.before_write")
            try:
                ok = store.write(name, e, state, kept)
            except (StoreUnknown, StoreError) as error:
                log.error("write %s of group %s: %s", e.kind, name, error, extra={"group": name})
                return Stored(e.write_id, None, str(error) if isinstance(error, StoreError) else "")
            hit(f"server.{phase}.after_write")
            return Stored(e.write_id, ok)

        self._stored_by(write, e.write_id)

    def _read_back(self, e: ReadBack) -> None:
        store, name = self.coordinator.store, self.name

        def read() -> Stored:
            try:
                return Stored(e.write_id, store.read_decision(name, e.update_id))
            except (StoreUnknown, StoreError) as error:
                log.error("reading back the decision of %s: %s", e.update_id, error, extra={"group": name})
                return Stored(e.write_id, None)

        def begin() -> None:
            if self.over is None:
                self._stored_by(read, e.write_id)

        asyncio.get_running_loop().call_later(_READ_BACK_S, begin)

    def _stored_by(self, work: Callable[[], Stored], write_id: str) -> None:
        """Run on the store's one thread, in order; the outcome comes back as ``Stored``."""
        future = asyncio.get_running_loop().run_in_executor(self.coordinator.store_thread, work)
        self._tasks.add(future)

        def done(f: asyncio.Future[Stored]) -> None:
            self._tasks.discard(f)
            if f.cancelled():
                return
            error = f.exception()
            if error is not None:
                log.error("the store raised", exc_info=error, extra={"group": self.name})
            self.submit(Stored(write_id, None) if error is not None else f.result())

        future.add_done_callback(done)

    def _background(self, work: Coroutine[Any, Any, None], failed: Callable[[Failure], Event]) -> None:
        """Run ``work``; if it fails unexpectedly, the update that waits for it hears so."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def done(t: asyncio.Task[None]) -> None:
            self._tasks.discard(t)
            if t.cancelled():
                return
            error = t.exception()
            if error is not None:
                log.error("background work failed", exc_info=error, extra={"group": self.name})
                self.submit(failed(Failure(Reason.INTERNAL, "unexpected error: the server's log has the details")))

        task.add_done_callback(done)


_EFFECTS: dict[type[Effect], Callable[[Group, Any], None]] = {
    Reply: Group._reply,
    Push: Group._push,
    PushTrainers: Group._push_trainers,
    EndSession: Group._end_session,
    Note: Group._note,
    StepDown: Group._step_down,
    MakePlan: Group._make_plan,
    Compare: Group._compare,
    Write: Group._write,
    ReadBack: Group._read_back,
}
