"""The registry imports lazily and reports a broken plug-in by its name."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from weightplane.transports import registry
from weightplane.transports.base import TransportError
from weightplane.transports.shm import ShmTransport


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made = {
        "shm": "weightplane.transports.shm:ShmTransport",
        "absent": "no_such_module_at_all:Thing",
        "wrong": "pathlib:Path",
        "misnamed": "weightplane.transports.shm:ShmTransport",
    }
    found = {n: EntryPoint(n, v, registry.GROUP) for n, v in made.items()}
    monkeypatch.setattr(registry, "_entries", lambda: found)
    registry.shutdown()
    yield
    registry.shutdown()


def test_available_reports_each_by_name(entries: None) -> None:
    found = registry.available()
    assert found["shm"].ok, found["shm"].reason
    for name, text in (
        ("absent", "no_such_module_at_all"),
        ("wrong", "not a Transport"),
        ("misnamed", "not a Transport"),
    ):
        assert not found[name].ok and repr(name) in found[name].reason and text in found[name].reason


def test_a_probe_that_raises_is_reported(entries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: ShmTransport) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(ShmTransport, "probe", broken)
    assert "no luck" in registry.available()["shm"].reason and "'shm'" in registry.available()["shm"].reason


def test_get(entries: None) -> None:
    assert registry.get("shm") is registry.get("shm")
    with pytest.raises(TransportError, match=r"'teleport'.*shm"):
        registry.get("teleport")
    with pytest.raises(TransportError, match=r"'absent'.*no_such_module_at_all"):
        registry.get("absent")
