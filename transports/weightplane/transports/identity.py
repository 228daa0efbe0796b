"""Whether many tensors are still the memory that they were: what lets spans be found once and used again.

Who keeps spans keeps their memory alive, so it cannot have been freed and allocated anew meanwhile: a tensor that is
now at the same address is the same memory. What may have happened is ``param.data = new``, a module moved to another
device, a tensor replaced by another object: all of that shows in an address, a size or an order.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain, compress
from typing import Any

import torch
from torch import nn

__all__ = ["LiveSpans", "MemoryWatch", "ModuleLayout"]

_Tensor: Any = torch.Tensor
_children_of = operator.attrgetter("_modules")
_tensors_of = operator.attrgetter("_parameters", "_buffers")
_FORM: tuple[Any, ...] = (operator.attrgetter("shape"), operator.attrgetter("dtype"), _Tensor.stride)


class LiveSpans(list[torch.Tensor]):
    """A bucket's spans, all of them views of live memory that stays: this very list is handed out again.

    ``memory``: the same spans as buffers, where they lie on the host (filled in by who hashes them there).
    """

    __slots__ = ("memory",)

    def __init__(self, spans: Sequence[torch.Tensor]) -> None:
        super().__init__(spans)
        self.memory: list[memoryview] | None = None


class MemoryWatch:
    """Tells which of a list of tensors became other memory between two looks. One thread at a time.

    Meant for tensors whose memory somebody keeps between the looks (see the module's text). A tensor counts as the same
    while address, device, bytes and order (row-major or not; lazily conjugated or negated) are; its shape and dtype
    matter no further, and are what a manifest knows. About 0.2 µs a tensor.
    """

    def __init__(self) -> None:
        self.generation = 0  # rises whenever a look finds something else
        self.since: list[int] = []  # by index: the generation since which it is this memory
        self.device_kinds: frozenset[str] = frozenset()  # of the tensors last seen
        self._present: list[bool] = []
        self._states: list[list[Any]] = []
        self._odd: list[int] = []

    def look(self, tensors: Sequence[torch.Tensor | None]) -> int:
        """Compare with the last look. The generation is equal if and only if nothing is new."""
        present = [t is not None for t in tensors]
        held: list[Any] = list(tensors) if all(present) else list(compress(tensors, present))
        if present == self._present and _states(held, self._odd) == self._states:
            return self.generation
        self.generation += 1
        self.device_kinds = frozenset(t.device.type for t in held)
        # Only of these can row-major memory be lazily conjugated or negated.
        self._odd = [i for i, t in enumerate(held) if t.is_complex() or t.numel() == 1]
        before = _rows(self._present, self._states)
        self._present, self._states = present, _states(held, self._odd)
        now = _rows(self._present, self._states)
        old = [*self.since, *[0] * len(present)]
        before += [None] * (len(now) - len(before))
        self.since = [
            old[i] if row == was and old[i] else self.generation
            for i, (row, was) in enumerate(zip(now, before, strict=False))
        ]
        return self.generation


def _states(held: list[Any], odd: list[int]) -> list[list[Any]]:
    """A column for each thing that may change, of all tensors: made by C loops."""
    lazy: list[Any] = [None] * len(held)
    for i in odd:
        lazy[i] = (held[i].is_conj(), held[i].is_neg())
    return [
        list(map(_Tensor.data_ptr, held)),
        list(map(_Tensor.is_contiguous, held)),
        [t.nbytes for t in held],
        list(map(_Tensor.get_device, held)),  # two devices may use one address
        lazy,
    ]


def _rows(present: list[bool], states: list[list[Any]]) -> list[tuple[Any, ...] | None]:
    """The columns turned, by index; ``None`` where there is no tensor."""
    rows = zip(*states, strict=True)
    return [next(rows) if p else None for p in present]


class ModuleLayout:
    """Tells whether a module's parameters and buffers are what they were: the same objects under the same names, at the
    same addresses, of the same shapes, strides and dtypes. About 1 µs a tensor, made of C loops.

    Keeps the modules that it saw alive until it looks again, but no tensor. One thread at a time.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._modules: list[nn.Module] = []
        self._children: list[dict[str, Any]] = []  # of every module
        self._tensors: list[dict[str, Any]] = []  # its parameters, its buffers
        self._parents: list[dict[str, Any]] = []  # those with children
        self._holders: list[dict[str, Any]] = []  # those with tensors
        self._buffered: list[nn.Module] = []
        self._names: list[Any] = []
        self._ids: list[int] = []
        self._addresses: list[int] = []
        self._forms: list[list[Any]] = []

    def changed(self) -> bool:
        """Whether anything is other than at the last call; True at the first."""
        children, tensors = self._dicts()
        same = (
            len(children) > 0
            and all(map(operator.is_, children, self._children))
            and all(map(operator.is_, tensors, self._tensors))
            and self._naming() == self._names
            and not self.moved()
            and self._same_forms(self.tensors())
        )
        if same:
            return False
        self._modules = list(self.module.modules())
        self._children, self._tensors = self._dicts()
        self._parents, self._holders = [d for d in self._children if d], [d for d in self._tensors if d]
        self._buffered = [m for m in self._modules if m._buffers]
        self._names = self._naming()
        self._ids = self._identities()
        held = self.tensors()
        self._addresses = list(map(_Tensor.data_ptr, held))
        self._forms = [[of(t) for t in held] for of in _FORM]
        return True

    def moved(self) -> bool:
        """Whether a tensor or a module was replaced, or a tensor has another address: the cheaper half of ``changed``,
        which comes first."""
        return self._identities() != self._ids or list(map(_Tensor.data_ptr, self.tensors())) != self._addresses

    def tensors(self) -> list[torch.Tensor]:
        """What is held now, by module, parameters first; each once, however many names its module has."""
        return [t for t in chain.from_iterable(map(dict.values, self._holders)) if t is not None]

    def _same_forms(self, held: list[torch.Tensor]) -> bool:
        # Shapes are compared one by one and dropped: thousands held at once would set the garbage collector off.
        return all(all(map(operator.eq, map(of, held), known)) for of, known in zip(_FORM, self._forms, strict=True))

    def _identities(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, chain(self._parents, self._holders)))))

    def _dicts(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        return list(map(_children_of, self._modules)), list(chain.from_iterable(map(_tensors_of, self._modules)))

    def _naming(self) -> list[Any]:
        return [
            list(map(len, self._children)),
            list(map(len, self._tensors)),
            list(chain.from_iterable(self._parents)),
            list(chain.from_iterable(self._holders)),
            [frozenset(m._non_persistent_buffers_set) for m in self._buffered],
        ]
