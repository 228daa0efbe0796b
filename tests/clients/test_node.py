"""clients/node: a trainer, a watcher and an operator of plain Node, against real processes of ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from tests.cli.checkpoints import tiny
from tests.cli.fleet import Launched
from tests.cli.test_publish_checkpoint import checkpoint
from tests.clients.needs import NODE
from tests.server.planes import Plane
from weightplane.trainer_agent.sources_safetensors import SafetensorsSource
from weightplane.transports.dtypes import as_bytes
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc, update_pb2

pytestmark = pytest.mark.usefixtures("node_client")


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    processes = Launched(tmp_path)
    yield processes
    processes.stop()


def command(name: str, address: str, *args: str) -> list[str]:
    return ["node", str(NODE / "bin" / f"{name}.js"), "--address", address, "--group", "g", *args]


def node(name: str, address: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(name, address, *args), capture_output=True, text=True, timeout=90, check=False)


def plane(launched: Launched) -> str:
    address = launched.start("plane", "controlplane", "--listen", "127.0.0.1:0", "--store", "memory:")["address"]
    return str(address)


def replica(
    launched: Launched, address: str, name: str, path: Path, dump: Path, staged: bool = True, **env: str
) -> None:
    options = {"path": str(path), "dump": str(dump / name), "staged": staged}
    flags = [f"--engine-option={k}={json.dumps(v)}" for k, v in options.items()]
    engine = ["--engine", "tests.cli.blank_engine:make", *flags]
    launched.start(name, "inference-agent", "--address", address, "-g", "g", "--replica-id", name, *engine, env=env)


def equal(path: Path, folder: Path) -> bool:
    """Whether what an engine dumped after its update is what the file holds, bit by bit."""
    source = SafetensorsSource(path)
    for i, meta in enumerate(source.manifest()):
        want = as_bytes(source.tensor(i)[0])
        got = torch.frombuffer(bytearray((folder / meta.name).read_bytes()), dtype=torch.uint8)
        if not torch.equal(got, want):
            return False
    return True


def eventually(look: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, what
        time.sleep(0.05)  # another process's state: nothing to wait on
    return found


def test_its_own_tests_pass_on_the_vectors_of_every_language() -> None:
    done = subprocess.run(["npm", "test"], cwd=NODE, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_trained_model_goes_from_node_to_two_replicas_bit_for_bit(launched: Launched, tmp_path: Path) -> None:
    """One of them is written in place, the other staged: two channels, one commit."""
    path, address = checkpoint(), plane(launched)
    for name in ("a", "b"):
        replica(launched, address, name, path, tmp_path, staged=name == "a")
    watch = subprocess.Popen(command("watch", address), stdout=subprocess.PIPE, text=True)
    try:
        done = node("publish", address, "--file", str(path), "--step", "3")
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["version"] == "1" and said["replicas"] == {"a": "READY", "b": "READY"}
        assert said["bytes"] == 2 * SafetensorsSource(path).manifest().nbytes  # by a channel each
        assert equal(path, tmp_path / "a") and equal(path, tmp_path / "b")
        assert watch.stdout is not None
        seen: dict[str, str] = {}
        while set(seen.values()) != {"1"} or len(seen) < 2:
            seen |= {r["id"]: r["version"] for r in json.loads(watch.stdout.readline())["replicas"]}
    finally:
        watch.kill()
        watch.wait()
    drained = node("drain", address, "--replica", "a")
    assert json.loads(drained.stdout) == {"id": "a", "admin": "DRAINING"}, drained.stderr
    assert node("publish", address, "--file", str(path), "--step", "4").returncode == 0


def test_what_is_wrong_is_said_in_a_line_with_the_commands_exit_codes(launched: Launched, tmp_path: Path) -> None:
    path, address = tiny(tmp_path / "one.safetensors", 1.0), plane(launched)
    (tmp_path / "cut.safetensors").write_bytes(path.read_bytes()[:-1])
    for args, code, told in (
        (["--file", str(tmp_path / "cut.safetensors")], 2, "cut.safetensors: tensor"),
        (["--file", str(tmp_path / "none")], 2, "ENOENT"),
        ([], 2, "--file is missing"),
        (["--file", str(path)], 4, "NOT_ENOUGH_REPLICAS"),
        (["--file", str(path), "--timeout", "0"], 2, "--timeout: expected a whole number from 1"),
    ):
        done = node("publish", address, *args)
        assert done.returncode == code and told in done.stderr and "    at " not in done.stderr, (args, done.stderr)
    words = command("publish", address, "--file", str(path))
    unread = {**os.environ, "WEIGHTPLANE_CA": str(tmp_path / "no.pem")}
    lost = subprocess.run(words, env=unread, capture_output=True, text=True, timeout=90, check=False)
    assert lost.returncode == 2 and "no.pem" in lost.stderr and "    at " not in lost.stderr, lost.stderr
    nobody = node("publish", "127.0.0.1:1", "--file", str(path))
    assert nobody.returncode == 3 and "no control plane answers" in nobody.stderr
    assert node("drain", address, "--replica", "r9").returncode == 7


def test_who_dials_a_control_plane_that_stands_by_hears_its_words(tmp_path: Path) -> None:
    path, planes = tiny(tmp_path / "one.safetensors", 1.0), [Plane(tmp_path / "store.db", "first")]
    try:
        planes[0].until(planes[0].leads)
        planes.append(Plane(tmp_path / "store.db", "second"))
        planes[1].until(planes[1].stands_by)
        for words in (
            ["publish", planes[1].listen, "--file", str(path)],
            ["drain", planes[1].listen, "--replica", "r"],
        ):
            done = node(*words)
            assert done.returncode == 3 and "this one stands by" in done.stderr, done
            assert "no control plane answers" not in done.stderr
    finally:
        for plane in planes:
            plane.process.kill()
            plane.process.wait()


def test_a_command_line_that_is_wrong_is_told_before_anybody_is_dialled(tmp_path: Path) -> None:
    path = tiny(tmp_path / "one.safetensors", 1.0)
    file = ["--file", str(path)]
    for name, address, args, told in (
        ("publish", "127.0.0.1:1", [*file, "--step", "x"], "--step: expected a whole number from 0, found 'x'"),
        ("publish", "127.0.0.1:1", [*file, "--step", "9223372036854775808"], "--step: expected"),
        ("publish", "127.0.0.1:99999", file, "a port from 1 to 65535"),
        ("publish", "127.0.0.1", file, "expected host:port"),
        ("publish", "", file, "expected host:port"),
        ("publish", "10.255.0.1:7450", file, "WEIGHTPLANE_INSECURE=1"),
        ("watch", "127.0.0.1:1", ["--lines", "0"], "--lines: expected a whole number from 1"),
        ("watch", "cp.example:1", [], "WEIGHTPLANE_INSECURE=1"),
        ("drain", "10.255.0.1:7450", ["--replica", "a"], "WEIGHTPLANE_INSECURE=1"),
    ):
        done = node(name, address, *args)
        assert done.returncode == 2 and told in done.stderr and "    at " not in done.stderr, (args, done.stderr)
    helped = node("publish", "127.0.0.1:1", "--help")
    assert helped.returncode == 0 and "usage:" in helped.stdout


def test_a_step_keeps_all_its_64_bits(launched: Launched, tmp_path: Path) -> None:
    path, address = tiny(tmp_path / "one.safetensors", 1.0), plane(launched)
    replica(launched, address, "a", path, tmp_path)
    step = 2**53 + 1
    with grpc.insecure_channel(address) as channel:
        fleet = fleet_pb2_grpc.FleetServiceStub(channel)
        eventually(lambda: fleet.ListGroups(fleet_pb2.ListGroupsRequest(), timeout=10).groups, "the group is made")
        done = node("publish", address, "--file", str(path), "--step", str(step))
        assert done.returncode == 0, done.stderr
        assert fleet.GetGroup(fleet_pb2.GetGroupRequest(group="g"), timeout=10).group.committed_step == step


def test_ctrl_c_ends_a_call_that_waits_for_a_replica(launched: Launched, tmp_path: Path) -> None:
    """The replica stands still before it is armed: nothing is sent, and no stream could be cancelled."""
    path, address = tiny(tmp_path / "one.safetensors", 1.0), plane(launched)
    replica(launched, address, "a", path, tmp_path, WEIGHTPLANE_FAILPOINTS="replica.arm.before=block:20")
    with grpc.insecure_channel(address) as channel:
        fleet = fleet_pb2_grpc.FleetServiceStub(channel)
        eventually(lambda: fleet.ListGroups(fleet_pb2.ListGroupsRequest(), timeout=10).groups, "the group is made")
        trainer = subprocess.Popen(command("publish", address, "--file", str(path)), stderr=subprocess.PIPE, text=True)

        def phase() -> int:
            updates = fleet.ListUpdates(fleet_pb2.ListUpdatesRequest(group="g"), timeout=10).updates
            return updates[0].phase if updates else 0

        eventually(lambda: phase() == update_pb2.UPDATE_PHASE_TRANSFERRING, "it waits for the replica to be armed")
        trainer.send_signal(signal.SIGINT)
        told = trainer.communicate(timeout=15)[1]
        assert trainer.returncode == 130 and "SIGINT" in told, told
        eventually(lambda: phase() == update_pb2.UPDATE_PHASE_ABORTED, "the update ends")


def test_a_control_plane_that_is_killed_with_the_answer_on_its_way_is_asked_again(
    launched: Launched, tmp_path: Path
) -> None:
    """The decision is stored, FinishUpdate's answer lost: what was committed counts, as is said after the restart."""
    path, store = tiny(tmp_path / "one.safetensors", 1.0), f"sqlite:{tmp_path / 'store.db'}"
    killed = {"WEIGHTPLANE_FAILPOINTS": "server.decide.after_write=kill"}
    words = ["controlplane", "--store", store, "--listen"]
    address = str(launched.start("plane", *words, "127.0.0.1:0", env=killed)["address"])
    replica(launched, address, "a", path, tmp_path)
    with grpc.insecure_channel(address) as channel:
        listed = fleet_pb2_grpc.FleetServiceStub(channel).ListGroups
        eventually(lambda: listed(fleet_pb2.ListGroupsRequest(), timeout=10).groups, "the replica's group is there")
    trainer = subprocess.Popen(
        command("publish", address, "--file", str(path)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert launched.processes["plane"].wait(30) == -signal.SIGKILL
    launched.start("again", *words, address)
    said, told = trainer.communicate(timeout=60)
    assert trainer.returncode == 0, told
    assert json.loads(said)["version"] == "1"
    eventually(lambda: (tmp_path / "a").exists() and equal(path, tmp_path / "a"), "the replica has applied it")


def test_a_committed_update_whose_answer_was_lost_for_good_is_unknown_and_named(
    launched: Launched, tmp_path: Path
) -> None:
    path, store = tiny(tmp_path / "one.safetensors", 1.0), f"sqlite:{tmp_path / 'store.db'}"
    words = ["controlplane", "--store", store, "--listen"]
    killed = {"WEIGHTPLANE_FAILPOINTS": "server.decide.after_write=kill"}
    address = str(launched.start("plane", *words, "127.0.0.1:0", env=killed)["address"])
    replica(launched, address, "a", path, tmp_path)
    with grpc.insecure_channel(address) as channel:
        listed = fleet_pb2_grpc.FleetServiceStub(channel).ListGroups
        eventually(lambda: listed(fleet_pb2.ListGroupsRequest(), timeout=10).groups, "the replica's group is there")
    began = time.monotonic()
    done = node("publish", address, "--file", str(path), "--timeout", "6")
    took = time.monotonic() - began
    assert done.returncode == 6 and "UNKNOWN_OUTCOME" in done.stderr, (done.returncode, done.stderr)
    assert took < 6 + 10 + 3, took  # its start; the deadline and ten seconds
    launched.start("again", *words, address)
    with grpc.insecure_channel(address) as channel:
        fleet = fleet_pb2_grpc.FleetServiceStub(channel)
        newest = fleet.ListUpdates(fleet_pb2.ListUpdatesRequest(group="g"), timeout=10).updates[0]
    assert newest.phase == update_pb2.UPDATE_PHASE_COMMITTED
    assert newest.update_id in done.stderr and "weightplane updates" in done.stderr, done.stderr


def big(path: Path) -> Path:
    """256 MB: some hundred chunks."""
    from safetensors.torch import save_file

    save_file({f"w{i}": torch.full((1 << 24,), float(i)) for i in range(4)}, path)
    return path


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_trainer_that_ends_in_mid_update_hurts_nobody_and_a_successor_publishes(
    launched: Launched, tmp_path: Path, number: int
) -> None:
    """A replica is slow at one chunk, so that the trainer is in the middle of its bytes when it ends."""
    path, address = big(tmp_path / "big.safetensors"), plane(launched)
    small = tiny(tmp_path / "one.safetensors", 1.0)
    replica(launched, address, "a", path, tmp_path, WEIGHTPLANE_FAILPOINTS="grpc.receive.inside=block:12@20")
    trainer = subprocess.Popen(command("publish", address, "--file", str(path)), stderr=subprocess.PIPE, text=True)
    with grpc.insecure_channel(address) as channel:
        watch = fleet_pb2_grpc.FleetServiceStub(channel)

        def phase() -> int:
            updates = watch.ListUpdates(fleet_pb2.ListUpdatesRequest(group="g"), timeout=10).updates
            return updates[0].phase if updates else 0

        eventually(lambda: watch.ListGroups(fleet_pb2.ListGroupsRequest(), timeout=10).groups, "the group is made")
        eventually(lambda: phase() == update_pb2.UPDATE_PHASE_TRANSFERRING, "it sends")
        held = node("publish", address, "--file", str(small)).stderr
        assert "TRAINER_HELD" in held and "--takeover" in held and "InitTransfer" not in held, held
        os.kill(trainer.pid, number)
        told = trainer.communicate(timeout=30)[1]
        assert trainer.returncode == (-9 if number == signal.SIGKILL else 130), told
        assert number == signal.SIGKILL or "SIGTERM" in told
        eventually(lambda: phase() == update_pb2.UPDATE_PHASE_ABORTED, "the update ends")
    done = node("publish", address, "--file", str(path), "--takeover")
    assert done.returncode == 0 and json.loads(done.stdout)["replicas"] == {"a": "READY"}, done.stderr
    assert equal(path, tmp_path / "a")
