"""``cuda_ipc``: what only it promises. Everywhere with a card that the host plays; ``gpu``: on real ones, with the kit.

``across`` needs two GPUs that are peers, ``colocated`` one; what a machine lacks is skipped and says so.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.transports.cuda_pair import Child, Pair, Place, Sender, buckets, paired, value
from tests.transports.host_card import card
from weightplane.transports.base import ArmToken, ChannelAborted, ChannelSpec, PeerLost, TransportError
from weightplane.transports.conformance.cases_data import *  # noqa: F403
from weightplane.transports.conformance.cases_faults import *  # noqa: F403
from weightplane.transports.conformance.cases_resources import *  # noqa: F403
from weightplane.transports.cuda_facts import Device, Facts
from weightplane.transports.cuda_import import CudaIpcImporter
from weightplane.transports.cuda_wait import Pace
from weightplane.transports.registry import get
from weightplane.v1.transport_pb2 import CudaIpcHandle, CudaIpcSender, PullRegion, PullWelcome

TRANSPORT = "weightplane.transports.cuda_ipc:CudaIpcTransport"
DEVICES = ("cuda", "cuda:0")
pytest_plugins = ["weightplane.transports.conformance.plugin"]

CARDS = torch.cuda.device_count()
HOST = Place("host", "cpu", "cpu")
COLOCATED = Place("colocated", "cuda:0", "cuda:0")
ACROSS = Place("across", "cuda:0", "cuda:1")
needs_one = pytest.mark.skipif(CARDS < 1, reason="needs a CUDA device")
needs_two = pytest.mark.skipif(CARDS < 2, reason=f"needs 2 CUDA devices, torch sees {CARDS}")
PLACES = [
    pytest.param(HOST, id="host"),
    pytest.param(COLOCATED, id="colocated", marks=[pytest.mark.gpu, needs_one]),
    pytest.param(ACROSS, id="across", marks=[pytest.mark.gpu, needs_two]),
]
everywhere = pytest.mark.parametrize("place", PLACES)


@pytest.fixture(autouse=True)
def home(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A directory of shared memory of its own, empty again after the test. Not the kit's: its peers live longer."""
    if "transport_name" in request.fixturenames:
        yield
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="wp-test-") as made:
        monkeypatch.setenv("WEIGHTPLANE_SHM_DIR", made)
        yield
        assert os.listdir(made) == []


@pytest.fixture
def pair(place: Place) -> Iterator[Pair]:
    with paired(place) as made:
        yield made


