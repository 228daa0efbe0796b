"""``evolve.replace`` does what ``dataclasses.replace`` does, for every value of the state."""

from __future__ import annotations

import dataclasses

import pytest

from weightplane.controlplane.core import events, model
from weightplane.controlplane.core.evolve import replace
from weightplane.controlplane.core.group_state import GroupState
from weightplane.controlplane.core.model import Replica
from weightplane.controlplane.core.reasons import Failure, Reason


def test_a_copy_differs_in_what_was_named_and_nothing_else() -> None:
    before = GroupState("g", "c", 3, last_version=7)
    after = replace(before, revision=9, epoch=4)
    assert after == dataclasses.replace(before, revision=9, epoch=4) != before
    assert (before.revision, before.epoch) == (0, 3) and hash(Failure(Reason.ENGINE, "x")) is not None
    assert replace(Replica("r"), replica_id="s") == Replica("s")
    with pytest.raises(dataclasses.FrozenInstanceError):
        after.revision = 1  # type: ignore[misc]


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="revison"):
        replace(GroupState("g", "c", 3), revison=1)


def test_every_value_of_the_state_can_be_copied() -> None:
    for module in (model, events):
        for name in vars(module):
            cls = getattr(module, name)
            if dataclasses.is_dataclass(cls) and isinstance(cls, type):
                blank = object.__new__(cls)
                for field in dataclasses.fields(cls):
                    object.__setattr__(blank, field.name, field.name)
                assert replace(blank) == blank, name


def test_a_class_that_computes_in_its_init_is_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class Computes:
        a: int
        twice: int = dataclasses.field(init=False, default=0)

        def __post_init__(self) -> None:
            object.__setattr__(self, "twice", 2 * self.a)

    with pytest.raises(TypeError, match="Computes"):
        replace(Computes(1), a=2)


def test_slots_are_refused() -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Slotted:
        a: int

    with pytest.raises(TypeError, match="without slots"):
        replace(Slotted(1), a=2)


def test_what_a_value_was_given_besides_its_fields_is_refused() -> None:
    """Of what is remembered on a value, as by ``cached_property``, a copy with other fields would be wrong."""
    value = Failure(Reason.ENGINE, "x")
    object.__setattr__(value, "remembered", 1)
    with pytest.raises(TypeError, match="remembered"):
        replace(value, message="y")
