"""A client that is not built is a skip on a developer's machine, and a failure where it must be there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.fleet import ROOT
from tests.clients import needs


@pytest.fixture(params=["cpp", "node"])
def absent(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(needs, "PROGRAM", tmp_path / "publish_checkpoint")
    monkeypatch.setattr(needs, "NODE", tmp_path)
    return str(request.param)


@pytest.mark.parametrize("asked", ["", "0", "other"])
def test_it_is_skipped_with_the_reason(absent: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTPLANE_NEEDS_CLIENTS", asked)
    with pytest.raises(pytest.skip.Exception, match=r"not built|no modules|not installed"):
        needs.need(absent)


@pytest.mark.parametrize("asked", ["1", "node cpp", "cpp,node"])
def test_it_fails_where_it_must_be_there(absent: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTPLANE_NEEDS_CLIENTS", asked)
    with pytest.raises(pytest.fail.Exception, match="WEIGHTPLANE_NEEDS_CLIENTS asks for it"):
        needs.need(absent)


def test_ci_asks_for_all_of_them() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert "export WEIGHTPLANE_NEEDS_CLIENTS=1" in lines
