"""Lock step: what is gathered when, what is kept how long, and what is hashed once."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.placement import Piece, Placement, full_box, full_placement
from weightplane.controlplane.core.plan import Plan
from weightplane.controlplane.core.planner import make_plan
from weightplane.trainer_agent.hashing import LaneHasher, RegionDigests
from weightplane.trainer_agent.naming import SourceError
from weightplane.trainer_agent.sources import StateDictSource
from weightplane.trainer_agent.stop import Stop
from weightplane.trainer_agent.supply import DirectSupply, GatherSupply
from weightplane.transports.buckets import SourceSpans, buckets_from
from weightplane.transports.digest import digest_tensor

STATE = {f"t{i}": torch.randn(16, 4) for i in range(12)}
MANIFEST = StateDictSource(STATE).manifest()


def plan(receiver: Placement | None = None, bucket_bytes: int = 300, manifest: Manifest = MANIFEST) -> Plan:
    sender = full_placement("rank/0", manifest)
    return make_plan(manifest, [sender], [receiver or full_placement("r/0", manifest)], bucket_bytes)


class Lanes:
    """Threads that take, 'send' and release every bucket, and write down what overlapped."""

    def __init__(self, supply: GatherSupply, work: list, pace: list[float]) -> None:
        self.moving = 0
        self.overlaps = 0
        self.taken: list[list[int]] = [[] for _ in work]
        self.errors: list[BaseException] = []
        self._supply, self._work, self._lock = supply, work, threading.Lock()
        self.threads = [threading.Thread(target=self._run, args=(i, p)) for i, p in enumerate(pace)]
        for t in self.threads:
            t.start()

    def _run(self, lane: int, pace: float) -> None:
        try:
            for bucket in self._work[lane][1]:
                got = self._supply.take(lane, bucket)
                for i, local in got.items():
                    assert torch.equal(local[0], STATE[f"t{i}"])
                self.taken[lane].extend(got)
                with self._lock:
                    self.moving += 1
                time.sleep(pace)
                with self._lock:
                    self.moving -= 1
                self._supply.done(lane, bucket)
        except BaseException as e:
            self.errors.append(e)
        finally:
            self._supply.leave(lane)

    def join(self) -> None:
        for t in self.threads:
            t.join(10)
            assert not t.is_alive()


def pump(supply: GatherSupply, lanes: Lanes) -> int:
    """The iterating thread; the largest window it saw."""
    largest = 0
    for i in range(len(MANIFEST)):
        if lanes.moving:
            lanes.overlaps += 1
        supply.offer(i, (STATE[f"t{i}"], full_box((16, 4))))
        largest = max(largest, supply._bytes)
        assert supply.wait_wanted(time.monotonic() + 10)
    supply.exhaust()
    return largest


@pytest.mark.parametrize("pace", [[0.001, 0.001], [0.0, 0.004], [0.004, 0.0]])
def test_without_room_nothing_is_gathered_while_a_lane_moves_bytes(pace: list[float]) -> None:
    plans = [plan(), plan(bucket_bytes=700)]
    work = [(p, buckets_from(p, "rank/0")) for p in plans]
    supply = GatherSupply(work, Stop(), 0)
    lanes = Lanes(supply, work, pace)
    pump(supply, lanes)
    lanes.join()
    assert not lanes.errors and lanes.overlaps == 0
    assert all(sorted(set(t)) == list(range(12)) for t in lanes.taken)
    assert not supply._window and supply._bytes == 0


def test_with_room_gathering_overlaps_and_stays_within_it() -> None:
    work = [(plan(), buckets_from(plan(), "rank/0"))]
    supply = GatherSupply(work, Stop(), 3 * 256)
    lanes = Lanes(supply, work, [0.003])
    assert pump(supply, lanes) <= 4 * 256
    lanes.join()
    assert not lanes.errors and lanes.overlaps > 0


def test_a_lane_that_leaves_holds_nobody_up() -> None:
    plans = [plan(), plan()]
    work = [(p, buckets_from(p, "rank/0")) for p in plans]
    supply = GatherSupply(work, Stop(), 0)
    supply.leave(1)
    lanes = Lanes(supply, work[:1], [0.0])
    pump(supply, lanes)
    lanes.join()
    assert not lanes.errors and not supply._window


def test_a_tensor_that_never_comes_is_an_error_not_a_wait() -> None:
    work = [(plan(), buckets_from(plan(), "rank/0"))]
    supply = GatherSupply(work, Stop(), 0)
    lanes = Lanes(supply, work, [0.0])
    supply.exhaust()
    lanes.join()
    assert isinstance(lanes.errors[0], SourceError) and "was not given" in str(lanes.errors[0])


def test_a_reason_to_stop_wakes_everyone() -> None:
    stop = Stop()
    work = [(plan(), buckets_from(plan(), "rank/0"))]
    supply = GatherSupply(work, stop, 0)
    lanes = Lanes(supply, work, [0.0])
    time.sleep(0.05)
    stop.set(KeyError("over"))
    lanes.join()
    assert isinstance(lanes.errors[0], KeyError)
    with pytest.raises(KeyError):
        supply.wait_wanted(time.monotonic() + 5)


def test_casts_are_made_once_a_lane_and_dropped_after_their_last_bucket() -> None:
    asked: list[int] = []

    class Counting(StateDictSource):
        def tensor(self, index: int):
            asked.append(index)
            return super().tensor(index)

    source = Counting({"big": torch.randn(64, 64), "small": torch.randn(3)}, cast=torch.float16)
    manifest = source.manifest()
    p = plan(full_placement("r/0", manifest), 1000, manifest)
    supply = DirectSupply(source, [(p, p.buckets)])
    for bucket in p.buckets:
        for tensor, _ in supply.take(0, bucket).values():
            assert isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float16
        supply.done(0, bucket)
    assert sorted(asked) == [0, 1] and not supply._cast[0]


def test_each_region_is_hashed_once_over_all_plans_and_equals_the_tensors_digest() -> None:
    halves = Placement.of("r/1", (Piece(i, ((0, 8), (0, 4))) for i in range(12)))
    plans = [plan(), plan(bucket_bytes=64), plan(halves)]
    digests = RegionDigests(plans, "rank/0", share=True)
    for lane, p in enumerate(plans):
        hasher = LaneHasher(lane, p, digests)
        spans = SourceSpans(p, MANIFEST, "rank/0", lambda i: (STATE[f"t{i}"], full_box((16, 4))), keep=True)
        for bucket in p.buckets:
            hasher.feed(bucket, spans.spans(bucket))
        hasher.finish()
    assert len(digests.values) == 24

    def late(p: Plan, region: int) -> int:
        raise AssertionError("nothing is late")

    for p in plans:
        want = [digest_tensor(STATE[f"t{r.tensor}"][r.box[0][0] : r.box[0][1]]) for r in p.regions]
        assert digests.of_plan(p, late) == want
    assert [len(digests.mine(p)) for p in plans] == [12, 0, 12], "plans 0 and 1 have the same regions"


def test_a_region_that_no_lane_hashed_is_asked_for() -> None:
    p = plan()
    digests = RegionDigests([p], "rank/0", share=True)
    assert digests.of_plan(p, lambda q, region: region) == list(range(12))


def test_an_error_while_hashing_is_raised_and_blocks_nobody() -> None:
    p = plan()
    hasher = LaneHasher(0, p, RegionDigests([p], "rank/0", share=True))
    for bucket in p.buckets:
        hasher.feed(bucket, [])
    with pytest.raises(ValueError, match="zip"):
        hasher.finish()


def test_meta() -> None:
    assert MANIFEST.tensors[0] == TensorMeta("t0", "float32", (16, 4))
