"""The live tensors of a module: what they are called, which share storage, and how their bytes are written."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from weightplane.transports.dtypes import check_movable, int_view

__all__ = ["Layout", "LiveTensor", "bump_version", "collect", "copy_bits"]

_Tensor: Any = torch.Tensor
_dicts_of = operator.attrgetter("_modules", "_parameters", "_buffers")
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


class Layout:
    """Tells whether a module's live tensors are what they were: the same objects under the same names, at the same
    addresses, of the same shapes, strides and dtypes. Under 1 µs a tensor, made of C loops. One thread at a time.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._modules: list[nn.Module] = []
        self._dicts: list[dict[str, Any]] = []  # of every module: children, parameters, buffers
        self._filled: list[dict[str, Any]] = []  # those that hold anything
        self._buffered: list[nn.Module] = []
        self._names: list[Any] = []
        self._ids: list[int] = []
        self._tensors: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._states: list[list[Any]] = []

    def changed(self) -> bool:
        """Whether anything is other than at the last call; True at the first."""
        dicts = self._all_dicts()
        same = (
            len(dicts) == len(self._dicts)
            and bool(dicts)
            and all(map(operator.is_, dicts, self._dicts))
            and self._naming() == self._names
            and not self.moved()
            and self._columns() == self._states
        )
        if same:
            return False
        self._modules = list(self.module.modules())
        self._dicts = self._all_dicts()
        self._buffered = [m for m in self._modules if m._buffers]
        self._filled = [d for d in self._dicts if d]
        self._names = self._naming()
        held = self._held()
        self._ids = list(map(id, held))
        self._tensors = [t for t in held if isinstance(t, torch.Tensor)]
        self._addresses = list(map(_Tensor.data_ptr, self._tensors))
        self._states = self._columns()
        return True

    def moved(self) -> bool:
        """Whether a tensor was replaced or has another address: the cheaper half of ``changed``, which comes first."""
        return list(map(id, self._held())) != self._ids or list(map(_Tensor.data_ptr, self._tensors)) != self._addresses

    def _all_dicts(self) -> list[dict[str, Any]]:
        return list(chain.from_iterable(map(_dicts_of, self._modules)))

    def _held(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._filled)))

    def _naming(self) -> list[Any]:
        return [
            list(map(len, self._dicts)),
            list(chain.from_iterable(self._filled)),
            [frozenset(m._non_persistent_buffers_set) for m in self._buffered],
        ]

    def _columns(self) -> list[list[Any]]:
        held = self._tensors
        whole = list(map(_Tensor.is_contiguous, held))
        return [
            [t.shape for t in held],
            [t.dtype for t in held],
            whole,
            [t.stride() for t, w in zip(held, whole, strict=True) if not w],
        ]


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
    """Many ``copy_bits`` of memory that stays, made ready once: a device's in few calls, the host's one by one.

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
                    torch._foreach_copy_(targets, sources)
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()


def copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bits, not values (bool bytes and NaN payloads survive). Keeps ``data_ptr``; raises the target's version."""
    if target.is_inference():
        with torch.inference_mode():  # such tensors can be written nowhere else
            int_view(target).copy_(int_view(source))
    else:
        with torch.no_grad():
            int_view(target).copy_(int_view(source))


def bump_version(tensors: Iterable[torch.Tensor]) -> None:
    """Tell autograd (and caches keyed on ``_version``) that raw bytes were written."""
    plain = [t for t in tensors if not t.is_inference()]
    if plain:
        torch.autograd.graph.increment_version(plain)
