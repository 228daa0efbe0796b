"""Critical cases over every wire they apply to, real cards among them; each fails by name with a defect planted.

``test_<id>_<what is right>[<transport>-<place>]``. On cards they are marked ``gpu``. The defects of these that hold for
every transport alike are planted where the case is shown without wires, too (``test_cases.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cases import (  # noqa: F401 - they register the cases
    cards_distribution,
    cards_memory,
    cards_transport,
)
from tests.cases.base import CaseFailed
from tests.cases.cards import CARD_CASES, TWINS, CardCase, planting_cards
from tests.cases.plants import PLANTS
from tests.cases.plants_cards import CARD_PLANTS, card_planted
from tests.cases.wires import WIRES, Wire, param

pytestmark = pytest.mark.timeout(180)


def _test_of(case: CardCase) -> Any:
    @pytest.mark.parametrize("wire", [param(w) for w in WIRES.values() if case.applies(w)])
    def body(wire: Wire) -> None:
        case.body(wire)

    body.__name__ = body.__qualname__ = f"test_{case.name}"
    body.__doc__ = case.body.__doc__
    return body


globals().update({f"test_{c.name}": _test_of(c) for c in CARD_CASES.values()})


@pytest.fixture(scope="module", autouse=True)
def twins() -> Iterator[None]:
    """A process for the other end is warm by the time it is needed."""
    TWINS.warm(2)
    yield
    TWINS.close()


_SHOWN = [
    param(wire, id_, id=f"{id_}-{wire.id}")
    for id_, plant in CARD_PLANTS.items()
    for wire in WIRES.values()
    if CARD_CASES[id_].applies(wire) and plant.shown(wire)
]


@pytest.mark.parametrize(("wire", "id_"), _SHOWN)
def test_planted_defect_is_found(wire: Wire, id_: str) -> None:
    plant = CARD_PLANTS[id_]
    with card_planted(id_), planting_cards(id_), pytest.raises(CaseFailed) as caught:
        CARD_CASES[id_].body(wire)
    found = str(caught.value)
    assert found.startswith(plant.found_by), f"expected {plant.found_by!r} to fail, found {found!r}"


def test_every_case_has_its_defect() -> None:
    assert CARD_CASES.keys() <= CARD_PLANTS.keys() | PLANTS.keys()
