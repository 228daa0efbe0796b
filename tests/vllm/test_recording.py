"""What loaders do, watched on tensors without bytes: small modules and loaders of this file, no vLLM."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.inference_agent.vllm_plugin.directly import DirectMap, Indirect, direct_map
from weightplane.inference_agent.vllm_plugin.recording import CopyRecorder

CPU = torch.device("cpu")
SHAPES = {"q": (4, 8), "k": (2, 8), "v": (2, 8), "o": (8, 4), "norm": (8,), "embed": (10, 8)}
MANIFEST = Manifest.of([TensorMeta(n, "float32", s) for n, s in SHAPES.items()])
Load = Callable[["Layers", dict[str, torch.Tensor]], None]


class Layers(nn.Module):
    """A fused projection, one that is cut, a norm, an embedding with padding, and something made of it."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"qkv": (8, 8), "o": (8, 4), "norm": (8,), "embed": (12, 8)}.items():
            module = nn.Module()
            module.register_parameter("weight", nn.Parameter(torch.full(shape, 7.0), requires_grad=False))
            self.add_module(name, module)

    def parameter(self, name: str) -> torch.Tensor:
        return self.get_parameter(f"{name}.weight").data


def whole(model: Layers, given: dict[str, torch.Tensor]) -> None:
    qkv = model.parameter("qkv")
    qkv.narrow(0, 0, 4).copy_(given["q"])
    qkv[4:6].copy_(given["k"])
    qkv[6:].view(2, 8).copy_(given["v"].detach())
    model.parameter("o").copy_(given["o"])
    model.parameter("norm").copy_(given["norm"].view(8))
    model.parameter("embed")[:10].copy_(given["embed"])
    model.parameter("embed")[10:].fill_(0)


def recorded(load: Load, model: Layers | None = None) -> DirectMap:
    """As a survey does it: the loader runs on a twin without memory."""
    live, twin, seen = model or Layers(), Layers().to("meta"), CopyRecorder()
    expected = {}
    for name, parameter in twin.named_parameters():
        module, _, leaf = name.rpartition(".")
        seen.target((module, leaf), parameter)
        expected[module, leaf] = parameter.numel()
    given = {n: torch.empty(s, device="meta") for n, s in SHAPES.items()}
    for name, tensor in given.items():
        seen.source(name, tensor)
    with seen:
        load(twin, given)
    for padded in (f.key for f in seen.fills):
        expected[padded] = sum(c.target.numel for c in seen.copies if c.key == padded)
    return direct_map(live, MANIFEST, seen, CPU, expected)


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {n: torch.rand(s, generator=made) for n, s in SHAPES.items()}


def test_the_copies_do_what_the_loader_did() -> None:
    model, expected, given = Layers(), Layers(), tensors()
    found = recorded(whole, model)
    slot = {i: (given[t.name], ()) for i, t in enumerate(MANIFEST)}
    assert set(found.differs(slot)) == {*SHAPES, "embed.weight (padding)"}
    for _ in found.copies_from(slot).steps():
        pass
    found.fill()
    whole(expected, given)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    assert not found.differs(slot) and not found.in_place_refusal and not found.cut
    assert found.elements == sum(t.numel() for t in given.values())
    for i, t in enumerate(MANIFEST):  # in place: a target of the tensor's own shape, in live memory
        view, box = found.live[i]
        assert torch.equal(view, given[t.name]) and [b for _, b in box] == list(t.shape)
    given["k"][1, 3] += 1
    assert found.differs(slot) == ["k"]


def test_bits_are_compared_not_values() -> None:
    model = Layers()
    found = recorded(whole, model)
    given = {n: torch.full(s, float("nan")) for n, s in SHAPES.items()}
    slot = {i: (given[t.name], ()) for i, t in enumerate(MANIFEST)}
    for _ in found.copies_from(slot).steps():
        pass
    found.fill()
    assert not found.differs(slot)
    model.parameter("norm").fill_(-0.0)
    given["norm"].fill_(0.0)
    assert found.differs(slot) == ["norm"]


