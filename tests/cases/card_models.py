"""Models of the cases over wires, known to both processes by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tests.cases.base import Small
from tests.cases.cases_distribution import Rows, _experts
from tests.cases.cases_memory import Layers
from weightplane.transports.digest import digest_tensor, hex_digest
from weightplane.transports.dtypes import int_view

__all__ = ["MODELS", "Even", "Many", "Mixed", "Strided", "Two", "named", "values_of"]


class Even(nn.Module):
    """Every element of version k is k. Each layer is a bucket of ``BUCKET`` bytes."""

    LAYERS, SIZE = 6, 1 << 16
    BUCKET = 4 * SIZE

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(size), requires_grad=False) for _ in range(self.LAYERS))

    def become(self, k: float) -> None:
        with torch.no_grad():
            for p in self.layers:
                p.fill_(k)

    def ends(self) -> torch.Tensor:
        """Least and most of every layer, on the calling thread's stream; on the device still."""
        return torch.stack([torch.stack(torch.aminmax(p.detach())) for p in self.layers])


class Mixed(nn.Module):
    """Dtypes in turn, so that sorting by dtype would change the order; equal sizes in bytes, so that nothing shows."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (torch.bfloat16, torch.float32, torch.int32, torch.float16, torch.bfloat16, torch.int64)
        for i in range(24):
            dtype = kinds[i % len(kinds)]
            size = 4096 // torch.empty((), dtype=dtype).element_size()
            self.register_buffer(f"t{i:02}", torch.zeros(size, dtype=dtype))

    def become(self, k: int) -> None:
        for i, t in enumerate(self.buffers()):
            t.copy_((torch.arange(t.numel(), device=t.device) * (i + 1) + k) % 97)


class Strided(nn.Module):
    """Parameters of the engine that do not lie in one piece."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        with torch.device(device):  # moved there, they would be made contiguous
            self.turned = nn.Parameter(torch.zeros(240, 400).t(), requires_grad=False)
            self.columns = nn.Parameter(torch.zeros(480, 400)[:, 30::3], requires_grad=False)
            self.plain = nn.Parameter(torch.zeros(33, 7), requires_grad=False)


class Many(nn.Module):
    """Thousands of small 1-D tensors."""

    def __init__(self, n: int = 3000) -> None:
        super().__init__()
        for i in range(n):
            self.register_buffer(f"t{i}", torch.zeros(1 + i % 37))


class Two(nn.Module):
    """A target and a draft model."""

    def __init__(self) -> None:
        super().__init__()
        self.target, self.draft = Small(), Small(1)


#: By name; each is made on a device.
MODELS: Mapping[str, Callable[[str], nn.Module]] = {
    "small": lambda device: Small().to(device),
    "even": lambda device: Even().to(device),
    "large": lambda device: Even(4 << 20).to(device),
    "mixed": lambda device: Mixed().to(device),
    "strided": Strided,
    "layers": lambda device: Layers(turned=True).to(device),
    "many": lambda device: Many().to(device),
    "two": lambda device: Two().to(device),
    "rows": lambda device: Rows().to(device),
    "experts": lambda device: _experts().to(device),
}


def named(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a module, or of a mapping."""
    if isinstance(source, nn.Module):
        yield from source.state_dict(keep_vars=True).items()
    else:
        yield from source.items()


def values_of(source: Any) -> dict[str, str]:
    """The digest of every tensor, by the processor."""
    return {n: hex_digest(digest_tensor(_on_cpu(t.detach()))) for n, t in named(source)}


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device.type == "cpu" else int_view(tensor).cpu()
