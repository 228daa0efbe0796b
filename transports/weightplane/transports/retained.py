"""Retained copies: immutable weights of one version, in host memory or in a file, from which others are caught up.

A ``Retainer`` keeps one, the newest, within ``max_bytes``. There are two while an older one is read, or is not given up
before the next is taken: a trainer's serves on should its update abort. A file is laid out in a folder and unlinked at
once: the disk space goes with the process, however that ends.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from weightplane.controlplane.core import placement as core
from weightplane.controlplane.core.manifest import DTYPE_BYTES, Manifest
from weightplane.controlplane.core.model import Held, Retained
from weightplane.controlplane.core.placement import Box, Placement, box_numel

from .buckets import Local
from .dtypes import check_movable, int_view

__all__ = ["MEMORY", "RetainError", "RetainedCopy", "Retainer"]

log = logging.getLogger(__name__)

MEMORY = "memory"
_ALIGN = 64

#: What a member holds: (root entry of the manifest, its box, the tensor that is it).
Piece = tuple[int, Box, torch.Tensor]


class RetainError(RuntimeError):
    """A copy cannot be kept: it is too large, or there is no room for it."""


class RetainedCopy:
    """The pieces of one process's members as they were at one version. Never written once it is whole.

    ``read`` and ``done`` (any thread) count its readers.
    """

    def __init__(self, held: Held, manifest: Manifest, arena: torch.Tensor) -> None:
        self.held, self.manifest = held, manifest
        self._arena = arena
        self._locals: dict[str, dict[int, list[Local]]] = {}
        self._readers = 0
        self._lock = threading.Lock()

    @property
    def says(self) -> Retained:
        """What is told of it."""
        return Retained(self.held, self.manifest.id)

    @property
    def nbytes(self) -> int:
        """Bytes kept."""
        return self._arena.numel()

    def locals(self, member: str) -> Mapping[int, list[Local]]:
        """A member's pieces, by root entry; ``KeyError`` if it is none of ours."""
        return self._locals[member]

    @property
    def members(self) -> tuple[str, ...]:
        """Whose pieces they are."""
        return tuple(self._locals)

    def placement(self, member: str) -> Placement:
        """What a member holds of it, under every name that a tensor has; ``KeyError`` if it is none of ours."""
        held, m = self._locals[member], self.manifest
        pieces = (core.Piece(i, box) for i in range(len(m)) for _, box in held.get(m.root(i), ()))
        return Placement.of(member, pieces)

    def read(self) -> RetainedCopy:
        """One reader more."""
        with self._lock:
            self._readers += 1
        return self

    def done(self) -> None:
        """One reader less."""
        with self._lock:
            self._readers -= 1

    @property
    def idle(self) -> bool:
        """Whether nobody reads it."""
        with self._lock:
            return not self._readers


class Retainer:
    """Keeps the newest copy. ``where``: ``MEMORY``, or a folder. ``max_bytes`` 0: no bound.

    One thread, but for ``get`` and ``read``.
    """

    def __init__(self, where: str = MEMORY, max_bytes: int = 0) -> None:
        if where != MEMORY and not Path(where).is_dir():
            raise ValueError(f"retain: expected {MEMORY!r} or a folder, found {where!r}")
        if max_bytes < 0:
            raise ValueError(f"retain_bytes: expected 0 (no bound) or more, found {max_bytes}")
        self._where, self._max = where, max_bytes
        self._current: RetainedCopy | None = None
        self._spare: torch.Tensor | None = None
        self._lock = threading.Lock()

    def get(self) -> RetainedCopy | None:
        """The copy that is kept now. Any thread."""
        with self._lock:
            return self._current

    def read(self, held: Held) -> RetainedCopy | None:
        """The copy of exactly ``held``, with one reader more (who says ``done``); ``None`` if it is not kept."""
        with self._lock:
            copy = self._current
            return copy.read() if copy is not None and copy.held == held else None

    def keep(self, copy: RetainedCopy | None) -> None:
        """From now on this one, or none. The room of the one before is the next one's, if nobody reads it."""
        with self._lock:
            old, self._current = self._current, copy
        if old is not None and old is not copy and old.idle:
            self._spare = old._arena

    def give_up(self, copy: RetainedCopy) -> None:
        """A copy that was taken and is not to be kept."""
        self._spare = copy._arena

    def take(self, held: Held, manifest: Manifest, members: Mapping[str, Iterable[Piece]]) -> RetainedCopy:
        """Copy these members' pieces; ``keep`` or ``give_up`` what comes back. Raises ``RetainError``.

        Members that hold equal boxes of a tensor share them. Device memory is read once what was queued before is done.
        """
        pieces = {member: list(held_by) for member, held_by in members.items()}
        places: dict[tuple[int, Box], tuple[int, torch.Tensor]] = {}
        size = 0
        for of_member in pieces.values():
            for root, box, tensor in of_member:
                if (root, box) not in places:
                    check_movable(tensor, manifest.tensors[root].name)
                    places[root, box] = (size, tensor)
                    nbytes = box_numel(box) * DTYPE_BYTES[manifest.tensors[root].dtype]
                    size += nbytes + -nbytes % _ALIGN
        if self._max and size > self._max:
            raise RetainError(f"a copy takes {size} bytes, and retain_bytes allows {self._max}")
        copy = RetainedCopy(held, manifest, self._arena(size))
        made: dict[tuple[int, Box], torch.Tensor] = {}
        for key, (at, tensor) in places.items():
            made[key] = _copied(copy._arena, at, tensor)
        for device in {t.device for _, t in places.values() if t.device.type == "cuda"}:
            torch.cuda.synchronize(device)
        for member, of_member in pieces.items():
            local: dict[int, list[Local]] = {}
            for root, box, _ in of_member:
                local.setdefault(root, []).append((made[root, box], box))
            copy._locals[member] = local
        return copy

    def _arena(self, size: int) -> torch.Tensor:
        spare, self._spare = self._spare, None
        if spare is not None and spare.numel() == size:
            return spare
        del spare
        try:
            if self._where == MEMORY or not size:
                return torch.empty(size, dtype=torch.uint8)
            return _file(self._where, size)
        except (RuntimeError, OSError) as e:
            raise RetainError(f"no room for a copy of {size} bytes in {self._where}: {e}") from e


def _file(folder: str, size: int) -> torch.Tensor:
    """A mapped file of ``size`` bytes that has no name any more. Its space is taken now: a full disk is told here."""
    handle, path = tempfile.mkstemp(prefix="weightplane-retained-", dir=folder)
    try:
        os.posix_fallocate(handle, 0, size)
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    finally:
        os.close(handle)
        os.unlink(path)


def _copied(arena: torch.Tensor, at: int, tensor: torch.Tensor) -> torch.Tensor:
    """A row-major copy of ``tensor``'s bits in ``arena``, from byte ``at`` on."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    nbytes = tensor.numel() * tensor.element_size()
    copy = arena[at : at + nbytes].view(tensor.dtype).view(tensor.shape)
    int_view(copy).copy_(int_view(tensor))
    return copy
