"""What counts as the same memory, and what must not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from weightplane.transports.identity import MemoryWatch, ModuleLayout


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


# --- modules


class Nest(nn.Module):
    """Modules without tensors of their own between others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(3)])
        self.bare = nn.Identity()


def rename(m: Any) -> None:
    linear = m.inner[1][0]
    linear.w = linear._parameters.pop("weight")


def reinterpret(m: Any) -> None:
    m.inner[2][0].weight.data = m.inner[2][0].weight.data.view(9)


CHANGES = {
    "replaced": lambda m: setattr(m.inner[0][0], "weight", nn.Parameter(torch.zeros(3, 3))),
    "moved": lambda m: setattr(m.inner[0][0].weight, "data", torch.zeros(3, 3)),
    "buffer-replaced": lambda m: m.inner[1][1].register_buffer("running_mean", torch.zeros(3)),
    "child-added": lambda m: m.bare.add_module("x", nn.Linear(2, 2)),
    "child-removed": lambda m: m.inner.__delitem__(1),
    "child-replaced": lambda m: m.inner[0].__setitem__(0, nn.Linear(3, 3)),
    "parameter-added": lambda m: m.bare.register_parameter("p", nn.Parameter(torch.zeros(2))),
    "parameter-removed": lambda m: m.inner[0][0].register_parameter("bias", None),
    "renamed": rename,
    "dict-swapped": lambda m: setattr(m.bare, "_parameters", {"p": nn.Parameter(torch.zeros(1))}),
    "transposed": lambda m: setattr(m.inner[1][0].weight, "data", m.inner[1][0].weight.data.t()),
    "reshaped": reinterpret,
    "reinterpreted": lambda m: setattr(m.inner[1][0].weight, "data", m.inner[1][0].weight.data.view(torch.int32)),
    "buffer-transient": lambda m: m.inner[1][1]._non_persistent_buffers_set.add("running_var"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_the_layout_is_seen(change: str) -> None:
    module = Nest()
    for p in module.parameters():
        p.requires_grad_(False)
    look = ModuleLayout(module)
    assert look.changed() and not look.changed() and not look.moved()
    CHANGES[change](module)
    if change in ("replaced", "moved", "buffer-replaced", "child-replaced"):
        assert look.moved()
    assert look.changed() and not look.changed() and not look.moved()


def test_values_that_change_are_no_other_layout() -> None:
    module = Nest()
    look = ModuleLayout(module)
    look.changed()
    for p in module.parameters():
        p.data.add_(1)
    module.inner[0].get_submodule("1")(torch.randn(4, 3))
    assert not look.changed() and not look.moved()
