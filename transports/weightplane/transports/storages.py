"""Storages that a sender holds so that receivers may read them: which of them nobody else needs any more."""

from __future__ import annotations

import sys
from typing import Final

import torch

__all__ = ["unwanted"]

_use_count: Final = getattr(torch._C, "_storage_Use_Count", None)


def unwanted(storages: dict[int, torch.UntypedStorage]) -> list[int]:
    """Of storages by the address that each had: those that nobody else holds, or that moved.

    None that merely nobody else holds, if this torch cannot tell.
    """
    return [a for a in storages if storages[a].data_ptr() != a or not _held_elsewhere(storages, a)]


def _held_elsewhere(storages: dict[int, torch.UntypedStorage], address: int) -> bool:
    if _use_count is None:
        return True
    return sys.getrefcount(storages[address]) > 2 or int(_use_count(storages[address]._cdata)) > 1
