"""Engines with one planted defect each: the examination of tokens must find them (``test_constant_load.py``)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.process.coded import serve
from weightplane.controlplane.core.model import NONE_HELD
from weightplane.controlplane.core.states import PauseMode
from weightplane.inference_agent.engines.base import EngineUpdate, VersionTag
from weightplane.inference_agent.engines.gate import PauseGate
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.serve import Served

_PASS_S = 0.005


class _OpenGate(PauseGate):
    """Stops nobody."""

    def pause(self, holder: str, mode: PauseMode) -> None:
        pass

    def wait_still(self, holder: str, timeout: float | None = None) -> bool:
        return True

    @contextmanager
    def exclusive(self, timeout: float | None = None) -> Iterator[None]:
        yield


class Torn(TorchModuleEngine):
    """Writes while passes run."""

    def __init__(self, module: object) -> None:
        super().__init__(module)  # type: ignore[arg-type]
        self.gate = _OpenGate()

    def mixed(self) -> str:
        return ""

    def apply(self, update_id: str) -> None:
        for _ in self._known().copies.steps():
            time.sleep(_PASS_S / 2)


class Mislabelled(TorchModuleEngine):
    """Has the new label before the new weights."""

    def begin(self, update: EngineUpdate) -> None:
        super().begin(update)
        incarnation = self.gate.tag.incarnation
        self.gate.relabel(
            VersionTag(update.version, update.update_id, update.trainer_step, update.lineage, incarnation)
        )


class Unfenced(TorchModuleEngine):
    """Generates on after an apply that failed halfway."""

    _before = NONE_HELD

    def pause(self, holder: str, mode: PauseMode) -> None:
        if holder != "dirty":
            super().pause(holder, mode)

    def abort(self, update_id: str, wrote: bool, reason: str) -> None:
        super().abort(update_id, wrote, reason)
        self._mixed = ""
        self._held = self._before
        for holder in ("dirty", "update"):
            self.gate.resume(holder)

    def begin(self, update: EngineUpdate) -> None:
        super().begin(update)
        self._before = self._held


def torn() -> Served:
    return serve(Torn, _PASS_S)


def mislabelled() -> Served:
    return serve(Mislabelled, _PASS_S)


def unfenced() -> Served:
    return serve(Unfenced, _PASS_S)
