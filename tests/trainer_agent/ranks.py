"""Runs one function in several spawned trainer ranks with a gloo process group, and collects what they return.

The function is named ``module:function`` and called with (rank, world_size, arguments); what it returns must be JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests import warm

ROOT = Path(__file__).resolve().parents[2]
PRELOAD = "torch,torch.distributed.fsdp,torch.distributed.tensor"


class Ranks:
    """Started ranks. ``wait`` gives each one's result; a rank that fails fails the test with its output."""

    def __init__(self, target: str, world_size: int, folder: Path, arguments: dict[str, Any] | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.processes = []
        for rank in range(world_size):
            spec = json.dumps([target, rank, world_size, str(folder), arguments or {}])
            log = (folder / f"rank{rank}.log").open("wb")
            command = [sys.executable, "-m", "tests.trainer_agent.ranks", spec]
            self.processes.append(
                warm.Popen(command, preload=PRELOAD, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
            )
            log.close()

    def log(self, rank: int) -> str:
        return (self.folder / f"rank{rank}.log").read_text(errors="replace")[-4000:]

    def wait(self, timeout: float = 90.0) -> list[Any]:
        end = time.monotonic() + timeout
        try:
            for rank, process in enumerate(self.processes):
                try:
                    code = process.wait(max(0.1, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    raise AssertionError(f"rank {rank} did not end:\n{self.log(rank)}") from None
                assert code == 0, f"rank {rank} ended with {code}:\n{self.log(rank)}"
        finally:
            self.kill()
        return [json.loads((self.folder / f"rank{r}.json").read_text()) for r in range(len(self.processes))]

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _main() -> None:
    import torch
    import torch.distributed as dist

    target, rank, world_size, folder, arguments = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    module, _, function = target.partition(":")
    result = getattr(importlib.import_module(module), function)(rank, world_size, arguments)
    Path(folder, f"rank{rank}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # a group some ranks of which are gone does not always close


if __name__ == "__main__":
    _main()
