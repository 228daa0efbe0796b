"""A worker receives armed buckets ahead of the agent's orders (``vllm_plugin.running``), and what it keeps between
updates. Needs no engine."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.inference_agent.test_shares import ALONE, KINDS, MANIFEST, TARGETS
from weightplane.inference_agent.caches import Newest
from weightplane.inference_agent.engines.base import EngineError
from weightplane.inference_agent.engines.vllm.remote import RemoteChannel
from weightplane.inference_agent.shares import Shares
from weightplane.inference_agent.sink import Sink
from weightplane.inference_agent.vllm_plugin import running
from weightplane.inference_agent.vllm_plugin.held import Holder
from weightplane.inference_agent.vllm_plugin.running import AHEAD, Run
from weightplane.transports.base import ChannelAborted, PeerLost


class Receiver:
    """Notes what is asked of it. ``fails``: what a bucket raises."""

    def __init__(self, count: int = 12, fails: dict[int, Exception] | None = None) -> None:
        self.armed_buckets = [SimpleNamespace(index=10 + n) for n in range(count)]
        self.fails = fails or {}
        self.said: list[str] = []

    def ahead(self, bucket: Any) -> None:
        self.said.append(f"ahead {bucket.index}")

    def take(self, bucket: Any) -> None:
        self.said.append(f"take {bucket.index}")
        if bucket.index in self.fails:
            raise self.fails[bucket.index]

    @property
    def taken(self) -> list[int]:
        return [int(s.split()[1]) for s in self.said if s.startswith("take")]


class Thread:
    """A data thread that does one thing at a time, when told to."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None]] = deque()

    def all(self) -> None:
        while self.queue:
            self.queue.popleft()()


def made(worker: Receiver, wanted: Callable[[Run], bool] = lambda _: True) -> tuple[Run, Thread]:
    thread = Thread()
    return Run(worker, thread.queue.append, wanted), thread  # type: ignore[arg-type]


def test_it_goes_on_a_few_buckets_and_no_further() -> None:
    worker = Receiver()
    run, thread = made(worker)
    assert run.order(10) == [10] and worker.taken == [10], "nothing is received before it is queued behind the answer"
    thread.all()
    assert worker.taken == list(range(10, 11 + AHEAD)) and not run.going
    assert run.order(11) == list(range(11, 11 + AHEAD)), "what is there needs no order"
    thread.all()
    assert worker.taken == list(range(10, 12 + AHEAD)), "each order lets it go on by as much"
    for index in range(12, 22):
        assert run.order(index)[0] == index
        thread.all()
    assert worker.taken == list(range(10, 22)), "each once, in order, and none beyond those armed"
    assert not thread.queue and not run.going


def test_other_questions_come_between_two_buckets() -> None:
    worker = Receiver()
    run, thread = made(worker)
    run.order(10)
    thread.queue.append(lambda: worker.said.append("asked"))
    thread.all()
    assert [s for s in worker.said if not s.startswith("ahead")][:4] == ["take 10", "take 11", "asked", "take 12"]


def test_each_bucket_is_announced_before_the_one_before_it() -> None:
    worker = Receiver(3)
    run, thread = made(worker)
    run.order(10)
    thread.all()
    assert worker.said == ["ahead 11", "take 10", "ahead 12", "take 11", "take 12"]


def test_a_failure_is_told_to_the_order_of_its_bucket() -> None:
    lost = PeerLost("the trainer is gone", bucket=12)
    worker = Receiver(fails={12: lost})
    run, thread = made(worker)
    run.order(10)
    thread.all()
    assert worker.taken == [10, 11, 12], "nothing is received after it"
    assert run.order(11) == [11]
    thread.all()
    for _ in range(2):
        with pytest.raises(PeerLost, match="gone") as raised:
            run.order(12)
        assert raised.value is lost
    thread.all()
    assert worker.taken == [10, 11, 12] and not run.going


def test_what_is_ordered_out_of_turn_is_refused() -> None:
    run, thread = made(Receiver())
    for index in (11, 9, 99):
        with pytest.raises(EngineError, match="out of turn"):
            run.order(index)
    assert not thread.queue


def test_a_run_that_is_over_takes_nothing_more() -> None:
    """Armed anew, dropped, or its agent is gone: what is queued does nothing."""
    worker = Receiver()
    current = [True]
    run, thread = made(worker, lambda _: current[0])
    run.order(10)
    current[0] = False
    thread.all()
    assert worker.taken == [10] and not thread.queue and not run.going


