"""``InferenceAgent``: keeps one inference engine in line with its group. Embeddable: its own threads, nothing global.

No signal handlers, no fork, no event loop: ``start`` and ``stop`` work in a script, a thread, or inside a running loop.
One loop thread owns the replica's state machine (``core.replica``): events go in, effects come out, nothing blocks it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weightplane.controlplane.core import replica as core
from weightplane.controlplane.core.events import Report
from weightplane.controlplane.core.model import SLEEP_TAGS, Held
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import PauseMode, Stage
from weightplane.controlplane.dial import Dial
from weightplane.controlplane.grpc_close import close_channels
from weightplane.controlplane.heartbeat import HeartbeatHelper, HelperStatus
from weightplane.controlplane.names import NAME_RULE, check_labels, check_text, is_name
from weightplane.transports import grpc_tls
from weightplane.transports.base import Transport
from weightplane.transports.retained import Retainer
from weightplane.transports.serving import order_of
from weightplane.v1 import agent_pb2

from . import codec
from .ahead import PlansAhead
from .auditing import Auditor
from .engines.base import Engine
from .faults import failure_of
from .hello import enabled_transports, hello_message
from .keeping import why_not
from .operations import Operations
from .rpc import AgentCalls
from .session import ControlSession, SessionStatus

__all__ = ["AgentStatus", "InferenceAgent"]

log = logging.getLogger("weightplane.inference_agent")

_TICK_S = 0.05  # while an update is taken
_IDLE_S = 0.5
_PROGRESS_S = 0.25  # between two reports that tell bytes alone


@dataclass(frozen=True)
class AgentStatus:
    """A snapshot. ``session``: CONNECTING, LIVE, SUPERSEDED or STOPPED; ``error``: its last error."""

    replica_id: str
    incarnation: str
    session: SessionStatus
    error: str
    heartbeat: HelperStatus
    held: tuple[Held, ...]
    dirty: str
    update_id: str
    stage: str
    pause_holders: frozenset[str]
    updates_since_start: int


@dataclass(frozen=True)
class _Restart:
    """The engine started anew behind us."""

    why: str


@dataclass(frozen=True)
class _Superseded:
    why: str


class _Leave:
    """Join no further update."""


class InferenceAgent:
    """The agent of one replica.

    ``dial``: where the control plane is (an address is enough on loopback). ``transports``: names, or instances by
    name; default: every registered one that works here. ``serving_address``: where routers reach the engine.
    ``heartbeat=False`` sends no heartbeats (the lease then ends; for tests). ``retain``: keep a copy of each version,
    from which other replicas are caught up. Thread-safe.
    """

    def __init__(
        self,
        dial: Dial | str,
        group: str,
        replica_id: str,
        engine: Engine,
        *,
        labels: Mapping[str, str] | None = None,
        transports: Sequence[str] | Mapping[str, Transport] | None = None,
        serving_address: str = "",
        heartbeat: bool = True,
        retain: Retainer | None = None,
    ) -> None:
        for what, name in (("group", group), ("replica_id", replica_id)):
            if not is_name(name):
                raise ValueError(f"{what}: expected {NAME_RULE}, found {name!r}")
        if retain is not None and not isinstance(retain, Retainer):
            raise TypeError(f"retain: expected a weightplane.transports.retained.Retainer, found {retain!r}")
        if retain is not None and (why := why_not(engine)):
            raise ValueError(f"retain: {why}")
        self._retain = retain
        self.dial = Dial(dial) if isinstance(dial, str) else dial
        self.group, self.replica_id, self.engine = group, replica_id, engine
        self._labels = {str(k): str(v) for k, v in (labels or {}).items()}
        check_labels(self._labels)  # here, where it can be mended, rather than at every dial
        check_text("serving_address", serving_address)
        self._transports, self._refused = enabled_transports(transports)
        self._serving_address = serving_address
        self._beats = heartbeat
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._channel: Any = None
        self._session: ControlSession | None = None
        self._helper: HeartbeatHelper | None = None
        self._ops: Operations | None = None
        self._auditor: Auditor | None = None
        self._state = core.ReplicaState(replica_id, "")
        self._life = ""
        self._told: tuple[float, int, int] = (0.0, 0, -1)
        self._by_hand = False
        self._beat_s, self._beat_at = 1.0, 0.0

    # --- the user's side

    def start(self) -> InferenceAgent:
        """Begin; returns at once (``wait_live`` waits). An agent starts once."""
        if self._thread is not None:
            raise RuntimeError("an agent starts once; make a new one")
        grpc_tls.present(self.dial)
        self._channel = self.dial.channel()
        self._begin_life()
        self._thread = threading.Thread(target=self._run, name=f"weightplane-agent-{self.replica_id}", daemon=True)
        self._thread.start()
        return self

    def stop(self, reason: str = "the agent stops", *, leave: bool = True, drain_s: float = 5.0) -> None:
        """End: with ``leave`` in good order: no further update, up to ``drain_s`` for the one under way, goodbye.

        Idempotent, bounded. An update still undecided here is dropped; the engine keeps what is whole, and its label.
        """
        if self._thread is None or self._stopping:
            return
        if leave:
            self._events.put(_Leave())
            end = time.monotonic() + drain_s
            while (t := self._state.taking) is not None and not t.over and time.monotonic() < end:
                time.sleep(0.02)
        self._stopping = True
        self._events.put(None)
        self._thread.join(5)
        if self._session is not None:
            self._session.stop(reason if leave else "")
        self._end_life(reason)
        close_channels([self._channel])
        grpc_tls.withdraw(self.dial)

    def wait_live(self, timeout: float = 10.0) -> bool:
        """Wait until the control stream is open."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self.status().session is SessionStatus.LIVE:
                return True
            time.sleep(0.01)
        return False

    def engine_restarted(self, why: str = "the engine restarted") -> None:
        """Tell that the engine (any worker of it) started anew: the replica becomes a new incarnation."""
        self._events.put(_Restart(why))

    @property
    def incarnation(self) -> str:
        """This life's id."""
        return self._state.incarnation

    def status(self) -> AgentStatus:
        """How things are now."""
        s, session, helper = self._state, self._session, self._helper
        t = s.taking
        return AgentStatus(
            replica_id=self.replica_id,
            incarnation=s.incarnation,
            session=session.status if session is not None else SessionStatus.STOPPED,
            error=session.error if session is not None else "",
            heartbeat=helper.status if helper is not None else HelperStatus.STARTING,
            held=self.engine.held(),
            dirty=self.engine.mixed() or (str(s.dirty_reason) if s.dirty else ""),
            update_id=t.want.update_id if t is not None else "",
            stage=t.stage.name if t is not None else "",
            pause_holders=self.engine.holders(),
            updates_since_start=s.updates_since_start,
        )

    # --- lives

    def _begin_life(self) -> None:
        """A fresh incarnation: read what the engine holds, say hello, beat."""
        engine, incarnation = self.engine, uuid.uuid4().hex
        engine.abort("", False, "a new agent took the engine over")
        engine.resume("update")
        engine.bind(incarnation)
        self._life = engine.life
        ordered = engine.holders() - {"dirty", "sleep"}  # they hold until the control plane says otherwise
        self._state = core.ReplicaState(
            self.replica_id,
            incarnation,
            len(engine.workers),
            paused=ordered,
            wanted=tuple((holder, PauseMode.KEEP) for holder in sorted(ordered)),
            asleep=tuple(t for t in SLEEP_TAGS if t in engine.asleep()),
            retained=copy.says if self._retain is not None and (copy := self._retain.get()) is not None else None,
        )
        calls = AgentCalls(self.dial, self._channel, self.group, self.replica_id)
        self._ops = Operations(
            engine,
            calls,
            self.group,
            self.replica_id,
            incarnation,
            self._transports,
            self._events.put,
            self._retain,
        )
        self._ahead = PlansAhead(self._ops.fetch_ahead)
        hello = hello_message(
            self.group,
            self.replica_id,
            incarnation,
            engine,
            self._labels,
            self._transports,
            self._refused,
            self._serving_address,
        )
        self._session = ControlSession(
            self.dial,
            self._channel,
            hello,
            self._events.put,
            self._events.put,
            lambda why: self._events.put(_Superseded(why)),
        )
        self._auditor = Auditor(engine, self._session.tell)
        self._handle(core.EngineHeld(engine.held(), bool(engine.mixed()), engine.mixed()))
        if self._beats:
            self._helper = HeartbeatHelper(self.dial, self.group, self.replica_id, incarnation)
            self._helper.start()
        self._session.start()
        log.info("replica %s begins life %s (%s)", self.replica_id, incarnation, engine.name)

    def _end_life(self, reason: str) -> None:
        if self._auditor is not None:
            self._auditor.stop()
        if self._helper is not None:
            self._helper.stop()
            self._helper = None
        if self._ops is not None:
            self._ops.abandon(reason)
            self._ops = None
            self.engine.resume("update")

    # --- the loop thread

    def _run(self) -> None:
        looked = 0.0
        while not self._stopping:
            t = self._state.taking
            try:
                idle = (t is None or t.over) and not self._ahead.waiting
                event = self._events.get(timeout=_IDLE_S if idle else _TICK_S)
            except queue.Empty:
                event = core.Tick()
            if event is None:
                return
            try:
                self._take(event)
                if time.monotonic() - looked >= _TICK_S:
                    looked = time.monotonic()
                    self._look()
            except BaseException as e:  # the thread is ours, whatever an engine raises
                log.exception("replica %s: taking %s failed", self.replica_id, type(event).__name__)
                self._give_up(e)

    def _give_up(self, error: BaseException) -> None:
        """A fault of ours: the update under way fails by name rather than by its deadline."""
        t = self._state.taking
        if t is not None and not t.over and not t.dropping:
            failure = failure_of(error, self.replica_id, "the agent")
            self._handle(core.Failed(t.want.update_id, replace(failure, reason=Reason.INTERNAL)))

    def _take(self, event: Any) -> None:
        if isinstance(event, agent_pb2.Welcome):
            assert self._ops is not None
            self._beat_s, self._beat_at = event.heartbeat_ms / 1000 or 1.0, time.monotonic()
            self._ops.new_session()
        elif isinstance(event, agent_pb2.DesiredReplica):
            self._desired(event)
        elif isinstance(event, _Restart):
            self._reborn(event.why)
        elif isinstance(event, _Leave):
            self._state = replace(self._state, leaving=True, sequence=self._state.sequence + 1)
            self._report()
        elif isinstance(event, _Superseded):
            if self._helper is not None:
                self._helper.stop()
        else:
            self._handle(event)

    def _desired(self, message: agent_pb2.DesiredReplica) -> None:
        """The newest desired state; one that is not for us changes nothing, nor does what it says of catch-ups."""
        assert self._ops is not None
        desired = codec.desired(message)
        self._handle(core.Desired(desired))
        if self._state.newest is desired:
            orders = [order_of(m, self.group) for m in message.serve]
            self._ops.serve(orders)
            if self._auditor is not None and message.HasField("declared"):
                self._auditor.judge(codec.declaration(message.declared))
            if self._state.taking is None:
                self._ops.look_ahead(message.committed_manifest_id, self._state.epoch)
            self._ahead.hear(message.committed_manifest_id, message.plans_ahead, time.monotonic())

    def _handle(self, event: Any) -> None:
        assert self._ops is not None
        before = self._state
        self._state, effects, reason = core.step(before, event, time.monotonic())
        if effects or self._state != before:
            log.debug("replica %s: %s: %s", self.replica_id, type(event).__name__, reason)
        for effect in effects:
            if isinstance(effect, core.SendReport):
                self._report()
            else:
                self._ops.run(effect, self._state)

    def _report(self) -> None:
        """Publish our state; what is held comes from the engine, now."""
        assert self._ops is not None and self._session is not None
        landed = self._ops.landed
        report: Report = core.report_of(self._state, landed, self.engine.running_requests)
        self._told = (time.monotonic(), landed, self._drains())
        receipts = self._ops.receipts(report.update_id) if report.stage is Stage.PREPARED else ()
        held = self.engine.held()
        self._by_hand = self.engine.paused_by_hand
        holders = (*report.pause_holders, "hand") if self._by_hand else report.pause_holders
        self._session.publish(replace(report, held=held, pause_holders=tuple(sorted(holders))), receipts)
        if self._auditor is not None:
            self._auditor.holds(h.version for h in held)

    def _look(self) -> None:
        """Between events: deadlines, progress, the helper, and whether the engine is still the one we know."""
        assert self._ops is not None
        self._handle(core.Tick())
        self._ops.watch()
        t = self._state.taking
        self._ahead.look(time.monotonic(), t is None or t.over)
        if self.engine.life != self._life:
            self._reborn("the engine was restarted behind its agent")
            return
        self._look_asleep()
        helper = self._helper
        if helper is not None:
            helper.progress(self._ops.progress)
            status = self._session.status if self._session is not None else SessionStatus.STOPPED
            if not helper.alive() and status is not SessionStatus.SUPERSEDED:
                log.warning("replica %s: the heartbeat helper is gone; starting another", self.replica_id)
                helper.start()
            now = time.monotonic()
            if self._session is not None and helper.silent and now - self._beat_at >= self._beat_s:
                self._beat_at = now  # a process takes seconds to start on a busy machine, more than a lease may have
                self._session.beat(self._ops.progress)
        if self.engine.paused_by_hand is not self._by_hand:
            what = (
                "is no longer paused by hand"
                if self._by_hand
                else "stands still, paused by hand: it is not routable until it goes on"
            )
            log.warning("replica %s: its engine %s", self.replica_id, what)
            self._state = replace(self._state, sequence=self._state.sequence + 1)
            self._report()
        at, *told = self._told
        if [self._ops.landed, self._drains()] != told and time.monotonic() - at >= _PROGRESS_S:
            self._state = replace(self._state, sequence=self._state.sequence + 1)
            self._report()

    def _drains(self) -> int:
        """How many requests the update under way waits for (pause WAIT); -1 if for none."""
        t = self._state.taking
        waits = t is not None and t.pause is PauseMode.WAIT and "update" in self._state.pausing
        return self.engine.running_requests if waits else -1

    def _look_asleep(self) -> None:
        """Whether somebody else put the engine to sleep or woke it up, while no order of ours is under way."""
        s, t, engine = self._state, self._state.taking, self.engine
        if s.sleep_begun > s.sleep_done:
            return
        asleep = tuple(tag for tag in SLEEP_TAGS if tag in engine.asleep())
        mixed = engine.mixed() if asleep and (t is None or t.over) else ""  # in an update a mix may be in the making
        if asleep == s.asleep and not (mixed and not s.dirty):
            return
        log.warning("replica %s: its engine sleeps (%s) by no order of ours", self.replica_id, ", ".join(asleep) or "-")
        engine.heed_sleep()
        lost = Failure(Reason.ENGINE, mixed, self.replica_id) if mixed else None
        self._handle(core.SleepDone(0, asleep, engine.held(), None, lost))

    def _reborn(self, why: str) -> None:
        log.warning("replica %s: %s; a new incarnation begins", self.replica_id, why)
        if self._session is not None:
            self._session.stop()
        self._end_life(why)
        while not self._events.empty():
            if self._events.get() is None:  # stop() was called meanwhile
                self._events.put(None)
                break
        self._begin_life()
