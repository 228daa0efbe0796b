"""Where bytes go and what is hashed of them: replayed spans, the way through host memory, launches, read-back.

A device's memory is played by the host's: ``card`` says that the host's memory is hashed by launches.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import pytest
import torch

from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.placement import Piece, Placement, full_box, full_placement
from weightplane.controlplane.core.plan import Bucket, Plan
from weightplane.controlplane.core.planner import make_plan
from weightplane.controlplane.core.states import Verify
from weightplane.controlplane.core.verify import sampled_regions
from weightplane.inference_agent import receipts, regions
from weightplane.inference_agent.engines.base import EngineError, LocalTensors
from weightplane.inference_agent.receipts import Ledger, RegionMemory, Sink, WorkerPlan
from weightplane.transports import digest_cuda
from weightplane.transports.buckets import SourceSpans
from weightplane.transports.digest import digest_spans, digest_tensor
from weightplane.transports.dtypes import as_bytes


class Launch:
    """A ``RegionGroup`` that hashes by the CPU, at its start: what lands later is too late."""

    def __init__(self, device: torch.device, items: Sequence[tuple[int, torch.Tensor]]) -> None:
        self.keys = [k for k, _ in items]
        self._flats = [t for _, t in items]
        self._values: list[int] = []
        self._running = False
        launches.append(self)

    def part(self, keys: Container[int]) -> Launch | None:
        pairs = [(k, t) for k, t in zip(self.keys, self._flats, strict=True) if k in keys]
        return Launch(torch.device("cpu"), pairs) if pairs else None

    def start(self) -> None:
        assert not self._running, "started twice"
        self._running = True
        self._values = [digest_spans([t]) for t in self._flats]

    def values(self) -> list[int]:
        assert self._running, "not started"
        self._running = False
        return self._values


launches: list[Launch] = []


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    launches.clear()
    monkeypatch.setattr(digest_cuda, "on_device", lambda t: t.is_contiguous())
    monkeypatch.setattr(digest_cuda, "RegionGroup", Launch)
    monkeypatch.setattr(regions, "_LEAST", 500)
    monkeypatch.setattr(regions, "_MOST", 500)
    monkeypatch.setattr(receipts, "digest_tensors", lambda t: pytest.fail("hashed by the span"))
    return launches


class Worker:
    """A worker of ``n`` tensors of 64 floats, and the trainer's bytes for it."""

    def __init__(
        self, targets: dict[int, torch.Tensor] | None = None, n: int = 12, bucket_bytes: int = 600, senders: int = 1
    ) -> None:
        metas = [TensorMeta(f"t{i}", "float32", (8, 8)) for i in range(n)]
        metas.append(TensorMeta("tied", "float32", (8, 8), "t0"))
        self.manifest = Manifest.of(metas)
        rows = 8 // senders
        held = [
            full_placement("rank/0", self.manifest)
            if senders == 1
            else Placement.of(f"rank/{s}", (Piece(i, ((s * rows, (s + 1) * rows), (0, 8))) for i in range(n)))
            for s in range(senders)
        ]
        self.plan: Plan = make_plan(self.manifest, held, [full_placement("r/0", self.manifest)], bucket_bytes)
        self.values = [torch.randn(8, 8) for _ in range(n)]
        made = {i: torch.zeros(8, 8) for i in range(n)} | (targets or {})
        made.setdefault(n, made[0])
        self.targets: LocalTensors = {i: (t, full_box((8, 8))) for i, t in made.items()}
        self.share = WorkerPlan(self.plan, self.manifest, "r/0")

    def bytes_of(self, bucket: Bucket) -> list[torch.Tensor]:
        holds = {i: (t, full_box((8, 8))) for i, t in enumerate(self.values)}
        spans = SourceSpans(self.plan, self.manifest, bucket.sender, holds)
        return spans.spans(bucket)

    def take(self, sink: Sink, ledger: Ledger | None, bucket: Bucket) -> list[torch.Tensor]:
        spans, memory = sink.spans(bucket)
        for span, data in zip(spans, self.bytes_of(bucket), strict=True):
            span.copy_(data)
        if any(s.is_cuda for s in spans):
            torch.cuda.synchronize()  # as every transport does
        sink.complete(bucket)
        if ledger is not None:
            ledger.feed(bucket, spans, memory)
        return spans

    def check(self) -> None:
        for i, (t, _) in self.targets.items():
            assert torch.equal(t, self.values[i if i < len(self.values) else 0]), i

    @property
    def digests(self) -> dict[int, int]:
        out = {}
        for i in self.share.regions:
            r = self.plan.regions[i]
            out[i] = digest_tensor(self.values[r.tensor][r.box[0][0] : r.box[0][1]])
        return out


