"""``nccl`` on cards: the conformance kit, and what needs the library itself. Every member has its own GPU.

Two GPUs run all that needs one receiver; cases with more members are skipped with how many they need.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from weightplane.transports.conformance.cases_data import *  # noqa: F403
from weightplane.transports.conformance.cases_faults import *  # noqa: F403
from weightplane.transports.conformance.cases_faults import ended, heal, poll
from weightplane.transports.conformance.cases_resources import *  # noqa: F403
from weightplane.transports.conformance.harness import Fleet, PeerError, Pool

TRANSPORT = "weightplane.transports.nccl:NcclTransport"
DEVICES = "cuda"
pytest_plugins = ["weightplane.transports.conformance.plugin"]
MakeFleet = Callable[..., Fleet]
MIB = 1 << 20

if find_spec("nccl") is None:
    pytest.skip("nccl4py is not installed", allow_module_level=True)


def test_one_gpu_twice_is_refused_with_the_advice(pool: Pool) -> None:
    """D05: at open, before the library is asked."""
    one = Pool(pool.transport, "cuda:0")
    try:
        with Fleet(one, "blob:2:1000", bucket_bytes=1000) as f, pytest.raises(PeerError, match="use cuda_ipc"):
            f.open()
    finally:
        one.close()


@pytest.mark.parametrize("missing", ["s0", "r0"])
def test_a_peer_that_never_comes_ends_the_others_by_the_deadline(fleet: MakeFleet, missing: str) -> None:
    f = fleet("blob:4:1048576", bucket_bytes=MIB)
    f.open()
    f.arm(deadline_s=3)
    end = time.monotonic() + 3
    other = "r0" if missing == "s0" else "s0"
    error = ended(f.move([other]), other, end, {"ChannelTimeout"})
    assert error.peers == (missing,)
    heal(f)


def test_an_abort_ends_the_connecting(fleet: MakeFleet) -> None:
    f = fleet("blob:4:1048576", bucket_bytes=MIB)
    f.open()
    f.arm()
    moves = f.move(["r0"])
    poll(lambda: f.peers["r0"].call("cpu_s") > 0)
    since = time.monotonic()
    f.peers["r0"].call("abort", 5, channel=f.channel, reason="the test says so")
    ended(moves, "r0", since, {"ChannelAborted"})
    heal(f)


def test_all_members_abort_in_mid_broadcast_and_a_new_communicator_works(fleet: MakeFleet) -> None:
    f = fleet(f"blob:4:{64 * MIB}", receivers=["full"] * 3, bucket_bytes=16 * MIB, fit=True)
    f.open()
    f.update(1)
    f.arm()
    place = {"name": "kit.receive.before", "nth": 3, "action": "hold"}
    f.peers["r0"].call("failpoints", rules=[place])
    moves = f.move()
    f.peers["r0"].wait_event()
    since = time.monotonic()
    for peer in f.peers.values():
        peer.call("abort", 5, channel=f.channel, reason="the coordinator says so")
    f.peers["r0"].call("release")
    for member in f.parts:
        ended(moves, member, since, {"ChannelAborted"})
    heal(f)


def test_peak_device_memory_is_bounded(fleet: MakeFleet) -> None:
    """Beside the tensors: at most half a GB of ours on each device. What the library takes is printed, and bounded."""
    f = fleet(f"blob:24:{24 * MIB}", bucket_bytes=512 * MIB)
    before: dict[str, dict[str, Any]] = {m: p.call("stats") for m, p in f.peers.items()}
    for peer in f.peers.values():
        peer.call("reset_peak")
    f.open()
    for seed in range(3):
        f.update(seed)
    for member, peer in f.peers.items():
        now = peer.call("stats")
        ours = now["device_peak"] - before[member]["device_allocated"]
        all_of_it = now["device_used"] - before[member]["device_used"]
        print(f"{member}: ours at peak {ours / 1e6:.0f} MB, all of it now {all_of_it / 1e6:.0f} MB")
        assert ours <= 500e6, (member, ours)
        assert all_of_it <= 1e9, (member, all_of_it)  # NCCL 2.28 alone: 0.51 GB for a pair of H200


def test_two_senders_and_two_receivers(fleet: MakeFleet) -> None:
    """Four GPUs: split communicators, buckets for all and for some, in one order."""
    f = fleet("matrix:64:48", senders=["rows:0/2", "rows:1/2"], receivers=["cols:0/2", "full"], bucket_bytes=500)
    f.open()
    for seed in range(5):
        f.update(seed)
    f.close_channel()
    f.open()
    f.update(6)
