"""The kit's cases about sleep: an engine that sleeps rightly passes them, and each defect in it fails one by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.inference_agent.models import manifest_of
from tests.inference_agent.server import eventually, server
from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.model import NONE_HELD, SLEEP_TAGS
from weightplane.controlplane.core.states import Mode, PauseMode
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.base import Engine, EngineError, EngineUpdate
from weightplane.inference_agent.engines.conformance import EngineConformance
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine


class Sleeper(TorchModuleEngine):
    """What a sleep releases is overwritten; a light one puts it back from a copy."""

    sleep_levels = (1, 2)

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
        self.released: frozenset[str] = frozenset()
        self.kept: list[torch.Tensor] | None = None

    def asleep(self) -> frozenset[str]:
        return self.released

    def sleep(self, level: int) -> None:
        if level not in self.sleep_levels:
            raise EngineError(f"sleep level {level}")
        if self._update is not None or self.released:
            raise EngineError("an update is open, or a part of it sleeps")
        self.gate.pause("sleep", PauseMode.KEEP)
        self.gate.wait_still("sleep", 10)
        live = [t.tensor for w in self._live for t in w]
        self.kept = [t.detach().clone() for t in live] if level == 1 else None
        if level == 2:
            self._held = NONE_HELD
            self._fence("its weights were dropped")
        for t in live:
            t.detach().fill_(float("nan"))
        self.released = frozenset(SLEEP_TAGS)

    def wake(self, tags: frozenset[str]) -> None:
        left = self.released - tags
        if "weights" in left:
            raise EngineError("the weights come first")
        if not left and self.mixed():
            raise EngineError("its weights are lost")
        if "weights" in self.released and self.kept is not None:
            for t, kept in zip([t.tensor for w in self._live for t in w], self.kept, strict=True):
                t.detach().copy_(kept)
        self.released = left
        if not left:
            self.gate.resume("sleep")

    def begin(self, update: EngineUpdate) -> None:
        if "weights" in self.released:
            raise EngineError("its weights are asleep")
        super().begin(update)


class TestSleeper(EngineConformance):
    def build(self) -> Engine:
        return Sleeper()

    def manifest_of(self, engine: Engine) -> Manifest:
        assert isinstance(engine, Sleeper)
        return manifest_of(engine.modules[0])


class ForgetsToFence(Sleeper):
    def _fence(self, why: str) -> None:
        if "dropped" not in why:
            super()._fence(why)


class KeepsItsVersion(Sleeper):
    def sleep(self, level: int) -> None:
        held = self._held
        super().sleep(level)
        self._held = held


class GeneratesHalfAwake(Sleeper):
    def wake(self, tags: frozenset[str]) -> None:
        super().wake(tags)
        self.gate.resume("sleep")


class TakesUpdatesAsleep(Sleeper):
    def begin(self, update: EngineUpdate) -> None:
        TorchModuleEngine.begin(self, update)


class WakesInAnyOrder(Sleeper):
    def wake(self, tags: frozenset[str]) -> None:
        self.released -= tags


class KeepsNothing(Sleeper):
    def sleep(self, level: int) -> None:
        super().sleep(level)
        self.kept = None


class SleepsInAnUpdate(Sleeper):
    def sleep(self, level: int) -> None:
        open_, self._update = self._update, None
        super().sleep(level)
        self._update = open_


class WakesEverybody(Sleeper):
    def wake(self, tags: frozenset[str]) -> None:
        super().wake(tags)
        for holder in () if self.released else self.holders():
            self.gate.resume(holder)


class HasEveryLevel(Sleeper):
    def sleep(self, level: int) -> None:
        super().sleep(max(1, min(level, 2)))


Kit = Callable[[TestSleeper, Engine], None]
DEFECTS: list[tuple[type[Sleeper], Kit]] = [
    (ForgetsToFence, TestSleeper.test_a_deep_sleep_leaves_nothing_of_ours_until_an_update),
    (KeepsItsVersion, TestSleeper.test_a_deep_sleep_leaves_nothing_of_ours_until_an_update),
    (WakesInAnyOrder, TestSleeper.test_a_deep_sleep_leaves_nothing_of_ours_until_an_update),
    (GeneratesHalfAwake, TestSleeper.test_a_light_sleep_keeps_what_it_holds),
    (KeepsNothing, TestSleeper.test_a_light_sleep_keeps_what_it_holds),
    (TakesUpdatesAsleep, lambda kit, e: kit.test_no_update_begins_while_the_weights_sleep(e, 1, Mode.STAGED)),
    (TakesUpdatesAsleep, lambda kit, e: kit.test_no_update_begins_while_the_weights_sleep(e, 2, Mode.IN_PLACE)),
    (WakesInAnyOrder, TestSleeper.test_the_weights_wake_up_first),
    (SleepsInAnUpdate, TestSleeper.test_it_falls_asleep_alone),
    (WakesEverybody, TestSleeper.test_a_pause_of_somebody_else_outlives_a_sleep),
    (HasEveryLevel, TestSleeper.test_an_order_that_it_has_no_level_for_is_refused),
]


@pytest.mark.parametrize(("defect", "case"), DEFECTS)
def test_a_defect_is_found(defect: type[Sleeper], case: Kit) -> None:
    engine = defect()
    try:
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            case(TestSleeper(), engine)
    finally:
        engine.close()


def test_who_falls_asleep_behind_its_agent_is_asleep() -> None:
    """The engine is put to sleep by somebody else: the fleet knows within a second, at either level."""
    with server() as plane:
        engine = Sleeper()
        agent = InferenceAgent(plane.address, "g", "a", engine).start()

        def replica() -> Any:
            return plane.state("g").replicas["a"]

        try:
            eventually(lambda: "a" in plane.state("g").replicas and replica().reported, 10, "it is there")
            for level, weights in ((1, "JOINING"), (2, "DIRTY")):
                engine.sleep(level)
                eventually(lambda: replica().admin == "ASLEEP", 2, "it is noticed")
                assert replica().asleep == SLEEP_TAGS and replica().weights == weights
                assert "sleep" in replica().pause_holders
                engine.wake(frozenset({"weights"}))
                eventually(
                    lambda: replica().asleep == ("kv_cache",) and replica().admin == "ACTIVE", 2, "it is noticed"
                )
                if level == 1:
                    engine.wake(frozenset(SLEEP_TAGS))
                    eventually(lambda: not replica().asleep and not replica().pause_holders, 2, "it is noticed")
        finally:
            agent.stop()
            engine.close()
