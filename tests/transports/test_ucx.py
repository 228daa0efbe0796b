"""``ucx`` on CPU memory through the conformance kit, and what only it promises: registration, transports, addresses."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weightplane.controlplane.core.plan import Bucket, Segment
from weightplane.transports import huge_pages, registry, ucx_agent
from weightplane.transports.base import ArmToken, ChannelSpec, TransportError
from weightplane.transports.conformance.cases_data import *  # noqa: F403
from weightplane.transports.conformance.cases_faults import *  # noqa: F403
from weightplane.transports.conformance.cases_faults import MIB, poll
from weightplane.transports.conformance.cases_resources import *  # noqa: F403
from weightplane.transports.conformance.harness import Fleet, PeerError, Pool
from weightplane.transports.pull import PullReceiveChannel, PullSendChannel
from weightplane.transports.ucx import UcxTransport
from weightplane.transports.ucx_export import UcxExporter
from weightplane.transports.ucx_import import UcxImporter

TRANSPORT = "ucx"
pytest_plugins = ["weightplane.transports.conformance.plugin"]
MakeFleet = Callable[..., Fleet]

if not ucx_agent.package():
    pytest.skip("NIXL is not installed (tools/test-nixl.txt)", allow_module_level=True)


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Iterator[UcxTransport]:
    """With a directory of its own, empty again after the test."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="wp-test-") as home:
        monkeypatch.setenv("WEIGHTPLANE_SHM_DIR", home)
        made = UcxTransport()
        yield made
        made.shutdown()
        assert os.listdir(home) == []


class Pair:
    """A sender and a receiver in this process, on one channel of one bucket."""

    def __init__(self, transport: UcxTransport, nbytes: int = 1 << 20) -> None:
        self.bucket = Bucket(0, "s", ("r",), (Segment(0, 0, nbytes),), nbytes)
        spec = ChannelSpec(
            channel_id=f"c-{os.getpid()}-{time.monotonic_ns()}",
            group="g",
            transport="ucx",
            key=bytes(range(32)),
            senders=("s",),
            receivers=("r",),
            bucket_bytes=nbytes,
            offers={"s": transport.offer("s"), "r": transport.offer("r")},
        )
        self.sender: PullSendChannel = transport.open_sender(spec, "s")
        self.receiver: PullReceiveChannel = transport.open_receiver(spec, "r")
        assert isinstance(self.sender._exporter, UcxExporter) and isinstance(self.receiver._importer, UcxImporter)
        self.exporter, self.importer = self.sender._exporter, self.receiver._importer
        self._updates = 0

    def update(self, source: list[torch.Tensor], target: list[torch.Tensor]) -> None:
        """One update, checked."""
        self._updates += 1
        token = ArmToken(f"u{self._updates}", 1, 1)
        self.sender.arm(token, [self.bucket], time.monotonic() + 30)
        self.receiver.arm(token, [self.bucket], time.monotonic() + 30)
        failed: list[BaseException] = []

        def receive() -> None:
            try:
                self.receiver.receive(self.bucket, target)
            except BaseException as e:
                failed.append(e)
                self.sender.abort(f"the receiver failed: {e!r}")

        thread = threading.Thread(target=receive)
        thread.start()
        self.sender.send(self.bucket, source)
        try:
            self.sender.flush()
        finally:
            thread.join(10)
            if failed:
                raise failed[0]
        assert torch.equal(torch.cat(source), torch.cat(target))

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()


@pytest.fixture
def pair(transport: UcxTransport) -> Iterator[Pair]:
    made = Pair(transport)
    yield made
    made.close()


