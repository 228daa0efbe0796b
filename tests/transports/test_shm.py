"""``shm`` through the conformance kit, and what only it promises: segments, keys, quick detection, ``drop``."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightplane.controlplane.core.plan import Bucket, Segment
from weightplane.transports import shm_ring
from weightplane.transports.base import ArmToken, ChannelAborted, ChannelSpec, ChannelTimeout, PeerLost, TransportError
from weightplane.transports.conformance.cases_data import *  # noqa: F403
from weightplane.transports.conformance.cases_faults import *  # noqa: F403
from weightplane.transports.conformance.cases_faults import MIB, broken, ended, heal, poll
from weightplane.transports.conformance.cases_resources import *  # noqa: F403
from weightplane.transports.conformance.harness import Fleet, PeerError
from weightplane.transports.shm import ShmTransport

TRANSPORT = "shm"
pytest_plugins = ["weightplane.transports.conformance.plugin"]
MakeFleet = Callable[..., Fleet]
KEY = bytes(range(32))


def segments(channel: str) -> list[str]:
    """Names in /dev/shm of a channel's sender ``s0``."""
    return [n for n in os.listdir("/dev/shm") if n == shm_ring.segment_name(channel, "s0")]


def spec(channel: str, receivers: int = 1, **changes: Any) -> ChannelSpec:
    """A channel from ``s`` to ``r0..``."""
    given: dict[str, Any] = {
        "channel_id": f"{channel}-{os.getpid()}",
        "group": "g",
        "transport": "shm",
        "key": KEY,
        "senders": ("s",),
        "receivers": tuple(f"r{i}" for i in range(receivers)),
        "bucket_bytes": 1000,
        "offers": {},
    }
    return ChannelSpec(**(given | changes))


def bucket(index: int, nbytes: int = 1000, receivers: tuple[str, ...] = ("r0",)) -> Bucket:
    return Bucket(index, "s", receivers, (Segment(0, index * nbytes, nbytes),), nbytes)


def soon(seconds: float = 30) -> float:
    return time.monotonic() + seconds


TOKEN = ArmToken("u", 1, 1)


# -- peers


@pytest.mark.parametrize(("victim", "place"), [("s0", "shm.send.inside"), ("r0", "shm.receive.inside")])
def test_a_death_is_noticed_within_a_second_and_leaves_no_segment(fleet: MakeFleet, victim: str, place: str) -> None:
    f, moves, event = broken(fleet, victim, place, 5, "kill")
    other = "r0" if victim == "s0" else "s0"
    error = ended(moves, other, event["at"], {"PeerLost"})
    assert error.peers == (victim,) and error.bucket >= 0
    if victim == "s0":
        assert ended(moves, "r1", event["at"], {"PeerLost"}).peers == ("s0",)
    assert segments(f.channel) == []


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_dropped_receiver_holds_nobody_up(fleet: MakeFleet, how: str) -> None:
    """The others get every byte; a stopped one that comes back is told, and its ring serves no other update."""
    f, moves, _ = broken(fleet, "r0", "shm.receive.inside", 5, how)
    sender = f.peers["s0"]
    if how == "kill":
        with pytest.raises(PeerError) as caught:
            moves["s0"].result(5)
        assert caught.value.peers == ("r0",)
        sender.call("drop", channel=f.channel, member="r0")
        f.move(["s0"], first=caught.value.bucket)["s0"].result(20)  # goes on where it stopped
    else:
        poll(lambda: f.peers["r1"].call("landed", channel=f.channel) > 40 * MIB)
        sender.call("drop", channel=f.channel, member="r0")
        moves["s0"].result(20)
    moves["r1"].result(20)
    f.check(2, ["r1", "s0"])
    if how == "stop":
        with pytest.raises(PeerError, match=r"\['r0'\] were dropped.*bind a new channel"):
            f.arm("u-next", ["s0"])
        f.peers["r0"].signal(signal.SIGCONT)
        with pytest.raises(PeerError, match="dropped 'r0'"):
            moves["r0"].result(10)
        heal(f)
    else:
        f.arm("u-next", ["s0", "r1"])
        heal(f, "r0")


def test_a_dropped_receiver_that_never_came(fleet: MakeFleet) -> None:
    f = fleet("blob:12:1048576", receivers=["full"] * 2)
    f.open()
    f.arm("u", ["s0", "r1"])
    moves = f.move(["s0", "r1"])
    assert not moves["s0"].done()
    f.peers["s0"].call("drop", channel=f.channel, member="r0")
    for future in moves.values():
        future.result(20)
    f.check(0, ["r1"])
    assert segments(f.channel) == []
    f.arm("u2", ["s0", "r1"])
    for future in f.move(["s0", "r1"]).values():
        future.result(20)


