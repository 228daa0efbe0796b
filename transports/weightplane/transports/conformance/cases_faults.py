"""Conformance: aborts, deaths and stops at named places end every call in time, and the survivors go on afterwards.

A transport under test calls ``failpoints.hit("<name>.send.inside")`` and ``"<name>.receive.inside"`` at least once for
every 2 MiB that it moves, between two parts of a bucket or right after one; the kit's own places (``kit.send.before``,
``kit.send.after``, ``kit.receive.before``, ``kit.receive.after``) are around the calls.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import pytest

from .harness import Answer, Fleet, PeerError

MakeFleet = Callable[..., Fleet]

__all__ = [
    "test_abort_at",
    "test_abort_before_and_after_use",
    "test_deadline_names_the_peer",
    "test_killed_at",
    "test_stopped_at",
]

MIB = 1 << 20
TOTAL = 40 * MIB
PLACES = [
    ("s0", "kit.send.before", 6),
    ("s0", "{}.send.inside", 5),
    ("s0", "kit.send.after", 5),
    ("r0", "kit.receive.before", 3),
    ("r0", "{}.receive.inside", 5),
    ("r0", "kit.receive.after", 3),
]
at_places = pytest.mark.parametrize(("victim", "place", "nth"), PLACES, ids=lambda v: str(v).replace("{}.", ""))
Moves = dict[str, Future[Answer]]


def broken(fleet: MakeFleet, victim: str, place: str, nth: int, action: str) -> tuple[Fleet, Moves, dict[str, Any]]:
    """A fleet of one sender and two receivers in the middle of an update, in which ``victim`` has come to ``place``."""
    f = fleet("blob:4:10485760", receivers=["full"] * 2, bucket_bytes=2 * MIB, fit=True)
    f.open()
    f.update(1)
    f.arm()
    for future in f.each("fill", f.senders, seed=2).values():
        future.result(60)
    rule = {"name": place.format(f.transport), "nth": nth, "action": action}
    f.peers[victim].call("failpoints", rules=[rule])
    moves = f.move()
    return f, moves, f.peers[victim].wait_event()


def heal(f: Fleet, victim: str = "") -> None:
    """After a fault: close in time, a fresh process for the victim, a new channel, and an exact update."""
    took = f.close_channel([m for m in f.parts if m != victim])
    assert max(took.values()) < 5, took
    if victim:
        f.replace(victim)
    for peer in f.peers.values():
        peer.call("failpoints", rules=[])
    f.open()
    f.update(3)


def ended(moves: Moves, member: str, since: float, kinds: set[str]) -> PeerError:
    """The member's call has failed as it should, within a second of ``since``."""
    with pytest.raises(PeerError) as caught:
        moves[member].result(10)
    assert caught.value.kind in kinds, caught.value
    assert caught.value.at - since <= 1.0, f"{member} took {caught.value.at - since:.2f} s"
    return caught.value


def unharmed(f: Fleet, moves: Moves, victim: str, member: str) -> bool:
    """Whether a receiver got everything, for all that another receiver is stuck or gone: by a one-sided transport it
    may go on, by others everything may be on its way already. Then it is exact; the update fails all the same."""
    if not {victim, member} <= set(f.receivers):
        return False
    wait([moves[member]], 10 if f.one_sided else 0)
    if moves[member].done() and moves[member].exception() is None:
        f.check(2, [member])
        return True
    return False


def abort(f: Fleet, moves: Moves, victim: str, member: str, reason: str) -> float:
    """Abort a survivor that waits: it leaves within a second and says why, unless it had everything a moment before.
    The seconds that ``abort`` itself took."""
    since = time.monotonic()
    took: float = f.peers[member].call("abort", 5, channel=f.channel, reason=reason)
    wait([moves[member]], 10)
    if not unharmed(f, moves, victim, member):
        error = ended(moves, member, since, {"ChannelAborted", "PeerLost"})
        assert error.kind != "ChannelAborted" or reason in error.text
    return took


