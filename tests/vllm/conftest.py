"""Real vLLM servers, shared by the tests of a module; all is skipped where vLLM is not installed."""

from __future__ import annotations

import importlib.util
import os
import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.inference_agent.server import FAST, Server

from .fleet import Fleet
from .models import Goldens, make_model
from .servers import TELLING, VllmServer

HERE = Path(__file__).parent
runpy.run_path(str(HERE / "startup" / "sitecustomize.py"))  # engines are also forked from this process, or run in it


#: What takes longest goes first where two processes share the files, but those with two servers not at once. The two
#: of the first line share engines.
LONGEST = (
    ("test_generation", "test_http_fleet"),
    *(("test_direct",), ("test_failures",), ("test_demo_vllm",), ("test_examples_vllm",), ("test_tensor_parallel",)),
    *(("test_faults_vllm",), ("test_offline",), ("test_cases_vllm",)),
    *(("test_parity",), ("test_async_llm",), ("test_experts",), ("test_draft",)),
)


PLACE = {name: n for n, names in enumerate(LONGEST) for name in names}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file goes to one process; so do files that share engines."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-not-found, unused-ignore]

    class Files(LoadFileScheduling):  # type: ignore[misc, unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            name = Path(nodeid.partition("::")[0]).stem
            return str(PLACE.get(name, name))

    config.option.loadscopereorder = False  # by LONGEST, not by number
    return Files(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("vllm") is None
    if missing and os.environ.get("WEIGHTPLANE_NEEDS_VLLM"):
        raise pytest.UsageError("vLLM is not installed here, and these tests are to run: make test-vllm sets it up")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(500))
            if missing and "golden" in getattr(item, "fixturenames", ()):  # every real engine is compared with it
                item.add_marker(pytest.mark.skip(reason="needs vLLM: make test-vllm sets up .venv-vllm for it"))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: PLACE.get(item.path.stem, len(LONGEST)))


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
def golden(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Goldens]:
    """What a fresh vLLM without Weightplane generates from each."""
    mine = tmp_path_factory.getbasetemp()
    shared = mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine
    made = Goldens(folders, shared / "goldens.json")
    yield made
    if "PYTEST_XDIST_WORKER" not in os.environ:  # else the other may wait for them
        made.close()


@pytest.fixture(scope="session")
def plane() -> Iterator[Server]:
    # Leases are not what is shown here: on a machine that others use, three seconds of silence are no sign of death.
    server = Server(replace(FAST, ttl_s=10.0, routing_budget_s=30.0)).start()
    yield server
    server.close()


@pytest.fixture(scope="session")
def pair(
    golden: Goldens, folders: dict[str, Path], plane: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """Two servers of A on a core each, with an agent each, in a group of their own. They tell versions and cached
    tokens of each output, and have small blocks."""
    logs = tmp_path_factory.mktemp("pair")
    servers = {
        n: VllmServer(folders["A"], logs / f"{n}.log", core, options=TELLING).launch()
        for core, n in enumerate(("a", "b"))
    }
    with Fleet("pair", plane, {n: s.wait_healthy() for n, s in servers.items()}, logs) as fleet:
        for name, server in servers.items():
            assert server.label() == "default" and fleet.tokens(name) == golden["A"]
        yield fleet
