"""A trainer in C++, a torch replica and a real vLLM: one update, a transport for each, one commit."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cli.fleet import Launched
from tests.clients.needs import PROGRAM, need
from tests.inference_agent.server import Server, eventually
from weightplane.trainer_agent.sources_safetensors import SafetensorsSource
from weightplane.transports.digest import digest_tensor, hex_digest

from .servers import AgentProcess, VllmServer

Golden = dict[str, list[list[int]]]
GROUP = "languages"


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    processes = Launched(tmp_path)
    yield processes
    processes.stop()


def test_a_cpp_trainer_reaches_a_torch_replica_by_shm_and_vllm_by_grpc_in_one_update(
    golden: Golden, folders: dict[str, Path], plane: Server, launched: Launched, tmp_path: Path
) -> None:
    """Both serve A. The torch replica's live digests are B's afterwards, and vLLM generates as a fresh engine of B."""
    need("cpp")
    file = folders["B"] / "model.safetensors"
    where = ["--address", plane.address, "--group", GROUP]
    with ExitStack() as stack:
        vllm = VllmServer(folders["A"], tmp_path / "vllm.log")
        stack.callback(vllm.kill)
        vllm.start()
        options = ["--engine-option", f"path={file}", "--generate", "127.0.0.1:0"]
        engine = ["--replica-id", "torch", "--engine", "tests.cli.blank_engine:make", *options]
        serving = launched.start("torch", "inference-agent", *where, *engine)["generate"]
        agent = AgentProcess(plane.address, GROUP, "vllm", vllm.url, tmp_path / "agent.log", "--transport", "grpc")
        stack.callback(agent.stop)

        def there(name: str) -> bool:
            r = plane.state(GROUP).replicas.get(name)
            return r is not None and r.reported and any(o for w in r.workers for o in w.offers)

        for name in ("torch", "vllm"):
            eventually(lambda n=name: there(n), 60, f"{name} joins: {agent.log.read_text()[-3000:]}")  # type: ignore[misc]
        assert vllm.all_tokens() == golden["A"]
        done = subprocess.run(
            [str(PROGRAM), *where, "--file", str(file), "--step", "1"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr + agent.log.read_text()[-3000:]
        said = json.loads(done.stdout)
        assert said["transports"] == {"torch": "shm", "vllm": "grpc"}
        assert said["replicas"] == {"torch": "READY", "vllm": "READY"}
        source = SafetensorsSource(file)
        wanted = {m.name: hex_digest(digest_tensor(source.tensor(i)[0])) for i, m in enumerate(source.manifest())}
        with urllib.request.urlopen(f"http://{serving}/digests", timeout=30) as answer:
            assert json.load(answer) == wanted
        assert vllm.all_tokens() == golden["B"] and vllm.label() == str(said["version"])
        for name in ("torch", "vllm"):
            r = plane.state(GROUP).replicas[name]
            assert (r.weights, r.held.version) == ("READY", said["version"])