def poll(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for a condition of another process."""
    end, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < end, "the condition never came"
        pause.wait(0.005)


@at_places
def test_abort_at(fleet: MakeFleet, victim: str, place: str, nth: int) -> None:
    """Abort from another thread, of those that wait for the victim and of the victim itself, inside and out."""
    f, moves, _ = broken(fleet, victim, place, nth, "hold")
    for member in [m for m in f.parts if m != victim and not unharmed(f, moves, victim, m)]:
        assert abort(f, moves, victim, member, "the test says so") < 0.5
    since = time.monotonic()
    f.peers[victim].call("abort", 5, channel=f.channel, reason="the test says so")
    f.peers[victim].call("release")
    ended(moves, victim, since, {"ChannelAborted"})
    for member in f.parts:
        with pytest.raises(PeerError, match="the test says so") as caught:
            f.arm("u-after", [member])
        assert caught.value.kind == "ChannelAborted"
    heal(f)


def test_abort_before_and_after_use(fleet: MakeFleet) -> None:
    """Abort before arm, twice, and after close: never an error of its own, and always final."""
    f = fleet("blob:2:1000", bucket_bytes=1000)
    f.open()
    for member, peer in f.peers.items():
        for reason in ("first", "second"):
            peer.call("abort", 5, channel=f.channel, reason=reason)
        with pytest.raises(PeerError, match="first") as caught:
            f.arm("u-1", [member])
        assert caught.value.kind == "ChannelAborted"
    for peer in f.peers.values():
        peer.call("keep_closed", channel=f.channel)
        peer.call("abort", 5, channel=f.channel, reason="late")
    heal(f)


@at_places
def test_killed_at(fleet: MakeFleet, victim: str, place: str, nth: int) -> None:
    """SIGKILL: survivors raise ``PeerLost`` that names the victim, or leave within a second of being aborted."""
    f, moves, event = broken(fleet, victim, place, nth, "kill")
    f.peers[victim].process.wait(20)
    assert f.peers[victim].process.returncode == -signal.SIGKILL
    survivors = [m for m in f.parts if m != victim]
    wait([moves[m] for m in survivors], 0.5 if f.collective else 2)  # a collective's library mostly waits for ever
    for member in survivors:
        if unharmed(f, moves, victim, member):
            continue
        if moves[member].done():
            error = ended(moves, member, event["at"] + 1, {"PeerLost"})
            assert error.peers == (victim,) or (f.collective and victim in error.peers)
        else:
            abort(f, moves, victim, member, "a peer died")
    heal(f, victim)


@at_places
def test_stopped_at(fleet: MakeFleet, victim: str, place: str, nth: int) -> None:
    """SIGSTOP in mid-update: others wait (the deadline is far) until aborted, then leave within a second."""
    f, moves, _ = broken(fleet, victim, place, nth, "stop")
    survivors = [m for m in f.parts if m != victim]
    watched = next((m for m in reversed(f.receivers) if m != victim), victim)
    before = TOTAL  # landed in the update before
    end = (
        time.monotonic() + 2 if f.one_sided and victim in f.senders else float("inf")
    )  # a stopped one may serve nothing
    if watched != victim:
        poll(lambda: f.peers[watched].call("landed", channel=f.channel) > before or time.monotonic() > end)
    survivors = [m for m in survivors if not unharmed(f, moves, victim, m)]
    if watched in survivors:
        landed = f.peers[watched].call("landed", channel=f.channel)
        waits = not moves[watched].done() and landed < before + TOTAL
        assert waits or unharmed(f, moves, victim, watched)
    for member in survivors:
        abort(f, moves, victim, member, "a peer is stuck")
    assert f.peers[victim].alive
    heal(f, victim)


@pytest.mark.parametrize("victim", ["s0", "r0"])
def test_deadline_names_the_peer(fleet: MakeFleet, victim: str) -> None:
    """With nobody to abort it, a blocked call ends at the deadline and says whom it waited for, and in which bucket."""
    f = fleet("blob:4:10485760", bucket_bytes=2 * MIB)
    f.open()
    f.update(1)  # who connects with the first bytes, or starts a card then, takes its own time
    f.arm(deadline_s=1.5)
    end = time.monotonic() + 1.5
    other = "r0" if victim == "s0" else "s0"
    place = "kit.send.before" if victim == "s0" else "kit.receive.before"
    f.peers[victim].call("failpoints", rules=[{"name": place, "nth": 3, "action": "hold"}])
    moves = f.move()
    f.peers[victim].wait_event()
    error = ended(moves, other, end, {"ChannelTimeout"})
    assert error.peers == (victim,) and error.bucket >= 2
    f.peers[victim].call("release")
    with pytest.raises(PeerError):
        moves[victim].result(10)
    heal(f)
