"""What counts as the same memory, and what must not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weightplane.transports.identity import MemoryWatch


def tensors(n: int = 8) -> list[torch.Tensor | None]:
    return [torch.randn(4, 4) for _ in range(n)]


def test_nothing_new_is_the_same_generation_and_other_objects_of_the_same_memory_are_nothing_new() -> None:
    watch, held = MemoryWatch(), tensors()
    first = watch.look(held)
    assert watch.look(held) == first
    assert watch.look([t.detach() for t in held if t is not None]) == first
    assert watch.since == [first] * 8


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.clone(),
        lambda t: t.t(),
        lambda t: t[:3],
        lambda t: t[1:],
        lambda t: t.double(),
        lambda t: None,
    ],
    ids=["clone", "transposed", "shorter", "later", "wider", "gone"],
)
def test_one_that_changed_is_named_and_the_others_are_not(change) -> None:
    watch, held = MemoryWatch(), tensors()
    first = watch.look(held)
    kept = held[3]
    held[3] = change(kept)
    second = watch.look(held)
    assert second > first and [i for i, g in enumerate(watch.since) if g == second] == [3]
    assert watch.look(held) == second
    held[3] = kept
    assert watch.look(held) > second, "back where it was is news as well: nobody kept it meanwhile"


def test_data_replaced_in_the_same_object_and_a_module_that_moves() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    watch, held = MemoryWatch(), list(module.parameters())
    kept = [p.detach() for p in held]
    first = watch.look(held)
    held[1].data = held[1].data.clone()
    second = watch.look(held)
    assert [g == second for g in watch.since] == [False, True, False, False]
    square = held[0].data
    held[0].data = square.t()
    assert watch.look(held) > second and watch.since[0] == watch.generation
    module.to(torch.float64)
    assert watch.look(list(module.parameters())) > first and set(watch.since) == {watch.generation}
    assert len(kept) == 4


def test_lazy_conjugates_are_other_bytes_at_the_same_address() -> None:
    plain = torch.randn(5, dtype=torch.complex64)
    watch, scalar = MemoryWatch(), torch.zeros(())
    first = watch.look([plain, scalar])
    assert watch.look([plain, scalar]) == first
    assert watch.look([plain.conj(), scalar]) > first


def test_more_or_fewer_tensors() -> None:
    watch, held = MemoryWatch(), tensors()
    first = watch.look(held)
    held.append(torch.zeros(()))
    second = watch.look(held)
    assert watch.since == [first] * 8 + [second]
    del held[-2:]
    assert watch.look(held) > second and watch.since == [first] * 7
    empty = MemoryWatch()
    assert empty.look([]) == empty.look([])
