"""clients/cpp: a trainer in C++, against real processes of ours. ``make clients-cpp`` builds it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.checkpoints import tiny
from tests.cli.fleet import Launched
from tests.cli.test_publish_checkpoint import checkpoint
from tests.clients import framing_vectors
from tests.clients.cpp_fleet import Fleet, digests_of, weights
from tests.clients.needs import BUILT
from tests.process.harness import eventually
from weightplane.trainer_agent.sources_safetensors import SafetensorsSource
from weightplane.transports.pull_wire import host_id
from weightplane.v1 import update_pb2

wires = pytest.mark.parametrize("wire", ["grpc", "shm"])
built = pytest.mark.usefixtures("cpp")


def test_the_vectors_of_framing_are_what_the_code_says() -> None:
    stored = json.loads(framing_vectors.FILE.read_text(encoding="utf-8"))
    now = framing_vectors.content()
    for rows in (stored, now):
        for row in rows["errors"]:
            row["details"] = framing_vectors.meaning(row["details"])
    assert stored == now


@built
def test_the_library_agrees_with_every_vector_and_sees_a_changed_one(tmp_path: Path) -> None:
    shutil.copytree(framing_vectors.FILE.parent, folder := tmp_path / "vectors")

    def compared() -> subprocess.CompletedProcess[str]:
        return subprocess.run([BUILT / "vectors", folder], capture_output=True, text=True, timeout=60, check=False)

    done = compared()
    assert done.returncode == 0 and "0 differ" in done.stdout, done.stdout + done.stderr
    for name, before, after in (
        ("digests", "7ef4fa69ec1033e7", "7ef4fa69ec1033e8"),
        ("manifests", "m-6800941cba", "m-6800941cbb"),
        ("plans", "p-642e82dba6", "p-642e82dba7"),
        ("framing", '"chosen":[0,1,2,3,4]', '"chosen":[0,1,2,3,5]'),
        ("framing", '"fence":"9c05', '"fence":"9c06'),
        ("framing", '"parts":[[0,33,0],', '"parts":[[0,33,1],'),
        ("framing", '"generation\\":5,', '"generation\\":6,'),
    ):
        file = folder / f"{name}.json"
        whole = file.read_text(encoding="utf-8")
        assert before in whole
        file.write_text(whole.replace(before, after), encoding="utf-8")
        assert compared().returncode != 0, name
        file.write_text(whole, encoding="utf-8")


@built
@wires
def test_a_trained_model_goes_to_a_staged_and_an_in_place_replica_twice(
    launched: Launched, tmp_path: Path, wire: str
) -> None:
    """One update of two modes: in-place channels come after the staged replicas' vote."""
    first, fleet = checkpoint(), Fleet(launched)
    second = tmp_path / "second.safetensors"
    content = bytearray(first.read_bytes())
    for at in range(len(content) - 80_000_000, len(content), 40_001):
        content[at] ^= 1
    second.write_bytes(content)
    fleet.replica("a", first)
    fleet.replica("b", first, staged=False)
    for version, path in enumerate((first, second), 1):
        said = fleet.publish("--file", str(path), "--step", str(version), "--transport", wire)
        assert said["version"] == version and said["step"] == version and said["update_id"]
        assert said["replicas"] == {"a": "READY", "b": "READY"} and said["seconds"] > 0 and said["gbps"] > 0
        wanted = digests_of(path)
        assert fleet.get("a", "/digests") == wanted and fleet.get("b", "/digests") == wanted
        assert fleet.get("a", "/version")["version"] == version
    assert digests_of(first) != digests_of(second)


@built
@wires
def test_two_staged_replicas_share_a_channel_and_its_digests(launched: Launched, tmp_path: Path, wire: str) -> None:
    path, fleet = weights(tmp_path / "w.safetensors", 2.0), Fleet(launched)
    fleet.replica("a", path)
    fleet.replica("b", path)
    said = fleet.publish("--file", str(path), "--transport", wire)
    assert said["bytes"] == SafetensorsSource(path).manifest().nbytes
    assert fleet.get("a", "/digests") == fleet.get("b", "/digests") == digests_of(path)


