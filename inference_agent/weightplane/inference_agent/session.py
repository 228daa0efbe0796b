"""The agent's control stream: hello, reports out, desired state in; redials with jitter until it is superseded.

Plain threads and gRPC's synchronous API on purpose: the agent lives inside other people's processes, and grpc.aio
shares one poller among all event loops of a process. Outbound there is a mailbox of one report: only the newest counts.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Any

import grpc

from weightplane.controlplane.at_exit import end_at_exit
from weightplane.controlplane.core.events import Report
from weightplane.controlplane.core.model import Condition
from weightplane.controlplane.core.reasons import Reason
from weightplane.controlplane.dial import Dial
from weightplane.controlplane.handshake import trouble
from weightplane.v1 import agent_pb2, agent_pb2_grpc, update_pb2

from . import codec
from .rpc import reason_of

__all__ = ["ControlSession", "SessionStatus"]

log = logging.getLogger("weightplane.inference_agent")

_BACKOFF_S = (0.1, 2.0)
_SAID_S = (2.0, 60.0)  # the same trouble is told of again after so long, then twice as long, up to the second
_REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


class SessionStatus(StrEnum):
    """How the stream is."""

    CONNECTING = "CONNECTING"
    LIVE = "LIVE"
    SUPERSEDED = "SUPERSEDED"
    STOPPED = "STOPPED"


class _Trouble:
    """Says why the stream is down: at once if it is another reason than before, else ever more rarely."""

    def __init__(self, who: str, dial: Dial) -> None:
        self._who, self._dial, self._address = who, dial, dial.address
        self._kind: Any = None
        self._next, self._pause = 0.0, _SAID_S[0]

    def over(self) -> None:
        """The stream is open."""
        self._kind, self._next, self._pause = None, 0.0, _SAID_S[0]

    def say(self, code: Any, text: str, reason: Reason | None = None) -> None:
        """The stream is down, and is dialled again. ``reason``: the control plane's own."""
        now, kind = time.monotonic(), (code, reason)
        if kind == self._kind and now < self._next:
            return
        self._pause = _SAID_S[0] if kind != self._kind else min(_SAID_S[1], 2 * self._pause)
        self._kind, self._next = kind, now + self._pause
        again = f"it is dialled until then, and this is said again in {self._pause:.0f} s"
        if code in _REFUSALS:  # dialling again helps once someone mends it
            log.error("%s: the control plane at %s refuses us: %s; %s", self._who, self._address, text, again)
        elif code is grpc.StatusCode.UNAVAILABLE and reason is not None:
            who = "name the one that does (--address or WEIGHTPLANE_ADDRESS)"
            log.warning(
                "%s: the control plane at %s does not lead: %s; %s; %s", self._who, self._address, text, who, again
            )
        elif code is grpc.StatusCode.UNAVAILABLE and (found := trouble(self._dial)):
            log.error("%s: no connection to the control plane at %s: %s; %s", self._who, self._address, found, again)
        elif code is grpc.StatusCode.UNAVAILABLE:
            where = "start one (weightplane controlplane), or name its address (--address or WEIGHTPLANE_ADDRESS)"
            log.warning("%s: no control plane answers at %s: %s: %s; %s", self._who, self._address, text, where, again)
        else:
            log.info("%s: the control stream to %s is down (%s); %s", self._who, self._address, text, again)


def _most(ttl_s: float) -> float:
    """The longest to wait before dialling again: a coordinator that restarted waits two TTL for whom it knew."""
    return min(_BACKOFF_S[1], max(_BACKOFF_S[0], ttl_s / 4))


