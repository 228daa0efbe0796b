"""Invariants of the data path, which the simulator cannot judge, and the bugs planted against them: a real publish."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.trainer_agent.fleet import fill, fleet
from weightplane.controlplane.core.manifest import TensorMeta
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.trainer_agent import sources
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.sources import ModuleSource
from weightplane.transports.dtypes import as_bytes

from .invariants import Violation
from .plants import Patch, Plant

__all__ = ["DATA_PLANTS", "publish_once"]

Bits = dict[str, torch.Tensor]


class Served(nn.Module):
    """A layer, and a buffer of the engine's own (a cache, say) that no trainer sends."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(37, 5)
        self.register_buffer("scratch", torch.tensor([1.5, -0.0, float("nan"), 7.0]), persistent=False)


def bits(module: nn.Module) -> Bits:
    """Every parameter and buffer, sent or not, as bytes of its own."""
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: as_bytes(tensor.detach()).clone() for name, tensor in named}


def inv_source_untouched(before: Bits, source: nn.Module) -> None:
    """The source's tensors are never mutated."""
    changed = [name for name, now in bits(source).items() if not now.equal(before[name])]
    if changed:
        raise Violation("inv_source_untouched", f"the publish wrote to the trainer's {changed}")


def inv_unsent_untouched(before: Bits, served: nn.Module, sent: set[str]) -> None:
    """Unsent tensors and buffers stay bit-identical."""
    changed = [name for name, now in bits(served).items() if name not in sent and not now.equal(before[name])]
    if changed:
        raise Violation("inv_unsent_untouched", f"the update wrote to the engine's {changed}, which was not sent")


def publish_once(mode: str) -> None:
    """Two updates: of tensors as they are, and of others that the trainer casts. Raises ``Violation``."""
    trained, wide = Served(), Served()
    served, narrow = Served(), Served().to(torch.bfloat16)
    with fleet() as f:
        f.replica("r0", TorchModuleEngine(served))
        _publish(f.publisher(ModuleSource(trained)), mode, trained, served)
    with fleet() as f:
        f.replica("r0", TorchModuleEngine(narrow))
        _publish(f.publisher(ModuleSource(wide, cast=torch.bfloat16)), mode, wide, narrow)


def _publish(publisher: Publisher, mode: str, trained: Served, served: Served) -> None:
    fill(trained, 3)
    source, live = bits(trained), bits(served)
    publisher.publish(1, mode=mode)
    inv_source_untouched(source, trained)
    inv_unsent_untouched(live, served, set(trained.state_dict()))
    assert served.layer.weight.equal(trained.layer.weight.to(served.layer.weight.dtype)), "the update did not land"


DATA_PLANTS: list[Plant] = []


def plant(covers: str, found_by: str) -> Callable[[Callable[[Patch], None]], None]:
    """As the simulator's; there is no seed to look for."""

    def add(fn: Callable[[Patch], None]) -> None:
        DATA_PLANTS.append(Plant(fn.__name__, covers, " ".join((fn.__doc__ or "").split()), fn, found_by))

    return add


@plant("the source's tensors are never mutated", "inv_source_untouched")
def casts_round_the_source(p: Patch) -> None:
    """A cast rounds the trainer's own tensor and sends that."""
    old = sources.cast_to

    def cast_to(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
        rounded = old(tensor, meta)
        tensor.copy_(rounded)
        return rounded

    p.attr(sources, "cast_to", cast_to)


@plant("unsent tensors and buffers stay bit-identical", "inv_unsent_untouched")
def updates_reset_what_was_not_sent(p: Patch) -> None:
    """Every update sets the engine's runtime buffers back to zero."""
    old = TorchModuleEngine._post_process

    def post_process(engine: TorchModuleEngine) -> None:
        old(engine)
        for module in engine.modules:
            sent = module.state_dict(keep_vars=True)
            for name, buffer in module.named_buffers():
                if name not in sent:
                    buffer.zero_()

    p.attr(TorchModuleEngine, "_post_process", post_process)