def test_no_name_is_left_once_all_are_attached(fleet: MakeFleet) -> None:
    f = fleet("blob:3:1000", receivers=["full"] * 2)
    f.open()
    assert len(segments(f.channel)) == 1
    f.arm("u", ["s0", "r0"])
    assert len(segments(f.channel)) == 1
    f.arm("u", ["r1"])
    assert segments(f.channel) == []
    f.update(1)


def test_a_sender_that_dies_before_all_attached(fleet: MakeFleet) -> None:
    f = fleet("blob:3:1000", receivers=["full"] * 2)
    f.open()
    f.arm("u", ["s0", "r0"])
    f.peers["s0"].kill()
    with pytest.raises(PeerError, match="'s0' died") as caught:
        f.arm("u", ["r1"])
    assert caught.value.kind == "PeerLost"
    assert segments(f.channel) == []


# -- in one process


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of shared memory of its own, empty again after the test."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="wp-test-") as made:
        monkeypatch.setenv("WEIGHTPLANE_SHM_DIR", made)
        yield Path(made)
        assert os.listdir(made) == []


@pytest.fixture
def transport(home: Path) -> ShmTransport:
    return ShmTransport()


def test_what_a_dead_owner_left_is_swept(transport: ShmTransport, home: Path) -> None:
    stale = home / "weightplane-stale"
    code = (
        "import os, sys, signal; from pathlib import Path; from weightplane.transports.shm_ring import Segment;"
        f"Segment.create(Path({str(stale)!r}), b'k', 'c', 's', 1, 2, 4096);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert stale.exists()
    mine = transport.open_sender(spec("alive"), "s")
    assert not stale.exists()
    transport.open_sender(spec("other"), "s").close()
    assert os.listdir(home) == [shm_ring.segment_name(spec("alive").channel_id, "s")], "the living are left alone"
    mine.close()


def test_the_key_is_checked(transport: ShmTransport) -> None:
    sender = transport.open_sender(spec("key"), "s")
    receiver = transport.open_receiver(spec("key", key=bytes(32)), "r0")
    with pytest.raises(TransportError, match="key of 's' is not ours"):
        receiver.arm(TOKEN, [bucket(0)], soon())
    receiver.close()
    sender.close()
    with pytest.raises(TransportError, match="31 bytes, expected 32"):
        transport.open_sender(spec("key", key=bytes(31)), "s")


def test_a_receiver_without_the_key_is_not_served(transport: ShmTransport) -> None:
    made = spec("proof")
    sender = transport.open_sender(made, "s")
    receiver = transport.open_receiver(made, "r0")
    receiver.arm(TOKEN, [bucket(0)], soon())
    sender.arm(TOKEN, [bucket(0)], soon())
    segment = sender._segment
    segment.bytes[segment.receiver_at(0)] ^= 1
    with pytest.raises(TransportError, match="'r0' attached without the channel's key"):
        sender.send(bucket(0), [torch.zeros(1000, dtype=torch.uint8)])
    receiver.close()
    sender.close()


def test_a_foreign_file_is_refused(transport: ShmTransport, home: Path) -> None:
    made = spec("foreign")
    path = home / shm_ring.segment_name(made.channel_id, "s")
    for mode, text in ((0o644, "mode 644"), (0o600, "too short")):
        path.touch(mode=mode)
        path.chmod(mode)
        receiver = transport.open_receiver(made, "r0")
        with pytest.raises(TransportError, match=text):
            receiver.arm(TOKEN, [bucket(0)], soon())
        receiver.close()
        path.unlink()


def test_the_segment_is_private(transport: ShmTransport, home: Path) -> None:
    made = spec("private")
    sender = transport.open_sender(made, "s")
    stat = (home / shm_ring.segment_name(made.channel_id, "s")).stat()
    assert stat.st_mode & 0o777 == 0o600 and stat.st_blocks * 512 >= stat.st_size, "private and prefaulted"
    sender.close()


def test_another_host_mount_or_user_is_named(transport: ShmTransport) -> None:
    ours = transport.offer("s")
    assert ours.transport == "shm" and ours.shm.pid == os.getpid()
    theirs = SimpleNamespace(shm=SimpleNamespace(host_id="elsewhere/1.1/0"))
    offers: Any = {"s": ours, "r0": theirs}
    with pytest.raises(TransportError, match="'r0' is at elsewhere") as caught:
        transport.open_sender(spec("host", offers=offers), "s")
    assert caught.value.peers == ("r0",)


def test_too_little_shared_memory_says_so(transport: ShmTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportError, match=r"KiB are needed.*--shm-size"):
        transport.open_sender(spec("full"), "s")
    assert not transport.probe().ok and "--shm-size" in transport.probe().reason
    assert len(os.listdir("/proc/self/fd")) == fds


@pytest.mark.alone
def test_probe_leaves_nothing_and_is_quick(transport: ShmTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    transport.probe()
    fds, start = len(os.listdir("/proc/self/fd")), time.monotonic()
    assert transport.probe().ok
    assert time.monotonic() - start < 0.05 and len(os.listdir("/proc/self/fd")) == fds
    monkeypatch.setenv("WEIGHTPLANE_SHM_DIR", "/no/such/directory")
    assert "/no/such/directory" in ShmTransport().probe().reason


def test_wrong_use_is_named(transport: ShmTransport) -> None:
    made = spec("misuse", receivers=2)
    with pytest.raises(TransportError, match="'nobody' is not a member"):
        transport.open_sender(made, "nobody")
    sender, receiver = transport.open_sender(made, "s"), transport.open_receiver(made, "r0")
    one = bucket(0)
    with pytest.raises(TransportError, match="never armed"):
        sender.send(one, [torch.zeros(1000, dtype=torch.uint8)])
    with pytest.raises(TransportError, match="bucket 3 is not 's'"):
        sender.arm(TOKEN, [bucket(3, receivers=("r9",))], soon())
    with pytest.raises(TransportError, match="bucket 3 is not 'r0'"):
        receiver.arm(TOKEN, [bucket(3, receivers=("r1",))], soon())
    sender.arm(TOKEN, [one], soon())
    receiver.arm(TOKEN, [one], soon())
    with pytest.raises(TransportError, match="has 1000 bytes, its spans 999"):
        sender.send(one, [torch.zeros(999, dtype=torch.uint8)])
    with pytest.raises(ValueError, match="span 1"):
        sender.send(one, [torch.zeros(500, dtype=torch.uint8), torch.zeros(125)])
    sender.close()
    receiver.close()
    sender.close()
    with pytest.raises(TransportError, match="closed"):
        sender.send(one, [])
    sender.abort("after close")


def test_different_plans_are_noticed(transport: ShmTransport) -> None:
    made = spec("plans")
    sender, receiver = transport.open_sender(made, "s"), transport.open_receiver(made, "r0")
    sender.arm(TOKEN, [bucket(1)], soon())
    receiver.arm(TOKEN, [bucket(0)], soon())
    sender.send(bucket(1), [torch.ones(1000, dtype=torch.uint8)])
    target = torch.zeros(1000, dtype=torch.uint8)
    with pytest.raises(TransportError, match=r"expected bucket 0 at byte 0.*sent bucket 1.*different plans"):
        receiver.receive(bucket(0), [target])
    assert not target.any()
    sender.close()
    receiver.close()


def test_what_was_sent_before_close_is_still_read_then_the_peer_is_lost(transport: ShmTransport) -> None:
    made = spec("drain")
    sender, receiver = transport.open_sender(made, "s"), transport.open_receiver(made, "r0")
    both = [bucket(0), bucket(1)]
    sender.arm(TOKEN, both, soon())
    receiver.arm(TOKEN, both, soon())
    sender.send(both[0], [torch.full((1000,), 7, dtype=torch.uint8)])
    sender.close()
    target = torch.zeros(1000, dtype=torch.uint8)
    receiver.receive(both[0], [target])
    assert bool((target == 7).all())
    with pytest.raises(PeerLost, match="'s' closed its side"):
        receiver.receive(both[1], [target])
    receiver.close()


def test_flush_notices_a_receiver_that_moved_on(transport: ShmTransport) -> None:
    made = spec("left")
    sender, receiver = transport.open_sender(made, "s"), transport.open_receiver(made, "r0")
    receiver.arm(TOKEN, [bucket(0)], soon())
    sender.arm(TOKEN, [bucket(0)], soon())
    sender.send(bucket(0), [torch.ones(1000, dtype=torch.uint8)])
    receiver.arm(ArmToken("u2", 1, 1), [bucket(0)], soon())
    with pytest.raises(PeerLost, match="left this update"):
        sender.flush()
    sender.close()
    receiver.close()


@pytest.mark.parametrize("other", [ArmToken("v", 1, 1), ArmToken("u", 2, 1), ArmToken("u", 1, 2)])
def test_each_part_of_the_token_fences(transport: ShmTransport, other: ArmToken) -> None:
    """Bytes in flight of another update, epoch or generation are skipped when the receiver arms later or earlier."""
    made = spec("fence")
    sender, receiver = transport.open_sender(made, "s"), transport.open_receiver(made, "r0")
    receiver.arm(TOKEN, [bucket(0)], soon())
    sender.arm(TOKEN, [bucket(0)], soon())
    sender.send(bucket(0), [torch.full((1000,), 1, dtype=torch.uint8)])
    receiver.arm(other, [bucket(0)], soon())
    sender.send(bucket(1), [torch.full((1000,), 1, dtype=torch.uint8)])  # still the old update, written after
    sender.arm(other, [bucket(0)], soon())
    sender.send(bucket(0), [torch.full((1000,), 2, dtype=torch.uint8)])
    target = torch.zeros(1000, dtype=torch.uint8)
    receiver.receive(bucket(0), [target])
    assert bool((target == 2).all())
    sender.flush()
    sender.close()
    receiver.close()


@pytest.mark.alone
def test_receiver_waits_for_a_late_sender_and_gives_up_in_time(transport: ShmTransport) -> None:
    receiver = transport.open_receiver(spec("late"), "r0")
    start = time.monotonic()
    with pytest.raises(ChannelTimeout, match="waited for 's'"):
        receiver.arm(TOKEN, [bucket(0)], soon(0.3))
    assert 0.25 < time.monotonic() - start < 1
    receiver.abort("enough")
    with pytest.raises(ChannelAborted, match="enough"):
        receiver.arm(TOKEN, [bucket(0)], soon())
    receiver.close()


def test_a_member_attaches_once(transport: ShmTransport) -> None:
    made = spec("twice", receivers=2)
    sender, receiver = transport.open_sender(made, "s"), transport.open_receiver(made, "r0")
    receiver.arm(TOKEN, [bucket(0)], soon())
    second = transport.open_receiver(made, "r0")
    with pytest.raises(TransportError, match="has it open already"):
        second.arm(TOKEN, [bucket(0)], soon())
    for channel in (second, receiver, sender):
        channel.close()


def test_a_death_shows_through_a_forked_child_that_keeps_the_lock(home: Path) -> None:
    """The pidfd sees what the lock cannot."""
    path = home / "weightplane-fork"
    code = (
        "import os, signal, sys; from pathlib import Path; from weightplane.transports.shm_ring import Segment;"
        f"s = Segment.create(Path({str(path)!r}), b'k', 'c', 's', 1, 2, 4096)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.pause()\n"
        "print(child, flush=True); sys.stdin.readline(); os._exit(0)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdin is not None
    child = int(owner.stdout.readline())
    segment = shm_ring.Segment.attach(path, b"k", "c", "s", 1, 0, "r0")
    peer = segment.sender_peer()
    assert not peer.dead()
    owner.stdin.write("x\n")
    owner.stdin.flush()
    poll(peer.dead)
    assert not shm_ring.lock_is_free(segment.fd, 0), "the child still holds the lock"
    os.kill(child, signal.SIGKILL)
    peer.close()
    segment.close()
    owner.stdin.close()
    owner.wait(10)
    owner.stdout.close()
    path.unlink(missing_ok=True)


@pytest.mark.alone
def test_four_quarters_reach_two_halves_with_no_full_copy_in_any_process(fleet: Any) -> None:
    """96 MiB of matrices, rows to columns: no process needs more than 8 MiB beside its own part."""
    rows = [f"rows:{i}/4" for i in range(4)]
    f = fleet("matrix:4096:4096", senders=rows, receivers=["cols:0/2", "cols:1/2"], bucket_bytes=1 << 20)
    f.open()
    f.update(1)
    for future in f.each("fill", f.senders, seed=2).values():
        future.result(60)
    before = {m: p.call("stats")["rss_kib"] for m, p in f.peers.items()}
    for peer in f.peers.values():
        peer.call("reset_peak")
    f.arm()
    for future in f.move().values():
        future.result(60)
    peaks = {m: p.call("stats")["peak_kib"] - before[m] for m, p in f.peers.items()}
    assert max(peaks.values()) < 8 << 10, peaks
    f.check(2)