@built
def test_one_update_goes_over_shm_and_grpc_to_the_replicas_that_want_each(launched: Launched, tmp_path: Path) -> None:
    """Both are offered unless one is named: three channels, one of them in place, and one commit."""
    one, two = (weights(tmp_path / f"{v}.safetensors", v) for v in (1.0, 2.0))
    fleet = Fleet(launched)
    fleet.replica("near", one)
    fleet.replica("far", one, only="grpc")
    fleet.replica("in-place", one, only="grpc", staged=False)
    for version, path in enumerate((one, two), 1):
        said = fleet.publish("--file", str(path))
        assert said["version"] == version and set(said["replicas"].values()) == {"READY"}, said
        assert said["transports"] == {"far": "grpc", "in-place": "grpc", "near": "shm"}
        assert said["bytes"] == 3 * SafetensorsSource(path).manifest().nbytes  # a channel each
        for name in ("near", "far", "in-place"):
            assert fleet.get(name, "/digests") == digests_of(path) and fleet.get(name, "/version")["version"] == version
    said = fleet.publish("--file", str(one), "--transport", "shm")  # who cannot be reached by it takes no part
    assert said["transports"] == {"near": "shm"} and said["replicas"] == {"near": "READY"}
    assert fleet.get("far", "/digests") == digests_of(two)


