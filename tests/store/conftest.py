"""Every test that asks for an ``opener`` runs on each kind of store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.helpers import Opener, openers


@pytest.fixture(params=["memory", "sqlite"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    return openers(request.param, tmp_path)
