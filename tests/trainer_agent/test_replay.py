"""What is worked out once: the same lists of spans while the source's memory stays, and never a stale one."""

from __future__ import annotations

import copy
import dataclasses
import gc
import time
from collections.abc import Callable, Container, Sequence
from typing import ClassVar

import pytest
import torch
from torch import nn

from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.placement import Piece, Placement, full_placement
from weightplane.controlplane.core.plan import Bucket, Plan
from weightplane.controlplane.core.planner import make_plan
from weightplane.controlplane.core.states import Verify
from weightplane.controlplane.core.verify import sampled_regions
from weightplane.trainer_agent import replay
from weightplane.trainer_agent.channels import OpenChannel
from weightplane.trainer_agent.hashing import LaneHasher, RegionDigests
from weightplane.trainer_agent.sending import Lane, Sending
from weightplane.trainer_agent.sources import ModuleSource, Source, StateDictSource
from weightplane.trainer_agent.stop import Stop
from weightplane.trainer_agent.supply import DirectSupply
from weightplane.transports import digest_cuda
from weightplane.transports.base import ArmToken, Capabilities, ChannelSpec, Probe, SendChannel, Transport
from weightplane.transports.digest import digest_spans, digest_tensor
from weightplane.transports.dtypes import as_bytes
from weightplane.v1.transport_pb2 import Rendezvous


class Recorder(SendChannel):
    """Keeps the lists it is handed, as a transport that pulls does, and the bytes at the time of ``send``."""

    def __init__(self) -> None:
        self.lists: dict[int, Sequence[torch.Tensor]] = {}
        self.sent: dict[int, bytes] = {}
        self.flushes = 0

    def arm(self, token: ArmToken, buckets: Sequence[Bucket], deadline: float) -> None: ...

    def send(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        assert all(s.dtype == torch.uint8 and s.dim() == 1 and s.is_contiguous() for s in spans)
        self.lists[bucket.index] = spans
        self.sent[bucket.index] = b"".join(bytes(s.cpu().numpy()) for s in spans)

    def flush(self) -> None:
        self.flushes += 1

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...


class To(Transport):
    """A transport of the given capabilities that only records."""

    name = "recorder"

    def __init__(self, kinds: set[str], buffered: bool) -> None:
        self.capabilities = Capabilities(frozenset(kinds), False, True, False, buffered)  # type: ignore[misc]

    def probe(self) -> Probe:
        return Probe(True)

    def offer(self, member: str) -> Rendezvous:
        return Rendezvous()

    def open_sender(self, spec: ChannelSpec, member: str) -> Recorder:
        return Recorder()

    def open_receiver(self, spec: ChannelSpec, member: str):
        raise AssertionError("not here")


class Trainer:
    """Publishes a source over one recorded channel, as ``Transfer`` does."""

    def __init__(self, source: Source, bucket_bytes: int = 300, kinds: set[str] | None = None, buffered: bool = False):
        self.source, self.bucket_bytes = source, bucket_bytes
        self.former: list[replay.ChannelReplay] = []
        self.channel = Recorder()
        spec = ChannelSpec("c", "g", "recorder", b"k" * 32, ("rank/0",), ("r/0",), bucket_bytes, {})
        self.opened = OpenChannel(spec, "rank/0", To(kinds or {"cpu"}, buffered), self.channel)
        self.plan: Plan | None = None
        self.manifest: Manifest | None = None

    def reopen(self) -> None:
        """Another channel in the place of the one that was, as after a join."""
        self.former = replay.newest([self.channel])
        replay.forget([self.channel])
        self.channel = Recorder()
        self.opened = dataclasses.replace(self.opened, channel=self.channel)

    def publish(self, receiver: Placement | None = None, *, hold: bool = True, verify: Verify = Verify.FULL) -> Sending:
        manifest = self.manifest = self.source.manifest()
        placement = receiver or full_placement("r/0", manifest)
        self.plan = make_plan(manifest, [self.source.placement(0)], [placement], self.bucket_bytes)
        self.digests = RegionDigests([self.plan], "rank/0", share=True, update_id="u1", verify=verify)
        buckets = replay.of_channel(self.channel, self.plan, manifest, "rank/0", self.former).buckets
        self.channel.lists, self.channel.sent = {}, {}
        lane = Lane(0, self.opened, self.plan, buckets)
        supply = DirectSupply(self.source, [(self.plan, buckets)], replay=hold)
        sending = Sending([lane], manifest, supply, self.digests, Stop())
        sending.start()
        assert sending.wait(time.monotonic() + 20)
        self.lanes = sending.lanes
        self.source.end()
        return sending

    def check(self, state: dict[str, torch.Tensor]) -> None:
        """Every byte sent, and every digest, is the state's of now."""
        assert self.plan is not None and self.manifest is not None
        for bucket in self.plan.buckets:
            want = b""
            for s in bucket.segments:
                r = self.plan.regions[s.region]
                tensor = state[self.manifest.tensors[r.tensor].name]
                for dim, (start, stop) in enumerate(r.box):
                    tensor = tensor.narrow(dim, start, stop - start)
                want += bytes(as_bytes(tensor.cpu())[s.offset : s.offset + s.nbytes].numpy())
            assert self.channel.sent[bucket.index] == want, bucket
        found = self.digests.of_plan(self.plan, lambda p, r: pytest.fail("nothing is late"))
        for r, value in zip(self.plan.regions, found, strict=True):
            tensor = state[self.manifest.tensors[r.tensor].name]
            for dim, (start, stop) in enumerate(r.box):
                tensor = tensor.narrow(dim, start, stop - start)
            assert value == digest_tensor(tensor)


def state(n: int = 8) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.randn(8, 4) for i in range(n)}


