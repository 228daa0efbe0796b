"""One publish: manifest, barrier of the ranks, attempts, and what a failure means to the caller."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.model import Held
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.v1 import fleet_pb2, update_pb2

from .attempt import Attempt
from .collective import start_request_id, tell_others
from .context import AttemptFailed, failures_of, guilty, is_undecided
from .errors import OutcomeUnknown, PublishError, RpcRefused, TrainerFenced, Unanswered, UpdateFailed, UpdateRefused
from .hold import NEVER_GRANTED, Hold
from .keeping import Keeping
from .options import FailurePolicy, PublishOptions
from .produced import Produced
from .receipt import PublishReceipt, receipt_of
from .sources import Source
from .stop import Stop

__all__ = ["Publishing"]

log = logging.getLogger(__name__)

_ROUNDS = 8  # of binding again, should replicas join and leave all the time
_DRAIN_S = 8.0  # an aborted update is drained by then: only then do all ranks read the same outcomes
_TELL_S = 30.0
_BEFORE_S = 600.0  # for what comes before the update's own clock, if the group's time-out is to hold
_GRACE_S = 0.5

#: Failures after which a second attempt may go better although no replica is to blame.
_PASSING = frozenset({Reason.COORDINATOR_RESTARTED, Reason.MEMBER_RESTARTED})
_POLICIES = {
    fleet_pb2.FAILURE_POLICY_RETRY: FailurePolicy.RETRY,
    fleet_pb2.FAILURE_POLICY_CONTINUE_STALE: FailurePolicy.CONTINUE_STALE,
}
#: Failures that CONTINUE_STALE does not forgive: they would come again, or the ranks are no longer in step.
_MISTAKES = frozenset({Reason.INVALID_ARGUMENT, Reason.REQUEST_ID_REUSED, Reason.PEER_RANK_FAILED})


def _silence(error: BaseException) -> Unanswered | None:
    """The cause to show: that nobody answered. A refusal's own text says all there is."""
    return error if isinstance(error, Unanswered) else None


class _Opened(Exception):
    """Another rank opened the update while this one was binding."""


