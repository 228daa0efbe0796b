"""Cases of kind process that are not critical, by id: forks, ports, children, threads; and what a stall says."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.cases.base import MOVERS, Small, holds, site
from tests.inference_agent.server import eventually
from tests.inference_agent.test_processes import alive
from tests.trainer_agent.fleet import fill, hook
from weightplane.controlplane.core.reasons import Reason
from weightplane.controlplane.server.thread import ControlPlaneThread
from weightplane.inference_agent import transfer
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.generate import GenerateServer
from weightplane.trainer_agent.errors import UpdateFailed
from weightplane.transports.shm import ShmReceiveChannel
from weightplane.transports.ucx_agent import package

ROOT = Path(__file__).resolve().parents[2]

HEAD = """
import os, signal, subprocess, sys, threading, time
from tests.cases.base import Small, holds, site
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.sources import ModuleSource

def trainer(**options):
    return Publisher(sys.argv[1], "g", ModuleSource(Small(1)), transport=sys.argv[2], bucket_bytes=4096, **options)

def ended(pid, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"
"""


@contextmanager
def script(text: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A program, ended with the block."""
    command = [sys.executable, "-c", HEAD + text, *arguments]
    process = warm.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def said(text: str, *arguments: str) -> str:
    """All that a program prints; it must end by itself, and well."""
    with script(text, *arguments) as process:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        return out


# --- forks


def test_P09_a_forked_child_is_refused_whatever_it_calls_and_long_before_its_deadline() -> None:
    text = """
publisher = trainer()
publisher.publish(1)
from weightplane.trainer_agent.errors import ForkedProcessError
calls = [lambda: publisher.publish(2, update_timeout=3), publisher.init, publisher.release,
         lambda: publisher.publish_async(2, update_timeout=3), lambda: publisher.wait_for_replicas(1, timeout=3),
         lambda: publisher.outcome("u", timeout=3)]
for n, call in enumerate(calls):
    pid = os.fork()
    if not pid:
        try:
            call()
        except ForkedProcessError:
            os._exit(7)
        except BaseException:
            os._exit(8)
        os._exit(9)
    print(n, ended(pid, 20))
print(publisher.publish(2).ready)
publisher.close()
"""
    with site("r0") as f:
        assert said(text, f.address, "shm").splitlines() == [*(f"{n} 7" for n in range(6)), "('r0',)"]


@pytest.mark.skipif(not package(), reason="NIXL is not installed (tools/test-nixl.txt)")
def test_P20_P25_children_forked_beside_an_open_channel_end_and_the_next_update_goes_on() -> None:
    """Workers of ``multiprocessing``, and forks that run a program; then a while of nothing, then updates again."""
    text = """
import multiprocessing
def work(n):
    return n * n
publisher = trainer()
publisher.publish(1)
with multiprocessing.get_context("fork").Pool(3) as pool:
    print(pool.map(work, range(6)))
    print(publisher.publish(2).ready)
codes = []
for _ in range(5):
    pid = os.fork()
    if not pid:
        os.execv("/bin/true", ["true"])
    codes.append(ended(pid, 5))
print(codes)
time.sleep(1.2)  # idle, longer than a heartbeat
print(publisher.publish(3).ready)
publisher.close()
"""
    with site("r0") as f:
        lines = said(text, f.address, "ucx").splitlines()
        assert lines == ["[0, 1, 4, 9, 16, 25]", "('r0',)", "[0, 0, 0, 0, 0]", "('r0',)"]
        assert holds(f.engines["r0"], Small(1))


# --- ports


def test_P11_listeners_that_are_started_all_at_once_never_take_each_others_ports() -> None:
    """Every one binds and then tells; where a user names a port that is taken, it is said so by that port."""
    with ExitStack() as stack, ThreadPoolExecutor(12) as pool:

        def plane(_: int) -> str:
            return stack.enter_context(ControlPlaneThread()).address

        def generate(_: int) -> str:
            server = GenerateServer(TorchModuleEngine(Small()), lambda *a, **k: []).start()
            stack.callback(server.stop)
            return server.address

        found = [*pool.map(plane, range(6)), *pool.map(generate, range(12))]
        assert len(set(found)) == len(found) and not any(a.endswith(":0") for a in found)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            command = [sys.executable, "-m", "weightplane.cli", "controlplane", "--listen", f"127.0.0.1:{port}"]
            done = subprocess.run(
                [*command, "--store", "memory:"], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
            )
        assert done.returncode not in (0, 1) and f"127.0.0.1:{port}" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("transport", MOVERS)
def test_P15_channels_that_are_closed_and_opened_again_at_once_never_meet_an_older_one(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer goes and another comes, time after time, while one replica is late in everything that it closes."""
    rng, close = random.Random(7), transfer.Channels.close

    def late(self: Any, *args: Any) -> None:
        time.sleep(rng.random() * 0.3)
        close(self, *args)

    get = transfer.Channels.get

    def slow(self: Any, c: Any, member: str) -> Any:
        if member == "r1/0" and (c.channel_id, member) not in self._open:
            time.sleep(rng.random() * 0.3)
        return get(self, c, member)

    monkeypatch.setattr(transfer.Channels, "close", late)
    monkeypatch.setattr(transfer.Channels, "get", slow)
    with site("r0", "r1") as f:
        module, generations = Small(), []
        for step in range(1, 7):
            fill(module, step)
            with f.publisher(module, transport=transport, incarnation=f"life {step}") as publisher:
                assert set(publisher.publish(step).ready) == {"r0", "r1"}
                generations.append(f.state().trainer.generation)
            assert all(holds(e, module) for e in f.engines.values())
        assert generations == sorted(set(generations))


# --- what a stall says, and what ends it


def test_P18_a_stall_says_in_which_phase_at_which_bucket_and_for_whom_it_waited() -> None:
    with site("r0", "r1") as f:
        publisher = f.publisher(Small(1), transport=MOVERS[-1])
        publisher.init()
        go = threading.Event()
        f.stack.callback(go.set)

        stalled = threading.Event()

        def stall(n: int) -> None:
            if n == 3:
                stalled.set()
                go.wait(60)

        with hook("replica.receive.inside", stall):
            handle = publisher.publish_async(1, update_timeout=6.0, prepare_timeout=2.5)
            assert stalled.wait(20)
            with pytest.raises(UpdateFailed) as caught:
                handle.result(20)
            go.set()
        text = str(caught.value)
        assert caught.value.reason is Reason.DEADLINE and "deadline passed in TRANSFERRING" in text, text
        assert "waited for replicas" in text and "(ARMED)" in text, text
        for name, failure in caught.value.failures.items():  # nobody, where all had got equally far
            assert f"{name} (ARMED)" in text and f"{name} is furthest behind, with" in text, failure


def test_P31_an_abort_that_blocks_is_bounded_and_so_is_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the transport, at the replica: the update ends all the same, is said to have, and the agent stops."""
    monkeypatch.setattr("weightplane.inference_agent.operations._DRAIN_S", 0.5)
    with site("r0") as f:
        publisher = f.publisher(Small(1))
        publisher.publish(1)
        go = threading.Event()
        f.stack.callback(go.set)
        inside = threading.Event()

        def stall(n: int) -> None:
            inside.set()
            go.wait(60)

        monkeypatch.setattr(ShmReceiveChannel, "abort", lambda self, reason: go.wait(60))
        with hook("replica.receive.inside", stall):
            handle = publisher.publish_async(2, update_timeout=30)
            assert inside.wait(10)
            began = time.monotonic()
            handle.cancel("enough")
            with pytest.raises(Exception, match="enough"):
                handle.result(10)
            f.idle("the update is over", 5)
            f.agents["r0"].stop(drain_s=0.2)
            assert time.monotonic() - began < 20, "it waited for what blocks"
            go.set()


def test_P32_where_no_thread_can_be_made_there_is_an_error_and_no_hang() -> None:
    text = """
real = threading.Thread.start
def none(self):
    raise RuntimeError("can't start new thread")
threading.Thread.start = none
began = time.monotonic()
try:
    publisher = trainer(update_timeout=5, init_timeout=5)
    publisher.publish(1)
    print("published")
except Exception as e:
    print(type(e).__name__, str(e)[:200].replace("\\n", " "), flush=True)
print("soon" if time.monotonic() - began < 20 else "late")
threading.Thread.start = real
print(trainer(takeover=True).publish(2).ready)
"""
    with site("r0") as f:
        error, when, after = said(text, f.address, "shm").splitlines()
        assert "thread" in error and "RuntimeError" in error, error
        assert (when, after) == ("soon", "('r0',)")


_NO_THREADS = """
import faulthandler, resource
faulthandler.enable()
publisher = trainer(init_timeout=5, heartbeat="stream")
os.setgid(65534)
os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
publisher.publish(1)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user who has a limit")
def test_P32_at_the_kernels_own_limit_a_client_ends_and_says_why() -> None:
    """As another user who may have one process; gRPC gives up its own threads by ending the process."""
    with site("r0") as f, script(_NO_THREADS, f.address, "shm") as process:
        try:
            _, err = process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # faulthandler says where every thread stands
            raise AssertionError(f"it does not end: {process.communicate()[1]}") from None
        assert process.returncode != 0 and ("pthread_create" in err or "new thread" in err), err
        f.idle("nothing is open")


# --- children


def test_P22_a_trainer_that_raises_in_an_update_ends_with_all_that_it_started() -> None:
    text = """
class Broken(ModuleSource):
    def tensor(self, index):
        if index == 3:
            raise ZeroDivisionError("no tensor today")
        return super().tensor(index)
publisher = Publisher(sys.argv[1], "g", Broken(Small(1)), transport=sys.argv[2], bucket_bytes=4096)
publisher.init()
print(*open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split(), flush=True)
publisher.publish(1, update_timeout=20)
"""
    with site("r0") as f:
        with script(text, f.address, "shm") as process:
            out, err = process.communicate(timeout=30)
            assert process.returncode == 1 and "no tensor today" in err, err
        children = [int(p) for p in out.split()]
        assert children, "its heartbeat helper"
        eventually(lambda: not any(map(alive, children)), 5, what="its children are gone")
        f.idle("the update is over", 5)
        module = Small(4)
        second = f.publisher(module, trainer_id="second")
        eventually(partial(_granted, second), 10, what="the group is free for the next")
        assert second.publish(2).ready == ("r0",) and holds(f.engines["r0"], module)


def _granted(publisher: Any) -> bool:
    from weightplane.trainer_agent.errors import TrainerHeld

    try:
        publisher.init()
    except TrainerHeld:
        return False
    return True