class ControlSession:
    """One member's control stream. The callbacks run on the session's thread and must not block."""

    def __init__(
        self,
        dial: Dial,
        channel: grpc.Channel,
        hello: agent_pb2.Hello,
        on_welcome: Callable[[agent_pb2.Welcome], None],
        on_desired: Callable[[agent_pb2.DesiredReplica], None],
        on_superseded: Callable[[str], None],
    ) -> None:
        self._metadata = dial.metadata
        self._trouble = _Trouble(hello.agent_id, dial)
        self._stub = agent_pb2_grpc.AgentServiceStub(channel)
        self._hello = hello
        self._on_welcome, self._on_desired, self._on_superseded = on_welcome, on_desired, on_superseded
        self._changed = threading.Condition()
        self._most_s = _BACKOFF_S[1]
        self._report: Report | None = None
        self._receipts: Sequence[update_pb2.Receipt] = ()
        self._unsent = False
        self._conditions: Sequence[Condition] | None = None
        self._untold = False  # the conditions, on the stream in use
        self._beat: int | None = None  # progress to tell with the next heartbeat of ours, if one is due
        self._goodbye: str | None = None
        self._stream = 0  # the number of the stream in use; requests of an older one end
        self._revision = 0  # of the desired state seen on this stream
        self._call: Any = None
        self._stopped = False
        self.status = SessionStatus.CONNECTING
        self.error = ""
        self._thread = threading.Thread(target=self._run, name=f"weightplane-session-{hello.agent_id}", daemon=True)

    def start(self) -> None:
        """Begin to dial."""
        self._thread.start()
        end_at_exit(self.stop)

    def publish(self, report: Report, receipts: Sequence[update_pb2.Receipt] = ()) -> None:
        """Make ``report`` the newest; it goes out as soon as a stream is open, and again on every new one."""
        with self._changed:
            self._report, self._receipts, self._unsent = report, receipts, True
            self._changed.notify_all()

    def tell(self, conditions: Sequence[Condition]) -> None:
        """Make these the newest conditions; they go out as reports do."""
        with self._changed:
            self._conditions, self._untold = tuple(conditions), True
            self._changed.notify_all()

    def beat(self, progress: int) -> None:
        """Renew the lease on this stream, while there is nobody else to: the heartbeat helper has only been started."""
        with self._changed:
            self._beat = progress
            self._changed.notify_all()

    def stop(self, goodbye: str = "", timeout: float = 2.0) -> None:
        """End the stream, after a goodbye if ``goodbye`` says why. Idempotent; bounded."""
        with self._changed:
            self._goodbye = self._goodbye or goodbye or None
            self._stopped = True
            call = self._call
            self._changed.notify_all()
        if self._goodbye is not None and self.status is SessionStatus.LIVE:
            self._thread.join(timeout)  # the coordinator ends the stream once it took the goodbye
        if call is not None:
            call.cancel()
        self._thread.join(timeout)

    # --- the session's thread

    def _run(self) -> None:
        backoff = _BACKOFF_S[0]
        while True:
            welcomed, error = self._one_stream()
            with self._changed:
                if self._stopped:
                    self.status = SessionStatus.STOPPED
                    return
            reason = reason_of(error) if error is not None else None
            self.error = f"{error.code().name}: {error.details()}" if error is not None else "the stream ended"
            if reason is Reason.SESSION_SUPERSEDED:
                self.status = SessionStatus.SUPERSEDED
                log.error("%s: a newer session took over: %s", self._hello.agent_id, self.error)
                self._on_superseded(self.error)
                return
            self.status = SessionStatus.CONNECTING
            backoff = _BACKOFF_S[0] if welcomed else min(self._most_s, backoff * 2)
            if welcomed:
                self._trouble.over()
            self._trouble.say(error.code() if error is not None else None, self.error, reason)
            with self._changed:
                self._changed.wait_for(lambda: self._stopped, backoff * random.uniform(0.5, 1.5))
                if self._stopped:
                    self.status = SessionStatus.STOPPED
                    return

    def _one_stream(self) -> tuple[bool, Any]:
        """From hello to the stream's end: (whether we were welcome, the error or None)."""
        with self._changed:
            self._stream += 1
            self._revision = 0
            self._unsent = self._report is not None
            self._untold = self._conditions is not None
            mine = self._stream
            if self._stopped:
                return False, None
            self._call = self._stub.Session(self._requests(mine), metadata=self._metadata)
        welcomed = False
        try:
            for response in self._call:
                kind = response.WhichOneof("message")
                if kind == "welcome":
                    welcomed, self.status, self.error = True, SessionStatus.LIVE, ""
                    self._most_s = _most(response.welcome.ttl_ms / 1000)
                    self._on_welcome(response.welcome)
                elif kind == "replica":
                    with self._changed:
                        self._revision = max(self._revision, response.replica.revision)
                    self._on_desired(response.replica)
        except grpc.RpcError as e:
            return welcomed, e
        finally:
            with self._changed:
                self._stream += 1  # its requests end
                self._changed.notify_all()
        return welcomed, None

    def _requests(self, mine: int) -> Iterator[agent_pb2.SessionRequest]:
        """What goes out on one stream; runs on gRPC's thread."""
        yield agent_pb2.SessionRequest(hello=self._hello)
        beats = 0
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._stream != mine or self._unsent or self._untold or self._stopped or self._beat is not None
                    )
                )
                if self._stream != mine:
                    return
                progress, self._beat = self._beat, None
                report = self._report if self._unsent else None
                receipts = self._receipts
                revision, leaving = self._revision, self._stopped
                conditions = self._conditions if self._untold else None
                self._unsent = self._untold = False
            if conditions is not None:
                yield agent_pb2.SessionRequest(conditions=codec.conditions_message(conditions))
            if report is not None:
                yield agent_pb2.SessionRequest(report=codec.report_message(report, revision, receipts))
            if progress is not None:
                beats += 1
                beat = agent_pb2.Heartbeat(sequence=beats, progress=progress, process=agent_pb2.PROCESS_STATE_RUNNING)
                yield agent_pb2.SessionRequest(heartbeat=beat)
            if leaving:
                if self._goodbye is not None:
                    yield agent_pb2.SessionRequest(goodbye=agent_pb2.Goodbye(reason=self._goodbye))
                return