class Untouched(StateDictSource):
    """Counts how often a tensor is asked for."""

    asked = 0

    def held(self):
        return self._tensors

    def tensor(self, index: int):
        Untouched.asked += 1
        return super().tensor(index)


def test_a_second_publish_hands_out_the_very_lists_and_asks_for_no_tensor() -> None:
    values = state()
    trainer = Trainer(Untouched(values))
    trainer.publish()
    first, asked = dict(trainer.channel.lists), Untouched.asked
    for t in values.values():
        t.mul_(-3)
    trainer.publish()
    assert trainer.channel.lists.keys() == first.keys() and len(first) == 4
    assert all(trainer.channel.lists[i] is first[i] for i in first)
    assert Untouched.asked == asked == 8
    trainer.check(values)


@pytest.mark.parametrize("change", ["data", "object", "transposed", "freed", "grown"])
def test_memory_that_changed_is_found_and_only_its_bucket_is_worked_out_anew(change: str) -> None:
    module = nn.ParameterDict({f"t{i}": nn.Parameter(torch.randn(8, 8)) for i in range(8)})
    trainer = Trainer(ModuleSource(module), bucket_bytes=600)
    trainer.publish()
    first = dict(trainer.channel.lists)
    one = module["t3"]
    if change == "data":
        one.data = torch.randn(8, 8)
    elif change == "object":
        module["t3"] = nn.Parameter(torch.randn(8, 8))
    elif change == "transposed":
        one.data = one.data.t()
    elif change == "freed":
        del one, module["t3"]
        gc.collect()
        rest = {k: module[k] for k in sorted(module)}
        module.clear()
        module.update({**rest, "t3": nn.Parameter(torch.randn(8, 8))})
        module.update({k: module.pop(k) for k in sorted(module)})
    else:
        one.data = torch.randn(16, 8)[:8]  # the same size, in a larger storage
    trainer.publish()
    trainer.check({n: p.detach() for n, p in module.items()})
    same = [i for i in first if trainer.channel.lists[i] is first[i]]
    assert same == [0, 2, 3], "tensor 3 is in bucket 1 of four"
    trainer.publish()
    trainer.check({n: p.detach() for n, p in module.items()})


def test_a_channel_in_the_place_of_another_sends_what_was_found_for_that() -> None:
    values = state()
    trainer = Trainer(Untouched(values))
    trainer.publish()
    first, asked = dict(trainer.channel.lists), Untouched.asked
    trainer.reopen()
    values["t3"].mul_(-3)
    trainer.publish(full_placement("another/0", trainer.source.manifest()))
    assert trainer.channel.lists.keys() == first.keys() and Untouched.asked == asked
    assert all(trainer.channel.lists[i] is first[i] for i in first)
    trainer.check(values)
    trainer.reopen()
    values["t5"].data = torch.randn(8, 4)
    trainer.publish()
    assert Untouched.asked == asked + 1, "memory that changed meanwhile is found"
    trainer.check(values)
    trainer.publish(full_placement("third/0", trainer.source.manifest()))
    assert Untouched.asked == asked + 1, "another plan of the same channel, of the same bytes"
    trainer.check(values)


def test_a_channel_with_other_buckets_follows_none() -> None:
    values = state()
    trainer = Trainer(StateDictSource(values))
    trainer.publish()
    trainer.reopen()
    trainer.bucket_bytes = 500
    trainer.publish()
    assert len(trainer.channel.sent) < 4
    trainer.check(values)


def test_a_module_that_is_converted_and_one_that_moves() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    trainer = Trainer(ModuleSource(module))
    trainer.publish()
    module.to(torch.float64)
    trainer.publish()
    trainer.check({n: p.detach() for n, p in module.named_parameters()})
    module.to(torch.float32)
    trainer.publish()
    trainer.check({n: p.detach() for n, p in module.named_parameters()})
    for p in module.parameters():
        p.data = p.data.clone()
    trainer.publish()
    trainer.check({n: p.detach() for n, p in module.named_parameters()})


