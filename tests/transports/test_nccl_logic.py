"""``nccl``'s channels over sockets and host memory: the conformance kit, and what only a collective promises."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import pytest
import torch

from tests.transports.collective_tcp import StreamCard, TcpCollective, TcpCommunicator, TcpRuntime
from weightplane.controlplane.core.plan import Bucket, Segment
from weightplane.transports import collective, collective_layout
from weightplane.transports.base import (
    ArmToken,
    ChannelAborted,
    ChannelSpec,
    ChannelTimeout,
    PeerLost,
    TransportError,
)
from weightplane.transports.collective import CollectiveChannel
from weightplane.transports.collective_layout import Large, Packed, Tuning, encoded, fence, fence_problem, steps_of
from weightplane.transports.collective_receive import CollectiveReceiveChannel
from weightplane.transports.collective_send import CollectiveSendChannel
from weightplane.transports.conformance import cases_data
from weightplane.transports.conformance.cases_data import (  # noqa: F401
    test_mismatched_tokens_move_nothing,
    test_more_than_two_gib_in_one_tensor,
    test_nan_payloads,
    test_quarters_to_halves,
    test_several_calls_of_one_update,
    test_source_may_be_spoiled_after_flush,
    test_stale_bytes_are_never_delivered,
    test_ten_thousand_tiny_tensors,
    test_tied_names,
    test_two_channels_at_once,
)
from weightplane.transports.conformance.cases_faults import *  # noqa: F403
from weightplane.transports.conformance.cases_resources import *  # noqa: F403
from weightplane.transports.conformance.harness import Fleet
from weightplane.v1.transport_pb2 import NcclRendezvous, Rendezvous

TRANSPORT = "tests.transports.collective_tcp:TcpCollective"
pytest_plugins = ["weightplane.transports.conformance.plugin"]

MakeFleet = Callable[..., Fleet]
TUNING = Tuning(large=1000, pack=600)
Spans = list[torch.Tensor]


def bucket_of(index: int, sizes: Sequence[int], sender: str = "s0", receivers: Sequence[str] = ("r0",)) -> Bucket:
    segments = tuple(Segment(100 * index + n, 0, size) for n, size in enumerate(sizes))
    return Bucket(index, sender, tuple(receivers), segments, sum(sizes))


@pytest.mark.parametrize("layout", ["", "plain"], ids=["into-strided", "into-plain"])
def test_every_dtype_shape_and_stride(fleet: MakeFleet, layout: str) -> None:
    cases_data.test_every_dtype_shape_and_stride(fleet, 2, layout)


def test_bucket_edges(fleet: MakeFleet) -> None:
    cases_data.test_bucket_edges(fleet, (1 << 20) + 8192)


# -- the layout


@pytest.mark.parametrize("seed", range(20))
def test_steps_cover_a_bucket_once_within_their_buffers(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [
        rng.choice([1, 7, 16, 100, 599, 600, 601, 999, 1000, 5000, 2_000_000]) for _ in range(rng.randrange(1, 90))
    ]
    tuning = Tuning(large=rng.choice([1, 300, 1000, 1 << 40]), pack=rng.choice([600, 4096, 1 << 21]))
    bucket = bucket_of(0, sizes)
    steps = steps_of(bucket, tuning)
    covered = sorted((p.offset, p.offset + p.nbytes) for s in steps for p in s.parts)
    assert covered[0][0] == 0 and covered[-1][1] == bucket.nbytes
    assert all(a[1] == b[0] for a, b in itertools.pairwise(covered))
    for step in steps:
        assert step.payload == sum(p.nbytes for p in step.parts) > 0
        if isinstance(step, Packed):
            assert step.nbytes <= tuning.pack and all(p.at % 16 == 0 for p in step.parts)
            places = [(p.at, p.at + p.nbytes) for p in step.parts]
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(places))
            assert places[-1][1] == step.nbytes
        else:
            assert len(step.parts) <= 64 and all(p.nbytes >= tuning.large for p in step.parts)
    kinds = [isinstance(s, Packed) for s in steps]
    assert kinds == sorted(kinds, reverse=True), "what is packed goes first"


def test_the_layout_is_what_other_languages_are_told() -> None:
    """``docs/transports.md`` gives this very example."""
    steps = steps_of(bucket_of(0, [10, 5000, 20, 32, 600, 1000]), TUNING)
    assert steps == (
        Packed(
            (
                collective_layout.Part(0, 10, 0),
                collective_layout.Part(5010, 20, 16),
                collective_layout.Part(5030, 32, 48),
            ),
            80,
        ),
        Packed((collective_layout.Part(5062, 600, 0),), 600),
        Large((collective_layout.Part(10, 5000), collective_layout.Part(5662, 1000))),
    )


def test_a_fence_names_what_differs() -> None:
    token = ArmToken("update-7", 3, 4)
    said = fence("c-1", token, [bucket_of(2, [10]), bucket_of(5, [20])], TUNING)
    assert fence_problem(encoded(said), said) == "" and len(encoded(said)) == 512
    other = fence("c-1", ArmToken("update-8", 3, 4), [bucket_of(2, [10])], TUNING)
    problem = fence_problem(encoded(other), said)
    assert "update 'update-8', expected 'update-7'" in problem and "buckets 1, expected 2" in problem
    assert "epoch" not in problem
    for junk in (bytes(512), os.urandom(512), b"[1]".ljust(512, b"\0")):
        assert "no fence" in fence_problem(junk, said)
    long = fence('"\\é' * 500, ArmToken("層" * 3000, 2**62, 2**62), [bucket_of(2**30, [1])], TUNING)
    assert fence_problem(encoded(long), long) == ""
    assert fence_problem(encoded({**long, "update": "層"[:0] + "x"}), long)


# -- channels in this process


class Cluster:
    """Members ``s0…`` and ``r0…``, each with a card and a library of its own, on one channel."""

    def __init__(self, senders: int = 1, receivers: int = 1, *, kernel: bool = True, tuning: Tuning = TUNING) -> None:
        self.senders = [f"s{i}" for i in range(senders)]
        self.receivers = [f"r{i}" for i in range(receivers)]
        self.members = self.senders + self.receivers
        self.runtimes = {m: TcpRuntime(StreamCard(kernel=kernel)) for m in self.members}
        for m, runtime in self.runtimes.items():
            runtime.uuid = f"card-{m}"
        self.transports = {m: TcpCollective(tuning, self.runtimes[m]) for m in self.members}
        self.channels: dict[str, CollectiveChannel] = {}
        self.pool = ThreadPoolExecutor(len(self.members))
        self.token = ArmToken("u1", 1, 1)

    def spec(self, **changes: Any) -> ChannelSpec:
        values: dict[str, Any] = {
            "channel_id": f"c-{os.urandom(8).hex()}",
            "group": "g",
            "transport": "tcp_collective",
            "key": bytes(32),
            "senders": tuple(self.senders),
            "receivers": tuple(self.receivers),
            "bucket_bytes": 1 << 20,
            "offers": {m: t.offer(m) for m, t in self.transports.items()},
        }
        return ChannelSpec(**(values | changes))

    def open(self, **changes: Any) -> None:
        spec = self.spec(**changes)
        for channel in self.channels.values():
            channel.close()
        for m in self.members:
            opener = self.transports[m].open_sender if m in self.senders else self.transports[m].open_receiver
            self.channels[m] = cast("CollectiveChannel", opener(spec, m))

    def sender(self, m: str = "s0") -> CollectiveSendChannel:
        return cast("CollectiveSendChannel", self.channels[m])

    def receiver(self, m: str = "r0") -> CollectiveReceiveChannel:
        return cast("CollectiveReceiveChannel", self.channels[m])

    def arm(self, buckets: Sequence[Bucket], deadline_s: float = 20, update: str = "", skew_s: float = 0.0) -> None:
        """``skew_s``: each member's deadline is so much later than the one's before it."""
        self.token = ArmToken(update or f"u-{os.urandom(4).hex()}", 1, 1)
        for n, m in enumerate(self.members):
            mine = [b for b in buckets if m == b.sender or m in b.receivers]
            self.channels[m].arm(self.token, mine, time.monotonic() + deadline_s + n * skew_s)

    def start(self, member: str, work: Callable[[], object]) -> Future[object]:
        return self.pool.submit(work)

    def send(self, m: str, buckets: Sequence[Bucket], spans: dict[int, Spans], flush: bool = True) -> Future[object]:
        def work() -> None:
            for b in buckets:
                if b.sender == m:
                    self.sender(m).send(b, spans[b.index])
            if flush:
                self.sender(m).flush()

        return self.pool.submit(work)

    def receive(
        self, m: str, buckets: Sequence[Bucket], spans: dict[int, Spans], ahead: bool = False
    ) -> Future[object]:
        mine = [b for b in buckets if m in b.receivers]

        def work() -> None:
            for b, following in itertools.zip_longest(mine, mine[1:]):
                if ahead and following is not None:
                    self.receiver(m).ahead(following, spans[following.index])
                self.receiver(m).receive(b, spans[b.index])

        return self.pool.submit(work)

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        self.pool.shutdown()
        for runtime in self.runtimes.values():
            for listener in runtime._listeners.values():
                listener.close()


@pytest.fixture
def cluster() -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(*counts: int, **options: Any) -> Cluster:
        made.append(Cluster(*counts, **options))
        made[-1].open()
        return made[-1]

    threads = threading.active_count()
    yield make
    for one in made:
        one.close()
    end = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < end:
        threading.Event().wait(0.01)
    assert threading.active_count() <= threads


def noise(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def pieces(whole: torch.Tensor, seed: int) -> Spans:
    """Views of ``whole``, cut anywhere; some of them empty."""
    rng = random.Random(seed)
    cuts = sorted(rng.randrange(whole.numel() + 1) for _ in range(rng.randrange(1, 9)))
    edges = [0, *cuts, whole.numel()]
    return [whole[a:b] for a, b in itertools.pairwise(edges)]


def whole_of(bucket: Bucket, whole: torch.Tensor) -> Spans:
    """As the plan cuts it: a span for each segment."""
    return list(whole.split([s.nbytes for s in bucket.segments]))


def moved(c: Cluster, buckets: Sequence[Bucket], seed: int = 1, ahead: bool = False) -> None:
    """One call, checked; spans cut anywhere at either end."""
    source = {b.index: noise(b.nbytes, seed + b.index) for b in buckets}
    target = {(m, b.index): torch.zeros(b.nbytes, dtype=torch.uint8) for b in buckets for m in b.receivers}
    c.arm(buckets)
    futures = [c.send(s, buckets, {i: pieces(t, i) for i, t in source.items()}) for s in c.senders]
    for r in c.receivers:
        spans = {i: pieces(t, 7 * i + seed) for (m, i), t in target.items() if m == r}
        futures.append(c.receive(r, buckets, spans, ahead))
    for f in futures:
        f.result(20)
    for (m, i), t in target.items():
        assert torch.equal(t, source[i]), (m, i)


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "copies"])
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_spans_cut_differently_at_every_member(cluster: Callable[..., Cluster], kernel: bool, ahead: bool) -> None:
    c = cluster(1, 2, kernel=kernel)
    buckets = [
        bucket_of(i, sizes, "s0", c.receivers) for i, sizes in enumerate([[3000, 20, 1], [50] * 40, [5000, 999]])
    ]
    for seed in (1, 2):
        moved(c, buckets, seed, ahead)


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_senders_and_any_receivers_never_block_each_other(
    cluster: Callable[..., Cluster], seed: int
) -> None:
    """Random plans over four senders and three receivers: broadcasts, sends to some, calls without some members."""
    rng = random.Random(seed)
    c = cluster(4, 3)
    at = 0
    for call in range(3):
        buckets = []
        for _ in range(rng.randrange(1, 14)):
            to = c.receivers if rng.random() < 0.5 else rng.sample(c.receivers, rng.randrange(1, 3))
            sizes = [rng.choice([1, 40, 700, 3000]) for _ in range(rng.randrange(1, 6))]
            at += rng.randrange(1, 4)
            buckets.append(bucket_of(at, sizes, rng.choice(c.senders), [r for r in c.receivers if r in to]))
        moved(c, buckets, seed + call, ahead=rng.random() < 0.7)


def test_what_is_announced_arrives_before_it_is_asked_for(cluster: Callable[..., Cluster]) -> None:
    c = cluster()
    buckets = [bucket_of(0, [700, 3000]), bucket_of(1, [800, 4000]), bucket_of(2, [10])]
    source = {b.index: whole_of(b, noise(b.nbytes, b.index)) for b in buckets}
    target = {b.index: whole_of(b, torch.zeros(b.nbytes, dtype=torch.uint8)) for b in buckets}
    c.arm(buckets)
    sent = c.send("s0", buckets, source)
    c.receiver().ahead(buckets[1], target[1])
    c.receiver().receive(buckets[0], target[0])
    end = time.monotonic() + 5
    while not torch.equal(torch.cat(target[1]), torch.cat(source[1])):
        assert time.monotonic() < end
        threading.Event().wait(0.005)
    assert not any(t.any() for t in target[2]), "nobody spoke of that one"
    assert c.receiver().bytes_landed == buckets[0].nbytes
    with pytest.raises(TransportError, match="another list of spans"):
        c.receiver().receive(buckets[1], list(target[1]))
    c.sender().abort("the test is over")
    with pytest.raises(ChannelAborted):
        sent.result(5)


def test_tables_are_made_once_for_a_list_of_spans(cluster: Callable[..., Cluster]) -> None:
    c = cluster()
    buckets = [bucket_of(i, [40] * 30) for i in range(4)]
    source = {b.index: whole_of(b, torch.empty(b.nbytes, dtype=torch.uint8)) for b in buckets}
    target = {b.index: whole_of(b, torch.empty(b.nbytes, dtype=torch.uint8)) for b in buckets}
    made = {}
    for seed in range(3):
        for spans in source.values():
            for span in spans:
                span.copy_(noise(span.numel(), seed))
        c.arm(buckets)
        futures = c.send("s0", buckets, source), c.receive("r0", buckets, target)
        for f in futures:
            f.result(10)
        assert all(torch.equal(torch.cat(source[i]), torch.cat(target[i])) for i in source)
        made[seed] = c.runtimes["s0"].card.tables, c.runtimes["r0"].card.tables
    assert made[0] == made[1] == made[2]
    assert len(c.sender()._programs) == len(c.receiver()._programs) == 4
    moved(c, buckets)
    assert c.runtimes["s0"].card.tables > made[2][0]


def test_lists_that_cannot_come_again_are_let_go_of(cluster: Callable[..., Cluster]) -> None:
    c = cluster()
    buckets = [bucket_of(i, [40] * 3) for i in range(2)]
    moved(c, buckets)  # its lists are gone by now
    c.sender().flush()
    assert c.sender()._programs == {}


def test_flush_waits_until_every_receiver_has_everything(cluster: Callable[..., Cluster]) -> None:
    """The last operation may be complete at the sender long before: then the acknowledgement is what it waits for."""
    c = cluster(1, 2)
    buckets = [bucket_of(0, [100], "s0", c.receivers), bucket_of(1, [100], "s0", ["r1"])]
    spans = {m: {b.index: [torch.zeros(b.nbytes, dtype=torch.uint8)] for b in buckets} for m in c.members}
    c.arm(buckets)
    sent = c.send("s0", buckets, spans["s0"])
    for future in [c.receive("r0", buckets, spans["r0"]), c.receive("r1", buckets[:1], spans["r1"])]:
        future.result(5)
    with pytest.raises(TimeoutError):
        sent.result(0.3)
    c.receive("r1", buckets[1:], spans["r1"]).result(5)
    sent.result(5)
    kinds = {m: made.groups for m, (made,) in ((m, c.runtimes[m].made) for m in c.members)}
    assert kinds == {
        "s0": ["broadcast", "broadcast", "exchange", "exchange", "reduce", "exchange"],
        "r0": ["broadcast", "broadcast", "reduce"],
        "r1": ["broadcast", "broadcast", "exchange", "exchange", "reduce", "exchange"],
    }


def test_flush_in_mid_call_waits_for_the_device_alone(cluster: Callable[..., Cluster]) -> None:
    c = cluster()
    buckets = [bucket_of(i, [100]) for i in range(3)]
    spans = {b.index: [torch.zeros(b.nbytes, dtype=torch.uint8)] for b in buckets}
    c.arm(buckets)
    received = c.receive("r0", buckets, {i: [torch.ones(100, dtype=torch.uint8)] for i in spans})
    for b in buckets:
        c.sender().send(b, spans[b.index])
        c.sender().flush()
    received.result(5)
    c.sender().flush()


# -- what is refused


def test_one_gpu_twice_is_refused_with_the_advice(cluster: Callable[..., Cluster]) -> None:
    c = cluster(1, 2)
    c.runtimes["r1"].uuid = c.runtimes["s0"].uuid
    spec = c.spec()
    for m in c.members:
        opener = c.transports[m].open_sender if m == "s0" else c.transports[m].open_receiver
        with pytest.raises(TransportError, match=r"'s0' and 'r1' use one GPU \(card-s0\).*use cuda_ipc") as caught:
            opener(spec, m)
        assert caught.value.peers == ("s0", "r1")


def test_versions_offers_and_ids_that_do_not_fit_are_refused(cluster: Callable[..., Cluster]) -> None:
    c = cluster()
    offers = dict(c.spec().offers)

    def refused(match: str, **changes: Any) -> None:
        with pytest.raises(TransportError, match=match):
            c.transports["r0"].open_receiver(c.spec(**changes), "r0")

    other = Rendezvous(transport="nccl", nccl=NcclRendezvous(device_uuid="card-x", version=22703))
    refused(r"'s0' 2\.28\.9, 'r0' 2\.27\.3: install the same torch", offers={**offers, "r0": other})
    refused("no offer of a GPU from r0", offers={"s0": offers["s0"]})
    refused(r"'s0' offered 4 unique id\(s\), and this is number 4", ordinal=4)
    refused("names a member twice", receivers=("r0", "s0"), senders=("s0",))
    with pytest.raises(TransportError, match=r"'s0' is not a member of channel .* in that role"):
        c.transports["s0"].open_receiver(c.spec(), "s0")


def test_ids_are_offered_until_they_are_used_and_used_once(cluster: Callable[..., Cluster]) -> None:
    c = cluster()
    first = list(c.transports["s0"].offer("s0").nccl.unique_ids)
    assert len(set(first)) == 4 and all(len(i) == 128 for i in first)
    assert list(c.transports["s0"].offer("rank/0").nccl.unique_ids) == first
    for other in ("rank/1", "replica-a/0"):
        assert not c.transports["s0"].offer(other).nccl.unique_ids
    spec = c.spec()
    c.open(offers=spec.offers)
    moved(c, [bucket_of(0, [10])])
    assert list(c.transports["s0"].offer("s0").nccl.unique_ids)[:3] == first[1:]
    with pytest.raises(TransportError, match="unique id was used before"):
        c.transports["r0"].open_receiver(spec, "r0")
    c.transports["r0"].open_receiver(c.spec(offers=spec.offers, ordinal=1), "r0").close()
    left = list(c.transports["s0"].offer("s0").nccl.unique_ids)
    waits = c.transports["s0"].open_sender(c.spec(offers=c.spec().offers), "s0")
    assert list(c.transports["s0"].offer("s0").nccl.unique_ids) == left, "it is bound, and may be used yet"
    waits.close()
    assert left[0] not in c.transports["s0"].offer("s0").nccl.unique_ids, "others may have used it, and wait no more"


def test_out_of_order_unarmed_and_ill_cut_buckets_are_refused_and_harmless(cluster: Callable[..., Cluster]) -> None:
    c = cluster()
    buckets = [bucket_of(3, [100]), bucket_of(5, [100])]
    spans = {b.index: [noise(100, b.index)] for b in buckets}
    target = {b.index: [torch.zeros(100, dtype=torch.uint8)] for b in buckets}
    with pytest.raises(TransportError, match="never armed"):
        c.sender().send(buckets[0], spans[3])
    soon = time.monotonic() + 10
    for odd, match in (
        (buckets[::-1], "bucket 3 comes after bucket 5"),
        ([bucket_of(1, [1], "s9")], "bucket 1 is not 's0''s on this channel"),
        ([bucket_of(1, [1], "s0", ["r0", "r9"])], "bucket 1 is not 's0''s"),
    ):
        with pytest.raises(TransportError, match=match):
            c.sender().arm(c.token, odd, soon)
    c.arm(buckets)
    with pytest.raises(TransportError, match="bucket 5: bucket 3 is next"):
        c.sender().send(buckets[1], spans[5])
    received = c.receive("r0", buckets, target)
    for bad, match in (
        ([spans[3][0][:50]], "has 100 bytes, its spans 50"),
        ([spans[3][0].view(torch.int8)], "span 0: expected contiguous 1-D uint8 on cpu, found torch.int8"),
        ([noise(200, 1)[::2]], "span 0: expected contiguous"),
    ):
        with pytest.raises(TransportError, match=match):
            c.sender().send(buckets[0], bad)
    c.send("s0", buckets, spans).result(10)
    received.result(10)
    assert all(torch.equal(spans[i][0], target[i][0]) for i in spans)
    with pytest.raises(TransportError, match="bucket 3: none is next"):
        c.sender().send(buckets[0], spans[3])


# -- faults


def ended(future: Future[object], since: float, kind: type[Exception]) -> Any:
    with pytest.raises(kind) as caught:
        future.result(10)
    assert time.monotonic() - since < 1.0
    return caught.value


def usable(c: Cluster) -> None:
    """After a fault: every member closes in time, and a new channel works."""
    for channel in c.channels.values():
        start = time.monotonic()
        channel.close()
        assert time.monotonic() - start < 1
    for made in (made for runtime in c.runtimes.values() for made in runtime.made):
        assert made._aborted.is_set()
    c.open()
    moved(c, [bucket_of(0, [10, 2000], "s0", c.receivers)])


@pytest.mark.alone
@pytest.mark.parametrize("skew_s", [0.0, 0.15], ids=["together", "one sooner"])
def test_a_peer_that_never_comes_ends_the_others_by_the_deadline(
    cluster: Callable[..., Cluster], skew_s: float
) -> None:
    c = cluster(1, 2)
    buckets = [bucket_of(7, [100], "s0", c.receivers)]
    spans = {7: [torch.zeros(100, dtype=torch.uint8)]}
    c.arm(buckets, deadline_s=0.5, skew_s=skew_s)
    end = time.monotonic() + 0.5
    futures = {"s0": c.send("s0", buckets, spans), "r0": c.receive("r0", buckets, spans)}
    for m, future in futures.items():
        error = ended(future, end, ChannelTimeout)
        assert error.bucket == 7 and set(error.peers) == set(c.members) - {m} and "to connect" in str(error)
    usable(c)


@pytest.mark.alone
def test_an_abort_ends_the_connecting(cluster: Callable[..., Cluster]) -> None:
    c = cluster()
    buckets = [bucket_of(0, [100])]
    c.arm(buckets)
    sent = c.send("s0", buckets, {0: [torch.zeros(100, dtype=torch.uint8)]})
    threading.Event().wait(0.1)
    since = time.monotonic()
    c.sender().abort("enough")
    assert time.monotonic() - since < 0.1
    assert "enough" in str(ended(sent, since, ChannelAborted))
    c.receiver().abort("it too")
    usable(c)


def test_a_member_without_buckets_connects_when_it_is_armed(cluster: Callable[..., Cluster]) -> None:
    c = cluster(2, 2)
    moved(c, [bucket_of(0, [100], "s0", ["r0"])])
    moved(c, [bucket_of(0, [100], "s1", c.receivers)])


@pytest.mark.alone
def test_all_abort_in_mid_broadcast_and_a_new_channel_works(cluster: Callable[..., Cluster]) -> None:
    c = cluster(1, 2)
    buckets = [bucket_of(i, [5 << 20], "s0", c.receivers) for i in range(8)]
    source = {b.index: [torch.zeros(b.nbytes, dtype=torch.uint8)] for b in buckets}
    c.arm(buckets)
    sent = c.send("s0", buckets, source)
    target = {i: [torch.ones_like(t[0])] for i, t in source.items()}
    got = c.receive("r0", buckets, target)
    c.receive("r1", buckets[:1], {0: [torch.ones(5 << 20, dtype=torch.uint8)]}).result(10)
    while not c.receiver().bytes_landed:
        threading.Event().wait(0.005)
    assert c.receiver().bytes_landed < 40 << 20 and not sent.done() and not got.done()
    since = time.monotonic()
    for channel in c.channels.values():
        channel.abort("the coordinator says so")
    assert time.monotonic() - since < 0.1
    for future in (sent, got):
        assert "the coordinator says so" in str(ended(future, since, ChannelAborted))
    assert all(c.channels[m]._drained.is_set() for m in ("s0", "r0")), (
        "nothing runs any more when the calls have raised"
    )
    assert c.channels["r1"]._drained.wait(5), "who was in no call is aborted by a thread"
    written = sum(b.nbytes for b in buckets if not target[b.index][0].all())
    assert c.receiver().bytes_landed >= written, "what was cut off has been written in part"
    usable(c)


@pytest.mark.alone
def test_what_the_library_notices_is_a_lost_peer(cluster: Callable[..., Cluster]) -> None:
    c = cluster(1, 2)
    for runtime in c.runtimes.values():
        runtime.tells = True
    buckets = [bucket_of(i, [100], "s0", c.receivers) for i in range(2)]
    spans = {m: {b.index: [torch.zeros(100, dtype=torch.uint8)] for b in buckets} for m in c.members}
    c.arm(buckets)
    sent = c.send("s0", buckets[:1], spans["s0"], flush=False)
    for future in [c.receive(r, buckets[:1], spans[r]) for r in c.receivers]:
        future.result(5)
    sent.result(5)
    waits = c.receive("r0", buckets[1:], spans["r0"])
    threading.Event().wait(0.05)
    since = time.monotonic()
    c.channels["s0"].abort("it dies, say")
    error = ended(waits, since, PeerLost)
    assert error.peers == ("s0", "r1") and error.bucket == 1 and "remote error" in str(error)
    c.channels["r1"].abort("told")
    usable(c)


@pytest.mark.alone
def test_an_unfinished_call_ends_the_channel(cluster: Callable[..., Cluster]) -> None:
    c = cluster()
    buckets = [bucket_of(i, [100]) for i in range(3)]
    c.arm(buckets)
    c.arm(buckets)  # nothing of it was moved: the library was told nothing
    spans = {b.index: [torch.zeros(100, dtype=torch.uint8)] for b in buckets}
    futures = c.send("s0", buckets[:2], spans, flush=False), c.receive("r0", buckets[:2], spans)
    for future in futures:
        future.result(5)
    for channel in c.channels.values():
        with pytest.raises(ChannelAborted, match="unfinished at bucket 2"):
            channel.arm(c.token, buckets, time.monotonic() + 5)
    usable(c)


@pytest.mark.alone
def test_members_of_different_updates_move_nothing(cluster: Callable[..., Cluster]) -> None:
    c = cluster()
    bucket = bucket_of(4, [100, 3000])
    target = whole_of(bucket, torch.zeros(bucket.nbytes, dtype=torch.uint8))
    c.sender().arm(ArmToken("old", 1, 1), [bucket], time.monotonic() + 0.7)
    c.receiver().arm(ArmToken("new", 1, 2), [bucket], time.monotonic() + 0.7)
    end = time.monotonic() + 0.7
    sent = c.send("s0", [bucket], {4: whole_of(bucket, noise(bucket.nbytes, 1))})
    error = ended(c.receive("r0", [bucket], {4: target}), end, TransportError)
    assert "update 'old', expected 'new'; generation 1, expected 2" in str(error) and error.peers == ("s0",)
    ended(sent, end, ChannelTimeout)
    assert not any(t.any() for t in target)
    usable(c)


@pytest.mark.alone
def test_dropping_a_member_ends_the_channel(cluster: Callable[..., Cluster]) -> None:
    c = cluster(1, 2)
    c.sender().drop("r1")
    with pytest.raises(ChannelAborted, match="r1 was left out"):
        c.sender().arm(c.token, [], time.monotonic() + 5)
    usable(c)


def _wait(event: threading.Event) -> None:
    event.wait()


@pytest.mark.alone
def test_a_device_that_does_not_stop_keeps_its_memory(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "_CLOSE_S", 0.2)
    monkeypatch.setattr(collective, "_DRAIN_S", 0.1)
    c = cluster()
    moved(c, [bucket_of(0, [10])])
    card = c.runtimes["r0"].card
    stuck = threading.Event()
    card.queue(c.receiver()._lanes.copy, partial(_wait, stuck))
    start = time.monotonic()
    c.receiver().abort("now")
    with pytest.raises(ChannelAborted):
        c.receiver().arm(c.token, [], time.monotonic() + 5)
    c.receiver().close()
    assert time.monotonic() - start < 1 and c.receiver() in collective._abandoned
    stuck.set()
    c.receiver()._drained.wait(5)
    collective._abandoned.remove(c.receiver())
    c.receiver()._lanes.close()


def test_close_lets_the_last_acknowledgement_out(cluster: Callable[..., Cluster]) -> None:
    """A receiver that leaves at once does not leave a sender waiting that has not come to the acknowledgement yet."""
    c = cluster()
    bucket = bucket_of(0, [100])
    spans = [torch.zeros(100, dtype=torch.uint8)]
    c.arm([bucket])
    received = c.receive("r0", [bucket], {0: [torch.ones(100, dtype=torch.uint8)]})
    reduce = TcpCommunicator.reduce
    held = threading.Event()

    def late(self: TcpCommunicator, byte: torch.Tensor) -> None:
        if 0 not in self._peers:
            held.wait(5)
        reduce(self, byte)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TcpCommunicator, "reduce", late)
        sent = c.send("s0", [bucket], {0: spans})
        received.result(5)
        closing = c.pool.submit(c.receiver().close)
        held.set()
        closing.result(5)
        sent.result(5)
