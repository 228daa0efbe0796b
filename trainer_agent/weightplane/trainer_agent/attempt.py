"""One update from this rank's side: start, update, finish; or abort. The thread that publishes runs it.

Whatever goes wrong ends here: the coordinator is told, this rank's channels are aborted, its sending threads have left
the source, and ``AttemptFailed`` says why (or the caller's own exception goes through).
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.plan import PlanError
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.failpoints import hit
from weightplane.transports.base import TransportError
from weightplane.transports.buckets import SpanError
from weightplane.v1 import tensor_pb2, update_pb2
from weightplane.v1 import weight_transfer_pb2 as wt

from .client import Pending
from .context import AttemptFailed, Rank, RanksDisagree, UpdateEnded, is_aborted, is_over, is_undecided
from .errors import (
    OutcomeUnknown,
    PublisherClosed,
    PublishError,
    RpcRefused,
    TrainerFenced,
    Unanswered,
    failure_from_proto,
)
from .options import PublishOptions
from .produced import NOTHING_QUEUED, Produced
from .sources import Source
from .sources_gather import GatherSource
from .stop import Stop
from .transfer import Transfer

__all__ = ["Attempt"]

log = logging.getLogger(__name__)

_ASKED_S = 0.5  # after it an outcome is asked for no longer: what a busy host takes to end has the rest of the second
_GRACE_S = 0.8  # after the deadline, all last questions together may take this long: a publish ends within a second
_SETTLE_S = 0.7  # wait this long for an aborted update's last word before raising


@dataclass
class Attempt:
    """One StartUpdate … FinishUpdate. ``run`` once; ``notice`` from the watch thread.

    ``on_source_free``: every participant has read everything.
    """

    rank: Rank
    options: PublishOptions
    step: int
    request_id: str
    source: Source
    manifest: Manifest
    stop: Stop
    on_source_free: Callable[[], None]
    produced: Produced = NOTHING_QUEUED
    hold_source: bool = True
    update_id: str = ""
    version: int = 0
    epoch: int = 0
    nbytes: int = 0
    transfer: Transfer | None = None
    _deadline: float = 0.0
    _told: threading.Event = field(default_factory=threading.Event)
    _finishing: Pending | None = None

    def run(self, deadline: float) -> update_pb2.UpdateInfo:
        """The whole update; returns it committed. ``deadline``: for StartUpdate; then the update's own holds.

        Raises ``AttemptFailed``, ``TrainerFenced``, ``OutcomeUnknown``, or whatever the source or the caller raised.
        """
        watchdog: threading.Timer | None = None
        self._deadline = deadline
        try:
            try:
                self._start(deadline)
            except RpcRefused as e:
                raise self._disagreement(e) or e from None
            watchdog = self._watchdog()
            assert self.transfer is not None
            self.transfer.run()
            self.on_source_free()
            return self._finish()
        except BaseException as e:
            return self._end(e)
        finally:
            if watchdog is not None:
                watchdog.cancel()

    def let_go(self) -> None:
        """After ``run``: what the transfer held on to, the source's tensors too, waits for no garbage collector."""
        self.stop.over()
        transfer, self.transfer, self._finishing = self.transfer, None, None
        if transfer is not None:
            transfer.let_go()

    def notice(self, update: update_pb2.UpdateInfo) -> None:
        """What the watch stream says of any update. Never blocks."""
        if update.request_id == self.request_id:
            if is_aborted(update):
                self.stop.set(UpdateEnded(update))
            transfer = self.transfer
            excluded = [o.replica_id for o in update.outcomes if o.excluded]
            if excluded and transfer is not None:
                transfer.exclude(excluded)
        elif self.rank.world_size > 1 and not self.update_id and self._foreign(update):
            text = (
                f"another rank publishes step {update.trainer_step} (update {update.update_id}), this one {self.step}"
            )
            self.stop.set(RanksDisagree(f"{self.rank.member}: {text}: all ranks must make the same calls of publish"))

    def _foreign(self, update: update_pb2.UpdateInfo) -> bool:
        """An open update of this very trainer that this rank never asked for."""
        mine = update.generation == self.rank.generation
        return mine and is_undecided(update) and update.request_id not in self.rank.request_ids

    def _disagreement(self, error: RpcRefused) -> RanksDisagree | None:
        """The same request_id with other content: another rank calls publish with another step, manifest or options."""
        if error.failure.reason is not Reason.REQUEST_ID_REUSED or self.rank.world_size == 1:
            return None
        update = self._ask(time.monotonic() + 1.0)
        mine = f"step {self.step}, manifest {self.manifest.id}"
        there = f"step {update.trainer_step}, manifest {update.manifest_id}" if update is not None else "something else"
        text = f"{self.rank.member} publishes {mine}, another rank {there}, or with other options"
        return RanksDisagree(f"{text}: all ranks must make the same calls of publish")

    # --- phases ---

    def _start(self, deadline: float) -> None:
        r = self.rank
        request = wt.StartUpdateRequest(
            request_id=self.request_id,
            group=r.group,
            generation=r.generation,
            manifest_id=self.manifest.id,
            trainer_step=self.step,
        )
        self.options.fill(request)
        answer: wt.StartUpdateResponse = r.client.call("StartUpdate", request, deadline, self.stop)
        self.update_id, self.version, self.epoch = answer.update_id, answer.version, answer.epoch
        self._deadline = time.monotonic() + answer.remaining_ms / 1000
        hit("trainer.start.after")
        plans = {}
        for c in answer.channels:
            self.nbytes += c.nbytes
            plans[c.channel_id] = r.plans.get(c.plan_id, self.manifest, lambda n, p=c.plan_id: self._page(p, n))  # type: ignore[misc]
        transfer = Transfer(
            r,
            self.source,
            self.manifest,
            answer,
            plans,
            self._deadline,
            self.stop,
            self._lane_failed,
            self.produced,
            hold_source=self.hold_source,
            begin_finish=self._begin_finish,
        )
        self.transfer = transfer
        self.stop.on_set(lambda e: transfer.abandon(str(e)))

    def _page(self, plan_id: str, page: int) -> tensor_pb2.PlanPage:
        request = wt.GetPlanRequest(group=self.rank.group, plan_id=plan_id, page=page)
        answer: wt.GetPlanResponse = self.rank.client.call("GetPlan", request, self._deadline, self.stop)
        return answer.page

    def _begin_finish(self) -> None:
        """Say that all is declared and every digest put. The coordinator decides once the receivers have it all, so
        this may be said while bytes are on the wire."""
        r = self.rank
        assert self.transfer is not None
        hit("trainer.finish.before")
        request = wt.FinishUpdateRequest(
            request_id=uuid.uuid4().hex,
            group=r.group,
            generation=r.generation,
            update_id=self.update_id,
            epoch=self.epoch,
            rank=r.rank,
            gather_s=self.transfer.user_code.spent,
        )
        self._finishing = r.client.begin("FinishUpdate", request, self._deadline + 2.0, self.stop)

    def _finish(self) -> update_pb2.UpdateInfo:
        if self._finishing is None:
            self._begin_finish()
        assert self._finishing is not None
        answer: wt.FinishUpdateResponse = self._finishing.wait()
        hit("trainer.finish.after")
        return self._flipped(answer.update)

    def _flipped(self, update: update_pb2.UpdateInfo) -> update_pb2.UpdateInfo:
        """A committed update, once its replicas serve it. A coordinator that restarted after the decision answers
        before they are back; it takes those not back within two TTL for absent, and so do we."""
        end = min(self._deadline, time.monotonic() + 2 * self.rank.ttl_s)
        while _unresolved(update) and time.monotonic() < end:
            time.sleep(0.02)
            update = self._ask(end) or update
        return update

    def _watchdog(self) -> threading.Timer | None:
        """Shortly before the deadline: name this rank if it is stuck in the user's own collective."""
        if not isinstance(self.source, GatherSource) or self.transfer is None:
            return None
        code = self.transfer.user_code
        total = self._deadline - time.monotonic()
        prepare = min(self.options.prepare_timeout or total, max(total - 1.0, total * 0.9))

        def look() -> None:
            if code.since:
                self._abort(f"{self.rank.member} is stuck {code.text()}: a collective of its own", self.rank.rank)

        timer = threading.Timer(max(0.0, prepare - min(1.0, 0.1 * prepare)), look)
        timer.daemon = True
        timer.start()
        return timer

    # --- the end, when it is not a commit ---

    def _lane_failed(self, error: BaseException) -> None:
        """A sending thread failed: tell the coordinator at once, from that thread."""
        self._abort(*self._words(error))

    def _words(self, error: BaseException) -> tuple[str, int]:
        """(what to say, rank to blame): a rank for what its own code did, none for what happened to its transports."""
        if isinstance(error, TransportError):
            peers = f" (peers {', '.join(repr(p) for p in error.peers)})" if error.peers else ""
            return f"{self.rank.member} cannot send: {type(error).__name__}: {error}{peers}", -1
        if isinstance(error, TimeoutError | KeyboardInterrupt | SystemExit | PublishError | Unanswered):
            return f"{self.rank.member}: {type(error).__name__}: {error}", -1
        return f"{self.rank.member} failed: {type(error).__name__}: {error}", self.rank.rank

    def _abort(self, reason: str, rank: int, seconds: float = 1.0) -> None:
        """AbortUpdate, once; its answer is not waited for long and its failure only logged (deadlines hold anyway)."""
        if self._told.is_set():
            return
        self._told.set()
        request = wt.AbortUpdateRequest(
            request_id=uuid.uuid4().hex,
            group=self.rank.group,
            generation=self.rank.generation,
            update_id=self.update_id,
            reason=reason[:2000],
            rank=rank,
        )
        try:
            self.rank.client.call(
                "AbortUpdate", request, self._soon(seconds, _GRACE_S / 2)
            )  # then its outcome is asked
        except (RpcRefused, Unanswered) as e:
            log.info("group %s: abort of %s: %s", self.rank.group, self.update_id or "the update", e)

    def _soon(self, seconds: float, grace: float = _GRACE_S) -> float:
        """That many seconds from now, but within the grace after the deadline (and never without any time at all)."""
        now = time.monotonic()
        return min(now + seconds, max(self._deadline + grace, now + 0.1))

    def _end(self, error: BaseException) -> update_pb2.UpdateInfo:
        """Clean up after ``error``, then raise what it means; or return the update if it committed all the same."""
        if self._finishing is not None:
            self._finishing.cancel()
        if self.transfer is not None:
            self.transfer.abandon(str(error))
        finishing = isinstance(error, Unanswered) and error.method == "FinishUpdate"
        unknown = finishing or (isinstance(error, RpcRefused) and error.failure.reason is Reason.UNKNOWN_OUTCOME)
        if not unknown and not isinstance(error, UpdateEnded):
            self._tell(error)
        if self.transfer is not None and not self.transfer.join(2.0):
            log.error("group %s: a sending thread did not leave its channel in time", self.rank.group)
        if unknown:
            return self._outcome(error)
        if isinstance(error, UpdateEnded):
            raise AttemptFailed(error.failure, self._settle(error.update)) from None
        if isinstance(error, RpcRefused):
            return self._refused(error)
        if isinstance(error, TransportError | SpanError | PlanError | TimeoutError | RanksDisagree | Unanswered):
            update = self._settle(None)
            if update is not None and update.phase == update_pb2.UPDATE_PHASE_COMMITTED:
                return self._flipped(update)  # the receivers had it all, and it was decided, before this went wrong
            if update is not None and is_aborted(update) and not self._told_by_us(update):
                raise AttemptFailed(failure_from_proto(update.failure), update) from error
            raise AttemptFailed(self._own_failure(error), update, update_id=self.update_id) from error
        if isinstance(error, PublisherClosed) and self._finishing is not None:
            update = self._settle(None)
            if update is not None and update.phase == update_pb2.UPDATE_PHASE_COMMITTED:
                return self._flipped(update)  # the cancel came after the decision
        raise error

    def _tell(self, error: BaseException) -> None:
        """Abort what may be open because of us."""
        if isinstance(error, TrainerFenced):
            return
        if not self.update_id:
            maybe = isinstance(error, Unanswered | KeyboardInterrupt | SystemExit | PublishError | RanksDisagree) or (
                isinstance(error, RpcRefused) and error.failure.reason is Reason.DEADLINE
            )
            if not maybe:
                return
            update = self._ask(self._soon(1.0))
            if update is None and not isinstance(error, RanksDisagree):
                return
            self.update_id = update.update_id if update is not None else ""
        if isinstance(error, RpcRefused):
            if error.update is None or is_undecided(error.update):
                self._abort(f"{self.rank.member}: {error.failure}", -1)
            return
        self._abort(*self._words(error))

    def _refused(self, error: RpcRefused) -> update_pb2.UpdateInfo:
        if error.failure.reason is Reason.TRAINER_FENCED:
            raise TrainerFenced(error.failure) from None
        if error.update is not None and error.update.request_id == self.request_id:
            self.update_id = error.update.update_id  # it was opened, and aborted before anything was armed
        if not self.update_id:
            raise AttemptFailed(error.failure, error.update, refused=True) from None
        update = self._settle(error.update)
        if update is not None and update.phase == update_pb2.UPDATE_PHASE_COMMITTED:
            return update
        raise AttemptFailed(error.failure, update) from None

    def _own_failure(self, error: BaseException) -> Failure:
        if isinstance(error, Unanswered):
            text = f"the control plane did not answer {error}; it aborts the update at its deadline if it lives"
            return Failure(Reason.DEADLINE, text)
        reason = Reason.TRANSPORT
        member = self.rank.member
        if isinstance(error, TransportError) and error.peers:
            member = error.peers[0].rpartition("/")[0] or error.peers[0]
        elif isinstance(error, TimeoutError):
            reason = Reason.DEADLINE
        elif isinstance(error, RanksDisagree):
            reason = Reason.PEER_RANK_FAILED
        elif isinstance(error, SpanError | PlanError):
            reason = Reason.PLACEMENT_MISMATCH
        return Failure(reason, f"{type(error).__name__}: {error}", member)

    def _told_by_us(self, update: update_pb2.UpdateInfo) -> bool:
        return update.failure.message.startswith(self.rank.member)

    def _ask(self, deadline: float) -> update_pb2.UpdateInfo | None:
        """GetUpdate; ``None`` if there is no such update, or no answer."""
        request = wt.GetUpdateRequest(group=self.rank.group)
        if self.update_id:
            request.update_id = self.update_id
        else:
            request.request_id = self.request_id
        try:
            answer: wt.GetUpdateResponse = self.rank.client.call("GetUpdate", request, deadline)
        except (RpcRefused, Unanswered) as e:
            log.info("group %s: %s", self.rank.group, e)
            return None
        return answer.update

    def _settle(self, update: update_pb2.UpdateInfo | None) -> update_pb2.UpdateInfo | None:
        """The last word of an update that ends, with every replica's outcome; waited for ``_SETTLE_S`` at most."""
        end = self._soon(_SETTLE_S)
        while True:
            found = self._ask(end)
            update = found if found is not None else update
            if found is None or is_over(found) or time.monotonic() + 0.02 >= end:
                return update
            time.sleep(0.02)

    def _outcome(self, error: BaseException) -> update_pb2.UpdateInfo:
        """Ask until the outcome is known, which may take as long as the update might have; the coordinator may be
        restarting."""
        end = self._soon(float("inf"), _ASKED_S)
        pause = 0.02
        while time.monotonic() < end:
            update = self._ask(end)
            if update is not None and is_over(update):
                if is_aborted(update):
                    raise AttemptFailed(failure_from_proto(update.failure), update) from error
                return self._flipped(update)
            time.sleep(max(0.0, min(pause, end - time.monotonic())))
            pause = min(0.5, 2 * pause)
        raise self._unknown(error)

    def _unknown(self, error: BaseException) -> OutcomeUnknown:
        message = f"whether update {self.update_id} (version {self.version}) committed is not known: {error}"
        return OutcomeUnknown(Failure(Reason.UNKNOWN_OUTCOME, message), update_id=self.update_id, version=self.version)


def _unresolved(update: update_pb2.UpdateInfo) -> bool:
    """Whether a participant of a committed update was neither seen to serve it nor to fail."""
    on_its_way = (update_pb2.WEIGHTS_STATE_PENDING, update_pb2.WEIGHTS_STATE_JOINING)
    return any(o.state in on_its_way and not o.excluded and not o.HasField("failure") for o in update.outcomes)