def test_fifty_publishes_of_tensors_that_come_and_go_are_never_stale() -> None:
    """Freed between publishes, allocated anew, often at the very address: only what is kept may be known."""
    values = state(6)
    source = StateDictSource(values)
    trainer = Trainer(source)
    generator = torch.Generator().manual_seed(7)
    for _ in range(50):
        for name in list(values):
            if torch.rand((), generator=generator) < 0.3:
                del values[name]
                values[name] = torch.randn(8, 4, generator=generator)
        trainer.publish()
        trainer.check(values)


def test_what_lies_in_pieces_is_packed_each_time_and_the_rest_is_replayed() -> None:
    values = state()
    values["t2"] = torch.randn(4, 8).t()
    trainer = Trainer(StateDictSource(values))
    trainer.publish()
    first = dict(trainer.channel.lists)
    values["t2"].add_(1)
    trainer.publish()
    trainer.check(values)
    assert [i for i in first if trainer.channel.lists[i] is first[i]] == [0, 2, 3]


def test_a_receiver_of_columns_gets_packed_bytes_and_one_of_rows_the_rows_themselves() -> None:
    values = state()
    trainer = Trainer(StateDictSource(values))
    for box, replayed in ((((0, 8), (1, 3)), False), (((2, 6), (0, 4)), True)):
        for _ in range(2):
            first = dict(trainer.channel.lists)
            trainer.publish(Placement.of("r/0", (Piece(i, box) for i in range(8))))
            trainer.check(values)
        assert [trainer.channel.lists[i] is first[i] for i in first] == [replayed] * len(first)


@pytest.mark.parametrize(
    "source",
    [
        lambda v: StateDictSource(v, cast=torch.float16),
        lambda v: StateDictSource(lambda: v),
        lambda v: type("Own", (StateDictSource,), {"tensor": lambda s, i: StateDictSource.tensor(s, i)})(v),
    ],
    ids=["cast", "callable", "own-tensor"],
)
def test_sources_that_may_make_their_tensors_anew_are_asked_each_time(source: Callable[..., Source]) -> None:
    values = state()
    made = source(values)
    trainer = Trainer(made)
    trainer.publish()
    first = dict(trainer.channel.lists)
    trainer.publish()
    assert made.held() is None and not any(trainer.channel.lists[i] is first[i] for i in first)


def test_memory_is_let_go_of_when_asked_and_never_held_when_told_so() -> None:

    values = state()
    trainer = Trainer(StateDictSource(values))
    trainer.publish()
    weak = values["t0"].untyped_storage()._weak_ref()
    gone = torch.UntypedStorage._expired
    values["t0"] = torch.randn(8, 4)
    trainer.channel.lists = {}
    assert not gone(weak), "kept: its lists may be asked for again"
    replay.forget([trainer.channel])
    assert gone(weak)
    torch.UntypedStorage._free_weak_ref(weak)
    trainer.publish(hold=False)
    trainer.channel.lists = {}
    weak = values["t1"].untyped_storage()._weak_ref()
    values["t1"] = torch.randn(8, 4)
    assert gone(weak)
    torch.UntypedStorage._free_weak_ref(weak)


def test_another_source_on_the_same_channel_is_looked_at_afresh() -> None:
    one, two = state(), state()
    trainer = Trainer(StateDictSource(one))
    trainer.publish()
    trainer.source = StateDictSource(two)
    trainer.publish()
    trainer.check(two)


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("strided", [False, True])
def test_memory_that_a_transport_cannot_read_is_mirrored_in_reused_slots(buffered: bool, strided: bool) -> None:
    values = state(12)
    if strided:
        values["t5"] = torch.randn(4, 8).t()
    trainer = Trainer(StateDictSource(values), kinds={"some-card"}, buffered=buffered)
    for round_ in range(3):
        for t in values.values():
            t.add_(round_)
        sending = trainer.publish()
        trainer.check(values)
        nbytes, seconds = sending.mirrored
        assert nbytes == 12 * 128 and seconds > 0
    slots = {s[0].untyped_storage().data_ptr() for s in trainer.channel.lists.values()}
    assert len(slots) == 5 and not slots & {t.data_ptr() for t in values.values()}
    assert (trainer.channel.flushes > 3) is not buffered, "an unbuffered transport has read a slot before it is reused"


def test_what_a_transport_can_read_is_not_mirrored() -> None:
    trainer = Trainer(StateDictSource(state()))
    assert trainer.publish().mirrored == (0, 0.0)


