"""The C++ trainer's GPU transports where there is no GPU: its own code over a card that the host plays
(``clients/cpp/test/host_cuda.cpp``), read by ours over the same (``tests/transports/host_card.py``); and what is said
where there is no driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.cli.blank_engine import blank_module
from tests.clients.cpp_fleet import weights
from tests.clients.needs import BUILT, PROGRAM
from tests.inference_agent.server import Server, eventually, server
from tests.transports import host_card
from tests.transports.collective_tcp import StreamCard, TcpCollective, TcpRuntime
from weightplane.controlplane import failpoints
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.trainer_agent.sources_safetensors import SafetensorsSource
from weightplane.transports.collective_layout import Tuning

pytestmark = pytest.mark.usefixtures("cpp")
CARD = "00112233-4455-6677-8899-aabbccddeeff"  # as clients/cpp/test/host_cuda.cpp has it


class HostNccl(TcpCollective):
    """``nccl``'s receiving side over sockets, one card for each replica; the trainer's end is ``host_nccl.cpp``."""

    name: ClassVar[str] = "nccl"

    def __init__(self, replica: str) -> None:
        runtime = TcpRuntime(StreamCard())
        runtime.uuid = f"card of {replica}"
        super().__init__(Tuning(), runtime)


class Site:
    """A control plane and replicas in this process that read what the C++ trainer exports."""

    def __init__(self, plane: Server, file: Path, stack: ExitStack) -> None:
        self.plane, self.file, self.stack = plane, file, stack
        self.engines: dict[str, TorchModuleEngine] = {}

    def join(self, name: str, wire: str = "cuda_ipc", *, staged: bool = True) -> None:
        engine = self.engines[name] = TorchModuleEngine(blank_module(str(self.file)), staged=staged)
        transports = {wire: host_card.HostCardIpc() if wire == "cuda_ipc" else HostNccl(name)}
        agent = InferenceAgent(self.plane.address, "g", name, engine, transports=transports)
        self.stack.callback(agent.stop)
        agent.start()
        eventually(lambda: (r := self.plane.state().replicas.get(name)) and r.reported, what=f"{name} is here")

    def holds(self, name: str, file: Path) -> bool:
        """Whether a replica's live tensors are a file's, bit by bit."""
        live, source = self.engines[name].modules[0].state_dict(), SafetensorsSource(file)
        return all(torch.equal(live[m.name], source.tensor(i)[0]) for i, m in enumerate(source.manifest()))

    def start(self, file: Path, *more: str, wire: str = "cuda_ipc", **env: str) -> subprocess.Popen[str]:
        where = ["--address", self.plane.address, "--group", "g"]
        words = [str(PROGRAM), *where, "--file", str(file), "--transport", wire, *more]
        merged = {**os.environ, "LD_LIBRARY_PATH": str(BUILT / "host_card"), **env}
        return subprocess.Popen(words, env=merged, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def publish(self, file: Path, *more: str, wire: str = "cuda_ipc", code: int = 0, **env: str) -> dict[str, Any]:
        process = self.start(file, *more, wire=wire, **env)
        out, told = process.communicate(timeout=90)
        assert process.returncode == code, out + told
        said: dict[str, Any] = json.loads(out)
        return said


@pytest.fixture
def site(tmp_path: Path, segments: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("WEIGHTPLANE_SHM_DIR", str(segments))
    monkeypatch.setattr(host_card, "UUID", CARD)
    with ExitStack() as stack:
        stack.callback(failpoints.set_hook, None)
        yield Site(stack.enter_context(server()), weights(tmp_path / "one.safetensors", 1.0), stack)


def test_staged_and_in_place_replicas_read_the_trainers_card(site: Site, segments: Path, tmp_path: Path) -> None:
    """Two channels of one listener, in two rounds; a model that is not a multiple of anything."""
    site.join("a")
    site.join("b")
    site.join("in-place", staged=False)
    two = weights(tmp_path / "two.safetensors", 2.0)
    for version, file in enumerate((site.file, two), 1):
        said = site.publish(file)
        assert said["version"] == version and set(said["replicas"].values()) == {"READY"}, said
        assert set(said["transports"].values()) == {"cuda_ipc"}
        assert said["bytes"] == 2 * SafetensorsSource(file).manifest().nbytes
        assert all(site.holds(name, file) for name in site.engines)
    ours = f"weightplane-pull-{os.getpid()}-"  # the replicas', who live
    assert not [p.name for p in segments.iterdir() if not p.name.startswith(ours)], "the trainers' sockets"


def test_buckets_of_many_chunks_are_told_in_portions(site: Site, tmp_path: Path) -> None:
    """Every odd tensor is padded on the card, so that neighbours of a bucket are no neighbours in memory."""
    from safetensors.torch import save_file

    site.file = tmp_path / "many.safetensors"
    save_file({f"w{i}": torch.full((3,), i % 251, dtype=torch.uint8) for i in range(21_000)}, site.file)
    site.join("a")
    site.publish(site.file)
    assert site.holds("a", site.file)


def test_the_members_of_a_collective_get_it_from_the_trainers_card(site: Site, tmp_path: Path) -> None:
    """Segments that are packed, that are cut to fill a buffer, and that travel as they are; two receivers, then one."""
    from safetensors.torch import save_file

    site.file = tmp_path / "first.safetensors"
    sizes = {"large": 9_000_000, "small": 3, "odd": 70_001, "more": 4_000_000, "last": 1}
    for n, file in enumerate((site.file, second := tmp_path / "second.safetensors")):
        save_file({name: torch.arange(size, dtype=torch.float32) + n for name, size in sizes.items()}, file)
    site.join("a", "nccl")
    site.join("b", "nccl")
    for version, file in enumerate((site.file, second), 1):
        said = site.publish(file, wire="nccl")
        assert said["version"] == version and said["replicas"] == {"a": "READY", "b": "READY"}
        assert said["transports"] == {"a": "nccl", "b": "nccl"}
        assert site.holds("a", file) and site.holds("b", file)


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("wire", ["cuda_ipc", "nccl"])
def test_a_trainer_that_ends_in_mid_update_is_seen_to_be_gone(
    site: Site, segments: Path, tmp_path: Path, wire: str, number: int
) -> None:
    site.join("a", wire)
    site.publish(site.file, wire=wire)
    reached, go_on = threading.Event(), threading.Event()

    def hook(name: str, n: int) -> None:
        if name == f"{wire}.receive.inside" and n == 3:
            reached.set()
            go_on.wait(20)

    failpoints.set_hook(hook)
    two = weights(tmp_path / "two.safetensors", 2.0)
    trainer = site.start(two, wire=wire)
    try:
        assert reached.wait(30), "it sends"
        os.kill(trainer.pid, number)
        out, told = trainer.communicate(timeout=30)
        if number == signal.SIGKILL:
            assert trainer.returncode == -signal.SIGKILL
        else:
            assert trainer.returncode == 130, out + told
    finally:
        go_on.set()
        trainer.kill()
        trainer.wait()
        failpoints.set_hook(None)
    eventually(lambda: site.plane.state().open is None, 30, "the update ends")
    assert site.plane.state().committed.version == 1 and site.holds("a", site.file)
    said = site.publish(two, "--takeover", wire=wire)
    assert said["replicas"] == {"a": "READY"} and site.holds("a", two)
    left = [p.name for p in segments.iterdir() if p.name.startswith(f"weightplane-pull-{trainer.pid}-")]
    assert not left, "what the dead trainer left is swept by the next one"


def test_what_is_missing_is_said(site: Site, tmp_path: Path) -> None:
    site.join("a")
    for env, more, told in (
        ({"LD_LIBRARY_PATH": ""}, [], ("libcuda.so.1", "NVIDIA driver")),
        ({}, ["--device", "3"], ("cuDeviceGet of GPU 3", "CUDA_ERROR_INVALID_DEVICE", "CUDA_VISIBLE_DEVICES")),
        ({"HOST_CARD_BYTES": "1000"}, [], ("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", "the whole file")),
        ({"WEIGHTPLANE_SHM_DIR": str(tmp_path / "none")}, [], ("cannot listen in", "WEIGHTPLANE_SHM_DIR")),
    ):
        said = site.publish(site.file, *more, code=4, **env)
        assert said["reason"] == "TRANSPORT" and all(t in said["message"] for t in told), said
    (driver := tmp_path / "driver").mkdir()  # and no NCCL beside it
    (driver / "libcuda.so.1").symlink_to(BUILT / "host_card" / "libcuda.so.1")
    said = site.publish(site.file, wire="nccl", code=4, LD_LIBRARY_PATH=str(driver))
    assert said["reason"] == "TRANSPORT" and "libnccl.so.2" in said["message"] and "NCCL 2.18" in said["message"], said
    assert site.plane.state().trainer is None, "the group was never asked for"
