"""Real vLLM servers, shared by the tests of a module; all is skipped where vLLM is not installed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.inference_agent.server import FAST, Server

from .fleet import Fleet
from .models import goldens, make_model
from .servers import VllmServer

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("vllm") is None
    if missing and os.environ.get("WEIGHTPLANE_NEEDS_VLLM"):
        raise pytest.UsageError("vLLM is not installed here, and these tests are to run: make test-vllm sets it up")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(500))
            if missing and "golden" in getattr(item, "fixturenames", ()):  # every real engine is compared with it
                item.add_marker(pytest.mark.skip(reason="needs vLLM: make test-vllm sets up .venv-vllm for it"))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints A and B, of float32; T…: with tied embeddings; …16: in bfloat16; M…: with experts."""
    base = tmp_path_factory.mktemp("models")
    names = ("A", "B", "TA", "TB", "A16", "B16", "TA16", "TB16", "MA", "MB")
    return {
        n: make_model(
            base / n,
            seed,
            tie=n[0] == "T",
            dtype="bfloat16" if n.endswith("16") else "float32",
            experts=4 if n[0] == "M" else 0,
        )
        for seed, n in enumerate(names)
    }


@pytest.fixture(scope="session")
def golden(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    """What a fresh vLLM without Weightplane generates from each; made before any server is started."""
    found = goldens(folders)
    assert len({str(v) for v in found.values()}) == len(found), "the models must not agree"
    return found


@pytest.fixture(scope="session")
def plane() -> Iterator[Server]:
    # Leases are not what is shown here: on a machine that others use, three seconds of silence are no sign of death.
    server = Server(replace(FAST, ttl_s=10.0, routing_budget_s=30.0)).start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def pair(
    golden: object, folders: dict[str, Path], plane: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """Two servers of A on a core each, with an agent each, in a group of their own."""
    logs = tmp_path_factory.mktemp("pair")
    servers = {n: VllmServer(folders["A"], logs / f"{n}.log", core).launch() for core, n in enumerate(("a", "b"))}
    with Fleet("pair", plane, {n: s.wait_healthy() for n, s in servers.items()}, logs) as fleet:
        yield fleet
