"""What failed is let go of: an error holds every frame that it passed, and so channels, memory and descriptors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from weightplane.inference_agent.threads import WorkThread
from weightplane.inference_agent.transfer import Transfer


class Held:
    """Something that a frame holds."""


@pytest.fixture(autouse=True)
def _by_reference_counts_alone() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_a_thread_that_waits_for_work_holds_nothing_of_the_last() -> None:
    thread = WorkThread("t")
    refs: list[weakref.ref[Held]] = []

    def fails() -> None:
        held = Held()
        refs.append(weakref.ref(held))
        raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        thread.submit(fails).result(10)
    del fails
    _until_gone(refs)
    thread.stop()


@pytest.mark.parametrize("who", ["worker", "meanwhile"])
def test_a_transfer_that_failed_does_not_hold_itself(who: str) -> None:
    workers: list[Any] = [
        SimpleNamespace(thread=WorkThread(f"t{i}"), channel=SimpleNamespace(abort=lambda _: None)) for i in range(2)
    ]
    refs: list[weakref.ref[Held]] = []

    def fails(worker: Any = None) -> None:
        if worker is not workers[1]:
            held = Held()
            refs.append(weakref.ref(held))
            raise ValueError("failed")

    def run() -> None:
        transfer = SimpleNamespace(workers=workers)
        meanwhile = None if who == "worker" else fails
        Transfer._everywhere(transfer, fails if who == "worker" else lambda _: None, meanwhile)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="failed"):
        run()
    for w in workers:
        w.thread.submit(int).result(10)
    _until_gone(refs)
    for w in workers:
        w.thread.stop()


def _until_gone(refs: list[weakref.ref[Held]]) -> None:
    """The threads leave their last frames a moment after they have answered."""
    from tests.process.harness import eventually

    assert refs
    eventually(lambda: not any(r() for r in refs), "what the failed frames held is gone", 5)
