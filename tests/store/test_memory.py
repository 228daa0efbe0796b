"""The memory store's faults, each at the call it was meant for."""

from __future__ import annotations

import pytest

from tests.store.helpers import GROUP, Desk, update
from weightplane.controlplane.store import StoreError, StoreUnknown
from weightplane.controlplane.store.memory import Fault, MemoryStore


@pytest.fixture
def d() -> Desk:
    store = MemoryStore()
    d = Desk(store, store.open().epoch)
    d.freeze(update(1))
    return d


@pytest.mark.parametrize(
    "fault, error, written",
    [
        (Fault.FAIL, StoreError, False),
        (Fault.UNKNOWN_WRITTEN, StoreUnknown, True),
        (Fault.UNKNOWN_LOST, StoreUnknown, False),
    ],
)
def test_an_injected_fault_hits_its_kind_once(d: Desk, fault: Fault, error: type[Exception], written: bool) -> None:
    store = d.store
    assert isinstance(store, MemoryStore)
    store.inject(fault, "decide")
    assert d.roster("r1", "ACTIVE"), "another kind is not hit"
    with pytest.raises(error):
        d.decide(update(1))
    assert store.read_decision(GROUP, "u1") is written
    assert d.decide(update(1))
    store.inject(fault, times=2)
    for _ in range(2):
        with pytest.raises(error):
            d.roster("r2", "ACTIVE")
    assert d.roster("r2", "ACTIVE")
    store.inject(fault, "read_decision")
    with pytest.raises(error):
        store.read_decision(GROUP, "u1")
    assert store.read_decision(GROUP, "u1")


def test_the_delay_hook_sees_each_call(d: Desk) -> None:
    store = d.store
    assert isinstance(store, MemoryStore)
    seen: list[tuple[str, str]] = []
    store.delay = lambda kind, when: seen.append((kind, when))
    d.decide(update(1))
    store.read_decision(GROUP, "u1")
    assert seen == [("decide", "before"), ("decide", "after"), ("read_decision", "before")]