class Launch:
    """A ``RegionGroup`` that hashes host memory by the CPU."""

    made = 0

    def __init__(self, device: torch.device, items: Sequence[tuple[int, torch.Tensor]]) -> None:
        self.keys, self._flats = [k for k, _ in items], [t for _, t in items]
        Launch.made += 1

    def part(self, keys: Container[int]) -> Launch | None:
        made = copy.copy(self)
        pairs = [(k, t) for k, t in zip(self.keys, self._flats, strict=True) if k in keys]
        made.keys, made._flats = [k for k, _ in pairs], [t for _, t in pairs]
        return made if pairs else None

    def start(self) -> None: ...

    def values(self) -> list[int]:
        return [digest_spans([t]) for t in self._flats]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> type[Launch]:
    """The host's memory plays a card's: it is hashed by launches."""
    Launch.made = 0
    monkeypatch.setattr(digest_cuda, "on_device", lambda t: True)
    monkeypatch.setattr(digest_cuda, "RegionGroup", Launch)
    return Launch


def test_device_memory_is_hashed_by_launches_made_once_and_nothing_bucket_by_bucket(
    card: type[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LaneHasher, "_hash", lambda *a: pytest.fail("hashed by the bucket"))
    values = state()
    trainer = Trainer(StateDictSource(values))
    for _ in range(3):
        trainer.publish()
        trainer.check(values)
        for t in values.values():
            t.add_(1)
    assert card.made == 1
    values["t3"] = torch.randn(8, 4)
    trainer.publish()
    trainer.check(values)
    assert card.made == 2
    trainer.publish(verify=Verify.SAMPLED)
    trainer.publish()
    trainer.check(values)
    assert card.made == 2, "a sample is a part of what was made for all"


def test_what_is_packed_is_hashed_by_the_bucket_and_the_rest_by_launches(card: type[Launch]) -> None:
    values = {**state(), "t2": torch.randn(4, 8).t(), "t7": torch.randn(30, 40).t()}
    trainer = Trainer(StateDictSource(values), bucket_bytes=1000)
    for _ in range(2):
        trainer.publish()
        trainer.check(values)
        for t in values.values():
            t.add_(1)
    assert card.made == 1


def test_an_error_on_the_card_ends_the_publish(card: type[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Launch) -> list[int]:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(Launch, "values", fails)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        Trainer(StateDictSource(state())).publish()


def test_a_sample_is_hashed_and_nothing_else() -> None:
    values = {f"t{i}": torch.randn(4) for i in range(300)}
    trainer = Trainer(StateDictSource(values))
    trainer.publish(verify=Verify.SAMPLED)
    assert trainer.plan is not None
    picked = sampled_regions("u1", 300)
    found = trainer.digests.of_plan(trainer.plan, lambda p, r: pytest.fail("nothing is late"))
    want = [digest_tensor(values[f"t{i}"]) if i in picked else 0 for i in range(300)]
    assert found == want and 16 <= len(picked) < 300 and len(trainer.digests.found) == len(picked)


def test_a_sampled_region_that_no_lane_hashed_is_asked_for_and_no_other() -> None:
    values = {f"t{i}": torch.randn(4) for i in range(300)}
    source = StateDictSource(values)
    manifest = source.manifest()
    plan = make_plan(manifest, [source.placement(0)], [full_placement("r/0", manifest)], 300)
    digests = RegionDigests([plan], "rank/0", share=True, update_id="u2", verify=Verify.SAMPLED)
    asked: list[int] = []

    def late(plan: Plan, region: int) -> int:
        asked.append(region)
        return region + 1

    found = digests.of_plan(plan, late)
    assert asked == sampled_regions("u2", 300) and found == [i + 1 if i in asked else 0 for i in range(300)]


def test_what_was_queued_is_waited_for_and_is_nothing_on_the_host() -> None:
    produced = StateDictSource(state()).produced()
    produced.wait()
    produced.order()

    class Event:
        seen: ClassVar[list[str]] = []

        def synchronize(self) -> None:
            self.seen.append("waited for")

    produced._events[torch.device("cuda", 0)] = Event()
    trainer = Trainer(StateDictSource(state()))
    manifest = trainer.source.manifest()
    trainer.plan = make_plan(manifest, [trainer.source.placement(0)], [full_placement("r/0", manifest)], 300)
    trainer.channel.send = lambda bucket, spans: Event.seen.append("sent")  # type: ignore[method-assign]
    buckets = trainer.plan.buckets
    supply = DirectSupply(trainer.source, [(trainer.plan, buckets)])
    lane = Lane(0, trainer.opened, trainer.plan, buckets)
    sending = Sending([lane], manifest, supply, None, Stop(), produced=produced)
    sending.start()
    assert sending.wait(time.monotonic() + 20)
    assert Event.seen == ["waited for"] + ["sent"] * len(buckets)
