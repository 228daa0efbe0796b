"""A coordinator that restarts waits two TTL for the replicas that it knew: an agent dials often enough for that."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.inference_agent.sessions import session_with
from weightplane.v1 import agent_pb2

DIALS = 8


class Restarting:
    """Welcomes the first stream and ends it, and refuses those that follow, as a server that only just starts does."""

    def __init__(self, ttl_ms: int) -> None:
        self.ttl_ms = ttl_ms
        self.dialled: list[float] = []
        self.enough = threading.Event()

    def session(self, _requests: Any, context: Any) -> Iterator[agent_pb2.SessionResponse]:
        self.dialled.append(time.monotonic())
        if len(self.dialled) == 1:
            yield agent_pb2.SessionResponse(welcome=agent_pb2.Welcome(session=1, epoch=1, ttl_ms=self.ttl_ms))
        if len(self.dialled) > DIALS:
            self.enough.set()
        context.abort(grpc.StatusCode.UNAVAILABLE, "starting")


@pytest.mark.parametrize(("ttl_ms", "bound"), [(400, True), (60_000, False)])
def test_dials_again_about_four_times_a_ttl(ttl_ms: int, bound: bool) -> None:
    service = Restarting(ttl_ms)
    with session_with(service.session, "r0", "i") as session:
        session.start()
        assert service.enough.wait(60)
    took = service.dialled[DIALS] - service.dialled[1]
    # Its back-off alone is 0.2 + 0.4 + 0.8 + 1.6 + 2 + 2 + 2 s, each times 0.5 to 1.5; with this TTL, 0.1 s each time.
    assert (took < 4.5 * 0.75) if bound else (took >= 4.5)
