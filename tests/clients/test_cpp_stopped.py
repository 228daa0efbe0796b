"""A C++ trainer that stands still in the middle of an update is told as the cause of it; a replica that does, as
before. And a control plane that nobody runs is told of soon."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.checkpoints import tiny
from tests.cli.fleet import Launched, weightplane
from tests.clients.cpp_fleet import Fleet, digests_of, weights
from tests.clients.needs import PROGRAM
from tests.process.harness import eventually
from weightplane.v1 import common_pb2, update_pb2

wires = pytest.mark.parametrize(("wire", "chunk"), [("grpc", 12), ("shm", 48)])
pytestmark = [pytest.mark.usefixtures("cpp"), pytest.mark.chaos]


@contextmanager
def trainer_of(fleet: Fleet, *args: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(fleet.command(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def over(fleet: Fleet, version: int) -> update_pb2.UpdateInfo | None:
    newest = fleet.newest()
    return newest if newest is not None and newest.version == version and newest.HasField("failure") else None


@wires
def test_a_trainer_that_is_stopped_in_mid_update_is_named(
    launched: Launched, tmp_path: Path, segments: Path, monkeypatch: pytest.MonkeyPatch, wire: str, chunk: int
) -> None:
    """The replica stands still for a moment, so that the trainer is amid its bytes when it is stopped."""
    monkeypatch.setenv("WEIGHTPLANE_SHM_DIR", str(segments))
    one, two = (weights(tmp_path / f"{v}.safetensors", v) for v in (1.0, 2.0))
    fleet = Fleet(launched)
    fleet.replica("a", one, WEIGHTPLANE_FAILPOINTS=f"{wire}.receive.inside=block:1.5@{chunk}")
    assert fleet.publish("--file", str(one), "--transport", wire)["version"] == 1
    with trainer_of(fleet, "--file", str(two), "--transport", wire, "--timeout", "60") as trainer:
        eventually(lambda: fleet.sends(2), "it sends")
        os.kill(trainer.pid, signal.SIGSTOP)
        eventually(lambda: over(fleet, 2), "it is aborted long before its deadline", 15)
        newest = over(fleet, 2)
        assert newest is not None
        failure = newest.failure
        assert failure.reason == common_pb2.REASON_MEMBER_LOST and failure.member == "rank/0", failure
        assert "no heartbeat came for" in failure.message and "its connection is open" in failure.message, failure
        told = weightplane("updates", "-g", "g", "--address", fleet.address)
        assert "trainer rank 0 is lost" in told.stdout, told
        eventually(lambda: "trainer rank 0 is lost" in launched.log("plane"), "the journal says so")
        eventually(lambda: fleet.get("a", "/version")["version"] == 1, "the replica serves what it did")
        said = fleet.publish("--file", str(two), "--transport", wire)  # no takeover: the hold is over
        assert said["replicas"] == {"a": "READY"} and fleet.get("a", "/digests") == digests_of(two)
        os.kill(trainer.pid, signal.SIGCONT)
        out, told_by_it = trainer.communicate(timeout=30)
    assert trainer.returncode == 5, told_by_it
    assert json.loads(out)["reason"] in ("MEMBER_LOST", "TRAINER_FENCED"), out
    assert fleet.get("a", "/digests") == digests_of(two)


@wires
def test_a_trainer_that_stands_still_for_less_than_the_ttl_goes_on(
    launched: Launched, tmp_path: Path, wire: str, chunk: int
) -> None:
    path, fleet = weights(tmp_path / "one.safetensors", 1.0), Fleet(launched)
    fleet.replica("a", path, WEIGHTPLANE_FAILPOINTS=f"{wire}.receive.inside=block:1.5@{chunk // 4}")
    with trainer_of(fleet, "--file", str(path), "--transport", wire) as trainer:
        eventually(lambda: fleet.sends(1), "it sends")
        os.kill(trainer.pid, signal.SIGSTOP)
        time.sleep(1.0)  # what is shown is that this long costs nothing
        os.kill(trainer.pid, signal.SIGCONT)
        out, told = trainer.communicate(timeout=60)
    assert trainer.returncode == 0 and json.loads(out)["replicas"] == {"a": "READY"}, told


@wires
def test_a_replica_that_takes_nothing_is_told_as_the_replica(
    launched: Launched, tmp_path: Path, wire: str, chunk: int
) -> None:
    """The trainer lives, and beats."""
    path, fleet = weights(tmp_path / "one.safetensors", 1.0), Fleet(launched)
    fleet.replica("a", path, WEIGHTPLANE_FAILPOINTS=f"{wire}.receive.inside=block:60@{chunk // 4}")
    said = fleet.publish("--file", str(path), "--transport", wire, "--timeout", "6", code=5)
    assert said["reason"] == "DEADLINE" and said["member"] == "a", said
    newest = fleet.newest()
    assert newest is not None and newest.failure.member == "a" and "a is furthest behind" in newest.failure.message


@contextmanager
def nobody(kind: str) -> Iterator[str]:
    """An address of this machine where nobody answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if kind == "silent":
            taken.listen(0)
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.alone
@pytest.mark.parametrize(
    ("kind", "timeout", "bound"), [("refused", 120, 2.0), ("silent", 120, 2.0), ("refused", 1, 1.5)]
)
def test_that_nobody_answers_at_the_control_planes_address_is_told_within_two_seconds(
    tmp_path: Path, kind: str, timeout: int, bound: float
) -> None:
    path = tiny(tmp_path / "one.safetensors", 1.0)
    with nobody(kind) as address:
        command = [str(PROGRAM), "--address", address, "--group", "g", "--file", str(path), "--timeout", str(timeout)]
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        took = time.monotonic() - began
    assert done.returncode == 3 and took < bound + 0.3, (took, done)  # and the program's start
    said = json.loads(done.stdout)
    assert said["reason"] == "UNREACHABLE" and said["committed"] is False
    for part in (address, "does a control plane listen there", "weightplane controlplane", "WEIGHTPLANE_ADDRESS"):
        assert part in said["message"] and part in done.stderr, said
