"""What the C++ trainer waits for within --wait: replicas, a dead trainer's hold, a control plane that stands by."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.checkpoints import tiny
from tests.cli.fleet import ROOT, Launched
from tests.clients.cpp_fleet import Fleet, weights
from tests.clients.needs import PROGRAM
from tests.process.harness import eventually
from tests.server.planes import Plane
from weightplane.v1 import transport_pb2
from weightplane.v1 import weight_transfer_pb2 as wt
from weightplane.v1 import weight_transfer_pb2_grpc as wt_grpc

pytestmark = pytest.mark.usefixtures("cpp")


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def a_dead_trainer_holds(fleet: Fleet, takeover: bool = False) -> None:
    """Its lease goes on for the TTL, and nobody renews it."""
    offers = [transport_pb2.Rendezvous(transport="grpc", grpc=transport_pb2.GrpcRendezvous())]
    asked = wt.InitTransferRequest(group="g", trainer_id="dead", incarnation="1", world_size=1, host_id="h")
    asked.request_id, asked.takeover = uuid.uuid4().hex, takeover
    asked.offers.extend(offers)
    with fleet.viewer() as channel:
        wt_grpc.WeightTransferServiceStub(channel).InitTransfer(asked, timeout=10)


def test_as_many_replicas_as_it_is_told_are_waited_for(launched: Launched, tmp_path: Path) -> None:
    path, fleet = tiny(tmp_path / "one.safetensors", 1.0), Fleet(launched)
    fleet.replica("a", path)
    said = fleet.publish("--file", str(path), "--replicas", "2", "--wait", "1", code=4)
    assert said["reason"] == "NOT_ENOUGH_REPLICAS"
    assert said["message"] == "group 'g': expected 2 replica(s), found 1 (a)"
    assert fleet.publish("--file", str(path), "--replicas", "0", code=2)["reason"] == "INVALID_ARGUMENT"
    with started(fleet.command("--file", str(path), "--replicas", "2", "--wait", "60")) as trainer:
        fleet.replica("b", path)
        out, told = trainer.communicate(timeout=60)
    assert trainer.returncode == 0, told
    assert json.loads(out)["replicas"] == {"a": "READY", "b": "READY"}
    help_ = subprocess.run([str(fleet.program), "--help"], capture_output=True, text=True, timeout=10, check=True)
    assert "--replicas N" in help_.stdout


def publishing(fleet: Fleet, path: Path, program: str) -> list[str]:
    """The command of either trainer."""
    if program == "c++":
        return fleet.command("--file", str(path))
    python = [sys.executable, "-m", "weightplane.cli", "publish"]
    return [*python, str(path), "-g", "g", "-a", fleet.address, "--json"]


@pytest.mark.parametrize("program", ["c++", "weightplane publish"])
def test_too_few_within_reach_of_a_transport_are_too_few(launched: Launched, tmp_path: Path, program: str) -> None:
    path, fleet = tiny(tmp_path / "one.safetensors", 1.0), Fleet(launched)
    fleet.replica("near", path)
    fleet.replica("far", path, only="grpc")
    command = [*publishing(fleet, path, program), "--transport", "shm", "--replicas"]
    done = subprocess.run([*command, "2", "--wait", "1"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4, done.stderr
    assert "NOT_ENOUGH_REPLICAS" in done.stdout, done.stdout
    refused = "group 'g': expected 2 replica(s), found 1 (near); far: no transport that both sides can use, shm: "
    assert refused in done.stdout, done.stdout
    done = subprocess.run([*command, "1"], capture_output=True, text=True, timeout=60, check=True)
    said = json.loads(done.stdout)
    assert "shm" in said["absent"]["far"] and said["version"] == 1, said  # the refused one had opened nothing
    with started([*command, "2", "--wait", "60"]) as trainer:
        fleet.replica("late", path)
        out, told = trainer.communicate(timeout=60)
    assert trainer.returncode == 0, (out, told)
    assert list(json.loads(out)["absent"]) == ["far"] and '"late"' in out


@pytest.mark.parametrize("program", ["c++", "weightplane publish"])
def test_one_that_no_transport_reaches_is_waited_for_too(launched: Launched, tmp_path: Path, program: str) -> None:
    path, fleet = tiny(tmp_path / "one.safetensors", 1.0), Fleet(launched)
    fleet.replica("far", path, only="grpc")
    command = [*publishing(fleet, path, program), "--transport", "shm", "--wait"]
    done = subprocess.run([*command, "1"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4 and "NOT_ENOUGH_REPLICAS" in done.stdout and "far" in done.stdout, done
    with started([*command, "60"]) as trainer:
        fleet.replica("near", path)
        out, told = trainer.communicate(timeout=60)
    assert trainer.returncode == 0 and list(json.loads(out)["absent"]) == ["far"], (out, told)
    began = time.monotonic()
    subprocess.run([*command, "60"], capture_output=True, timeout=120, check=True)
    assert time.monotonic() - began < 40, "one is within reach: nobody waits for more"


@pytest.mark.chaos
@pytest.mark.parametrize("program", ["c++", "weightplane publish"])
def test_a_dead_trainers_hold_is_waited_for(launched: Launched, tmp_path: Path, program: str) -> None:
    path, fleet = tiny(tmp_path / "one.safetensors", 1.0), Fleet(launched)
    fleet.replica("a", path)
    command = publishing(fleet, path, program)
    a_dead_trainer_holds(fleet)
    with started([*command, "--wait", "0"]) as trainer:
        while trainer.poll() is None:  # however long it takes to start: the hold has not lapsed when it asks
            a_dead_trainer_holds(fleet)
            time.sleep(0.5)
        out, told = trainer.communicate(timeout=60)
    assert trainer.returncode == 4 and "TRAINER_HELD" in out, (out, told)
    with started([*command, "--wait", "60"]) as trainer:
        out, told = trainer.communicate(timeout=90)
    assert trainer.returncode == 0 and "TRAINER_HELD" not in out, (out, told)


@pytest.mark.chaos
def test_a_trainer_that_is_fenced_says_so_and_nothing_else(launched: Launched, tmp_path: Path) -> None:
    one, two = (weights(tmp_path / f"{v}.safetensors", v) for v in (1.0, 2.0))
    fleet = Fleet(launched)
    fleet.replica("a", one, WEIGHTPLANE_FAILPOINTS="grpc.receive.inside=block:6@24")
    assert fleet.publish("--file", str(one), "--transport", "grpc")["version"] == 1
    with started(fleet.command("--file", str(two), "--transport", "grpc")) as trainer:
        eventually(lambda: fleet.sends(2), "it sends")
        a_dead_trainer_holds(fleet, takeover=True)
        _, told = trainer.communicate(timeout=30)
    assert trainer.returncode == 5 and told.count("\n") == 1 and "TRAINER_FENCED" in told, told


@pytest.mark.chaos
def test_a_control_plane_that_stands_by_is_waited_for_until_it_leads(launched: Launched, tmp_path: Path) -> None:
    path, store = tiny(tmp_path / "one.safetensors", 1.0), tmp_path / "store.db"
    first = Plane(store, "first")
    planes = [first]
    try:
        first.until(first.leads)
        planes.append(second := Plane(store, "second"))
        second.until(second.stands_by)
        command = [str(PROGRAM), "--address", second.listen, "--group", "g", "--file", str(path)]
        for more in ([], ["--replicas", "2"]):
            done = subprocess.run(
                [*command, "--wait", "1", *more], capture_output=True, text=True, timeout=60, check=False
            )
            said = json.loads(done.stdout)
            assert done.returncode == 3 and said["reason"] == "COORDINATOR_RESTARTED", done
            assert f"(pid {first.process.pid} on " in said["message"] and "this one stands by" in said["message"]
        with started([*command, "--wait", "60"]) as trainer:
            time.sleep(1)
            assert trainer.poll() is None, trainer.communicate()
            first.process.kill()
            engine = ["--engine", "tests.cli.blank_engine:make", "--engine-option", f"path={json.dumps(str(path))}"]
            launched.start("a", "inference-agent", "-a", second.listen, "-g", "g", "--replica-id", "a", *engine)
            out, told = trainer.communicate(timeout=60)
        assert trainer.returncode == 0 and json.loads(out)["replicas"] == {"a": "READY"}, (out, told)
    finally:
        for plane in planes:
            plane.process.kill()
            plane.process.wait()


def test_a_port_that_is_not_gRPCs_is_told_as_such(launched: Launched, tmp_path: Path) -> None:
    path = tiny(tmp_path / "one.safetensors", 1.0)
    ports = ["--gateway", "127.0.0.1:0", "--probes", "127.0.0.1:0"]
    plane = launched.start("plane", "controlplane", "--listen", "127.0.0.1:0", "--store", "memory:", *ports)
    for port in ("gateway", "probes"):
        command = [str(PROGRAM), "--address", plane[port], "--group", "g", "--file", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 3 and f"what answers at {plane[port]} is not gRPC" in done.stdout, done
        assert "start one" not in done.stdout
