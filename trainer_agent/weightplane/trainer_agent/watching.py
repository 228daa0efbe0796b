"""A rank's ear and its lease: a stream on which the coordinator tells what becomes of updates, read by its own thread.

Two ways. With the **helper**: a control Session, and a helper process whose heartbeats hold the lease even while this
process holds the GIL; until it beats, this process does. With the **stream** alone (no process may be spawned): a
WatchUpdate stream that holds the lease as long as it lives. Either way the thread only hands on what it hears; it is
never held up by a transfer.
"""

from __future__ import annotations

import itertools
import logging
import queue
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from weightplane.controlplane.at_exit import end_at_exit
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.heartbeat import HeartbeatHelper
from weightplane.v1 import agent_pb2, update_pb2
from weightplane.v1 import weight_transfer_pb2 as wt

from .client import Client
from .errors import RpcRefused, error_from_rpc

__all__ = ["Notice", "Watch"]

log = logging.getLogger(__name__)

_BACKOFF_S = (0.05, 1.0)


@dataclass(frozen=True, slots=True)
class Notice:
    """The newest of what the coordinator says. ``over``: this trainer's hold is over, and why."""

    update: update_pb2.UpdateInfo | None = None
    over: Failure | None = None


class Watch:
    """Holds one rank's lease under one generation, from ``start`` to ``close``. ``listener`` runs in its thread."""

    def __init__(
        self,
        client: Client,
        group: str,
        incarnation: str,
        rank: int,
        generation: int,
        listener: Callable[[Notice], None],
        *,
        helper: bool = True,
        told: Callable[[agent_pb2.DesiredTrainer], None] | None = None,
        says: Callable[[], agent_pb2.TrainerReport] | None = None,
        welcomed: Callable[[], None] | None = None,
    ) -> None:
        """``told`` hears all that this rank should know, ``says`` gives what it retains (with the helper).
        ``welcomed``: a stream is open, perhaps to a coordinator that knows nothing of us."""
        self._told, self._says, self._welcomed = told, says, welcomed
        self._client, self._group, self._incarnation = client, group, incarnation
        self._rank, self.generation = rank, generation
        self._listener = listener
        self._closed = threading.Event()
        self._call: Any = None
        self._beat_s = 0.2  # until the coordinator says how often
        self._outbox: queue.Queue[agent_pb2.SessionRequest | None] = queue.Queue()
        self._helper = self._start_helper() if helper else None
        self.latest = Notice()
        self._thread = threading.Thread(target=self._run, name=f"weightplane-watch-{rank}", daemon=True)

    def _start_helper(self) -> HeartbeatHelper | None:
        helper = HeartbeatHelper(
            self._client.dial,
            self._group,
            f"rank/{self._rank}",
            self._incarnation,
            generation=self.generation,
            rank=self._rank,
        )
        try:
            helper.start()
        except OSError as e:
            log.warning("no heartbeat helper (%s): the lease rests on the watch stream alone", e)
            helper.stop()
            return None
        return helper

    def start(self) -> None:
        """Start listening."""
        self._thread.start()
        end_at_exit(self._end_stream)  # the helper stays, and tells that the process is dead

    def progress(self, value: int) -> None:
        """Publish how much was done, for those who judge a silence."""
        if self._helper is not None:
            self._helper.progress(value)

    def report(self) -> None:
        """Say anew what this rank retains. Any thread."""
        if self._says is not None and self._helper is not None:
            self._outbox.put(agent_pb2.SessionRequest(trainer=self._says()))

    def _run(self) -> None:
        pause = _BACKOFF_S[0]
        while not self._closed.is_set():
            try:
                for message in self._open():
                    self._client.following = True
                    pause = _BACKOFF_S[0]
                    self._take(message)
                    if self.latest.over is not None:
                        return
                text = "the stream ended"
            except grpc.RpcError as e:
                found = error_from_rpc("watch", e)
                text = str(found)
                if isinstance(found, RpcRefused) and found.failure.reason in _OVER:
                    self._tell(Notice(self.latest.update, found.failure))
                    return
            finally:
                self._client.following = False
            if self._closed.wait(pause * random.uniform(0.5, 1.5)):
                return
            log.info("group %s: watching again after: %s", self._group, text)
            pause = min(2 * pause, _BACKOFF_S[1])
            if self._helper is not None and not self._helper.alive():
                self._restart_helper(self._helper)

    @staticmethod
    def _restart_helper(helper: HeartbeatHelper) -> None:
        try:
            helper.start()
        except OSError as e:
            log.warning("the heartbeat helper could not be started again: %s", e)

    def _open(self) -> Any:
        metadata = self._client.dial.metadata
        if self._helper is None:
            request = wt.WatchUpdateRequest(group=self._group, generation=self.generation, rank=self._rank)
            self._call = self._client.transfer.WatchUpdate(request, metadata=metadata)
        else:
            self._outbox.put(None)  # ends the requests of an earlier call
            self._outbox = queue.Queue()
            self._call = self._client.agent.Session(self._requests(self._outbox), metadata=metadata)
        if self._closed.is_set():
            self._call.cancel()
        return self._call

    def _requests(self, outbox: queue.Queue[agent_pb2.SessionRequest | None]) -> Iterator[agent_pb2.SessionRequest]:
        hello = agent_pb2.Hello(
            group=self._group,
            agent_id=f"rank/{self._rank}",
            incarnation=self._incarnation,
            kind=agent_pb2.SESSION_KIND_CONTROL,
            trainer=agent_pb2.TrainerHello(generation=self.generation, rank=self._rank),
            software="weightplane trainer_agent",
        )
        yield agent_pb2.SessionRequest(hello=hello)
        if self._says is not None:
            yield agent_pb2.SessionRequest(trainer=self._says())
        for n in itertools.count(1):
            try:
                message = outbox.get(timeout=self._beat_s if self._helper is not None and self._helper.silent else None)
            except queue.Empty:  # a process takes seconds to start on a busy machine, more than a lease may have
                running = agent_pb2.PROCESS_STATE_RUNNING
                yield agent_pb2.SessionRequest(heartbeat=agent_pb2.Heartbeat(sequence=n, process=running))
                continue
            if message is None:
                return
            yield message

    def _take(self, message: Any) -> None:
        if isinstance(message, agent_pb2.SessionResponse):
            if message.HasField("welcome"):
                self._beat_s = message.welcome.heartbeat_ms / 1000 or self._beat_s
                if self._welcomed is not None:
                    self._welcomed()
            if not message.HasField("trainer"):
                return
            message = message.trainer
            if self._told is not None:
                self._told(message)
        update = message.update if message.HasField("update") else None
        over = (
            Failure(Reason.TRAINER_FENCED, "this hold is over: another trainer took it, or a rank closed it")
            if message.fenced
            else None
        )
        self._tell(Notice(update, over))

    def _tell(self, notice: Notice) -> None:
        self.latest = notice
        self._listener(notice)

    def close(self) -> None:
        """Let go of the lease. Idempotent, bounded."""
        self._end_stream()
        if self._helper is not None:
            self._helper.stop()

    def _end_stream(self) -> None:
        self._closed.set()
        self._outbox.put(None)
        call = self._call
        if call is not None:
            call.cancel()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)


#: Answers after which the stream is not dialled again.
_OVER = frozenset(
    {
        Reason.TRAINER_FENCED,
        Reason.SESSION_SUPERSEDED,
        Reason.UNAUTHENTICATED,
        Reason.PERMISSION_DENIED,
        Reason.NOT_IMPLEMENTED,
    }
)