def ledger(w: Worker, sink: Sink | None, verify: Verify = Verify.FULL, as_they_come: bool = True) -> Ledger:
    return Ledger(w.share, "u1", verify, as_they_come, sink)


# --- the sink


def test_the_same_lists_come_again_and_scattered_ones_anew() -> None:
    w = Worker({5: torch.zeros(8, 8).t()})
    sink = Sink(w.share, w.targets)
    assert not any(map(sink.lasting, w.share.buckets)), "nothing is known yet"
    first = [w.take(sink, None, b) for b in w.share.buckets]
    w.check()
    for v in w.values:
        v.mul_(2)
    second = [w.take(sink, None, b) for b in w.share.buckets]
    w.check()
    assert [a is b for a, b in zip(first, second, strict=True)] == [True, True, False, True, True, True]
    ahead = [sink.lasting(b) for b in w.share.buckets]
    assert [a is b for a, b in zip(ahead, second, strict=True)] == [True, True, False, True, True, True]
    assert ahead[2] is None


@pytest.mark.parametrize("apart", [False, True], ids=["tied", "tied-apart"])
@pytest.mark.parametrize("verify", [Verify.FULL, Verify.SAMPLED, Verify.OFF])
def test_targets_that_the_transport_cannot_write_are_reached_through_one_bucket_of_host_memory(
    apart: bool, verify: Verify
) -> None:
    targets = {5: torch.zeros(8, 8).t()} | ({12: torch.zeros(8, 8)} if apart else {})
    w = Worker(targets)
    sink = Sink(w.share, w.targets, frozenset({"some-card"}))
    blocks, lists = set(), []
    for _ in range(2):
        took = ledger(w, sink, verify)
        spans = [w.take(sink, took, b) for b in w.share.buckets]
        lists.append([id(s) for s in spans])
        blocks |= {(s.untyped_storage().data_ptr(), s.untyped_storage().nbytes()) for some in spans for s in some}
        w.check()
        wanted = w.digests if verify is Verify.FULL else {i: w.digests[i] for i in took.share.hashed("u1", verify)}
        assert took.digests == wanted and not took.missing()
        for v in w.values:
            v.add_(1)
    assert len(blocks) == 1 and blocks.pop()[1] == max(b.nbytes for b in w.share.buckets)
    assert lists[0] == lists[1], "the transport knows these lists"
    assert not any(map(sink.lasting, w.share.buckets)), "buckets share that memory: never two of them at once"


def test_what_the_transport_can_write_is_not_bounced() -> None:
    w = Worker()
    sink = Sink(w.share, w.targets, frozenset({"cpu"}))
    spans = w.take(sink, None, w.share.buckets[0])
    assert spans[0].data_ptr() == w.targets[0][0].data_ptr()


def test_a_bounce_into_inference_tensors() -> None:
    with torch.inference_mode():
        targets = {i: torch.zeros(8, 8) for i in range(12)}
    w = Worker(targets)
    sink = Sink(w.share, w.targets, frozenset())
    for b in w.share.buckets:
        w.take(sink, None, b)
    w.check()


# --- the ledger


