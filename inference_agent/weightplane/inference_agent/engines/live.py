"""The live tensors of a module: what they are called, which share storage, and how their bytes are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from weightplane.transports.dtypes import check_movable, int_view

__all__ = ["Copies", "LiveTensor", "bump_version", "collect", "versioned"]

_APPLY = 1 << 30  # bytes of a device that one call writes


@dataclass(frozen=True, eq=False)
class LiveTensor:
    """One distinct live tensor of one worker, and every name it has there (more than one: tied)."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    dtype: str


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers under every name they have. Non-persistent buffers are nobody's business."""
    yield from module.named_parameters(remove_duplicate=False)
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _key(t: torch.Tensor) -> tuple[object, ...]:
    where: object = t.data_ptr() if t.numel() else id(t)
    return (t.device, where, tuple(t.shape), t.stride(), t.dtype)


def collect(module: nn.Module) -> list[LiveTensor]:
    """The module's live tensors, by first name in module order. ``TypeError`` names one whose bytes cannot travel."""
    names: dict[tuple[object, ...], list[str]] = {}
    tensors: dict[tuple[object, ...], torch.Tensor] = {}
    for name, tensor in _named(module):
        check_movable(tensor, name)
        plain = tensor.detach()
        key = _key(plain)
        names.setdefault(key, []).append(name)
        tensors.setdefault(key, plain)
    return [LiveTensor(tuple(ns), tensors[k], check_movable(tensors[k], ns[0])) for k, ns in names.items()]


class Copies:
    """Copies of bits, not values (bool bytes and NaN payloads survive), between tensors that stay; made ready once. A
    device's are made in few calls, the host's one by one.

    ``pairs``: (target, source), of equal dtypes, shapes and devices. ``steps`` yields the bytes of each call before it
    is made; what is queued on a device has run when it ends.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._calls: list[tuple[bool, list[torch.Tensor], list[torch.Tensor], int]] = []
        self._devices = {t.device for t, _ in pairs if t.device.type == "cuda"}
        open_: dict[tuple[object, ...], int] = {}
        for target, source in pairs:
            nbytes = target.numel() * target.element_size()
            to, of = int_view(target), int_view(source)
            frozen = target.is_inference()
            key = (target.device, to.dtype, frozen)
            at = open_.get(key)
            if at is None or target.device.type != "cuda" or self._calls[at][3] + nbytes > _APPLY:
                open_[key] = len(self._calls)
                self._calls.append((frozen, [to], [of], nbytes))
            else:
                _, targets, sources, before = self._calls[at]
                targets.append(to)
                sources.append(of)
                self._calls[at] = (frozen, targets, sources, before + nbytes)

    def steps(self) -> Iterator[int]:
        """Copy. Keeps every ``data_ptr``; raises every target's version."""
        for frozen, targets, sources, nbytes in self._calls:
            yield nbytes
            # Tensors made in inference mode can be written nowhere else.
            with torch.inference_mode() if frozen else torch.no_grad():
                if len(targets) == 1:
                    targets[0].copy_(sources[0])
                else:
                    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()


def versioned(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those that have a version: all but the ones made in inference mode."""
    return [t for t in tensors if not t.is_inference()]


def bump_version(tensors: Sequence[torch.Tensor]) -> None:
    """Tell autograd (and caches keyed on ``_version``) that raw bytes were written. ``tensors``: see ``versioned``."""
    if tensors:
        torch.autograd.graph.increment_version(tensors)
