"""What the tests of several clients use."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.fleet import Launched
from tests.clients.needs import need


@pytest.fixture(scope="session")
def cpp() -> None:
    """The C++ client is there."""
    need("cpp")


@pytest.fixture(scope="session")
def node_client() -> None:
    """The Node client is there."""
    need("node")


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    processes = Launched(tmp_path)
    yield processes
    processes.stop()


@pytest.fixture
def segments() -> Iterator[Path]:
    """A folder in shared memory: what other programs have in /dev/shm is none of ours."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)