def data(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


# -- registration


def test_a_storage_is_one_region_and_neighbours_one_chunk(pair: Pair) -> None:
    arena, target = data(2 << 20, 1), torch.zeros(1 << 20, dtype=torch.uint8)
    spans = [arena[:1000], arena[1000:5000], arena[1 << 20 : (2 << 20) - 5000]]
    pair.update(spans, [target])
    assert len(pair.exporter._regions) == 1 and len(pair.importer._regions) == 1
    entry = pair.sender._held[0].entry
    assert (entry.offsets, entry.sizes) == ((0, 1 << 20), (5000, (1 << 20) - 5000))
    pair.update(spans, [target])
    assert pair.sender._held[0].entry is entry


def test_spans_that_are_none_are_refused_by_name(pair: Pair) -> None:
    token = ArmToken("u", 1, 1)
    pair.sender.arm(token, [pair.bucket], time.monotonic() + 5)
    half = 1 << 19
    for odd in (torch.zeros(half // 4), torch.zeros(2 * half, dtype=torch.uint8)[::2]):
        with pytest.raises((ValueError, TransportError), match=r"span 1: expected contiguous|has 1048576 bytes"):
            pair.sender.send(pair.bucket, [torch.zeros(half, dtype=torch.uint8), odd])
    assert len(pair.exporter._regions) == 0


def test_M16_sources_freed_and_allocated_again_are_never_read_stale(pair: Pair) -> None:
    """New memory every time, usually at the address of the last; nothing of it stays registered."""
    for seed in range(12):
        source = data(1 << 20, seed)
        target = torch.zeros(1 << 20, dtype=torch.uint8)
        spans = [source[: 1 << 19], source[1 << 19 :]]
        pair.update(spans, [target])
        del spans, source, target
    assert len(pair.exporter._regions) <= 1 and len(pair.importer._regions) <= 1


def test_M17_memory_that_was_released_and_mapped_again_at_its_address_is_filled_as_it_is_now(pair: Pair) -> None:
    """On both sides; nothing that was registered before is written or read in its place."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    n, private, fixed = 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0x10

    def mapped(address: int) -> int:
        flags = private | (fixed if address else 0)
        found = libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(n), 3, flags, -1, ctypes.c_long(0))
        assert found and found != ctypes.c_void_p(-1).value
        return int(found)

    places = [mapped(0), mapped(0)]
    source, target = (torch.frombuffer((ctypes.c_uint8 * n).from_address(p), dtype=torch.uint8) for p in places)
    spans, into = [source], [target]
    for seed in (1, 2, 3):
        source.copy_(data(n, seed))
        pair.update(spans, into)
        for place in places:
            assert mapped(place) == place
        assert not source.any() and not target.any(), "fresh pages"


def test_memory_that_moves_under_the_same_list_is_noticed(pair: Pair) -> None:
    """``resize_`` of a storage frees and takes memory though tensor and list are the same objects."""
    source, target = data(1 << 20, 1), torch.zeros(1 << 20, dtype=torch.uint8)
    spans, into = [source], [target]
    pair.update(spans, into)
    first = source.data_ptr()
    source.untyped_storage().resize_(0)
    between = torch.full((1 << 20,), 0xEE, dtype=torch.uint8)  # takes the place of what was freed
    source.untyped_storage().resize_(1 << 20)
    source.copy_(data(1 << 20, 2))
    assert source.data_ptr() != first
    pair.update(spans, into)
    assert len(pair.exporter._regions) == 1
    del between


def test_a_new_region_over_an_old_one(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lives of one stretch of addresses that overlap in part: the second is read by its own registration."""
    room = mmap.mmap(-1, 3 << 20)
    target = torch.zeros(1 << 20, dtype=torch.uint8)
    connected = pair.importer._connect
    calls: list[str] = []

    def connect(name: str, remote: Any) -> None:
        calls.append(name)
        connected(name, remote)

    monkeypatch.setattr(pair.importer, "_connect", connect)
    for seed, offset in enumerate((0, 1 << 19, 100, 1 << 20)):
        source = torch.frombuffer(room, dtype=torch.uint8, count=1 << 20, offset=offset)
        source.copy_(data(1 << 20, seed))
        pair.update([source], [target])
        del source
        pair.sender._settle()
    assert len(calls) >= 3, "connected anew where memory overlaps"


def test_memory_is_held_while_it_is_registered_and_let_go_of_after(pair: Pair) -> None:
    source, target = data(1 << 20, 1), torch.zeros(1 << 20, dtype=torch.uint8)
    spans = [source]
    pair.update(spans, [target])
    address = source.data_ptr()
    del source, spans
    (region,) = pair.exporter._regions
    assert region.storages[address].data_ptr() == address
    pair.update([data(1 << 20, 2)], [target])
    assert address not in {a for r in pair.exporter._regions for a in r.storages} or len(pair.exporter._regions) == 0


@pytest.mark.alone
def test_ten_thousand_regions_are_registered_fast(transport: UcxTransport) -> None:
    made = Pair(transport, 10_000 * 64)
    source = [torch.full((64,), i % 251, dtype=torch.uint8) for i in range(10_000)]
    target = [torch.zeros(64, dtype=torch.uint8) for _ in range(10_000)]
    start = time.monotonic()
    made.update(source, target)
    first = time.monotonic() - start
    start = time.monotonic()
    made.update(source, target)
    assert first < 5 and time.monotonic() - start < 1
    made.close()


# -- what moves the bytes


def test_the_transports_in_use_are_told(pair: Pair) -> None:
    pair.update([data(1 << 20, 1)], [torch.zeros(1 << 20, dtype=torch.uint8)])
    for details in (pair.receiver.details, pair.sender.details):
        assert "cma/memory" in details["ucx_transports"] or "tcp/" in details["ucx_transports"]
        assert details["rdma"] == "no"


@pytest.mark.parametrize(
    ("line", "lanes", "rdma"),
    [
        ("b intra-node cfg#1 rma_am(tcp/lo)  amo_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)", 2, False),
        ("b inter-node cfg#2 tag(rc_mlx5/mlx5_0:1)  rma(rc_mlx5/mlx5_0:1)  ka(ud_mlx5/mlx5_0:1)", 2, True),
        ("b inter-node cfg#2 rma_am(srd/rdmap0s6:1)  am(srd/rdmap0s6:1)", 1, True),
        ("b self cfg#0 rma(rc_mlx5/mlx5_0:1)", 0, False),
        ("other inter-node cfg#1 rma(rc_mlx5/mlx5_0:1)", 0, False),
    ],
)
def test_what_ucx_says_of_its_connections_is_read(
    line: str, lanes: int, rdma: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As UCX 1.23 writes it; the lines of RDMA devices are made up after its source, none was at hand."""
    log = ucx_agent._Log()
    log._file = os.memfd_create("test")
    text = f"[1795846055.419525] [vm:1865 :0]      ucp_worker.c:1997 UCX  INFO    {line}\n"
    os.write(log._file, text.encode())
    monkeypatch.setattr(ucx_agent, "_log", log)
    agent = object.__new__(ucx_agent.Agent)
    agent.name = "b"
    assert len(agent.transports()) == lanes and agent.rdma is rdma
    os.close(log._file)


def test_less_than_rdma_is_refused(transport: UcxTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTPLANE_UCX_REQUIRE_RDMA", "1")
    monkeypatch.setattr(ucx_agent, "rdma_devices", lambda: ())
    assert "no RDMA device" in transport.probe().reason
    monkeypatch.setattr(ucx_agent, "rdma_devices", lambda: ("mlx5_0",))
    assert "only loopback is used" in transport.probe().reason
    with pytest.raises(TransportError, match="all senders are on this host"):
        Pair(transport)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")  # the user's own choice is taken, and found wanting
    assert transport.probe().ok
    made = Pair(transport)
    token = ArmToken("u", 1, 1)
    made.sender.arm(token, [made.bucket], time.monotonic() + 5)
    with pytest.raises(TransportError, match=r"UCX reaches 's' by .*(cma|tcp).*none of these is RDMA") as caught:
        made.receiver.arm(token, [made.bucket], time.monotonic() + 5)
    assert caught.value.peers == ("s",)
    made.close()


@pytest.mark.alone
def test_probe_is_quick_and_says_what_to_install(transport: UcxTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.monotonic()
    found = transport.probe()
    assert found.ok and time.monotonic() - start < 0.05
    assert found.details["ucx_net_devices"] == "lo" and found.details["version"]
    monkeypatch.setattr(ucx_agent, "package", lambda: "")
    assert "pip install --no-deps nixl-cu12" in transport.probe().reason
    with pytest.raises(TransportError, match="NIXL is not installed"):
        ucx_agent.Agent("s", True)
    monkeypatch.setenv("WEIGHTPLANE_PULL_BIND", "0.0.0.0:1")
    assert "NIXL" in transport.probe().reason


# -- the environment and the network

_SCRIPT = """
import os, sys
before = dict(os.environ)
import weightplane.transports.registry as registry
transport = registry.get("ucx")
assert transport.probe().ok and "torch" not in sys.modules and "nixl_cu12" not in sys.modules
from weightplane.transports.ucx_agent import Agent
agents = [Agent("s", True), Agent("r", True)]
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
import logging
assert logging.raiseExceptions
paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
inodes = {os.readlink(path) for path in paths if os.path.lexists(path)}
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/self/net/{table}").readlines()[1:]:
        fields = line.split()
        if f"socket:[{fields[9]}]" in inodes and fields[3] == "0A":
            print("listens", fields[1].split(":")[0])
for agent in agents:
    agent.close()
print("done")
"""


def test_nothing_listens_on_a_network_and_the_environment_stays(transport: UcxTransport) -> None:
    run = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.split("\n")
    assert set(lines) - {""} <= {"listens 0100007F", "done"} and "done" in lines, run.stdout
    assert "INFO" not in run.stdout + run.stderr


@pytest.fixture
def tcp_fleet() -> Iterator[MakeFleet]:
    """Fleets whose UCX knows nothing but TCP: reads are emulated by the sender's processor."""
    fleets: list[Fleet] = []

    def make(model: str, **options: Any) -> Fleet:
        fleets.append(Fleet(pool, model, **options))
        return fleets[-1]

    with pytest.MonkeyPatch.context() as patch:  # until the processes are there
        patch.setenv("UCX_TLS", "tcp,self")
        patch.setenv("WEIGHTPLANE_HUGE_PAGES", "0")  # its work would count as the transport's
        pool = Pool("ucx")
        try:
            yield make
        finally:
            for one in fleets:
                one.close()
            pool.close()


def test_over_tcp_the_sender_serves_and_what_was_given_up_never_lands(tcp_fleet: MakeFleet) -> None:
    """A sender that was stopped in mid-read goes on after the receiver's deadline: nothing is written any more."""
    f = tcp_fleet("blob:4:41943040", bucket_bytes=16 * MIB)
    f.open()
    f.update(1)

    def idle() -> bool:
        before = f.peers["s0"].call("cpu_s")
        time.sleep(0.5)  # the time itself is what is measured
        return bool(f.peers["s0"].call("cpu_s") - before < 0.1)

    poll(idle)  # it works for readers only while they read; what the update left to do is soon over
    for future in f.each("fill", f.receivers, seed=-1).values():
        future.result(60)
    f.arm(deadline_s=3)
    before = f.peers["r0"].call("landed", channel=f.channel)
    moves = f.move()
    poll(lambda: f.peers["r0"].call("landed", channel=f.channel) > before)
    f.peers["s0"].signal(signal.SIGSTOP)
    with pytest.raises(PeerError) as caught:
        moves["r0"].result(10)
    assert caught.value.kind == "ChannelTimeout" and caught.value.peers == ("s0",)
    f.peers["r0"].call("fill", seed=-1)
    f.peers["s0"].signal(signal.SIGCONT)
    with pytest.raises(PeerError):
        moves["s0"].result(10)
    f.check(-1, ["r0"])
    f.update(2)  # on the same channel


# -- what failed


SOURCE = """
import ctypes, sys
from weightplane.transports.ucx_agent import Agent
memory = ctypes.create_string_buffer(1 << 20)
agent, where = Agent("s", True), ("DRAM", ctypes.addressof(memory), 1 << 20, 0)
agent.register([where])
print(agent.connection().hex(), agent.metadata_of(where).hex(), where[1], flush=True)
sys.stdin.read()
"""


def test_an_error_that_is_kept_keeps_no_descriptor_open() -> None:
    """NIXL's agent and its handles are in the frames of what it raises; collected by reference counts alone."""

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    def rows(address: int) -> Any:
        return np.array([(address, 1 << 20, 0)], dtype=np.uint64)

    ucx_agent.Agent("first", True).close()  # what is opened once, and stays
    target = torch.zeros(1 << 20, dtype=torch.uint8)
    with subprocess.Popen([sys.executable, "-c", SOURCE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as source:
        assert source.stdout is not None
        try:
            connection, region, address = source.stdout.readline().split()
            gc.disable()
            before = count()
            agent = ucx_agent.Agent("r", True)
            agent.register([("DRAM", target.data_ptr(), 1 << 20, 0)])
            name = agent.add(bytes.fromhex(connection.decode()))
            agent.add(bytes.fromhex(region.decode()))
            read = agent.prepare(name, "DRAM", rows(target.data_ptr()), "DRAM", rows(int(address)))
            source.kill()
            source.wait(10)
            kept = []
            with pytest.raises(ucx_agent.UcxError, match="cannot be prepared") as caught:
                agent.prepare("nobody", "DRAM", rows(target.data_ptr()), "DRAM", rows(int(address)))
            kept.append(caught.value)
            with pytest.raises(ucx_agent.UcxError, match="the read failed: NIXL_ERR_") as caught:
                poll(lambda: agent.start(read) or agent.done(read))
            kept.append(caught.value)
            assert count() > before
            agent.close()
            assert count() == before, [e.__cause__ for e in kept]
        finally:
            gc.enable()
            source.kill()


# -- huge pages


def test_close_memory_is_taken_together() -> None:
    huge = huge_pages.HUGE
    assert huge_pages.aligned([(huge + 1, huge)]) == []
    assert huge_pages.aligned([(huge, huge)]) == [(huge, huge)]
    near = [(3 * huge // 2 + 4096, huge // 2), (huge - 4096, huge // 2 + 4096)]
    assert huge_pages.aligned(near) == [(huge, huge)]
    far = huge_pages.aligned([(0, 40 * huge), (100 * huge + 5, 3 * huge)])
    assert far == [(0, 16 * huge), (16 * huge, 16 * huge), (32 * huge, 8 * huge), (101 * huge, 2 * huge)]


def _huge_kib(address: int) -> int:
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    inside, kib = False, 0
    for line in lines:
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(x, 16) for x in head.split("-"))
            inside = start <= address < end
        elif inside and head == "AnonHugePages:":
            kib += int(line.split()[1])
    return kib


def test_memory_that_stays_goes_onto_huge_pages(transport: UcxTransport) -> None:
    """From the second update on, bytes unchanged; where the kernel has no such call, nothing happens."""
    made = Pair(transport, 8 << 20)
    source, target = data(8 << 20, 1), torch.zeros(8 << 20, dtype=torch.uint8)
    spans = [source]
    made.update(spans, [target])
    end = time.monotonic() + 5
    while made.exporter._collapser._thread is not None and time.monotonic() < end:
        time.sleep(0.01)
    release = tuple(int(x) for x in os.uname().release.split("-")[0].split(".")[:2])
    if release >= (6, 1):
        assert _huge_kib(source.data_ptr() + (4 << 20)) >= 4096
    made.update(spans, [target])
    made.close()


def test_registered_by_its_name() -> None:
    assert isinstance(registry.get("ucx"), UcxTransport)
