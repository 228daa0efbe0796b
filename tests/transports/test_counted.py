"""A receive that raises has counted what it may have written, and nothing is written after it: else a replica in place
that was written to in part would go on as if it had not been. Each test stops the transport right behind a write."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from weightplane.controlplane.core.plan import Bucket, Segment
from weightplane.transports import shm_ring
from weightplane.transports.base import ArmToken, ChannelAborted, ChannelSpec, ReceiveChannel, Transport
from weightplane.transports.external import ExternalTransport, set_mover
from weightplane.transports.grpc_stream import GrpcTransport
from weightplane.transports.shm import ShmTransport
from weightplane.transports.span_cursor import SpanCursor
from weightplane.transports.ucx import UcxTransport

NBYTES = 100_000
BUCKET = Bucket(0, "s", ("r",), (Segment(0, 0, NBYTES),), NBYTES)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def opened(stack: ExitStack, transport: Transport) -> tuple[ReceiveChannel, torch.Tensor]:
    """The receiver of an armed channel whose sender sends ones, and its zeros."""
    stack.callback(transport.shutdown)
    spec = ChannelSpec(
        channel_id=f"counted-{os.getpid()}-{transport.name}",
        group="g",
        transport=transport.name,
        key=bytes(range(32)),
        senders=("s",),
        receivers=("r",),
        bucket_bytes=NBYTES,
        offers={"s": transport.offer("s"), "r": transport.offer("r")},
    )
    sender, receiver = transport.open_sender(spec, "s"), transport.open_receiver(spec, "r")
    stack.callback(sender.close)
    stack.callback(receiver.close)
    token, deadline = ArmToken("u", 1, 1), time.monotonic() + 30
    sender.arm(token, [BUCKET], deadline)
    receiver.arm(token, [BUCKET], deadline)
    thread = threading.Thread(target=sender.send, args=(BUCKET, [torch.ones(NBYTES, dtype=torch.uint8)]), daemon=True)
    thread.start()
    stack.callback(thread.join, 10)
    return receiver, torch.zeros(NBYTES, dtype=torch.uint8)


def aborted(receiver: ReceiveChannel, target: torch.Tensor, inside: Callable[[], Any]) -> threading.Thread:
    """A thread that receives and must be aborted; started, and ``inside`` the transport when this returns."""

    def receive() -> None:
        with pytest.raises(ChannelAborted):
            receiver.receive(BUCKET, [target])

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    inside()
    return thread


def test_shm_counts_a_slot_that_was_dropped_under_the_copy(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, target = opened(stack, ShmTransport())
    monkeypatch.setattr(shm_ring.Segment, "dropped", lambda *_: bool(target.any()))
    with pytest.raises(ChannelAborted, match="dropped"):
        receiver.receive(BUCKET, [target])
    assert target.all() and receiver.bytes_landed == NBYTES


def test_grpc_waits_for_a_copy_under_way_and_counts_it(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, target = opened(stack, GrpcTransport())
    inside, go_on = threading.Event(), threading.Event()
    write = SpanCursor.write

    def slow(cursor: Any, address: int, nbytes: int) -> None:
        inside.set()
        assert go_on.wait(20)
        write(cursor, address, nbytes)

    monkeypatch.setattr(SpanCursor, "write", slow)
    thread = aborted(receiver, target, lambda: inside.wait(20))
    receiver.abort("in mid-copy")
    thread.join(0.3)
    assert thread.is_alive() and not target.any(), "it left while its memory was being written"
    go_on.set()
    thread.join(10)
    assert not thread.is_alive() and receiver.bytes_landed == NBYTES and target.all()


def test_ucx_counts_a_read_that_was_given_up(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = UcxTransport()
    if not transport.probe().ok:
        pytest.skip(transport.probe().reason)
    receiver, target = opened(stack, transport)
    agent: Any = type(receiver._importer._agent)  # type: ignore[attr-defined]
    start, done, remove = agent.start, agent.done, agent.remove
    inside, over = threading.Event(), threading.Event()

    def starting(self: Any, handle: Any) -> bool:
        start(self, handle)
        inside.set()
        return False

    def removing(self: Any, name: str) -> None:
        over.set()
        remove(self, name)

    monkeypatch.setattr(agent, "start", starting)
    monkeypatch.setattr(agent, "done", lambda self, handle: over.is_set() and done(self, handle))
    monkeypatch.setattr(agent, "remove", removing)
    thread = aborted(receiver, target, lambda: inside.wait(20))
    receiver.abort("in mid-read")
    thread.join(10)
    assert not thread.is_alive() and over.is_set() and receiver.bytes_landed == NBYTES


def test_external_counts_what_a_mover_that_raises_was_given(stack: ExitStack) -> None:
    def fails(_: Bucket, spans: Any) -> None:
        spans[0][:1] = 1
        raise RuntimeError("half-way")

    set_mover("s", lambda *_: None)
    set_mover("r", fails)
    stack.callback(set_mover, "s", None)
    stack.callback(set_mover, "r", None)
    receiver, target = opened(stack, ExternalTransport())
    with pytest.raises(RuntimeError, match="half-way"):
        receiver.receive(BUCKET, [target])
    assert receiver.bytes_landed == NBYTES and target.any()
