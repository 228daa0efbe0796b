"""Calls to the coordinator: a deadline each, retries only where no answer came, every answer typed. Any thread."""

from __future__ import annotations

import random
import time
from typing import Any, TypeVar

import grpc

from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.dial import Dial
from weightplane.v1 import agent_pb2_grpc, fleet_pb2_grpc, weight_transfer_pb2_grpc

from .errors import CoordinatorUnreachable, RpcRefused, Unanswered, error_from_rpc
from .stop import Stop

__all__ = ["Client"]

R = TypeVar("R")

_BACKOFF_S = (0.05, 1.0)


class Client:
    """One connection. Every call is unary but ``watch`` and ``session``, which are streams."""

    def __init__(self, dial: Dial) -> None:
        self.dial = dial
        self._channel = dial.channel()
        self.transfer: Any = weight_transfer_pb2_grpc.WeightTransferServiceStub(self._channel)
        self.fleet: Any = fleet_pb2_grpc.FleetServiceStub(self._channel)
        self.agent: Any = agent_pb2_grpc.AgentServiceStub(self._channel)

    def call(self, method: str, request: Any, deadline: float, stop: Stop | None = None, *, retry: bool = True) -> Any:
        """One logical call of WeightTransferService (or FleetService), tried again on UNAVAILABLE until ``deadline``.

        Every mutating request carries its request_id, so that a repeat is harmless. Raises ``RpcRefused`` for an answer
        that is a refusal, ``Unanswered`` when the outcome is unknown, and ``stop``'s reason as soon as it has one.
        """
        stub = getattr(self.transfer, method, None) or getattr(self.fleet, method)
        pause = _BACKOFF_S[0]
        while True:
            error = self._once(method, stub, request, deadline, stop or Stop())
            if not isinstance(error, Unanswered):
                return error
            wait = pause * random.uniform(0.5, 1.5)
            pause = min(2 * pause, _BACKOFF_S[1])
            again = retry and error.code is grpc.StatusCode.UNAVAILABLE
            if not again or time.monotonic() + wait >= deadline:
                raise error
            if stop is not None:
                stop.wait(lambda: False, time.monotonic() + wait)
            else:
                time.sleep(wait)

    def _once(self, method: str, stub: Any, request: Any, deadline: float, stop: Stop) -> Any:
        left = deadline - time.monotonic()
        if left <= 0:
            return Unanswered(method, grpc.StatusCode.DEADLINE_EXCEEDED, "no time was left for the call")
        future = stub.future(request, timeout=left, metadata=self.dial.metadata)
        future.add_done_callback(lambda _: stop.poke())
        try:
            stop.wait(future.done, deadline + 1.0)
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

    def unreachable(self, error: Unanswered) -> CoordinatorUnreachable:
        """The exception for a call that opens nothing and got no answer."""
        where = f"the control plane at {self.dial.address} did not answer"
        return CoordinatorUnreachable(
            Failure(Reason.DEADLINE, f"{where}: {error}. Is it running, and is this its address?")
        )

    def close(self) -> None:
        """Close the connection; open calls end as cancelled."""
        self._channel.close()
