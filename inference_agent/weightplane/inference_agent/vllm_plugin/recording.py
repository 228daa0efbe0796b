"""Which bytes of a checkpoint a model's loaders copy where: watched while they run on tensors without bytes.

Knows torch only. What is seen is complete or says what it did not understand: any operation that reads or writes a
watched tensor and is neither a view, nor a copy between two of them, nor a fill with one value, is a ``problem``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Copied", "CopyRecorder", "Filled", "Key", "Place"]

Key = tuple[str, str]  # (module, tensor in it)


@dataclass(frozen=True)
class Place:
    """A view: elements from the beginning of its tensor's storage, shape, strides."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def is_one_piece(self) -> bool:
        """Whether it is one row-major piece of memory."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """That view of a tensor which begins its own memory at ``whole``'s offset."""
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


@dataclass(frozen=True)
class Copied:
    """``source`` of the checkpoint's tensor ``name`` went to ``target`` of the model's tensor ``key``."""

    name: str
    source: Place
    key: Key
    target: Place


@dataclass(frozen=True)
class Filled:
    """``target`` of ``key`` was filled with ``value``: padding."""

    key: Key
    target: Place
    value: float


class CopyRecorder(TorchDispatchMode):
    """While it is entered, every operation is looked at. ``source`` and ``target`` say what is watched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[Copied] = []
        self.fills: list[Filled] = []
        self.problem = ""
        self.shapes: dict[Key, tuple[int, ...]] = {}  # of the targets
        self._names: dict[int, tuple[str, torch.dtype]] = {}
        self._keys: dict[int, tuple[Key, torch.dtype]] = {}
        self._alive: list[torch.Tensor] = []  # a storage is known by its address while it lives

    def source(self, name: str, tensor: torch.Tensor) -> None:
        """Watch a tensor of the checkpoint."""
        self._alive.append(tensor)
        self._names[_storage(tensor)] = (name, tensor.dtype)

    def target(self, key: Key, tensor: torch.Tensor) -> None:
        """Watch a tensor of the model (or one that stands for it, of the same shape and strides)."""
        self._alive.append(tensor)
        self._keys[_storage(tensor)] = (key, tensor.dtype)
        self.shapes[key] = tuple(tensor.shape)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See ``TorchDispatchMode``."""
        try:
            self._look(func, args, kwargs)
        except Exception as e:  # the loader itself must not fail by it
            self._say(f"{func} was not understood: {type(e).__name__}: {e}")
        return func(*args, **(kwargs or {}))

    def _look(self, func: Any, args: Any, kwargs: Any) -> None:
        if func is torch.ops.aten.copy_.default:
            self._copied(args[0], args[1])
        elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            self._filled(func, args[0], float(args[1]) if len(args) > 1 else 0.0)
        elif not getattr(func, "is_view", False):
            self._other(func, args, kwargs)

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        to, of = self._keys.get(_storage(target)), self._names.get(_storage(source))
        if to is None and of is None and _storage(source) not in self._keys:
            return  # nobody's business
        if to is None or of is None:
            known = f"{'.'.join(to[0])} is given" if to is not None else f"{self._named(source)} goes to"
            self._say(f"{known} something that was not followed")
        elif not target.dtype == source.dtype == to[1] == of[1]:
            self._say(f"{of[0]} is {of[1]}, {'.'.join(to[0])} is {to[1]}: it is cast")
        elif target.shape != source.shape:
            self._say(f"{of[0]} is broadcast into {'.'.join(to[0])}")
        elif target.numel():
            self.copies.append(Copied(of[0], _place(source), to[0], _place(target)))

    def _filled(self, func: Any, target: torch.Tensor, value: float) -> None:
        to = self._keys.get(_storage(target))
        if to is not None and target.numel():
            self.fills.append(Filled(to[0], _place(target), value))
        elif to is None:
            self._other(func, (target,), None)

    def _other(self, func: Any, args: Any, kwargs: Any) -> None:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.numel() and (name := self._named(leaf)):
                self._say(f"{name} goes through {func}")
                return

    def _named(self, tensor: torch.Tensor) -> str:
        at = _storage(tensor)
        if at in self._names:
            return self._names[at][0]
        return ".".join(self._keys[at][0]) if at in self._keys else ""

    def _say(self, problem: str) -> None:
        self.problem = self.problem or problem


def _storage(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0  # of no storage: nothing that is watched


def _place(tensor: torch.Tensor) -> Place:
    return Place(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