@pytest.mark.parametrize("bucket_bytes", [600, 100, 64])
def test_counts_order_and_what_is_missing(bucket_bytes: int) -> None:
    w = Worker(bucket_bytes=bucket_bytes)
    sink = Sink(w.share, w.targets)
    took = ledger(w, sink)
    buckets = w.share.buckets
    assert len(took.missing()) == 12 and took.nbytes == took.elements == 0
    w.take(sink, took, buckets[0])
    with pytest.raises(EngineError, match="bytes are in place and bucket 0 goes on at 0"):
        took.feed(buckets[0], *sink.spans(buckets[0]))
    if bucket_bytes < 256:
        with pytest.raises(EngineError, match="tensor 't"):
            took.feed(buckets[2], *sink.spans(buckets[2]))
    for b in buckets[1:-1]:
        w.take(sink, took, b)
    assert took.missing() and took.nbytes == w.share.nbytes - buckets[-1].nbytes
    assert took.elements == took.nbytes // 4
    w.take(sink, took, buckets[-1])
    assert not took.missing() and took.nbytes == w.share.nbytes == 12 * 256
    assert took.elements == w.share.elements == 12 * 64
    assert took.digests == w.digests
    assert list(took.packed()) == list(w.digests.values())


def test_buckets_of_whole_regions_may_come_in_any_order() -> None:
    w = Worker()
    sink = Sink(w.share, w.targets)
    took = ledger(w, sink)
    for b in reversed(w.share.buckets):
        w.take(sink, took, b)
    assert took.digests == w.digests and not took.missing()


@pytest.mark.parametrize("bucket_bytes", [2000, 600, 100])
def test_what_lands_on_a_card_is_hashed_there_once_it_is_whole(card: list[Launch], bucket_bytes: int) -> None:
    w = Worker(bucket_bytes=bucket_bytes)
    sink = Sink(w.share, w.targets)
    for _ in range(2):
        took = ledger(w, sink)
        for b in w.share.buckets:
            w.take(sink, took, b)
        assert took.digests == w.digests == took.digests
        for v in w.values:
            v.add_(1)
    assert len(card) == 6 and [k for g in card for k in g.keys] == list(range(12)), "launches are made once"


def test_a_launch_whose_bytes_did_not_all_land_says_nothing(card: list[Launch]) -> None:
    w = Worker()
    sink = Sink(w.share, w.targets)
    for _ in range(2):
        took = ledger(w, sink)
        for b in w.share.buckets[:-1]:
            w.take(sink, took, b)
        landed = [i for i, d in w.digests.items() if w.manifest.tensors[i].name not in took.missing()]
        assert took.digests == {i: w.digests[i] for i in landed} and len(landed) == 10
        assert list(took.packed())[-2:] == [0, 0]


def test_a_sample_on_a_card(card: list[Launch]) -> None:
    w = Worker(n=40)
    sink = Sink(w.share, w.targets)
    took = ledger(w, sink, Verify.SAMPLED)
    for b in w.share.buckets:
        w.take(sink, took, b)
    picked = sampled_regions("u1", 40)
    assert took.digests == {i: w.digests[i] for i in picked} and len(picked) == 16
    assert [v != 0 for v in took.packed()] == [i in picked for i in range(40)]


def test_several_senders_of_one_piece_land_in_parts_of_it(card: list[Launch]) -> None:
    w = Worker(senders=2)
    sink = Sink(w.share, w.targets)
    took = ledger(w, sink)
    for b in w.share.buckets:
        w.take(sink, took, b)
    assert len(w.share.regions) == 24 and took.digests == w.digests
    w.check()


# --- live memory


