"""Two agents that read one bucket: who does, who does not, what becomes of a half that fails; and the kit's faults."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.transports.test_ucx import Pair, data, transport  # noqa: F401
from weightplane.transports import ucx_agent, ucx_beside
from weightplane.transports.base import ArmToken, PeerLost, TransportError
from weightplane.transports.conformance.cases_faults import *  # noqa: F403
from weightplane.transports.conformance.cases_resources import *  # noqa: F403
from weightplane.transports.ucx import UcxTransport
from weightplane.transports.ucx_agent import Agent, UcxError
from weightplane.transports.ucx_beside import Beside

TRANSPORT = "tests.transports.ucx_by_two:UcxByTwo"
pytest_plugins = ["weightplane.transports.conformance.plugin"]
LARGE = 64 << 20

if not ucx_agent.package():
    pytest.skip("NIXL is not installed (tools/test-nixl.txt)", allow_module_level=True)


@pytest.fixture
def large(transport: UcxTransport, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:  # noqa: F811
    """A channel of one bucket that is read by two, whatever the cores."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    made = Pair(transport, LARGE)
    yield made
    made.close()


def second(pair: Pair) -> Agent | None:
    return pair.importer._beside._agent


def update(pair: Pair, seed: int, target: list[torch.Tensor]) -> None:
    pair.update([data(LARGE, seed)], target)


def test_a_large_bucket_is_read_by_two_agents(large: Pair) -> None:
    target = [torch.zeros(LARGE, dtype=torch.uint8)]
    for seed in (1, 2):
        update(large, seed, target)
    plan = large.importer._remotes["s"].plans[0]
    assert second(large) is not None
    assert sum(n for _, n in plan.reads) == sum(n for _, n in plan.beside) == LARGE // 2
    assert large.receiver.bytes_landed == 2 * LARGE


def test_a_small_bucket_is_read_by_one_agent(transport: UcxTransport) -> None:  # noqa: F811
    pair = Pair(transport, 1 << 20)
    try:
        pair.update([data(1 << 20, 1)], [torch.zeros(1 << 20, dtype=torch.uint8)])
        assert second(pair) is None and not pair.importer._remotes["s"].plans[0].beside
    finally:
        pair.close()


class _Said:
    def __init__(self, local: bool, *lanes: str) -> None:
        self.local, self.member, self._lanes = local, "r", lanes

    def transports(self) -> tuple[str, ...]:
        return self._lanes


