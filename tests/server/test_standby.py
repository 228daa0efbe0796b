"""Two control planes on one SQLite store: one leads, the other stands by and takes over when the first is gone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests import warm
from tests.cli.checkpoints import tiny
from tests.cli.fleet import ROOT, Launched, weightplane
from tests.server.planes import Plane
from weightplane.controlplane.store import StoreHeld
from weightplane.controlplane.store.sqlite import SqliteStore

pytestmark = pytest.mark.chaos


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Plane]]:
    planes: list[Plane] = []

    def one(name: str, listen: str = "") -> Plane:
        planes.append(Plane(tmp_path / "store.db", name, listen))
        return planes[-1]

    yield one
    for p in planes:
        p.process.kill()
        p.process.wait()


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    processes = Launched(tmp_path)
    yield processes
    processes.stop()


def test_the_second_stands_by_and_takes_over_from_one_that_is_killed(start: Callable[..., Plane]) -> None:
    first = start("first")
    first.until(first.leads)
    second = start("second")
    second.until(lambda: second.ready("/livez")[0] == 200)
    status, said = second.ready()
    assert status == 503 and f"(pid {first.process.pid} on {socket.gethostname()}) leads" in said["reason"]
    status, said = second.ready("/metrics")
    assert status == 503 and "this one stands by" in said["reason"]  # no metrics of groups that it does not have
    with grpc.insecure_channel(second.listen) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        health = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.RpcError) as refused:
        second.groups()
    assert isinstance(refused.value, grpc.Call) and refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert f"pid {first.process.pid}" in str(refused.value.details())
    assert first.leads() and first.ready()[1]["epoch"] == 1
    first.process.send_signal(signal.SIGSTOP)  # it keeps its store
    assert second.ready()[0] == 503
    first.process.kill()
    second.until(second.leads)
    assert second.ready()[1]["epoch"] == 2 and second.groups() == []
    assert second.log.read_text().count("stands by") == 1


def test_who_dials_the_one_that_stands_by_hears_its_words(start: Callable[..., Plane], tmp_path: Path) -> None:
    """Not that nobody answers and one is to be started: a third would stand by, too."""
    first = start("first")
    first.until(first.leads)
    second = start("second")
    second.until(second.stands_by)
    words = f"(pid {first.process.pid} on {socket.gethostname()}) leads on this store; this one stands by"
    for command in (["status"], ["watch", "-g", "g"], ["doctor"]):
        done = weightplane(*command, "-a", second.listen, env={"COLUMNS": "900"})
        text = done.stdout + done.stderr
        assert done.returncode == 3 and words in text and "name the control plane that leads" in text, text
        assert "no control plane answers" not in text and "start one" not in text, text
    checkpoint = tiny(tmp_path / "one.safetensors", 1.0)
    options = json.dumps(str(checkpoint))
    agent = [sys.executable, "-m", "weightplane.cli", "inference-agent", "-a", second.listen, "-g", "g"]
    agent += ["--replica-id", "a", "--engine", "tests.cli.blank_engine:make", "--engine-option", f"path={options}"]
    with warm.Popen(agent, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if second.listen in line and "WARNING" in line)
        finally:
            process.terminate()
    assert f"{second.listen} does not lead" in line and words in line and "start one" not in line, line


def test_a_publish_waits_for_the_one_that_stands_by_to_lead(
    start: Callable[..., Plane], launched: Launched, tmp_path: Path
) -> None:
    first = start("first")
    first.until(first.leads)
    second = start("second")
    second.until(second.stands_by)
    checkpoint = tiny(tmp_path / "one.safetensors", 1.0)
    command = [sys.executable, "-m", "weightplane.cli", "publish", str(checkpoint), "-g", "g"]
    command += ["-a", second.listen, "--wait", "60"]
    with warm.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as publish:
        try:
            assert publish.stderr is not None
            assert "this one stands by" in next(line for line in publish.stderr if line.startswith("still waiting"))
            first.process.kill()
            engine = [
                "--engine",
                "tests.cli.blank_engine:make",
                "--engine-option",
                f"path={json.dumps(str(checkpoint))}",
            ]
            launched.start("a", "inference-agent", "-a", second.listen, "-g", "g", "--replica-id", "a", *engine)
            _, said = publish.communicate(timeout=60)
            assert publish.returncode == 0, said
        finally:
            publish.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_on_the_same_address_it_waits_for_the_port_too(start: Callable[..., Plane], number: signal.Signals) -> None:
    first = start("first")
    first.until(first.leads)
    second = start("second", first.listen)
    second.until(second.stands_by)
    assert first.leads()
    first.process.send_signal(number)
    second.until(second.leads)
    assert second.groups() == []
    second.process.terminate()
    assert second.process.wait(20) == 0


def test_one_that_waits_ends_by_sigterm(start: Callable[..., Plane]) -> None:
    first = start("first")
    first.until(first.leads)
    for listen in ("", first.listen):
        second = start(f"second{listen}", listen)
        second.until(second.stands_by)
        second.process.terminate()
        assert second.process.wait(20) == 0, second.log.read_text()
    assert first.leads() and first.ready()[1]["epoch"] == 1


def test_a_leader_whose_lock_is_taken_away_notices_and_stands_by(start: Callable[..., Plane], tmp_path: Path) -> None:
    first = start("first")
    first.until(first.leads)
    (tmp_path / "store.db-lock").unlink()
    second = start("second")
    second.until(second.leads)
    first.until(first.stands_by)
    assert first.ready()[0] == 503 and second.leads()


def test_a_forked_child_keeps_no_lock_and_the_file_is_ours_alone(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SqliteStore(path)
    store.open()
    assert Path(f"{path}-lock").stat().st_mode & 0o777 == 0o600
    with pytest.raises(StoreHeld, match=f"pid {os.getpid()}"):
        SqliteStore(path).open()
    read, write = os.pipe()
    here, there = os.pipe()
    child = os.fork()
    if not child:
        os.write(there, b"x")
        os.close(write)
        os.read(read, 1)  # until the parent is done
        os._exit(0)
    os.read(here, 1)  # it runs
    store._held._close()  # type: ignore[union-attr]  # as our death would
    other = SqliteStore(path)
    assert other.open().epoch == 2
    other.close()
    assert not Path(f"{path}-lock").exists()
    store.close()
    os.close(write)
    for fd in (read, here, there):
        os.close(fd)
    os.waitpid(child, 0)
