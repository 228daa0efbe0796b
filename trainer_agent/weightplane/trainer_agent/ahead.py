"""A trainer that is idle binds to replicas as they come and fetches the plans made for them: the next publish need not.

For one rank: several bind together, in each publish. What fails here fails again, by name, in the publish. A channel
that takes the place of an open one is opened too; any other by the publish that needs it: memory is taken when it is
asked for.
"""

from __future__ import annotations

import logging
import threading
import time

import torch

from weightplane.controlplane.core.plan import PlanError
from weightplane.transports.base import TransportError
from weightplane.v1 import agent_pb2

from .errors import PublisherClosed, RpcRefused, Unanswered
from .hold import Hold
from .stop import Stop

__all__ = ["BindAhead"]

log = logging.getLogger(__name__)

_BIND_S = 2.0  # a publish that begins meanwhile waits for it


class BindAhead:
    """One publisher's. ``busy`` is its lock: held by whoever publishes or binds. Any thread."""

    def __init__(self, hold: Hold, busy: threading.Lock) -> None:
        self._hold, self._busy = hold, busy
        self._wanted = False
        self._plans: frozenset[str] = frozenset()  # as said last
        self._tried: frozenset[str] = frozenset()  # whatever became of them
        self._stop = Stop()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        if hold.settings.world_size == 1:
            hold.told.append(self._hear)

    def _hear(self, message: agent_pb2.DesiredTrainer) -> None:
        with self._lock:
            self._wanted, self._plans = message.rebind, frozenset(message.plans_ahead)
        self.begin()

    def begin(self) -> None:
        """In a thread of its own, if there is something to do and nothing is published. Returns at once."""
        with self._lock:
            running = self._thread is not None and self._thread.is_alive()  # it may have died of what nobody foresaw
            if running or not self._due() or self._busy.locked():
                return
            self._thread = threading.Thread(target=self._run, name="weightplane-bind-ahead", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as e:  # no thread can be made: the publish binds
                self._thread = None
                log.info("group %s: not bound ahead of the next publish: %s", self._hold.group, e)

    def _due(self) -> bool:
        return self._stop.error is None and (self._wanted or not self._plans <= self._tried)

    def _run(self) -> None:
        while self._busy.acquire(blocking=False):  # else a publish binds itself, and calls ``begin`` at its end
            try:
                with self._lock:  # each is wanted once, until the coordinator says so again
                    wanted, plans = self._wanted and self._hold.bound, self._plans - self._tried
                    self._wanted, self._tried = False, self._plans
                self._prepare(wanted, plans)
            finally:
                self._busy.release()
            with self._lock:
                if not self._due():
                    self._thread = None
                    return
        with self._lock:
            self._thread = None

    def _prepare(self, wanted: bool, plans: frozenset[str]) -> None:
        hold, end = self._hold, time.monotonic() + _BIND_S
        try:
            if wanted:
                if hold.device is not None:
                    torch.cuda.set_device(hold.device)  # this thread's, which is told to the coordinator
                hold.bind(end, self._stop)
                hold.pool.reopen()
        except (RpcRefused, Unanswered, PublisherClosed, TransportError) as e:
            log.info("group %s: not bound ahead of the next publish: %s", hold.group, e)
        for plan_id in plans:
            try:
                hold.fetch(plan_id, end, self._stop)
            except (RpcRefused, Unanswered, PublisherClosed, PlanError) as e:  # PlanError: of another manifest
                log.info("group %s: a plan is not fetched ahead of the next publish: %s", hold.group, e)

    def close(self) -> None:
        """Give up what is under way; nothing is begun any more."""
        self._stop.set(PublisherClosed("the publisher is being closed"))
