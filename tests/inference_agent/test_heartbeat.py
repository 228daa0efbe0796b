"""The heartbeat helper: keeps a lease through a held GIL or a stop, tells how the parent is, and dies with it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import grpc
import pytest

from tests.inference_agent.server import Server, eventually, server
from weightplane.controlplane.core.model import Replica
from weightplane.controlplane.core.states import Liveness, Process
from weightplane.controlplane.dial import Dial
from weightplane.controlplane.heartbeat import HeartbeatHelper, HelperStatus
from weightplane.controlplane.heartbeat_process import Parent
from weightplane.v1 import agent_pb2, agent_pb2_grpc, common_pb2

PARENT = """
import sys, time
from weightplane.controlplane.dial import Dial
from weightplane.controlplane.heartbeat import HeartbeatHelper
helper = HeartbeatHelper(Dial(sys.argv[1]), "g", "r", "life")
helper.start()
print(helper.pid, flush=True)
time.sleep(120)
"""


@pytest.fixture(scope="module")
def control_plane() -> Iterator[Server]:
    with server() as s:
        yield s


@pytest.fixture
def dial(control_plane: Server) -> Iterator[Dial]:
    """The address, with a control session of replica ``r`` open beside."""
    dial = Dial(control_plane.address)
    hello = agent_pb2.Hello(group="g", agent_id="r", incarnation="life")
    hello.replica.workers.add(index=0)
    hello.replica.modes.append(common_pb2.MODE_STAGED)
    hello.replica.pause_modes.append(common_pb2.PAUSE_MODE_KEEP)
    hello.replica.cache_policies.append(common_pb2.CACHE_POLICY_CLEAR)
    hello.replica.evidence = common_pb2.EVIDENCE_LIVE
    channel = dial.channel()
    done = False

    def messages() -> Iterator[agent_pb2.SessionRequest]:
        yield agent_pb2.SessionRequest(hello=hello)
        while not done:
            time.sleep(0.05)

    call = agent_pb2_grpc.AgentServiceStub(channel).Session(messages())
    assert next(call).HasField("welcome")
    yield dial
    done = True
    call.cancel()
    channel.close()


def replica(control_plane: Server) -> Replica:
    return control_plane.state().replicas["r"]


def hold_the_gil(seconds: int) -> None:
    """A foreign call that keeps the GIL, as a careless extension does."""
    ctypes.PyDLL(None).sleep(seconds)


def test_a_held_gil_costs_no_lease(control_plane: Server, dial: Dial) -> None:
    helper = HeartbeatHelper(dial, "g", "r", "life")
    helper.start()
    try:
        eventually(lambda: helper.status is HelperStatus.LIVE, what="the helper is live")
        before = helper.beats
        hold_the_gil(3)
        assert helper.beats - before >= 10, "no beats while the GIL was held"
        eventually(lambda: replica(control_plane).liveness is Liveness.LIVE, 2)  # the server shares our interpreter
        helper.progress(42)
        eventually(lambda: replica(control_plane).progress == 42)
    finally:
        helper.stop()
    assert not helper.alive()


@pytest.mark.alone
def test_stopped_and_dead_parents_are_told_and_never_outlived(control_plane: Server, dial: Dial) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, dial.address], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    helper = int(parent.stdout.readline())
    try:
        eventually(lambda: replica(control_plane).process is Process.RUNNING)
        os.kill(parent.pid, signal.SIGSTOP)
        eventually(lambda: replica(control_plane).process is Process.STOPPED, what="told that it is stopped")
        time.sleep(1.5)
        assert replica(control_plane).liveness is Liveness.LIVE, "between updates a stop costs nothing"
        os.kill(parent.pid, signal.SIGCONT)
        eventually(lambda: replica(control_plane).process is Process.RUNNING)
    finally:
        parent.kill()
        killed = time.monotonic()
        parent.wait()
    eventually(lambda: replica(control_plane).liveness is Liveness.LOST, 2.5, "the death is told")
    eventually(lambda: not os.path.exists(f"/proc/{helper}"), 2.5, "the helper leaves")
    assert time.monotonic() - killed < 3, "about one second on a quiet machine"


def test_a_process_with_thousands_of_descriptors_is_watched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """``select`` takes none above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    opened: list[int] = []

    def above(fd: int) -> int:
        opened.append(fcntl.fcntl(fd, fcntl.F_DUPFD, 1500))
        os.close(fd)
        return opened[-1]

    monkeypatch.setattr(os, "pidfd_open", lambda pid, inner=os.pidfd_open: above(inner(pid)))
    high = above(os.open(os.devnull, os.O_RDONLY))
    child = subprocess.Popen(["sleep", "100"])
    monkeypatch.setattr(os, "getppid", lambda: child.pid)
    try:
        parent = Parent(child.pid)
        assert parent._pidfd >= 1500 and parent.alive() and parent.wait([high], 5) == [high]
        child.kill()
        assert parent._pidfd in parent.wait([], 5) and not parent.alive()
    finally:
        child.kill()
        child.wait(10)
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_one_that_is_on_its_way_out_is_dead_however_long_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with a GPU closes its pipes at once and is gone a second or more later."""
    parent = Parent(os.getpid())
    monkeypatch.setattr(os, "getppid", lambda: parent.pid)
    assert parent.alive()
    letter, born, flags = parent._stat()
    assert letter == "R" and flags
    monkeypatch.setattr(parent, "_stat", lambda: ("D", born, flags | 0x4))
    assert parent.state() == agent_pb2.PROCESS_STATE_RUNNING and not parent.alive()


def test_a_parent_that_lost_its_pipe_is_beaten_for_still(control_plane: Server, dial: Dial) -> None:
    helper = HeartbeatHelper(dial, "g", "r", "life")
    helper.start()
    eventually(lambda: helper.status is HelperStatus.LIVE)
    process = helper._process
    assert process is not None and process.stdin is not None
    os.close(process.stdin.fileno())  # as a program does that closes whatever it does not know
    before = helper.beats
    eventually(lambda: helper.beats > before + 5, what="it goes on")
    helper.stop()
    assert not helper.alive()


def test_one_that_is_stopped_at_once_leaves_at_once(dial: Dial) -> None:
    helper = HeartbeatHelper(dial, "g", "r", "life")
    helper.start()
    began = time.monotonic()
    helper.stop(20)
    assert time.monotonic() - began < 10 and not helper.alive()


def test_it_comes_back_after_a_restart_of_the_coordinator() -> None:
    with server() as s:
        helper = HeartbeatHelper(Dial(s.address), "g", "r", "life")
        helper.start()
        eventually(lambda: helper.status is HelperStatus.LIVE)
        s.stop()
        eventually(lambda: helper.status is HelperStatus.CONNECTING and helper.error)
        s.start()
        eventually(lambda: helper.status is HelperStatus.LIVE)
        helper.stop()


def test_a_newer_helper_supersedes_and_the_older_does_not_redial(control_plane: Server, dial: Dial) -> None:
    first, second = (HeartbeatHelper(dial, "g", "r", "life") for _ in range(2))
    first.start()
    eventually(lambda: first.status is HelperStatus.LIVE)
    second.start()
    eventually(lambda: first.status is HelperStatus.SUPERSEDED)
    eventually(lambda: second.status is HelperStatus.LIVE)
    first.stop()
    second.stop()
    second.stop()


def test_addresses_in_the_open_need_tls_or_consent() -> None:
    with pytest.raises(ValueError, match="insecure=True"):
        Dial("10.0.0.7:7450")
    assert Dial("10.0.0.7:7450", insecure=True).metadata == ()
    secret = Dial("10.0.0.7:7450", tls=True, token="hush", cert_pem=b"c", key_pem=b"k")
    assert "hush" not in repr(secret) and Dial.from_dict(secret.to_dict()) == secret
    assert isinstance(Dial("localhost:1").channel(), grpc.Channel)
