"""Conformance: nothing grows, and waiting costs no processor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from .harness import Fleet

MakeFleet = Callable[..., Fleet]

__all__ = ["test_fifty_updates_grow_nothing", "test_opening_and_closing_grows_nothing", "test_waiting_is_idle"]

COUNTED = ("fds", "threads", "os_threads", "maps")
WARM_UP = 40  # updates until the allocators of a message library hold what they keep: growth after that is growth
DEVICE_SLACK = 32 << 20  # bytes of a device that a driver takes as it likes, in any process; an eighth as above
RSS_SLACK_KIB = 16 << 10  # a sixteenth of what 50 updates of 5 MB would leave behind if each were kept


def _compare(f: Fleet, before: dict[str, dict[str, Any]]) -> None:
    """Nothing has grown; a library may close its descriptors a moment after it was told to."""
    end = time.monotonic() + 5
    for member, peer in f.peers.items():
        while True:
            now = peer.call("stats")
            grown = {k: (before[member][k], now[k]) for k in COUNTED if now[k] > before[member][k]}
            if not grown or time.monotonic() > end:
                break
            time.sleep(0.05)  # descriptors of another process: nothing to wait on
        files = {k: (before[member]["files"].get(k, 0), n) for k, n in now["files"].items()}
        more = {k: counts for k, counts in files.items() if counts[1] > counts[0]}
        assert not grown, f"{member}: {grown}{f'; of descriptors {more}' if more else ''}"
        assert now["rss_kib"] < before[member]["rss_kib"] + RSS_SLACK_KIB, member
        if "device_used" in now:
            assert now["device_allocated"] <= before[member]["device_allocated"], member
            assert now["device_used"] < before[member]["device_used"] + DEVICE_SLACK, member


def _stats(f: Fleet) -> dict[str, dict[str, Any]]:
    return {m: p.call("stats") for m, p in f.peers.items()}


def test_fifty_updates_grow_nothing(fleet: MakeFleet) -> None:
    """Descriptors, threads, mappings and memory after 50 updates on one channel."""
    f = fleet("blob:5:1000001", receivers=["full"] * 2, fit=True)
    f.open()
    for seed in range(WARM_UP):
        f.update(seed)
    before = _stats(f)
    for seed in range(50):
        f.update(seed)
    _compare(f, before)


def test_opening_and_closing_grows_nothing(fleet: MakeFleet) -> None:
    """The same over channels opened, used, aborted or not, and closed."""
    f = fleet("blob:3:1000", receivers=["full"] * 2, fit=True)
    before: dict[str, dict[str, Any]] = {}
    for round_ in range(25):
        if round_ == 5:
            before = _stats(f)
        f.open()
        f.update(round_)
        if round_ % 2:
            for peer in f.peers.values():
                peer.call("abort", channel=f.channel, reason="a round of the test")
        f.close_channel()
    _compare(f, before)


def test_waiting_is_idle(fleet: MakeFleet) -> None:
    """A receiver that waits two seconds for bytes uses less than a tenth of a core."""
    f = fleet("blob:3:1000")
    f.open()
    if f.collective:
        f.update(1)  # its first bytes wait for a library to connect everybody, as busily as it likes
    f.arm()
    moves = f.move(f.receivers)
    before = f.peers["r0"].call("cpu_s")
    threading.Event().wait(2)  # the time itself is what is measured
    used = f.peers["r0"].call("cpu_s") - before
    f.move(f.senders)["s0"].result(30)
    moves["r0"].result(30)
    assert used < 0.2, f"{used:.3f} s of processor in 2 s"
