"""Calls to the coordinator: a deadline each, retries only where no answer came, every answer typed. Any thread."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import grpc

from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.dial import Dial
from weightplane.controlplane.grpc_close import close_channels
from weightplane.controlplane.handshake import trouble
from weightplane.v1 import agent_pb2_grpc, fleet_pb2_grpc, weight_transfer_pb2_grpc

from .errors import CoordinatorUnreachable, RpcRefused, Unanswered, error_from_rpc
from .stop import Stop

__all__ = ["Client", "Pending"]

_BACKOFF_S = (0.05, 1.0)


class Client:
    """One connection. Every call is unary but ``watch`` and ``session``, which are streams."""

    def __init__(self, dial: Dial) -> None:
        self.dial = dial
        self._channel = dial.channel()
        self.transfer: Any = weight_transfer_pb2_grpc.WeightTransferServiceStub(self._channel)
        self.fleet: Any = fleet_pb2_grpc.FleetServiceStub(self._channel)
        self.agent: Any = agent_pb2_grpc.AgentServiceStub(self._channel)
        self.following = False  # a stream is open: its thread takes the answers to calls as well

    def call(self, method: str, request: Any, deadline: float, stop: Stop | None = None) -> Any:
        """One logical call of WeightTransferService (or FleetService), tried again on UNAVAILABLE until ``deadline``.

        Every mutating request carries its request_id, so that a repeat is harmless. Raises ``RpcRefused`` for an answer
        that is a refusal, ``Unanswered`` when the outcome is unknown, and ``stop``'s reason as soon as it has one.
        """
        return self.begin(method, request, deadline, stop).wait()

    def begin(self, method: str, request: Any, deadline: float, stop: Stop | None = None) -> Pending:
        """The same, on its way while the caller does something else; then ``wait``."""
        if not self.following:
            _start_a_thread()
        stub = getattr(self.transfer, method, None) or getattr(self.fleet, method)
        return Pending(method, stub, request, deadline, stop or Stop(), self.dial.metadata)

    def unreachable(self, error: Unanswered) -> CoordinatorUnreachable:
        """The exception for a call that opens nothing and got no answer."""
        if error.said:
            text = f"the control plane at {self.dial.address} does not lead: {error.said}"
            return CoordinatorUnreachable(Failure(Reason.COORDINATOR_RESTARTED, text))
        where = f"the control plane at {self.dial.address} did not answer"
        found = trouble(self.dial) if error.code is grpc.StatusCode.UNAVAILABLE else ""
        why = found or f"{error}. Is it running, and is this its address?"
        return CoordinatorUnreachable(Failure(Reason.DEADLINE, f"{where}: {why}"))

    def close(self) -> None:
        """Close the connection; open calls end as cancelled."""
        close_channels([self._channel])


def _start_a_thread() -> None:
    """``RuntimeError`` where no thread can be had, before gRPC finds out: it begins a call first, then the thread that
    takes the answer, and without that it waits for the call for ever once the channel is collected."""
    thread = threading.Thread(target=int, name="weightplane-probe", daemon=True)
    thread.start()
    thread.join()


class Pending:
    """A call under way. ``wait`` once, from one thread, or ``cancel``."""

    def __init__(self, method: str, stub: Any, request: Any, deadline: float, stop: Stop, metadata: Any) -> None:
        self._method, self._stub, self._request = method, stub, request
        self._deadline, self._stop, self._metadata = deadline, stop, metadata
        self._future = self._send()

    def _send(self) -> Any:
        """The first attempt or another; ``None`` if there is no time for one."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return None
        future = self._stub.future(self._request, timeout=left, metadata=self._metadata)
        future.add_done_callback(lambda _: self._stop.poke())
        return future

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        if self._future is not None:
            self._future.cancel()

    def wait(self) -> Any:
        """The answer; see ``Client.call``."""
        pause = _BACKOFF_S[0]
        while True:
            found = self._outcome()
            if not isinstance(found, Unanswered):
                return found
            wait = pause * random.uniform(0.5, 1.5)
            pause = min(2 * pause, _BACKOFF_S[1])
            again = found.code is grpc.StatusCode.UNAVAILABLE
            if not again or time.monotonic() + wait >= self._deadline:
                raise found
            self._stop.wait(lambda: False, time.monotonic() + wait)
            self._future = self._send()

    def _outcome(self) -> Any:
        """What became of an attempt: its answer, or ``Unanswered``. Raises ``RpcRefused`` or the reason to stop."""
        future, method = self._future, self._method
        if future is None:
            return Unanswered(method, grpc.StatusCode.DEADLINE_EXCEEDED, "no time was left for the call")
        try:
            self._stop.wait(future.done, self._deadline + 1.0)
        except BaseException:
            future.cancel()
            raise
        try:
            return future.result(timeout=0.5)
        except grpc.FutureTimeoutError:
            future.cancel()
            return Unanswered(method, grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed")
        except grpc.FutureCancelledError:
            return Unanswered(method, grpc.StatusCode.CANCELLED, "the call was cancelled")
        except grpc.RpcError as e:
            found = error_from_rpc(method, e)
            if isinstance(found, RpcRefused):
                raise found from None
            return found
