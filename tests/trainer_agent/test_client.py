"""Calls to a scripted coordinator: retries, deadlines, and every refusal with its details."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.dial import Dial
from weightplane.controlplane.server.errors import Refused, status_of
from weightplane.trainer_agent.client import Client
from weightplane.trainer_agent.errors import PublisherClosed, RpcRefused, Unanswered
from weightplane.trainer_agent.stop import Stop
from weightplane.v1 import update_pb2
from weightplane.v1 import weight_transfer_pb2 as wt
from weightplane.v1 import weight_transfer_pb2_grpc as wt_grpc

Script = Callable[[Any, Any], Any]


class Scripted(wt_grpc.WeightTransferServiceServicer):
    """Plays ``script`` for StartUpdate."""

    def __init__(self) -> None:
        self.script: Script = lambda request, context: wt.StartUpdateResponse(version=7)
        self.seen: list[str] = []

    def StartUpdate(self, request: Any, context: Any) -> Any:
        self.seen.append(request.request_id)
        return self.script(request, context)


@pytest.fixture
def coordinator() -> Iterator[tuple[Scripted, Client]]:
    servicer = Scripted()  # type: ignore[abstract]
    server = grpc.server(ThreadPoolExecutor(4))
    wt_grpc.add_WeightTransferServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    client = Client(Dial(f"127.0.0.1:{port}"))
    yield servicer, client
    client.close()
    server.stop(0)


def start(client: Client, seconds: float = 5.0, stop: Stop | None = None, **options: bool) -> Any:
    request = wt.StartUpdateRequest(request_id="one")
    return client.call("StartUpdate", request, time.monotonic() + seconds, stop, **options)


def test_unavailable_is_tried_again_with_the_same_request_id(coordinator: tuple[Scripted, Client]) -> None:
    servicer, client = coordinator

    def twice(request: Any, context: Any) -> Any:
        if len(servicer.seen) < 3:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        return wt.StartUpdateResponse(version=7)

    servicer.script = twice
    assert start(client).version == 7 and servicer.seen == ["one"] * 3


@pytest.mark.alone
def test_unavailable_to_the_end_takes_the_deadline_and_no_more(coordinator: tuple[Scripted, Client]) -> None:
    servicer, client = coordinator
    servicer.script = lambda request, context: context.abort(grpc.StatusCode.UNAVAILABLE, "never")
    began = time.monotonic()
    with pytest.raises(Unanswered, match="never"):
        start(client, 1.0)
    assert 0.2 < time.monotonic() - began < 1.5 and 2 <= len(servicer.seen) < 20


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN]
)
def test_an_unknown_outcome_is_not_tried_again(coordinator: tuple[Scripted, Client], code: grpc.StatusCode) -> None:
    servicer, client = coordinator
    servicer.script = lambda request, context: context.abort(code, "who knows")
    with pytest.raises(Unanswered) as caught:
        start(client)
    assert caught.value.code is code and servicer.seen == ["one"]


@pytest.mark.alone
def test_a_silent_coordinator_costs_the_deadline(coordinator: tuple[Scripted, Client]) -> None:
    servicer, client = coordinator
    go = threading.Event()
    servicer.script = lambda request, context: go.wait(10) and None
    began = time.monotonic()
    with pytest.raises(Unanswered) as caught:
        start(client, 0.5)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED and time.monotonic() - began < 1.5
    go.set()


@pytest.mark.alone
def test_a_reason_to_stop_ends_a_call_at_once(coordinator: tuple[Scripted, Client]) -> None:
    servicer, client = coordinator
    go, stop = threading.Event(), Stop()
    servicer.script = lambda request, context: go.wait(10) and None
    threading.Timer(0.2, stop.set, [PublisherClosed("enough")]).start()
    began = time.monotonic()
    with pytest.raises(PublisherClosed, match="enough"):
        start(client, 20, stop)
    assert time.monotonic() - began < 1.0
    go.set()


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_comes_back_as_it_was_sent(coordinator: tuple[Scripted, Client], reason: Reason) -> None:
    servicer, client = coordinator
    failure = Failure(reason, "tensor 'é' is 3", "r1", "VERIFYING", ("é", "b"), 9)
    update = update_pb2.UpdateInfo(update_id="u-1", version=4, request_id="one")
    refused = Refused(failure, update, ended=True)

    def refuse(request: Any, context: Any) -> None:
        context.abort_with_status(rpc_status.to_status(status_of(refused)))

    servicer.script = refuse
    with pytest.raises(RpcRefused) as caught:
        start(client)
    assert caught.value.failure == failure and servicer.seen == ["one"]
    assert caught.value.update is not None and caught.value.update.version == 4


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, Reason.UNAUTHENTICATED),
        (grpc.StatusCode.PERMISSION_DENIED, Reason.PERMISSION_DENIED),
        (grpc.StatusCode.UNIMPLEMENTED, Reason.NOT_IMPLEMENTED),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.LIMIT),
    ],
)
def test_a_proxys_refusal_without_details(
    coordinator: tuple[Scripted, Client], code: grpc.StatusCode, reason: Reason
) -> None:
    servicer, client = coordinator
    servicer.script = lambda request, context: context.abort(code, "says the proxy")
    with pytest.raises(RpcRefused, match="says the proxy") as caught:
        start(client)
    assert caught.value.failure.reason is reason
