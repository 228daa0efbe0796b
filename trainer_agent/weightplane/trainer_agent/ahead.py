"""A trainer that is idle binds to replicas as they come, so that the next publish is spared it.

For one rank: several bind together, in each publish. What fails here fails again, by name, in the publish. Channels are
opened by the publish that needs them: memory is taken when it is asked for.
"""

from __future__ import annotations

import logging
import threading
import time

import torch

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
        self._stop = Stop()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        if hold.settings.world_size == 1:
            hold.told.append(self._hear)

    def _hear(self, message: agent_pb2.DesiredTrainer) -> None:
        self._wanted = message.rebind
        self.begin()

    def begin(self) -> None:
        """Bind, in a thread of its own, if somebody came and nothing is published. Returns at once."""
        with self._lock:
            running = self._thread is not None and self._thread.is_alive()
            if not self._wanted or running or self._busy.locked() or self._stop.error is not None:
                return
            self._thread = threading.Thread(target=self._run, name="weightplane-bind-ahead", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as e:  # no thread can be made: the publish binds
                self._thread = None
                log.info("group %s: not bound ahead of the next publish: %s", self._hold.group, e)

    def _run(self) -> None:
        if not self._busy.acquire(blocking=False):
            return  # a publish binds itself, and calls ``begin`` at its end
        try:
            if self._wanted and self._hold.bound:
                self._wanted = False  # until the coordinator says so again
                self._bind()
        finally:
            self._busy.release()

    def _bind(self) -> None:
        hold = self._hold
        if hold.device is not None:
            torch.cuda.set_device(hold.device)  # this thread's, which is told to the coordinator
        try:
            hold.bind(time.monotonic() + _BIND_S, self._stop)
        except (RpcRefused, Unanswered, PublisherClosed) as e:
            log.info("group %s: not bound ahead of the next publish: %s", hold.group, e)

    def close(self) -> None:
        """Give up what is under way; nothing is begun any more."""
        self._stop.set(PublisherClosed("the publisher is being closed"))
