"""Every critical case that applies here: its body passes, and it fails by name with the defect planted in the product.

The bodies are in ``cases_*.py``; each becomes a test of its own, ``test_<id>_<what is right>``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cases import (  # noqa: F401 - they register the cases and the defects
    cases_control,
    cases_distribution,
    cases_memory,
    cases_names,
    cases_process,
    cases_tensor,
    cases_transport,
    plants_transfer,
)
from tests.cases.base import CASES, CaseFailed
from tests.cases.children import POOL
from tests.cases.plants import PLANTS, planted

globals().update({f"test_{c.name}": c.body for c in CASES.values()})


@pytest.fixture(scope="module", autouse=True)
def spares(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes for the process cases are warm by the time they are needed."""
    if any("P0" in item.name or "X06" in item.name for item in request.session.items):
        POOL.warm()
    yield
    POOL.close()


@pytest.mark.parametrize("id_", PLANTS)
def test_planted_defect_is_found(id_: str) -> None:
    plant = PLANTS[id_]
    with planted(id_), pytest.raises(CaseFailed) as caught:
        CASES[id_].body()
    found = str(caught.value)
    assert found.startswith(plant.found_by), f"expected {plant.found_by!r} to fail, found {found!r}"


def test_every_case_has_its_defect_and_every_defect_its_case() -> None:
    assert set(PLANTS) == set(CASES)