@pytest.mark.parametrize(
    ("local", "lanes", "cores", "wanted"),
    [
        (True, ("cma/memory", "tcp/lo"), 2, True),
        (True, ("cma/memory", "tcp/lo"), 1, False),
        (True, ("tcp/lo",), 2, False),  # the sender's processor takes part
        (False, ("cma/memory", "tcp/eth0"), 2, False),  # one of the senders is on another host
        (True, ("rc_mlx5/mlx5_0:1",), 2, False),
        (True, (), 2, False),  # unknown: the user has UCX's log
    ],
)
def test_two_read_only_what_the_reading_thread_copies(
    monkeypatch: pytest.MonkeyPatch, local: bool, lanes: tuple[str, ...], cores: int, wanted: bool
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    first: Any = _Said(local, *lanes)
    assert Beside(first, None).wanted(LARGE) is wanted  # type: ignore[arg-type]


def test_a_half_that_fails_ends_the_pull_by_name_and_a_new_channel_is_exact(
    large: Pair,
    transport: UcxTransport,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = [torch.zeros(LARGE, dtype=torch.uint8)]
    update(large, 1, target)
    other, begin, token = second(large), Agent.start, ArmToken("u2", 1, 1)

    def start(self: Agent, read: int) -> bool:
        if self is other:
            raise UcxError("planted")
        return begin(self, read)

    monkeypatch.setattr(Agent, "start", start)
    large.sender.arm(token, [large.bucket], time.monotonic() + 30)
    large.receiver.arm(token, [large.bucket], time.monotonic() + 30)
    large.sender.send(large.bucket, [data(LARGE, 2)])
    with pytest.raises(PeerLost, match=r"'s' cannot be read: bucket 0 of 67108864 bytes.*planted"):
        large.receiver.receive(large.bucket, target)
    assert [t.name for t in threading.enumerate() if "ucx-half" in t.name] == []
    large.close()
    fresh = Pair(transport, LARGE)
    try:
        update(fresh, 3, target)
    finally:
        fresh.close()


def test_an_abort_stops_both_halves_before_the_call_ends(large: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    target = [torch.zeros(LARGE, dtype=torch.uint8)]
    update(large, 1, target)
    running, begun = 0, Agent.start
    at = threading.Event()

    def start(self: Agent, read: int) -> bool:
        nonlocal running
        running += 1
        try:
            if self is second(large) and not at.is_set():
                at.set()
                large.receiver.abort("test")
                time.sleep(0.05)  # a copy that takes its time: the call must not end before it
            return begun(self, read)
        finally:
            running -= 1

    monkeypatch.setattr(Agent, "start", start)
    with pytest.raises(TransportError, match="test"):
        update(large, 2, target)
    assert at.is_set() and running == 0


def test_what_fails_in_the_data_threads_half_lets_go_of_nothing_that_the_other_uses(
    large: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Released under it, a READ of the second agent is used after it was freed."""
    source, target = [data(LARGE, 1)], [torch.zeros(LARGE, dtype=torch.uint8)]
    large.update(source, target)
    other, begin, token = second(large), Agent.start, ArmToken("u2", 1, 1)
    assert other is not None
    inside, failed, order = threading.Event(), threading.Event(), list[str]()

    def start(self: Agent, read: int) -> bool:
        if self is not other:
            assert inside.wait(10)
            failed.set()
            raise UcxError("planted: its sender died")
        inside.set()
        assert failed.wait(10)
        time.sleep(0.1)  # a copy that takes its time
        order.append("copied")
        return begin(self, read)

    def noted(name: str, call: Any) -> Any:
        def noting(self: Agent, *args: Any) -> Any:
            if self is other:
                order.append(name)
            return call(self, *args)

        return noting

    monkeypatch.setattr(Agent, "start", start)
    monkeypatch.setattr(Agent, "release", noted("released", Agent.release))
    monkeypatch.setattr(Agent, "remove", noted("disconnected", Agent.remove))
    large.sender.arm(token, [large.bucket], time.monotonic() + 30)
    large.receiver.arm(token, [large.bucket], time.monotonic() + 30)
    before = large.receiver.bytes_landed
    large.sender.send(large.bucket, source)
    with pytest.raises(PeerLost, match="planted"):
        large.receiver.receive(large.bucket, target)
    assert order[0] == "copied" and "released" in order and "disconnected" in order
    assert large.receiver.bytes_landed - before >= 8 << 20, "what was copied may have been written"


def test_a_half_that_does_not_end_is_counted_whole_and_its_channel_is_over(
    large: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy hangs in the kernel, say: in place the replica must not believe that nothing was written."""
    target = [torch.zeros(LARGE, dtype=torch.uint8)]
    update(large, 1, target)
    other, begin, token = second(large), Agent.start, ArmToken("u2", 1, 1)
    inside, go = threading.Event(), threading.Event()

    def start(self: Agent, read: int) -> bool:
        if self is other:
            inside.set()
            assert go.wait(30)
        else:
            assert inside.wait(10)
            large.receiver.abort("test")
        return begin(self, read)

    monkeypatch.setattr(Agent, "start", start)
    monkeypatch.setattr(ucx_beside, "_END_S", 0.1)
    large.sender.arm(token, [large.bucket], time.monotonic() + 30)
    large.receiver.arm(token, [large.bucket], time.monotonic() + 30)
    before = large.receiver.bytes_landed
    large.sender.send(large.bucket, [data(LARGE, 2)])
    try:
        with pytest.raises(TransportError, match="test"):
            large.receiver.receive(large.bucket, target)
        assert large.receiver.bytes_landed - before >= LARGE // 2
        assert large.importer.broken
    finally:
        go.set()


def test_a_sender_that_does_not_work_for_a_second_agent_is_read_by_one(
    large: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It holds its GIL, or is stopped: one agent needs nothing of it."""
    first, done = large.importer._agent, Agent.done
    monkeypatch.setattr(Agent, "start", lambda self, read, start=Agent.start: start(self, read) and self is first)
    monkeypatch.setattr(Agent, "done", lambda self, read: self is first and done(self, read))
    monkeypatch.setattr(ucx_beside, "CONNECT_S", 0.1)
    target = [torch.zeros(LARGE, dtype=torch.uint8)]
    with caplog.at_level(logging.WARNING):
        update(large, 1, target)
    assert second(large) is None
    assert "one agent reads all by itself: 's' did not work for it within 0.1 s" in caplog.text


def test_memory_that_the_second_agent_cannot_register_is_read_by_one_from_then_on(
    large: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets whose READs were ready for two are read too."""
    source, target = [data(LARGE, 1)], [torch.zeros(LARGE, dtype=torch.uint8)]
    large.update(source, target)
    other, register = second(large), Agent.register

    def refuses(self: Agent, memory: Any) -> None:
        if self is other:
            raise UcxError("planted: locked memory")
        register(self, memory)

    monkeypatch.setattr(Agent, "register", refuses)
    large.update(source, [torch.zeros(LARGE, dtype=torch.uint8)])
    assert second(large) is None
    target[0].zero_()
    large.update(source, target)


def test_without_a_second_agent_one_reads_all(
    large: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: object) -> Agent:
        raise TransportError("planted: too many open files")

    monkeypatch.setattr(ucx_beside, "Agent", none)
    target = [torch.zeros(LARGE, dtype=torch.uint8)]
    with caplog.at_level(logging.WARNING):
        for seed in (1, 2):
            update(large, seed, target)
    said = [r.message for r in caplog.records if "one agent reads all" in r.message]
    assert said == ["r: one agent reads all by itself: planted: too many open files"]


def test_without_a_thread_one_reads_all(large: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ucx_beside, "threading", SimpleNamespace(Thread=NoThread, Event=threading.Event))
    target = [torch.zeros(LARGE, dtype=torch.uint8)]
    for seed in (1, 2):
        update(large, seed, target)
    assert second(large) is None
