"""What the tests of several clients use."""

from __future__ import annotations

import pytest

from tests.clients.needs import need


@pytest.fixture(scope="session")
def cpp() -> None:
    """The C++ client is there."""
    need("cpp")


@pytest.fixture(scope="session")
def node_client() -> None:
    """The Node client is there."""
    need("node")
