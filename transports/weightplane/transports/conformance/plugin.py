"""Pytest plug-in: fixtures ``transport_name``, ``pool`` and ``fleet`` for the kit's cases.

A module names its transport in ``TRANSPORT``; else ``--transport NAME`` does (repeatable). Cases that need much memory
are marked ``large`` and run with ``--large``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--transport`` and ``--large``."""
    group = parser.getgroup("weightplane transports")
    group.addoption("--transport", action="append", default=[], help="transport to run the conformance kit against")
    group.addoption("--large", action="store_true", default=False, help="run cases that need many GiB of memory")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks."""
    config.addinivalue_line("markers", "large: needs many GiB of memory; run with --large")
    config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout, where that is installed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is large unless asked for (``--run-large`` is Weightplane's own word for it)."""
    if not config.getoption("--large", default=False) and not config.getoption("--run-large", default=False):
        for item in items:
            if item.get_closest_marker("large"):
                item.add_marker(pytest.mark.skip(reason="needs many GiB of memory; run with --large"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each case for the module's transport, or for those of the command line."""
    if "transport_name" in metafunc.fixturenames:
        named = getattr(metafunc.module, "TRANSPORT", None)
        names = [named] if named else metafunc.config.getoption("--transport", default=[]) or []
        metafunc.parametrize("transport_name", names, scope="session")


@pytest.fixture(scope="session")
def pool(transport_name: str) -> Iterator[Any]:
    """Peers of the transport under test, shared by its cases."""
    from .harness import Pool

    made = Pool(transport_name)
    yield made
    made.close()


@pytest.fixture
def fleet(pool: Any) -> Iterator[Callable[..., Any]]:
    """Makes a ``harness.Fleet``; its peers are given back after the test."""
    from .harness import Fleet

    made: list[Fleet] = []

    def make(model: str, **options: Any) -> Fleet:
        made.append(Fleet(pool, model, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
