"""The C++ trainer on real GPUs. ``make clients-cpp-portable`` makes the program that is carried to a host with them.

Run on a pair of H200, 2026-11-30, b34e701: all ten passed; on 67216bc, on one H200, the four that one card can show.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from tests.cli.fleet import Launched
from tests.clients.cpp_fleet import Fleet, digests_of, weights
from tests.clients.needs import PORTABLE, PROGRAM, with_nccl
from tests.process.harness import eventually
from weightplane.v1 import update_pb2

CARDS = torch.cuda.device_count()
#: The transport, and the replicas' GPU: the trainer's is 0.
WIRES = [
    pytest.param("cuda_ipc", 0, id="cuda_ipc-colocated"),
    *(
        pytest.param(wire, 1, id=f"{wire}-across", marks=pytest.mark.skipif(CARDS < 2, reason="needs 2 GPUs"))
        for wire in ("cuda_ipc", "nccl")
    ),
]
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture
def fleet(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    made = Fleet(launched)
    made.program = PORTABLE if PORTABLE.exists() else PROGRAM
    for name, value in with_nccl().items():
        monkeypatch.setenv(name, value)
    if not made.program.exists():
        pytest.skip("make clients-cpp-portable makes the program that is carried here")
    return made


@pytest.mark.parametrize(("wire", "card"), WIRES)
def test_a_staged_or_an_in_place_replica_gets_the_files_bytes(
    fleet: Fleet, tmp_path: Path, wire: str, card: int
) -> None:
    """NCCL takes no GPU twice: one replica then, else two of two modes."""
    one, two = (weights(tmp_path / f"{v}.safetensors", v) for v in (1.0, 2.0))
    names = ["a"] if wire == "nccl" else ["a", "in-place"]
    for name in names:
        fleet.replica(name, one, staged=name == "a", device=f"cuda:{card}")
    for version, path in enumerate((one, two, one), 1):
        said = fleet.publish("--file", str(path), "--transport", wire, "--step", str(version))
        assert said["replicas"] == dict.fromkeys(names, "READY") and said["transports"] == dict.fromkeys(names, wire)
        for name in names:
            assert fleet.get(name, "/digests") == digests_of(path) and fleet.get(name, "/version")["version"] == version


def test_from_host_memory_a_gpu_is_reached_too(fleet: Fleet, tmp_path: Path) -> None:
    path = weights(tmp_path / "one.safetensors", 1.0)
    fleet.replica("a", path, device="cuda:0")
    for wire in ("shm", "grpc"):
        assert fleet.publish("--file", str(path), "--transport", wire)["transports"] == {"a": wire}
        assert fleet.get("a", "/digests") == digests_of(path)


@pytest.mark.chaos
@pytest.mark.parametrize(("wire", "card"), WIRES)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_trainer_that_ends_in_mid_update_hurts_nobody(
    fleet: Fleet, tmp_path: Path, wire: str, card: int, number: int
) -> None:
    one, two = (weights(tmp_path / f"{v}.safetensors", v) for v in (1.0, 2.0))
    # A bucket of cuda_ipc is the whole model here, read in one go: the replica stands still before the second one.
    point = "cuda_ipc.receive.before=block:6@2" if wire == "cuda_ipc" else "nccl.receive.inside=block:6@20"
    fleet.replica("a", one, device=f"cuda:{card}", WEIGHTPLANE_FAILPOINTS=point)
    fleet.publish("--file", str(one), "--transport", wire)
    trainer = subprocess.Popen(fleet.command("--file", str(two), "--transport", wire), stdout=subprocess.PIPE)
    try:
        eventually(lambda: fleet.sends(2), "it sends")
        os.kill(trainer.pid, number)
        assert trainer.wait(30) == (130 if number == signal.SIGTERM else -signal.SIGKILL)
    finally:
        trainer.kill()
        trainer.wait()
    eventually(lambda: (u := fleet.newest()) and u.phase == update_pb2.UPDATE_PHASE_ABORTED, "the update ends")
    assert fleet.get("a", "/digests") == digests_of(one) and fleet.get("a", "/version")["version"] == 1

    def again() -> bool:  # its six seconds may not be over
        words = fleet.command("--file", str(two), "--transport", wire, "--takeover", "--wait", "10")
        return subprocess.run(words, capture_output=True, timeout=90, check=False).returncode == 0

    eventually(again, "the next publish commits", 60)
    assert fleet.get("a", "/digests") == digests_of(two)