def soon(condition: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


# --- bytes


@everywhere
@pytest.mark.parametrize("ahead", [False, True])
def test_updates_are_exact(pair: Pair, ahead: bool) -> None:
    for seed in range(1, 5):
        pair.update(seed, ahead=ahead)
    assert pair.channel.bytes_landed == 4 * sum(b.nbytes for b in pair.plan)


@everywhere
def test_the_next_bucket_is_begun_before_it_is_asked_for(pair: Pair) -> None:
    pair.update(1)
    pair.child.call("fill", 2)
    pair.arm()
    pair.child.call("send", False)
    assert soon(pair.heard)
    pair.channel.ahead(pair.plan[1], pair.spans[1])
    pair.channel.receive(pair.plan[0], pair.spans[0])
    coming = [s.region for s in pair.plan[1].segments]
    assert soon(lambda: all(bool((pair.made[i] == value(2, i)).all()) for i in coming))
    assert pair.channel.bytes_landed == sum(b.nbytes for b in pair.plan) + pair.plan[0].nbytes, "not counted yet"
    for bucket, spans in zip(pair.plan[1:], pair.spans[1:], strict=True):
        pair.channel.receive(bucket, spans)
    pair.child.call("flush")
    pair.check(2)


@everywhere
@pytest.mark.parametrize("end", ["abort", "arm"])
def test_what_was_begun_lands_no_more_once_the_update_is_over(pair: Pair, end: str) -> None:
    pair.update(1)
    pair.child.call("fill", 2)
    pair.arm()
    pair.child.call("send", False)
    assert soon(pair.heard)
    pair.channel.ahead(pair.plan[1], pair.spans[1])
    pair.channel.receive(pair.plan[0], pair.spans[0])
    if end == "abort":
        pair.channel.abort("the test says so")
        with pytest.raises(ChannelAborted):
            pair.channel.receive(pair.plan[1], pair.spans[1])
    else:
        pair.channel.arm(ArmToken("another", 1, 1), pair.plan, time.monotonic() + 60)
    assert not pair.importer._running and pair.importer._in_flight == 0
    for spans in pair.spans[1:]:
        for s in spans:
            s.fill_(0xA5)
    time.sleep(0.05)  # nothing to wait on: nothing may come
    for spans in pair.spans[1:]:
        assert all(bool((s == 0xA5).all()) for s in spans)


def test_bytes_that_were_written_before_an_abort_are_counted() -> None:
    """A replica whose live memory was written is DIRTY, though no part had been counted."""
    with paired(HOST) as pair:
        pair.update(1)
        before = pair.channel.bytes_landed
        pair.child.call("fill", 2)
        pair.arm()
        pair.child.call("send", False)
        gate = threading.Event()
        card()._work.put(lambda: (gate.wait(), None)[1])  # the card is busy
        threading.Timer(0.1, pair.channel.abort, ("the test says so",)).start()
        threading.Timer(0.3, gate.set).start()
        with pytest.raises(ChannelAborted):
            pair.channel.receive(pair.plan[0], pair.spans[0])
        assert gate.is_set(), "the call is left only when nothing is written any more"
        assert bool((pair.spans[0][0] == value(2, 0)).all())
        assert pair.channel.bytes_landed > before


@everywhere
def test_a_pull_sees_the_end_of_what_the_sender_s_stream_still_writes(pair: Pair) -> None:
    pair.update(1)
    for t in pair.made:
        t.zero_()
    pair.child.call("fill", 2, True)
    start = time.monotonic()
    pair.arm()
    pair.child.start("send")
    pair.receive()
    took = time.monotonic() - start
    pair.child.result()
    pair.check(2)
    assert took > 0.2, f"{took:.3f} s: the writer was not slow, so nothing was shown"


@everywhere
def test_a_sender_that_shares_no_events_waits_itself(monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    monkeypatch.setenv("WEIGHTPLANE_CUDA_IPC_EVENTS", "0")
    with paired(place) as pair:
        pair.update(1)
        pair.child.call("fill", 2, True)
        pair.arm()
        pair.child.start("send")
        pair.receive()
        pair.child.result()
        pair.check(2)
        assert not pair.importer._events


# --- memory


@everywhere
def test_memory_that_was_freed_and_taken_anew_is_never_read_stale(pair: Pair) -> None:
    """X-rows of stale caches: the sender's tensors are other memory each time, often at the old addresses."""
    for seed in range(1, 9):
        pair.update(seed)
        pair.child.call("renew")
    assert pair.child.call("regions") <= len(pair.made) + 1
    pair.update(9)


@everywhere
def test_memory_that_was_freed_under_the_same_list_is_never_read_stale(pair: Pair) -> None:
    for seed in range(1, 5):
        pair.update(seed)
        pair.child.call("resize")
    pair.update(9)


@everywhere
def test_mappings_are_closed_with_the_memory_and_with_the_channel(pair: Pair) -> None:
    for seed in (1, 2):
        pair.update(seed)
        pair.child.call("renew")
    pair.update(3)
    assert soon(lambda: len(pair.importer._mapped) == pair.child.call("regions") > 0)
    pair.channel.close()
    assert not pair.importer._mapped and not pair.importer._events and not pair.importer._cards


@everywhere
@pytest.mark.parametrize("end", ["release", "close"])
def test_memory_that_a_sender_lets_go_of_between_updates_is_unmapped_at_once(pair: Pair, end: str) -> None:
    """M10, and a trainer that leaves the GPU to the engine: what a receiver maps stays in use."""
    pair.update(1)
    assert pair.importer._mapped
    if end == "close":
        pair.child.call("close")
    else:
        pair.child.call("release")
    assert soon(lambda: not pair.importer._mapped), "the receiver does nothing meanwhile"
    if end == "close":
        with pytest.raises(PeerLost):
            pair.channel.arm(ArmToken("after", 1, 1), pair.plan, time.monotonic() + 60)
    else:
        pair.child.call("renew")
        pair.update(2)


@pytest.mark.alone
@everywhere
def test_an_exporter_s_death_is_noticed_and_its_mappings_are_closed(pair: Pair, record_property: Any) -> None:
    """What becomes of mapped memory is recorded: readable or not, and whether the mapping closes."""
    pair.update(1)
    pair.arm()
    pair.child.call("send", False)
    pair.channel.receive(pair.plan[0], pair.spans[0])
    pair.child.end()
    start = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        pair.channel.receive(pair.plan[1], pair.spans[1])
    assert caught.value.peers == ("s",) and time.monotonic() - start < 1
    record_property("after the exporter's death", str(caught.value))
    pair.channel.close()
    assert not pair.importer._mapped
    for name in os.listdir(os.environ["WEIGHTPLANE_SHM_DIR"]):
        if f"-{pair.child.process.pid}-" in name:
            os.unlink(os.path.join(os.environ["WEIGHTPLANE_SHM_DIR"], name))  # its socket: it was killed
    for t in pair.made:
        t.fill_(3)  # the device is usable
    assert int(pair.made[0].sum()) == 3 * pair.made[0].numel()


@everywhere
def test_an_update_that_repeats_makes_nothing_anew(pair: Pair) -> None:
    for seed in (1, 2):
        pair.update(seed)
    plans = {n: p for s in pair.importer._sources.values() for n, p in s.plans.items()}
    mapped = dict(pair.importer._mapped)
    here, there = dict(card().calls), pair.child.call("calls")
    for seed in range(3, 9):
        pair.update(seed)
    now = {n: p for s in pair.importer._sources.values() for n, p in s.plans.items()}
    assert all(now[n] is p for n, p in plans.items()) and pair.importer._mapped == mapped
    if pair.place is HOST:
        after = pair.child.call("calls")
        assert all(card().calls[c] == here.get(c, 0) for c in ("open", "close", "tables"))
        assert all(after.get(c, 0) == there.get(c, 0) for c in ("allocation", "export"))


def test_another_list_of_the_same_memory_makes_nothing_anew() -> None:
    with paired(HOST) as pair:
        pair.update(1)
        tables = card().calls["tables"]
        pair.spans = [list(s) for s in pair.spans]
        pair.update(2)
        assert card().calls["tables"] == tables


@everywhere
def test_both_sides_in_one_process(place: Place) -> None:
    """The driver opens other processes' handles only: one's own memory is copied where it lies."""

    class Here:
        """A ``Child`` that is none."""

        def __init__(self) -> None:
            self.sender = Sender(place)
            self.thread: threading.Thread | None = None

        def call(self, name: str, *args: Any) -> Any:
            return getattr(self.sender, name)(*args)

        def start(self, name: str, *args: Any) -> None:
            self.thread = threading.Thread(target=getattr(self.sender, name), args=args)
            self.thread.start()

        def result(self) -> None:
            assert self.thread is not None
            self.thread.join(10)

    here: Any = Here()
    pair = Pair(place, here)
    for seed in (1, 2):
        pair.update(seed)
    assert all(not m.opened for m in pair.importer._mapped.values())
    pair.close()
    here.sender.close()


# --- refusals


def test_M13_memory_that_cannot_be_shared_is_refused_with_what_to_do() -> None:
    """M13, where it shows first when it is sent."""
    sender = Sender(HOST)
    offer = sender.transport.offer("s")
    sender.open(ChannelSpec("c", "g", "cuda_ipc", bytes(32), ("s",), ("r",), 1 << 20, {"s": offer}))
    sender.arm("u")
    card().unshareable = True
    try:
        with pytest.raises(TransportError, match=r"bucket 0: span 0 .* cannot be shared by CUDA IPC.*native allocator"):
            sender.send()
    finally:
        card().unshareable = False
        sender.close()


def attached(facts: Facts, welcome: CudaIpcSender) -> CudaIpcImporter:
    made = CudaIpcImporter(card(), facts)
    made.attach("s", PullWelcome(cuda_ipc=welcome), lambda: None)
    return made


def test_cards_that_are_no_peers_are_refused_before_anything_is_read() -> None:
    facts = Facts(torch_cuda="13.0", devices=(Device("host-card", 0), Device("other", 1)), complete=True)
    with pytest.raises(TransportError, match="no peer access") as caught:
        attached(facts, CudaIpcSender(device_uuid="other"))
    assert caught.value.peers == ("s",)


def test_M08_nonsense_from_a_sender_is_refused_by_name() -> None:
    facts = Facts(torch_cuda="13.0", devices=(Device("host-card", 0),), complete=True)
    with pytest.raises(TransportError, match="does not speak cuda_ipc"):
        CudaIpcImporter(card(), facts).attach("s", PullWelcome(), lambda: None)
    importer = attached(facts, CudaIpcSender(device_uuid="host-card"))
    for bad in (CudaIpcHandle(handle=b"x"), CudaIpcHandle(handle=b"x", storage_bytes=5, offset=-1)):
        with pytest.raises(TransportError, match="none of cuda_ipc"):
            importer.map("s", [PullRegion(id=1, cuda_ipc=bad)])
    importer.close()


def test_a_sender_on_another_host_is_refused() -> None:
    place = HOST
    transport = place.transport()
    offer = transport.offer("s")
    offer.cuda_ipc.host_id = "elsewhere"
    spec = ChannelSpec("c", "g", "cuda_ipc", bytes(32), ("s",), ("r",), 1 << 20, {"s": offer})
    with pytest.raises(TransportError, match="needs one host"):
        transport.open_receiver(spec, "r")
    transport.shutdown()


@pytest.mark.alone
def test_the_probe_is_quick_and_says_what_is_missing() -> None:
    transport = get("cuda_ipc") if CARDS else Place("x", "", "").transport()
    transport.probe()
    start = time.monotonic()
    probe = transport.probe()
    assert time.monotonic() - start < 0.05
    if not torch.version.cuda:
        assert not probe.ok and "built without CUDA" in probe.reason
        with pytest.raises(TransportError, match="built without CUDA"):
            transport.offer("rank/0")


# --- waiting


def test_waiting_checks_and_learns() -> None:
    pace, end, checks, looks = Pace(), time.monotonic() + 0.05, [], []

    def done() -> bool:
        looks.append(1)
        return time.monotonic() > end

    pace.until(done, 1e8, lambda: checks.append(1))
    assert checks and pace.rate < 2e12
    for _ in range(20):
        end = time.monotonic() + 0.05
        pace.until(done, 1e8, lambda: None)
    assert 1e9 < pace.rate < 4e9
    looks.clear()
    end = time.monotonic() + 0.05
    pace.until(done, 1e8, lambda: None)
    assert len(looks) < 2000

    def raises() -> None:
        raise ChannelAborted("now")

    with pytest.raises(ChannelAborted):
        pace.until(lambda: False, 0, raises)


# --- real cards alone


@pytest.mark.gpu
@needs_two
@pytest.mark.parametrize(("visible", "sender"), [("1,0", "cuda:1"), ("0", "cuda:0"), ("1", "cuda:0")])
def test_cards_are_matched_by_uuid(visible: str, sender: str) -> None:
    """D17, D21, D22: the two processes number the cards differently, or the receiver's is hidden from the sender."""
    with paired(Place("across", sender, "cuda:1", visible)) as pair:
        pair.update(1)
        assert pair.importer.details()["paths"] == ("same GPU" if visible == "1" else "peer")


@pytest.mark.gpu
@needs_one
def test_M13_expandable_segments_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """M13."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    child = Child(COLOCATED)
    try:
        with pytest.raises(TransportError, match="expandable_segments:False"):
            child.call("offer", "rank/0")
        pair = Pair(COLOCATED, child)
        pair.arm()
        with pytest.raises(TransportError, match=r"cannot be shared by CUDA IPC.*expandable_segments"):
            child.call("send")
        pair.close()
        child.call("close")
    finally:
        child.end()


@pytest.mark.gpu
@needs_one
@everywhere
def test_fifty_updates_keep_the_device_s_memory(place: Place) -> None:
    """Extra memory in place: tables alone."""
    if place is HOST:
        pytest.skip("needs a CUDA device")
    with paired(place) as pair:
        for seed in range(3):
            pair.update(seed)
        torch.cuda.synchronize(place.receiver)
        before = torch.cuda.memory_allocated(place.receiver), torch.cuda.mem_get_info(place.receiver)[0]
        torch.cuda.reset_peak_memory_stats(place.receiver)
        for seed in range(50):
            pair.update(seed)
        torch.cuda.synchronize(place.receiver)
        assert torch.cuda.memory_allocated(place.receiver) <= before[0]
        assert torch.cuda.max_memory_allocated(place.receiver) < before[0] + (64 << 20)
        assert torch.cuda.mem_get_info(place.receiver)[0] > before[1] - (64 << 20)


def test_the_plan_of_these_tests_has_buckets_of_every_kind() -> None:
    made = buckets()
    assert len(made) == 3 and min(b.nbytes for b in made) < 1 << 20 < max(b.nbytes for b in made)
    assert Path("/dev/shm").is_dir()
