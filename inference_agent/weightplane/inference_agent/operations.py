"""Carries out what the replica's state machine asks for, and reports each end as an event.

``run`` is called on the agent's loop thread and never blocks: checking, arming, receiving, preparing and applying go on
on one work thread (and a data thread per worker), in order; a drop aborts the channels at once and is finished on the
work thread, behind whatever it interrupts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from weightplane.controlplane import failpoints
from weightplane.controlplane.core import replica as core
from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.model import SLEEP_TAGS, Held, SleepOrder, Timings
from weightplane.controlplane.core.plan import Plan, PlanError
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import Evidence, Verify
from weightplane.transports.base import PeerLost, Transport, TransportError
from weightplane.transports.retained import Piece, Retainer
from weightplane.transports.serving import Order
from weightplane.v1 import update_pb2

from .caches import Newest
from .engines.base import Description, Engine, EngineUpdate, Reception
from .faults import Refusal, failure_of
from .keeping import Keeping, live_pieces
from .pauses import Pauses
from .placing import Placing
from .receipts import Ledger, RegionMemory, receipt_pages
from .rpc import Abandoned, AgentCalls, CallFailed
from .shares import Shares
from .threads import WorkThread, detached
from .transfer import Channels, LocalWorker, Transfer, Worker

__all__ = ["Operations"]

log = logging.getLogger("weightplane.inference_agent")

#: Bytes of receipts that the message which votes has room for (64 KiB in all). Longer ones are delivered before it.
WITH_VOTE = 32 << 10

_KEPT = 4  # plans and sinks remembered
_AHEAD_S = 2.0  # for what is fetched before it is asked for
_DRAIN_S = 5.0  # an aborted transfer leaves within one; after this it is left behind
_HEARSAY_S = 0.5  # a sender that is gone did not go by our fault: the coordinator's word of the cause is waited for


class Operations:
    """One life's operations. ``emit`` takes events from any thread."""

    def __init__(
        self,
        engine: Engine,
        calls: AgentCalls,
        group: str,
        replica_id: str,
        incarnation: str,
        transports: Mapping[str, Transport],
        emit: Callable[[Any], None],
        retainer: Retainer | None = None,
    ) -> None:
        self._engine, self._calls = engine, calls
        self._replica_id, self._incarnation = replica_id, incarnation
        self._emit, self._group = emit, group
        self.members = [f"{replica_id}/{w}" for w in range(len(engine.workers))]
        self._channels = Channels(group, transports)
        self._keeping = Keeping(retainer, self.members, group, calls, transports, emit) if retainer else None
        self._work, self._data = self._threads()
        self._transfer: Transfer | None = None
        self._epoch = 0
        each = len(self.members)  # every worker may have a plan of its own
        self._plans, self._shares = Newest(_KEPT * each), Shares(2 * _KEPT * each)
        self._live = Newest(_KEPT * each)
        self._placing = Placing(engine, calls, replica_id, incarnation, self.members, self._moved)
        self._pauses = Pauses(engine, replica_id, emit, self._pause_failed)
        self._steps = self._last_landed = self._landed_before = 0
        self._closed = False

    def _threads(self) -> tuple[WorkThread, list[WorkThread]]:
        return (
            WorkThread(f"weightplane-update-{self._replica_id}"),
            [WorkThread(f"weightplane-data-{m}") for m in self.members],
        )

    # --- on the loop thread

    def run(self, effect: core.Effect, state: core.ReplicaState) -> None:
        """Begin one effect (but ``SendReport``)."""
        self._epoch = state.epoch
        t = self._transfer
        if t is not None and state.taking is not None and state.taking.want.update_id == t.update_id:
            t.want = state.taking.want
        if isinstance(effect, core.Check):
            assert state.taking is not None
            self._transfer = t = Transfer(state.taking.want, state.taking.epoch, state.taking.deadline, self._group)
            self._begin(t, "checking the manifest", lambda: self._check(t))
        elif isinstance(effect, core.Pause):
            self._pauses.pause(effect.holder, effect.mode)
            if effect.holder == "update" and t is not None and t.in_place and t.want.calls:
                self._work.submit(lambda: self._open_ahead(t))
        elif isinstance(effect, core.Resume):
            self._pauses.resume(effect.holder)
        elif isinstance(effect, core.Sleep):
            order = effect.order
            self._work.submit(lambda: self._sleep(order))
        elif t is None:
            raise AssertionError(f"{effect} without a transfer")
        elif isinstance(effect, core.Arm):
            self._begin(t, f"call {effect.seq}", lambda: self._arm(t, effect.seq))
        elif isinstance(effect, core.Prepare):
            self._begin(t, "preparing", lambda: self._prepare(t))
        elif isinstance(effect, core.Apply):
            self._begin(t, "applying", lambda: self._apply(t), applying=True)
        elif isinstance(effect, core.Drop):
            t.cancel(effect.reason)
            t.drop_by = time.monotonic() + _DRAIN_S
            self._work.submit(lambda: self._drain(t, effect.reason))

    def receipts(self, update_id: str) -> Sequence[update_pb2.Receipt]:
        """Those that go with the vote for an update: nothing if they were delivered before it."""
        t = self._transfer
        return t.receipts if t is not None and t.update_id == update_id else ()

    def serve(self, orders: Sequence[Order]) -> None:
        """The catch-ups that are to be sent from our copy now."""
        if self._keeping is not None:
            self._keeping.serving.orders(orders)

    def new_session(self) -> None:
        """The coordinator may have forgotten our placements; that of what is retained is asked for by nobody."""
        self._placing.forget()
        keeping = self._keeping
        if keeping is not None:
            self._work.submit(lambda: keeping.place(self._incarnation, lambda: self._closed))

    def look_ahead(self, manifest_id: str, epoch: int) -> None:
        """Nothing is under way: what the next update of this manifest will ask for is said now."""
        self._epoch = epoch
        if self._placing.claim(manifest_id):
            self._work.submit(lambda: self._look_ahead(manifest_id))

    def _look_ahead(self, manifest_id: str) -> None:
        if not self._closed and self._transfer is None:  # else that update does it
            self._placing.ahead(manifest_id, self._epoch, lambda: self._closed)

    def fetch_ahead(self, manifest_id: str, plans: Sequence[str]) -> None:
        """Nothing is under way: the plans of the next update are fetched now."""
        self._work.submit(lambda: self._fetch_ahead(manifest_id, plans))

    def _fetch_ahead(self, manifest_id: str, plans: Sequence[str]) -> None:
        def over() -> bool:
            return self._closed or self._transfer is not None

        end = time.monotonic() + _AHEAD_S
        try:
            for plan_id in plans:
                if over() or self._plans.get(plan_id) is not None:
                    continue
                manifest = self._placing.manifest(manifest_id, end, over)
                plan = self._calls.plan(plan_id, manifest, end, over)
                self._plans.keep(plan_id, plan)
                for member in self.members:
                    self._shares.ahead(plan, manifest, member)
        except Abandoned:
            return
        except Exception as e:
            known = isinstance(e, CallFailed | PlanError)
            text = "replica %s: the next update's plan is not fetched ahead: %s"
            log.info(text, self._replica_id, e, exc_info=None if known else e)

    def _moved(self) -> None:
        """What is known of the old memory would keep it."""
        self._shares.clear()
        self._live.clear()

    @property
    def landed(self) -> int:
        """Payload bytes that the current or last update put in place."""
        t = self._transfer
        return t.landed if t is not None else self._last_landed

    @property
    def progress(self) -> int:
        """Rises with every unit of work done."""
        t = self._transfer
        return self._steps + self._landed_before + (t.landed if t is not None else 0)

    def watch(self) -> None:
        """Leave a staged update behind whose data threads do not leave: its memory is given up, never used again.

        In place nothing can be given up: the replica stays fenced until they leave.
        """
        t = self._transfer
        if t is None or not t.drop_by or time.monotonic() < t.drop_by:
            return
        t.drop_by = 0.0
        stuck = ", ".join(w.member for w in t.workers) or self._replica_id
        text = f"update {t.update_id}: {stuck} did not leave within {_DRAIN_S} s of its abort"
        if t.in_place:
            log.error("%s; it may still write live memory, so the replica stays fenced", text, extra=t.extra)
            return
        try:
            self._engine.abandon(t.update_id)
        except BaseException as e:
            log.error("%s, and it cannot be left behind: %s", text, e, extra=t.extra)
            return
        log.error("%s; left behind with its staging memory", text, extra=t.extra)
        t.abandoned = True
        self._work, self._data = self._threads()
        self._shares.clear()
        self._channels.forget([w.channel for w in t.workers])
        self._forget(t)
        self._emit(core.Drained(t.update_id, False))

    def abandon(self, reason: str, timeout: float = 2.0) -> bool:
        """This life ends: drop the update, free the channels, let the engine keep only what is whole.

        False if something could not be drained in time (it is left behind, on daemon threads).
        """
        self._closed = True
        self._pauses.close()
        if self._keeping is not None:
            self._keeping.serving.close()
        t = self._transfer
        if t is not None:
            t.cancel(reason)
        done = self._work.submit(lambda: self._engine.abort("", t is not None and t.wrote, reason))
        self._work.stop()
        for thread in self._data:
            thread.stop()
        try:
            done.result(timeout)
        except TimeoutError:
            log.error("replica %s: an operation did not end within %.1f s after %s", self._replica_id, timeout, reason)
            return False
        finally:
            detached("weightplane-close", self._channels.close)
        return True

    def _pause_failed(self, holder: str, error: BaseException) -> None:
        t = self._transfer
        if holder == "update" and t is not None:
            self._emit(core.Failed(t.update_id, failure_of(error, self._replica_id, "pausing generation")))

    # --- on the work thread

    def _begin(self, t: Transfer, doing: str, work: Callable[[], None], applying: bool = False) -> None:
        def run() -> None:
            if self._closed or t.abandoned:
                return
            try:
                work()
            except Abandoned:
                return  # dropped meanwhile: the drain behind us says so
            except BaseException as e:  # the thread is ours: an engine's SystemExit or CancelledError ends nothing else
                if isinstance(e, PeerLost) and not applying:
                    t.cancelled.wait(_HEARSAY_S)
                if t.cancelled.is_set() and not applying:
                    log.info("update %s: %s ended by its abort: %s", t.update_id, doing, e, extra=t.extra)
                    return
                self._failed(t, e, doing, applying)

        self._work.submit(run)

    def _failed(self, t: Transfer, error: BaseException, doing: str, applying: bool) -> None:
        failure = failure_of(error, self._replica_id, doing)
        expected = isinstance(error, Refusal | CallFailed | TransportError)  # they say what and who
        log.error("update %s: %s", t.update_id, failure, exc_info=None if expected else error, extra=t.extra)
        if applying:
            try:
                self._engine.abort(t.update_id, True, str(failure))
            except BaseException:  # it is DIRTY all the same, and must be known to be
                log.exception("update %s: the engine could not drop it", t.update_id, extra=t.extra)
            self._forget(t)
        self._emit(core.Failed(t.update_id, failure, dirty=applying))

    def _sleep(self, o: SleepOrder) -> None:
        """An order to sleep or to wake, whichever brings the engine to what it asks for."""
        engine, failure, lost = self._engine, None, None
        try:
            now = engine.asleep()
            if set(o.asleep) - now:
                engine.sleep(o.level)
            elif tags := frozenset(now - set(o.asleep)):
                engine.wake(tags)
        except BaseException as e:
            log.error("replica %s: order %d to sleep (%s): %s", self._replica_id, o.order, o.asleep, e, exc_info=e)
            failure = failure_of(e, self._replica_id, "falling asleep" if o.asleep else "waking up")
        if mixed := engine.mixed():
            lost = Failure(Reason.ENGINE, mixed, self._replica_id)
        asleep = tuple(t for t in SLEEP_TAGS if t in engine.asleep())
        self._emit(core.SleepDone(o.order, asleep, engine.held(), failure, lost))

    def _forget(self, t: Transfer) -> None:
        if self._transfer is t:
            self._last_landed = t.landed
            self._landed_before += self._last_landed
            self._transfer = None

    def _check(self, t: Transfer) -> None:
        failpoints.hit("replica.check.before")
        want, engine = t.want, self._engine
        placing = self._placing
        t.manifest = manifest = placing.manifest(want.manifest_id, t.deadline, t.cancelled.is_set)
        quick, t.layout, said = placing.describe(manifest)
        if want.mode not in engine.modes:
            message = f"mode {want.mode} is not possible now: {engine.staging_refusal}"
            raise Refusal(Failure(Reason.CAPABILITY, message, self._replica_id))
        placing.place(said, manifest, t.layout, self._epoch, t.deadline, t.cancelled.is_set)
        step, lineage = want.trainer_step, want.lineage
        engine.begin(
            EngineUpdate(t.update_id, want.version, step, lineage, want.mode, want.cache, manifest, want.holds)
        )
        failpoints.hit("replica.check.after")
        self._steps += 1
        self._emit(core.Checked(t.update_id))
        if t.layout == quick and engine.layout() != quick:  # nothing is armed before this thread is done here
            text = "a live tensor has another name, shape, stride or dtype than at the last update: publish again"
            raise Refusal(Failure(Reason.PLACEMENT_MISMATCH, text, self._replica_id))

    def _plan(self, t: Transfer, manifest: Manifest, plan_id: str) -> Plan:
        plan: Plan | None = self._plans.get(plan_id)
        if plan is None:
            plan = self._calls.plan(plan_id, manifest, t.deadline, t.cancelled.is_set)
            self._plans.keep(plan.id, plan)
        return plan

    def _open(self, t: Transfer) -> None:
        """Channel, sink and ledger of every worker, on its own data thread; each by its own channel and plan."""
        manifest = t.manifest
        of_worker = {w: c for c in t.want.channels for w in c.workers}
        as_they_come = not t.in_place or self._engine.evidence < Evidence.LIVE  # who cannot read back hashes at once
        for w, member in enumerate(self.members):
            desired = of_worker.get(w)
            channel = desired.channel if desired is not None else None
            if manifest is None or desired is None or channel is None or not desired.plan_id:
                text = f"a call to arm came without a channel or plan for {member}"
                raise Refusal(Failure(Reason.INTERNAL, text, self._replica_id))
            plan = self._plan(t, manifest, desired.plan_id)
            kinds = self._channels.device_kinds(channel.transport)
            reception = Reception(
                t.update_id, self._group, member, self._data[w], channel, plan, manifest, t.want.verify, as_they_come
            )
            elsewhere = self._engine.open_worker(w, reception)
            if elsewhere is not None:
                t.add(elsewhere)
                continue
            targets = partial(self._engine.targets, w)
            share, sink = self._shares.get(plan, manifest, member, kinds, (t.want.mode, t.layout), targets)
            opened = self._data[w].submit(partial(self._channels.get, channel, member)).result()
            untouched = t.in_place and not as_they_come and not self._engine.post_processes
            ledger = Ledger(share, t.update_id, t.want.verify, as_they_come, sink, untouched=untouched)
            base = opened.bytes_landed
            t.add(LocalWorker(member, self._data[w], opened, share, base, sink, ledger, channel_id=channel.channel_id))

    def _open_ahead(self, t: Transfer) -> None:
        """In place: what needs no pause is done while it begins. What fails here fails again with the arm."""
        if t.workers or t.cancelled.is_set() or self._closed or t.abandoned:
            return
        try:
            self._open(t)
        except Exception as e:
            log.info("update %s: its channels are opened again: %s", t.update_id, e, extra=t.extra)
            t.workers.clear()

    def _arm(self, t: Transfer, seq: int) -> None:
        if not t.workers:
            self._open(t)
        t.arm(seq)
        self._step()
        self._emit(core.Armed(t.update_id, seq))
        t.receive(self._engine, self._step)
        self._emit(core.Received(t.update_id, seq))

    def _step(self) -> None:
        self._steps += 1

    def _prepare(self, t: Transfer) -> None:
        failpoints.hit("replica.prepare.before")
        for w in t.workers:
            self._complete(w)
        start = time.monotonic()
        self._engine.prepare(t.update_id)
        evidence = Evidence.RECEIVED
        if t.in_place and t.want.verify is not Verify.OFF:
            self._read_back(t)
            evidence = self._engine.evidence
        t.verify_s = time.monotonic() - start
        receipts = []
        for w in t.workers:
            elements = w.elements() if evidence >= Evidence.CONSUMED else 0
            receipts.append(receipt_pages(w.share, t.update_id, evidence, w.landed, elements, w.packed()))
        if sum(page.ByteSize() for pages in receipts for page in pages) <= WITH_VOTE:
            t.receipts = tuple(page for pages in receipts for page in pages)
        else:
            for pages in receipts:
                self._calls.put_receipt(self._incarnation, self._epoch, pages, t.deadline, t.cancelled.is_set)
        failpoints.hit("replica.prepare.after")
        self._step()
        self._emit(core.Prepared(t.update_id, Timings(t.wire_s, t.verify_s)))

    def _complete(self, w: Worker) -> None:
        """Refuse to vote short of the plan, or when the transport moved other than it said."""
        names = w.missing()
        planned = w.share.nbytes
        message = ""
        if names:
            message = f"{w.member}: bytes of {len(names)} tensor(s) are missing: {', '.join(map(repr, names[:5]))}"
        elif w.landed != planned:
            message = f"{w.member}: expected {planned} payload bytes, the transport put {w.landed} in place"
        if message:
            raise Refusal(Failure(Reason.INCOMPLETE, message, self._replica_id, "", tuple(names[:5]), len(names)))

    def _read_back(self, t: Transfer) -> None:
        """LIVE evidence: hash what the workers hold now. Where that lies is found once per plan and layout."""
        if self._engine.evidence < Evidence.LIVE:
            return  # it showed what it can by not raising
        for i, w in enumerate(t.workers):
            if not isinstance(w, LocalWorker):
                continue  # its own process read back, or the engine would not say LIVE
            key = (w.share.reception, w.member, t.layout)
            if key not in self._live:
                self._live.keep(key, RegionMemory(w.share, self._engine.live(i)))
            w.ledger.read_back(self._live[key])

    def _live_pieces(self, t: Transfer) -> dict[str, list[Piece]]:
        """Where what is retained lies, by member; nothing is read yet."""
        said: Description | None = self._placing.known(t.manifest.id, t.layout) if t.manifest is not None else None
        if self._keeping is None or t.manifest is None or said is None:
            return {}
        return {p.member: live_pieces(self._engine.live(w), p, t.manifest) for w, p in enumerate(said.placements)}

    def _apply(self, t: Transfer) -> None:
        failpoints.hit("replica.apply.before")
        start = time.monotonic()
        read_s = 0.0
        if not t.in_place:
            self._engine.apply(t.update_id)
            if t.want.verify is not Verify.OFF:
                reading = time.monotonic()
                self._read_back(t)
                read_s = time.monotonic() - reading
        live = self._live_pieces(t)
        self._engine.commit(t.update_id)
        failpoints.hit("replica.apply.after")
        now = time.monotonic()
        paused_s = now - (self._pauses.since("update") or start)
        self._step()
        self._forget(t)
        timings = Timings(t.wire_s, t.verify_s + read_s, paused_s, now - start - read_s)
        if t.want.holds is not None:
            self._channels.discard([w.channel for w in t.workers])
        self._emit(core.Applied(t.update_id, self._engine.held(), timings))
        if self._keeping is not None and t.manifest is not None:
            self._keeping.take(t.want.holds or Held(t.want.version, t.update_id), t.manifest, live)

    def _drain(self, t: Transfer, reason: str) -> None:
        if t.abandoned:
            self._channels.discard([w.channel for w in t.workers])
            return
        t.drop_by = 0.0
        wrote = t.wrote
        try:
            failpoints.hit("replica.drop.before")
            self._engine.abort(t.update_id, wrote, reason)
            failpoints.hit("replica.drop.after")
        except BaseException:
            log.exception("update %s: it could not be dropped; memory counts as mixed", t.update_id, extra=t.extra)
            wrote = True
        self._channels.discard([w.channel for w in t.workers])
        self._forget(t)
        self._emit(core.Drained(t.update_id, wrote))