@built
def test_where_shared_memory_does_not_work_the_other_transport_is_taken(
    launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fleet = weights(tmp_path / "one.safetensors", 1.0), Fleet(launched)
    fleet.replica("a", path)
    monkeypatch.setenv("WEIGHTPLANE_SHM_DIR", str(tmp_path / "none"))
    said = fleet.publish("--file", str(path), "--transport", "shm", code=4)
    assert said["reason"] == "TRANSPORT" and "WEIGHTPLANE_SHM_DIR" in said["message"]
    # As a container without the host's /dev/shm is told where it is.
    monkeypatch.setenv("WEIGHTPLANE_HOST_ID", host_id(Path("/dev/shm")))
    assert fleet.publish("--file", str(path))["transports"] == {"a": "grpc"}
    assert fleet.get("a", "/digests") == digests_of(path)


@built
def test_what_is_wrong_is_said_with_its_reason_and_exit_code(launched: Launched, tmp_path: Path) -> None:
    path, fleet = tiny(tmp_path / "one.safetensors", 1.0), Fleet(launched)
    (tmp_path / "cut").write_bytes(path.read_bytes()[:-1])
    (tmp_path / "text").write_text("no tensors here, only words")
    gap = path.read_bytes().replace(b'"data_offsets": [0, 256]', b'"data_offsets": [1, 257]')
    (tmp_path / "gap").write_bytes(gap)
    odd = path.read_bytes().replace(b'"F32"', b'"F33"')
    (tmp_path / "odd").write_bytes(odd)
    (tmp_path / "void").write_bytes(struct.pack("<Q", 2) + b"{}")
    (tmp_path / "bare").write_bytes(struct.pack("<Q", 7) + b'{"w":1}')
    end = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    for name, before, after in (("number", b'"F32"', b"5"), ("shape", b"[8, 8]", b"{}"), ("pair", b"[0, 256]", b"{}")):
        header = path.read_bytes()[8:end]
        assert before in header
        header = header.replace(before, after, 1)
        (tmp_path / name).write_bytes(struct.pack("<Q", len(header)) + header + path.read_bytes()[end:])
    os.mkfifo(tmp_path / "pipe")
    for args, code, reason, told in (
        (["--file", str(tmp_path / "cut")], 2, "INVALID_ARGUMENT", "cut: tensor"),
        (["--file", str(tmp_path / "text")], 2, "INVALID_ARGUMENT", "not a safetensors file"),
        (["--file", str(tmp_path / "gap")], 2, "INVALID_ARGUMENT", "gap: tensor"),
        (["--file", str(tmp_path / "odd")], 2, "INVALID_ARGUMENT", "F33"),
        (["--file", str(tmp_path / "none")], 2, "INVALID_ARGUMENT", "No such file"),
        (["--file", str(tmp_path)], 2, "INVALID_ARGUMENT", "is not a file"),
        (["--file", str(tmp_path / "pipe")], 2, "INVALID_ARGUMENT", "is not a file"),
        (["--file", str(tmp_path / "void")], 2, "INVALID_ARGUMENT", "no tensor is in it"),
        (["--file", str(tmp_path / "bare")], 2, "INVALID_ARGUMENT", "its entry has no dtype"),
        (["--file", str(tmp_path / "number")], 2, "INVALID_ARGUMENT", "': expected a dtype's name, found 5"),
        (["--file", str(tmp_path / "shape")], 2, "INVALID_ARGUMENT", "': expected a list as its shape, found {}"),
        (["--file", str(tmp_path / "pair")], 2, "INVALID_ARGUMENT", "': expected two numbers as its data_offsets"),
        (["--file", str(path), "--address", "http://localhost:7450"], 2, "INVALID_ARGUMENT", "expected host:port"),
        (["--file", str(path), "--address", "dns:///localhost:7450"], 2, "INVALID_ARGUMENT", "expected host:port"),
        (["--file", str(path), "--address", "::1:7450"], 2, "INVALID_ARGUMENT", "in brackets: [::1]:7450"),
        ([], 2, "INVALID_ARGUMENT", "--group and --file are needed"),
        (["--bogus"], 2, "INVALID_ARGUMENT", "what is '--bogus'"),
        (["--file", str(path), "--step", "x"], 2, "INVALID_ARGUMENT", "--step: expected a whole number"),
        (["--file", str(path), "--transport", "ucx"], 2, "INVALID_ARGUMENT", "ucx"),
        (["--file", str(path), "--group", "no such group"], 2, "INVALID_ARGUMENT", "group"),
        (["--file", str(path), "--wait", "0"], 4, "NOT_ENOUGH_REPLICAS", ""),
        (["--file", str(path), "--address", "10.255.0.1:1"], 2, "INVALID_ARGUMENT", "WEIGHTPLANE_INSECURE"),
        (["--file", str(path), "--address", "127.0.0.1:99999"], 2, "INVALID_ARGUMENT", "a port from 1 to 65535"),
        (["--file", str(path), "--address", "127.0.0.1"], 2, "INVALID_ARGUMENT", "expected host:port"),
        (
            ["--file", str(path), "--address", "127.0.0.1:1"],
            3,
            "UNREACHABLE",
            "127.0.0.1:1: does a control plane listen",
        ),
    ):
        said = fleet.publish(*args, code=code)
        assert said["reason"] == reason and told in said["message"], (args, said)


@built
def test_names_that_the_engine_does_not_have_are_refused_by_name(launched: Launched, tmp_path: Path) -> None:
    path, fleet = weights(tmp_path / "w.safetensors", 1.0), Fleet(launched)
    fleet.replica("a", path)
    fleet.publish("--file", str(path))
    said = fleet.publish("--file", str(weights(tmp_path / "x.safetensors", 1.0, "x")), code=5)
    assert said["reason"] == "MANIFEST_MISMATCH" and "x0" in said["message"] and said["member"] == "a", said
    assert said["update_id"], said
    assert fleet.get("a", "/version")["version"] == 1
    assert fleet.publish("--file", str(path))["replicas"] == {"a": "READY"}


@built
@pytest.mark.chaos
@pytest.mark.parametrize(
    ("wire", "chunk", "number"),
    [("grpc", 24, signal.SIGKILL), ("grpc", 24, signal.SIGTERM), ("shm", 96, signal.SIGKILL)],
)
def test_a_trainer_that_ends_in_mid_update_hurts_nobody_and_a_successor_publishes(
    launched: Launched,
    tmp_path: Path,
    segments: Path,
    monkeypatch: pytest.MonkeyPatch,
    wire: str,
    chunk: int,
    number: int,
) -> None:
    """A replica is slow at one chunk of the second publish, so that the trainer is amid its bytes when it ends."""
    monkeypatch.setenv("WEIGHTPLANE_SHM_DIR", str(segments))
    one, two = (weights(tmp_path / f"{v}.safetensors", v) for v in (1.0, 2.0))
    fleet = Fleet(launched)
    fleet.replica("a", one, WEIGHTPLANE_FAILPOINTS=f"{wire}.receive.inside=block:6@{chunk}")
    fleet.replica("b", one)
    assert fleet.publish("--file", str(one), "--transport", wire)["version"] == 1
    trainer = subprocess.Popen(
        fleet.command("--file", str(two), "--transport", wire),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        eventually(lambda: fleet.sends(2), "it sends")
        held = fleet.publish("--file", str(two), code=4)  # it lives: it renews its lease meanwhile
        assert held["reason"] == "TRAINER_HELD" and "--takeover" in held["message"], held
        assert "InitTransfer" not in held["message"]
        os.kill(trainer.pid, number)
        out, told = trainer.communicate(timeout=30)
    finally:
        trainer.kill()
        trainer.wait()
    if number == signal.SIGTERM:
        assert trainer.returncode == 130 and "SIGTERM" in told, told
        assert json.loads(out)["reason"] == "ABORTED_BY_CALLER"
    eventually(lambda: (u := fleet.newest()) and u.phase == update_pb2.UPDATE_PHASE_ABORTED, "the update ends")
    for name in ("a", "b"):
        assert fleet.get(name, "/digests") == digests_of(one) and fleet.get(name, "/version")["version"] == 1
    both = {"a": "READY", "b": "READY"}
    said = fleet.publish("--file", str(two), "--takeover", "--transport", wire)
    if said["replicas"] != both:  # a's six seconds are not over: it joins the next one
        assert said["replicas"] == {"b": "READY"}
        eventually(lambda: fleet.publish("--file", str(two), "--transport", wire)["replicas"] == both, "a takes part")
    assert fleet.get("a", "/digests") == fleet.get("b", "/digests") == digests_of(two)
    assert not [p.name for p in segments.iterdir() if p.is_file()], "the dead trainer's shared memory is still there"


@built
@pytest.mark.chaos
@pytest.mark.parametrize(("wire", "chunk"), [("grpc", 7), ("shm", 30)])
def test_a_replica_that_dies_in_mid_update_ends_the_trainer_with_its_name(
    launched: Launched, tmp_path: Path, segments: Path, monkeypatch: pytest.MonkeyPatch, wire: str, chunk: int
) -> None:
    monkeypatch.setenv("WEIGHTPLANE_SHM_DIR", str(segments))
    one, fleet = weights(tmp_path / "one.safetensors", 1.0), Fleet(launched)
    fleet.replica("a", one, WEIGHTPLANE_FAILPOINTS=f"{wire}.receive.inside=kill@{chunk}")
    fleet.replica("b", one)
    said = fleet.publish("--file", str(one), "--transport", wire, code=5)
    assert said["reason"] == "MEMBER_LOST" and said["member"] == "a", said
    assert fleet.publish("--file", str(one), "--transport", wire)["replicas"] == {"b": "READY"}
    assert not [p.name for p in segments.iterdir() if p.is_file()]


@built
@pytest.mark.chaos
@pytest.mark.parametrize(
    ("point", "code", "reason"),
    [("server.decide.after_write", 6, "UNKNOWN_OUTCOME"), ("server.update.received", 3, "UNREACHABLE")],
)
def test_a_control_plane_that_dies_and_stays_away_is_told_as_it_is_and_soon(
    launched: Launched, tmp_path: Path, point: str, code: int, reason: str
) -> None:
    """After the decision nobody knows; before FinishUpdate was called, nothing can have committed."""
    path, store = tiny(tmp_path / "one.safetensors", 1.0), ["--store", f"sqlite:{tmp_path / 'store.db'}"]
    fleet = Fleet(launched, *store, plane_env={"WEIGHTPLANE_FAILPOINTS": f"{point}=kill"})
    fleet.replica("a", path)
    began = time.monotonic()
    done = subprocess.run(
        fleet.command("--file", str(path), "--timeout", "4"), capture_output=True, text=True, timeout=60, check=False
    )
    took = time.monotonic() - began
    assert done.returncode == code, done
    said = json.loads(done.stdout)
    assert said["reason"] == reason and said["update_id"], said
    assert took < 4 + (10 if code == 6 else 2) + 2, took  # and the program's start
    launched.start("again", "controlplane", *store, "--listen", fleet.address)
    newest = fleet.newest()
    assert newest is not None and newest.update_id == said["update_id"]
    if code == 6:
        assert newest.phase == update_pb2.UPDATE_PHASE_COMMITTED
        assert said["committed"] is None and "weightplane updates" in said["message"], said
    else:
        assert newest.phase != update_pb2.UPDATE_PHASE_COMMITTED and said["committed"] is False