@pytest.mark.parametrize("on_card", [False, True])
@pytest.mark.parametrize("as_they_come", [False, True])
def test_live_memory_is_read_under_every_name(
    on_card: bool, as_they_come: bool, request: pytest.FixtureRequest
) -> None:
    if on_card:
        request.getfixturevalue("card")
    w = Worker({12: torch.zeros(8, 8), 7: torch.zeros(8, 8).t()})
    sink = Sink(w.share, w.targets)
    live = RegionMemory(w.share, w.targets)
    took = Ledger(w.share, "u1", Verify.FULL, as_they_come, None)
    if on_card:
        as_they_come = False
        took = Ledger(w.share, "u1", Verify.FULL, as_they_come)
    for b in w.share.buckets:
        w.take(sink, took, b)
    took.read_back(live)
    assert took.digests == w.digests
    as_bytes(w.targets[12][0])[3] ^= 1
    with pytest.raises(EngineError, match="'t0'"):
        took.read_back(live)
    as_bytes(w.targets[12][0])[3] ^= 1
    w.targets[4][0][0, 0] += 1
    again = Ledger(w.share, "u2", Verify.FULL, False)
    again.read_back(live)
    assert {i for i, d in again.digests.items() if d != w.digests[i]} == {4}
    with pytest.raises(EngineError, match=r"1 tensor\(s\): 't4'"):
        took.read_back(live)


def test_one_memory_under_two_names_is_read_once(card: list[Launch]) -> None:
    w = Worker()
    found, others = RegionMemory(w.share, w.targets).digests(w.share.regions)
    assert found == {i: digest_tensor(w.targets[i][0]) for i in w.share.regions} and not others
    assert sum(len(g.keys) for g in card) == 12


def test_a_sample_of_live_memory(card: list[Launch]) -> None:
    w = Worker(n=40)
    live = RegionMemory(w.share, w.targets)
    took = ledger(w, None, Verify.SAMPLED, as_they_come=False)
    took.read_back(live)
    assert sorted(took.digests) == sampled_regions("u1", 40)


def test_a_region_that_is_held_nowhere_is_named() -> None:
    w = Worker()
    live = RegionMemory(w.share, {i: t for i, t in w.targets.items() if i != 3})
    with pytest.raises(EngineError, match="'t3'"):
        ledger(w, None, as_they_come=False).read_back(live)


def test_live_memory_that_nobody_else_writes_is_read_back_beside_the_wire_and_not_again(
    card: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    w = Worker()
    sink, live = Sink(w.share, w.targets), RegionMemory(w.share, w.targets)
    monkeypatch.setattr(RegionMemory, "digests", lambda self, wanted: pytest.fail("read again"))
    for verify in (Verify.FULL, Verify.SAMPLED):
        took = Ledger(w.share, "u1", verify, False, sink, untouched=True)
        for b in w.share.buckets:
            w.take(sink, took, b)
        took.read_back(live)
        assert took.digests == {i: d for i, d in w.digests.items() if i in w.share.hashed("u1", verify)}


@pytest.mark.parametrize("why", ["written", "second-home", "overlap", "strided", "short"])
def test_it_is_read_at_the_end_where_that_could_tell_more(card: list[Launch], why: str) -> None:
    targets: dict[int, torch.Tensor] = {}
    if why == "second-home":
        targets = {12: torch.zeros(8, 8)}
    elif why == "strided":
        targets = {3: torch.zeros(8, 8).t()}
    elif why == "overlap":
        both = torch.zeros(12, 8)
        targets = {3: both[:8], 4: both[4:]}
    w = Worker(targets)
    sink, live = Sink(w.share, w.targets), RegionMemory(w.share, w.targets)
    took = Ledger(w.share, "u1", Verify.FULL, False, sink, untouched=why != "written")
    for b in w.share.buckets[: -1 if why == "short" else None]:
        w.take(sink, took, b)
    as_bytes(w.targets[5][0])[0] ^= 1
    if why == "short":
        with pytest.raises(EngineError, match="'t5'"):
            took.read_back(live)
        return
    took.read_back(live)
    assert took.digests[5] != w.digests[5], "what is there now"
    assert (took.digests[3] != w.digests[3]) is (why == "overlap")