class Publishing:
    """One call of ``publish``. ``run`` once, in the publishing thread."""

    def __init__(
        self,
        hold: Hold,
        source: Source,
        options: PublishOptions,
        step: int,
        number: int,
        stop: Stop,
        source_free: Callable[[], None] | None,
        produced: Produced,
        *,
        hold_source: bool = True,
        keeping: Keeping | None = None,
    ) -> None:
        """``source_free``: tells the caller, who goes on meanwhile; ``None`` if the caller waits for the end anyway.
        ``produced`` and ``hold_source``: see ``Transfer``. ``keeping``: takes the snapshot that is retained."""
        self._keeping = keeping
        self._produced, self._hold_source = produced, hold_source
        self._hold, self._source, self._options = hold, source, options
        self._step, self._number = step, number
        self._stop, self._source_free = stop, source_free
        self._held = True  # the source is as it was when the publish began
        self._began = time.monotonic()
        self.opened = False  # an update, by any attempt
        self._retries = 0  # attempts beyond the first
        self._now: Attempt | None = None

    def run(self) -> PublishReceipt:
        """Publish; raises ``UpdateFailed``, ``TrainerFenced``, or what the source or the caller raised."""
        self._hush()
        try:
            self._source.begin(self._step)
            return self._attempts()
        finally:
            if self._keeping is not None:
                self._keeping.drop()  # what was not committed
            self._hold.listen(None, None)
            self._source.end()

    def _hush(self) -> None:
        """Word of an earlier failure is no longer news."""
        telling, self._hold.telling = self._hold.telling, None
        if telling is not None:
            telling.set(PublishError(Failure(Reason.SUPERSEDED, "a newer publish began")))

    def _attempts(self) -> PublishReceipt:
        """The first attempt, and under RETRY a second one."""
        options = self._options
        while True:
            try:
                try:
                    receipt = self._attempt(options)
                finally:
                    now, self._now = self._now, None
                    if now is not None:
                        now.let_go()
            except AttemptFailed as e:
                policy = self._policy(ask=not isinstance(e.__cause__, Unanswered))
                once_more = policy is FailurePolicy.RETRY and not self._retries and self._held
                again = self._again(e, options) if once_more else None
                if again is None:
                    raise self._failed(e) from e.__cause__
                log.warning("group %s: publish of step %d, once more: %s", self._hold.group, self._step, e)
                options = again
                self._retries += 1
            else:
                where = {"group": self._hold.group, "update_id": receipt.update_id, "version": receipt.version}
                log.info("step %d is committed as version %d", self._step, receipt.version, extra=where)
                return receipt

    def _read(self) -> None:
        """Every replica has read everything: the snapshot is taken before the caller may write."""
        now = self._now
        if self._keeping is not None and now is not None:
            self._keeping.snapshot(self._source, now.manifest, Held(now.version, now.update_id))
        self._free()

    def _free(self) -> None:
        """Every replica has read everything. If a second attempt may follow, the source is held all the same."""
        if self._source_free is not None and (self._options.failure is not FailurePolicy.RETRY or self._retries):
            self._held = False
            self._source_free()

    def _policy(self, *, ask: bool = True) -> FailurePolicy:
        """What to do about a failure: as asked, else as the group says, or said (``ask`` off: nobody answers now)."""
        if self._options.failure is FailurePolicy.GROUP:
            policy = self._hold.questions.policy(ask=ask)
            stale = policy.max_stale_versions
            failure = _POLICIES.get(policy.failure, FailurePolicy.RAISE)
            if failure is FailurePolicy.CONTINUE_STALE and not stale:
                failure = FailurePolicy.RAISE
            self._options = replace(self._options, failure=failure, max_stale_versions=stale)
        return self._options.failure

    def _attempt(self, options: PublishOptions) -> PublishReceipt:
        hold = self._hold
        request_id = start_request_id(hold.settings.incarnation, hold.generation, self._number, self._retries)
        hold.request_ids.append(request_id)
        del hold.request_ids[:-8]
        deadline = time.monotonic() + (options.update_timeout or _BEFORE_S)
        stop = Stop()
        self._stop.on_set(stop.set)
        try:
            manifest = self._source.manifest()
            hold.announce(manifest, self._source, deadline, stop)
        except BaseException as e:
            self._tell_others(request_id, e)
            raise self._typed(e) from _silence(e)
        for round_ in range(_ROUNDS):
            attempt = Attempt(
                hold.rank(),
                options,
                self._step,
                request_id,
                self._source,
                manifest,
                stop,
                self._read,
                self._produced,
                self._hold_source,
            )
            self._now = attempt
            hold.listen(attempt.notice, stop)
            if round_ or hold.settings.world_size > 1:
                self._rebind(attempt, deadline, manifest)
            started = time.monotonic()
            try:
                update = attempt.run(deadline)
            except AttemptFailed as e:
                e.version = attempt.version
                if e.refused and round_ + 1 < _ROUNDS and self._mend(e.failure, manifest):
                    continue
                raise
            finally:
                self.opened = self.opened or bool(attempt.update_id)
            if self._keeping is not None:
                self._keeping.keep(Held(update.version, update.update_id))
            total = time.monotonic() - (self._began if self._retries else started)
            mirrored = attempt.transfer.mirrored if attempt.transfer is not None else (0, 0.0)
            nbytes, retries = attempt.nbytes, self._retries
            return receipt_of(update, nbytes=nbytes, total_s=total, retries=retries, mirrored=mirrored)
        raise AssertionError("unreachable")

    def _rebind(self, attempt: Attempt, deadline: float, manifest: Manifest) -> None:
        """Bind again, all ranks together; then tell a coordinator that restarted what it forgot.

        If another rank opened the update meanwhile, or the last one is still being drained, StartUpdate will tell.
        """
        hold, stop = self._hold, Stop()
        attempt.stop.on_set(stop.set)
        timer = threading.Timer(_GRACE_S, lambda: stop.set(_Opened()))
        timer.daemon = True

        def listen(update: update_pb2.UpdateInfo) -> None:
            if update.request_id == attempt.request_id and is_undecided(update) and timer.ident is None:
                timer.start()  # the answer to our own call may be on its way: it is not thrown away
            attempt.notice(update)

        hold.listen(listen, attempt.stop)
        try:
            hold.bind(deadline, stop)
            hold.announce(manifest, self._source, deadline, attempt.stop)
        except _Opened:
            log.info("group %s: another rank opened the update; this one joins it", hold.group)
        except RpcRefused as e:
            if e.failure.reason is not Reason.UPDATE_IN_PROGRESS:
                raise self._typed(e) from None
        except Unanswered as e:
            raise self._typed(e) from e
        finally:
            timer.cancel()
            hold.listen(attempt.notice, attempt.stop)

    def _mend(self, failure: Failure, manifest: Manifest) -> bool:
        """Whether a refused StartUpdate is worth another round."""
        if failure.reason is Reason.UNKNOWN_MANIFEST or (
            failure.reason is Reason.PLACEMENT_MISMATCH and manifest.id in failure.message
        ):
            known = self._hold.knows(manifest.id)
            self._hold.forget(manifest.id)
            return known
        if failure.reason is Reason.INVALID_ARGUMENT and NEVER_GRANTED in failure.message:
            return True
        return failure.reason is Reason.REBIND_REQUIRED

    # --- failures ---

    def _typed(self, error: BaseException) -> BaseException:
        """What an error before the start becomes."""
        if isinstance(error, RpcRefused):
            if error.failure.reason is Reason.TRAINER_FENCED:
                return TrainerFenced(error.failure)
            return UpdateRefused(error.failure)
        if isinstance(error, Unanswered):
            return UpdateRefused(Failure(Reason.DEADLINE, f"the control plane did not answer: {error}"))
        return error

    def goes_stale(self, error: UpdateFailed, before: int) -> bool:
        """Whether the trainer may go on with old weights after ``before`` failed publishes in a row: the policy says
        so, what failed is over, and it is not the trainer's own mistake."""
        if self._policy() is not FailurePolicy.CONTINUE_STALE or before >= self._options.max_stale_versions:
            return False
        return not isinstance(error, OutcomeUnknown) and error.reason not in _MISTAKES

    def _failed(self, e: AttemptFailed) -> PublishError:
        if e.failure.reason is Reason.SUPERSEDED and self._hold.fenced(_GRACE_S):
            return TrainerFenced(e.failure)
        if e.refused:
            return UpdateRefused(e.failure, update=e.update)
        failures = failures_of(e.update) if e.update is not None else {}
        return UpdateFailed(e.failure, failures, e.update, update_id=e.update_id, version=e.version)

    def _again(self, e: AttemptFailed, options: PublishOptions) -> PublishOptions | None:
        """The options of a second attempt, equal on all ranks; ``None`` if there is none to be made."""
        if e.refused or e.update is None:
            return None
        update = self._hold.questions.drained(e.update.update_id, time.monotonic() + _DRAIN_S)
        if update is None:
            return None
        without = guilty(update)
        if not without and e.failure.reason not in _PASSING:
            return None
        whole = options.update_timeout or self._hold.questions.policy().update_timeout_ms / 1000
        left = round(whole - update.timings.total_s, 1)  # equal on all ranks, unlike what their clocks say
        if left < 0.5:
            return None
        exclude = tuple(sorted({*options.exclude, *without}))
        prepare = min(options.prepare_timeout, left)
        return replace(options, exclude=exclude, update_timeout=left, prepare_timeout=prepare)

    def _tell_others(self, request_id: str, error: BaseException) -> None:
        """This rank fails before the start: the other ranks wait for it, and must not wait long."""
        hold = self._hold
        if hold.settings.world_size == 1 or isinstance(error, RpcRefused | Unanswered | PublishError):
            return
        hold.telling = Stop()
        reason = f"rank/{hold.settings.rank} failed before the start: {type(error).__name__}: {error}"
        tell_others(
            hold.client,
            hold.group,
            hold.generation,
            hold.settings.rank,
            request_id,
            reason[:2000],
            hold.bind,
            hold.telling,
            _TELL_S,
        )

    def stale_receipt(self, error: UpdateFailed, stale: int) -> PublishReceipt:
        """The receipt of a publish that failed, under CONTINUE_STALE."""
        update = error.update or update_pb2.UpdateInfo(trainer_step=self._step)
        total = time.monotonic() - self._began
        return receipt_of(
            update,
            nbytes=0,
            total_s=total,
            retries=self._retries,
            committed=False,
            failure=error.failure,
            stale=stale,
        )
