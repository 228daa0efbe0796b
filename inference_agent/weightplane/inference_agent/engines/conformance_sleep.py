"""The part of the engine conformance kit about sleep; ``EngineConformance`` has it. No weights are lost unsaid."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import pytest

from weightplane.controlplane.core.model import NONE_HELD, SLEEP_TAGS, Held
from weightplane.controlplane.core.states import Mode, PauseMode

from .base import Engine, EngineError

__all__ = ["SleepCases"]

ALL = frozenset(SLEEP_TAGS)
WEIGHTS, REST = frozenset({"weights"}), frozenset(SLEEP_TAGS) - {"weights"}


class SleepCases:
    """Rules for engines that declare ``sleep_levels``; one that declares none refuses by name."""

    @abstractmethod
    def manifest_of(self, engine: Engine) -> Any:
        """See ``EngineConformance``, as the rest here."""

    take: Any
    update: Any
    pause: Any
    bits: Any
    passes: Any
    wanted: Any

    def asleep_at(self, engine: Engine, level: int) -> Any:
        """Update it, put it to sleep at ``level`` (or skip); returns the values that it had."""
        if level not in engine.sleep_levels:
            pytest.skip(engine.sleep_refusal or f"it has levels {engine.sleep_levels}")
        values = self.take(engine, 1, engine.modes[0])
        engine.sleep(level)
        return values

    def test_an_order_that_it_has_no_level_for_is_refused(self, engine: Engine) -> None:
        """By an error that says why; nothing falls asleep."""
        assert bool(engine.sleep_levels) == (not engine.sleep_refusal) and not engine.asleep()
        for level in {0, 1, 2, 3} - set(engine.sleep_levels):
            with pytest.raises(EngineError):
                engine.sleep(level)
        if not engine.sleep_levels:
            with pytest.raises(EngineError):
                engine.wake(ALL)
        assert not engine.asleep() and not engine.holders() and self.passes(engine, 5)

    def test_a_light_sleep_keeps_what_it_holds(self, engine: Engine) -> None:
        """Asleep it says so, by name, and stands still; awake it is what it was, and generates."""
        values = self.asleep_at(engine, 1)
        assert engine.asleep() == ALL and "sleep" in engine.holders() and not self.passes(engine, 0.2)
        assert engine.held() == (Held(1, "u1"),) * len(engine.workers) and not engine.mixed()
        engine.wake(WEIGHTS)
        assert engine.asleep() == REST and not self.passes(engine, 0.2), "what is needed to generate sleeps on"
        engine.wake(REST)
        assert not engine.asleep() and not engine.holders() and self.passes(engine, 5)
        manifest = self.manifest_of(engine)
        assert self.bits(engine, manifest) == self.wanted(engine, manifest, values)

    def test_a_deep_sleep_leaves_nothing_of_ours_until_an_update(self, engine: Engine) -> None:
        """From the order on it is mixed and holds nothing; no order lets it generate before a full update."""
        self.asleep_at(engine, 2)
        assert engine.asleep() == ALL and engine.mixed() and set(engine.held()) == {NONE_HELD}
        with pytest.raises(EngineError):
            engine.wake(ALL)
        assert "weights" in engine.asleep() and engine.mixed()
        engine.wake(WEIGHTS)
        assert engine.mixed() and set(engine.held()) == {NONE_HELD}, "awake, and not brought back"
        with pytest.raises(EngineError):
            engine.wake(REST)
        for holder in ("update", "dirty"):
            engine.resume(holder)
        assert engine.asleep() == REST and not self.passes(engine, 0.2), "lost weights generate"
        values = self.take(engine, 2, engine.modes[0])
        engine.resume("dirty")
        assert not engine.mixed() and engine.held() == (Held(2, "u2"),) * len(engine.workers)
        assert not self.passes(engine, 0.2), "an update wakes nobody up"
        engine.wake(REST)
        assert not engine.asleep() and self.passes(engine, 5)
        manifest = self.manifest_of(engine)
        assert self.bits(engine, manifest) == self.wanted(engine, manifest, values)

    @pytest.mark.parametrize("mode", [Mode.STAGED, Mode.IN_PLACE])
    @pytest.mark.parametrize("level", [1, 2])
    def test_no_update_begins_while_the_weights_sleep(self, engine: Engine, level: int, mode: Mode) -> None:
        """Refused by an error; with the weights awake it is taken, and lands."""
        if mode not in engine.modes:
            pytest.skip(f"{mode}: {engine.staging_refusal}")
        self.asleep_at(engine, level)
        with pytest.raises(EngineError):
            engine.begin(self.update(engine, 2, mode))
        engine.wake(WEIGHTS)
        self.take(engine, 3, mode)
        assert engine.held() == (Held(3, "u3"),) * len(engine.workers) and not engine.mixed()
        engine.wake(REST)
        assert self.passes(engine, 5)

    def test_the_weights_wake_up_first(self, engine: Engine) -> None:
        """They may need an update before anything is generated."""
        self.asleep_at(engine, 1)
        with pytest.raises(EngineError):
            engine.wake(REST)
        assert engine.asleep() == ALL

    def test_it_falls_asleep_alone(self, engine: Engine) -> None:
        """Not in the middle of an update, which goes on; not half asleep."""
        if not engine.sleep_levels:
            pytest.skip(engine.sleep_refusal)
        level = engine.sleep_levels[0]
        u = self.update(engine, 1, engine.modes[0])
        engine.begin(u)
        with pytest.raises(EngineError):
            engine.sleep(level)
        assert not engine.asleep() and "sleep" not in engine.holders()
        engine.abort(u.update_id, False, "over")
        assert self.passes(engine, 5)
        engine.sleep(level)
        if not engine.mixed():
            engine.wake(WEIGHTS)
            with pytest.raises(EngineError):
                engine.sleep(level)
            assert engine.asleep() == REST

    def test_a_pause_of_somebody_else_outlives_a_sleep(self, engine: Engine) -> None:
        """Whether the last of it wakes up then or is refused: nothing generates before that holder lets go."""
        self.asleep_at(engine, 1)
        self.pause(engine, PauseMode.KEEP, "operator")
        try:
            engine.wake(ALL)
        except EngineError:
            assert engine.asleep()
        assert "operator" in engine.holders() and not self.passes(engine, 0.2)
        engine.resume("operator")
        engine.wake(engine.asleep())
        assert not engine.asleep() and not engine.holders() and self.passes(engine, 5)
