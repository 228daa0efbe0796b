"""Every way to run vLLM with every kind of checkpoint: ``make test-vllm-product``. CI runs a pairwise part of it.

Run on 2 cores, vLLM 0.32.0 (CPU), 2026-11-29, 0f3ec54 and adaf3bb: all 20 exact.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.inference_agent.server import Server

from .fleet import Fleet
from .models import CORE, ENVIRONMENT, Goldens
from .product_cell import ROUNDS
from .servers import VllmServer

pytestmark = pytest.mark.large
CHECKPOINTS = {"A": "B", "TA": "TB", "A16": "B16", "TA16": "TB16"}  # of float32 and bfloat16; T: tied


def fresh(folder: Path, log: Path, core: str, options: dict[str, str]) -> list[list[int]]:
    """What a server says that was never updated."""
    server = VllmServer(folder, log, core, options=options).start()
    try:
        return server.all_tokens()
    finally:
        server.kill()


@pytest.mark.parametrize("first", CHECKPOINTS)
@pytest.mark.parametrize("way", ["two servers", "one server of two workers"])
def test_servers_go_there_and_back(
    way: str, first: str, folders: dict[str, Path], golden: Goldens, plane: Server, tmp_path: Path
) -> None:
    """A -> B -> A -> B over HTTP, staged and in place: tokens are a fresh engine's, the label is ours."""
    cores = {"a": "0", "b": "1"} if way == "two servers" else {"a": "0|1"}
    options = {} if way == "two servers" else {"--tensor-parallel-size": "2"}
    names = (first, CHECKPOINTS[first])
    expected = {n: golden[n] for n in names}
    if options and first.endswith("16"):  # two workers round other sums than one
        expected = {n: fresh(folders[n], tmp_path / f"fresh-{n}.log", cores["a"], options) for n in names}
    servers = {n: VllmServer(folders[first], tmp_path / f"{n}.log", c, options=options) for n, c in cores.items()}
    for s in servers.values():
        s.launch()
    group = f"product-{len(servers)}-{first}"
    with Fleet(group, plane, {n: s.wait_healthy() for n, s in servers.items()}, tmp_path) as fleet:
        assert all(fleet.tokens(n) == expected[first] for n in servers)
        for target, mode in ROUNDS:
            receipt = fleet.publish(folders[names[target]], mode=mode)
            assert {(r.state, r.mode) for r in receipt.replicas} == {("READY", mode.upper())}
            assert len(receipt.replicas) == len(servers)
            for name, server in servers.items():
                assert fleet.tokens(name) == expected[names[target]], f"{name}, {mode}"
                assert server.label() == str(receipt.version)


@pytest.mark.parametrize("first", CHECKPOINTS)
@pytest.mark.parametrize("way", ["LLM", "LLM in this process", "AsyncLLM"])
def test_programs_go_there_and_back(way: str, first: str, folders: dict[str, Path], golden: Goldens) -> None:
    """The same with a vLLM inside a program: its core in a process of its own, or in the program's."""
    names = (first, CHECKPOINTS[first])
    alone = "0" if way.endswith("this process") else "1"
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": alone, "VLLM_CPU_OMP_THREADS_BIND": CORE}
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.product_cell", way.split()[0], *(str(folders[n]) for n in names)],
        env={**os.environ, **ENVIRONMENT, **environment},
        input=json.dumps([golden[n] for n in names]),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0 and "exact" in done.stdout.split(), done.stdout + done.stderr[-4000:]