def test_a_parameter_that_was_replaced_is_seen() -> None:
    model = Layers()
    found = recorded(whole, model)
    assert not found.moved()
    model.get_submodule("o").weight = nn.Parameter(torch.zeros(8, 4), requires_grad=False)
    assert found.moved() == "o.weight"


def test_what_is_cut_is_for_staged_updates_only() -> None:
    def half(model: Layers, given: dict[str, torch.Tensor]) -> None:
        q = given["q"]
        whole(model, given | {"k": q[2:], "v": given["v"]})

    model, given = Layers(), tensors(1)
    found = recorded(half, model)
    assert "'q' does not go whole" in found.in_place_refusal
    slot = {i: (given[t.name], ()) for i, t in enumerate(MANIFEST)}
    for _ in found.copies_from(slot).steps():
        pass
    assert torch.equal(model.parameter("qkv")[4:6], given["q"][2:])
    assert found.cut == {"q"}


def _instead(name: str, act: Callable[[Layers, dict[str, torch.Tensor]], object]) -> Load:
    """``whole``, but for one tensor."""

    def load(model: Layers, given: dict[str, torch.Tensor]) -> None:
        scratch = {**given}
        if name:
            scratch.pop(name)
        for n, tensor in scratch.items():
            at = {"q": ("qkv", 0, 4), "k": ("qkv", 4, 6), "v": ("qkv", 6, 8), "embed": ("embed", 0, 10)}
            where, start, stop = at.get(n, (n, 0, SHAPES[n][0]))
            model.parameter(where)[start:stop].copy_(tensor)
        model.parameter("embed")[10:].fill_(0)
        act(model, given)

    return load


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (_instead("k", lambda m, g: None), "qkv.weight: its elements 32 to 48 are written by nobody"),
        (_instead("", lambda m, g: m.parameter("qkv")[5:7].copy_(g["v"])), "written twice"),
        (_instead("o", lambda m, g: m.parameter("o").copy_(g["o"] * 1)), "o goes through aten.mul"),
        (_instead("o", lambda m, g: m.parameter("o").t().copy_(g["o"].t())), "written in stripes"),
        (_instead("norm", lambda m, g: m.parameter("norm").copy_(g["norm"].half())), "norm goes through aten._to_copy"),
        (_instead("norm", lambda m, g: m.parameter("norm").copy_(g["norm"][:1])), "broadcast"),
        (_instead("", lambda m, g: m.parameter("norm").add_(1)), "norm.weight goes through aten.add_"),
        (_instead("", lambda m, g: m.parameter("norm").copy_(torch.ones(8, device="meta"))), "not followed"),
        (
            _instead("", lambda m, g: setattr(m, "table", g["embed"].float().cumsum(0))),
            "embed goes through aten.cumsum",
        ),
        (_instead("", lambda m, g: m.parameter("norm").copy_(m.parameter("o")[:, 0])), "not followed"),
        (_instead("", lambda m, g: torch.empty(4, 8, device="meta").copy_(g["q"])), "q goes to something"),
        (
            _instead("norm", lambda m, g: m.parameter("norm").view(torch.int32).copy_(g["norm"].view(torch.int32))),
            "cast",
        ),
    ],
)
def test_what_is_no_plain_copy_of_everything_is_named(load: Load, why: str) -> None:
    with pytest.raises(Indirect, match=why.replace(".", r"\.")):
        recorded(load)


def test_what_is_elsewhere_or_another_shape_once_it_is_loaded_is_named() -> None:
    model = Layers()
    model.get_submodule("o").weight = nn.Parameter(torch.zeros(4, 8), requires_grad=False)
    with pytest.raises(Indirect, match="another shape"):
        recorded(whole, model)
    model = Layers()
    model.get_submodule("o").weight = nn.Parameter(torch.zeros(4, 8).t(), requires_grad=False)
    with pytest.raises(Indirect, match="not one row-major piece"):
        recorded(whole, model)
    model = Layers()
    model.get_submodule("o")._parameters.clear()
    with pytest.raises(Indirect, match="no parameter"):
        recorded(whole, model)
    model = Layers().to(torch.bfloat16)
    with pytest.raises(Indirect, match="is float32"):
        recorded(whole, model)
