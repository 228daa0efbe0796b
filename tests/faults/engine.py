"""Engines that write down what they do, for the judge: ``--engine tests.faults.engine:make``.

Each line of ``<folder>/<replica>.history`` is one event of one engine life, written as it happens: it survives a
SIGKILL. What is live at a commit is read from memory there and then. ``defect`` plants one (``test_judge.py``).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.process.coded import Coded, Output, generator_of
from weightplane.controlplane.core.model import NONE_HELD
from weightplane.inference_agent import operations
from weightplane.inference_agent.engines.base import EngineUpdate
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.serve import Served

_all: list[RecordingEngine] = []


class RecordingEngine(TorchModuleEngine):
    def __init__(self, modules: list[Coded], path: Path, defect: str) -> None:
        self._path, self._defect, self._began = path, defect, 0
        self._leaked: list[Any] = []
        super().__init__(modules)
        self._write("born")
        _all.append(self)

    def _write(self, event: str, **more: Any) -> None:
        line = {"at": time.monotonic(), "life": self.life, "event": event, "pid": os.getpid(), **more}
        with self._path.open("a") as out:
            out.write(json.dumps(line) + "\n")

    def values(self) -> list[float]:
        """Every value that any live tensor of any worker has; one, if they are of one version."""
        found: set[float] = set()
        for module in self.modules:
            for p in module.parameters():
                least, most = torch.aminmax(p.detach())
                found |= {float(least), float(most)}
        return sorted(found)

    def begin(self, update: EngineUpdate) -> None:
        self._write("begin", update_id=update.update_id, version=update.version, step=update.trainer_step)
        super().begin(update)
        self._began += 1
        if self._defect == "leak-descriptors":
            self._leaked += [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
        elif self._defect == "leak-threads":
            for _ in range(3):
                threading.Thread(target=threading.Event().wait, daemon=True).start()
        elif self._defect == "leak-memory":
            self._leaked.append(bytearray(os.urandom(1 << 20)) * 48)

    def apply(self, update_id: str) -> None:
        if self._defect == "half-applied" and self._began % 2 == 0:
            copies = self._known().copies.steps()
            with self.gate.exclusive():
                self._fence(f"update {update_id} is being applied")
                next(copies)
            return
        super().apply(update_id)

    def commit(self, update_id: str) -> None:
        u = self._open(update_id)
        super().commit(update_id)
        self._write(
            "commit",
            update_id=u.update_id,
            version=u.version,
            step=u.trainer_step,
            mode=str(u.mode),
            live=self.values(),
        )

    def abort(self, update_id: str, wrote: bool, reason: str) -> None:
        super().abort(update_id, wrote, reason)
        self._write("abort", update_id=update_id, wrote=wrote, reason=reason, mixed=bool(self.mixed()))

    def restart(self) -> None:
        """As if its process had died and come back: blank weights, nothing held, a new life."""
        with self.gate.exclusive():
            for module in self.modules:
                for p in module.parameters():
                    p.detach().zero_()
            self._forget()
            self._held = NONE_HELD
            self._life = f"{self._life}+"
        self._write("born")


def restart() -> None:
    """Restart every engine of this process."""
    for engine in _all:
        engine.restart()


def _both(generators: list[Callable[..., list[Output]]]) -> Callable[..., list[Output]]:
    """What all workers say; where they differ, a token that no version has."""

    def generate(prompts: Any, **options: Any) -> list[Output]:
        first, *others = [g(prompts, **options) for g in generators]
        for other in others:
            for mine, theirs in zip(first, other, strict=True):
                mine.finished = mine.finished and theirs.finished
                if mine.finished and [t.version for t in mine.tags] == [t.version for t in theirs.tags]:
                    mine.tokens = [a if a == b else 1 for a, b in zip(mine.tokens, theirs.tokens, strict=True)]
                    mine.logprobs = [min(a, b) for a, b in zip(mine.logprobs, theirs.logprobs, strict=True)]
        return first

    return generate


def make(folder: str, replica: str, workers: int = 1, defect: str = "") -> Served:
    torch.set_num_threads(1)
    if replica == "r1":
        operations.WITH_VOTE = 0  # its receipts go by PutReceipt, as those of a large model; the others' with the vote
    models = [Coded().eval() for _ in range(workers)]
    engine = RecordingEngine(models, Path(folder) / f"{replica}.history", defect)
    return Served(engine, _both([generator_of(m, 0.001) for m in models]))
