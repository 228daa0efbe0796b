"""How receipts reach the control plane: short ones with the vote, and again on a new stream; long ones before it."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest

from tests.inference_agent.server import Server, server
from tests.inference_agent.sessions import session_with
from tests.inference_agent.test_agent import Pair
from weightplane.controlplane.core.events import Report
from weightplane.controlplane.core.states import Evidence, Stage
from weightplane.inference_agent import operations
from weightplane.inference_agent.rpc import AgentCalls
from weightplane.v1 import agent_pb2, update_pb2


@pytest.fixture
def plane() -> Iterator[Server]:
    with server() as s:
        yield s


@pytest.mark.parametrize(("room", "calls"), [(operations.WITH_VOTE, 0), (0, 1)], ids=["short", "long"])
def test_short_receipts_go_with_the_vote_and_long_ones_before_it(
    plane: Server, monkeypatch: pytest.MonkeyPatch, room: int, calls: int
) -> None:
    put: list[Any] = []
    deliver = AgentCalls.put_receipt

    def noted(self: AgentCalls, *args: Any) -> None:
        put.append(args)
        deliver(self, *args)

    monkeypatch.setattr(operations, "WITH_VOTE", room)
    monkeypatch.setattr(AgentCalls, "put_receipt", noted)
    with ExitStack() as stack:
        pair = Pair(stack, plane)
        for k in (1, 2):
            pair.publish(k)
            assert pair.content() == {float(k)} and len(put) == k * calls
        update = list(plane.state().history.values())[-1]
        assert update.parts["r"].evidence >= Evidence.RECEIVED


class Hub:
    """Notes the reports of each stream; ends the first stream once it has its vote."""

    def __init__(self) -> None:
        self.reports: queue.Queue[tuple[int, agent_pb2.ReplicaReport]] = queue.Queue()
        self.streams = 0

    def session(self, requests: Any, context: Any) -> Iterator[agent_pb2.SessionResponse]:
        self.streams += 1
        mine = self.streams
        assert next(requests).WhichOneof("message") == "hello"
        yield agent_pb2.SessionResponse(welcome=agent_pb2.Welcome(session=mine, epoch=1, heartbeat_ms=1000))
        for request in requests:
            self.reports.put((mine, request.report))
            if mine == 1:
                context.abort(grpc.StatusCode.UNAVAILABLE, "cut")


def test_a_vote_that_is_said_again_on_a_new_stream_has_its_receipts() -> None:
    hub = Hub()
    receipt = update_pb2.Receipt(update_id="u", member="r/0", plan_id="p", digests=[7], total=1)
    vote = Report("r", "life", 1, (), 1, update_id="u", stage=Stage.PREPARED)
    with session_with(hub.session, "r", "life") as session:
        session.publish(vote, [receipt])
        session.start()
        heard = [hub.reports.get(timeout=10) for _ in range(2)]
        assert [n for n, _ in heard] == [1, 2] and all(list(r.receipts) == [receipt] for _, r in heard)
        session.publish(vote)
        assert not hub.reports.get(timeout=10)[1].receipts
