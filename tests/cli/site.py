"""A control plane, a replica and a first publish, as the command's own processes; commands are run against them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .fleet import Launched, weightplane

__all__ = ["GROUP", "Site", "engine_of"]

GROUP = "tiny"


def engine_of(checkpoint: Path) -> list[str]:
    """Arguments of an agent whose engine fits a checkpoint."""
    return ["--engine", "tests.cli.blank_engine:make", f"--engine-option=path={json.dumps(str(checkpoint))}"]


class Site:
    def __init__(self, launched: Launched, address: str, checkpoint: Path) -> None:
        self.launched, self.address, self.checkpoint = launched, address, checkpoint

    def run(self, *args: str, code: int = 0, **kwargs: Any) -> str:
        done = weightplane(*args, "-a", self.address, **kwargs)
        assert done.returncode == code, f"{args}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def json(self, *args: str, code: int = 0) -> Any:
        done = weightplane(*args, "-a", self.address, "--json")
        assert done.returncode == code, f"{args}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)