class Planted:
    """Guards that see a defect in ``Run``."""

    @staticmethod
    def no_bound(m: pytest.MonkeyPatch) -> None:
        m.setattr(running, "AHEAD", 1 << 20)

    @staticmethod
    def failure_lost(m: pytest.MonkeyPatch) -> None:
        take = Run._take

        def swallowed(run: Run) -> None:
            take(run)
            if run._failed is not None:
                run._failed, run._next = None, run._next + 1

        m.setattr(Run, "_take", swallowed)

    @staticmethod
    def never_over(m: pytest.MonkeyPatch) -> None:
        init = Run.__init__
        m.setattr(Run, "__init__", lambda run, w, s, _: init(run, w, s, lambda _: True))


@pytest.mark.parametrize(
    ("plant", "guard"),
    [
        (Planted.no_bound, test_it_goes_on_a_few_buckets_and_no_further),
        (Planted.failure_lost, test_a_failure_is_told_to_the_order_of_its_bucket),
        (Planted.never_over, test_a_run_that_is_over_takes_nothing_more),
    ],
)
def test_the_guards_see_planted_defects(
    plant: Callable[[pytest.MonkeyPatch], None], guard: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        guard()


# --- who is about to be dropped, and the agent's side


def test_a_drop_ends_what_is_received_without_an_order() -> None:
    """It would wait behind it, until the deadline. What was ordered is aborted by its agent, who knows of it."""
    aborted: list[str] = []
    holder = Holder.__new__(Holder)
    channel = SimpleNamespace(abort=aborted.append)
    run = SimpleNamespace(going=False)
    holder._update = SimpleNamespace(  # type: ignore[assignment]
        update_id="u", stream=None, run=run, receiver=SimpleNamespace(channel=channel)
    )
    holder.leave("u", "dropped")
    assert aborted == []
    run.going = True
    holder.leave("another", "dropped")
    assert aborted == []
    holder.leave("u", "dropped")
    assert aborted == ["dropped"]


class Link:
    """Answers as a worker that is so many buckets ahead."""

    landed = 0

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.calls: list[Any] = []

    def call(self, do: str, timeout: float, cancelled: Any = None, **fields: Any) -> Any:
        self.calls.append(fields.get("bucket", do))
        index = fields.get("bucket", 0)
        return {"landed": index, "done": list(range(index, index + 1 + self.ahead))}

    def post(self, do: str, **fields: Any) -> None:
        self.calls.append(do)


def channel(link: Link) -> RemoteChannel:
    said = SimpleNamespace(update_id="u", channel=SimpleNamespace(channel_id="c"), member="r/0")
    return RemoteChannel(link, said)  # type: ignore[arg-type]


def test_the_agent_orders_only_what_is_not_there() -> None:
    link = Link(2)
    remote = channel(link)
    for index in range(7):
        remote.take(SimpleNamespace(index=index))  # type: ignore[arg-type]
    assert link.calls == [0, 3, 6] and remote.bytes_landed == 6
    token: Any = SimpleNamespace(epoch=1, generation=2)
    remote.arm(token, (), threading.TIMEOUT_MAX)
    remote.take(SimpleNamespace(index=7))  # type: ignore[arg-type]
    assert link.calls == [0, 3, 6, "arm", 7], "what was there before is not what is armed now"


def test_an_aborted_take_raises_though_the_bytes_are_there() -> None:
    link = Link(2)
    remote = channel(link)
    remote.take(SimpleNamespace(index=0))  # type: ignore[arg-type]
    remote.abort("enough")
    with pytest.raises(ChannelAborted, match="enough"):
        remote.take(SimpleNamespace(index=1))  # type: ignore[arg-type]


# --- what is kept between updates


def test_updates_in_place_leave_what_is_known_of_live_memory() -> None:
    """Made anew for each update it cost 50 ms on a card, and 1 ms of each bucket: without a slot there is none to drop
    it with. With the slot goes what is known of it."""
    pytest.importorskip("vllm")
    from weightplane.inference_agent.vllm_plugin.opening import Opening

    opening = Opening.__new__(Opening)
    opening._shares, opening._surveys, opening._slot = Shares(4), Newest(4), None

    def known() -> Sink:
        return opening._shares.get(ALONE, MANIFEST, "a", KINDS, "map", lambda: TARGETS)[1]

    where_its_bytes_go = known()
    for _ in range(2):
        opening._drop_slot()
        assert known() is where_its_bytes_go
    opening._slot = ("manifest", None, {})  # type: ignore[assignment]
    opening._drop_slot()
    assert known() is not where_its_bytes_go and opening._slot is None
