"""Bounded caches, and uploads that come in pages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from .fields import between, invalid

__all__ = ["Lru", "Pages"]

T = TypeVar("T")
V = TypeVar("V")


class Lru(Generic[V]):
    """A bounded map: the entry unused for longest goes first, unless it is in use (``pinned``)."""

    def __init__(self, most: int, pinned: Callable[[], set[str]] = set) -> None:
        self._entries: OrderedDict[str, V] = OrderedDict()
        self._most = most
        self._pinned = pinned

    def get(self, key: str) -> V | None:
        """The entry, now the newest."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: str, entry: V) -> None:
        """Add or replace; drop what is over the bound and not in use."""
        self._entries[key] = entry
        self._entries.move_to_end(key)
        if len(self._entries) > self._most:
            pinned = self._pinned()
            for old in list(self._entries)[:-1]:
                if len(self._entries) <= self._most:
                    break
                if old not in pinned:
                    del self._entries[old]

    def pop(self, key: str) -> None:
        """Forget an entry."""
        self._entries.pop(key, None)

    def __len__(self) -> int:
        return len(self._entries)


class Pages(Generic[T]):
    """An upload in pages: any order, any page may come again; complete once every index is there."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.pages: dict[int, Sequence[T]] = {}

    def add(self, field_name: str, first: int, total: int, page: Sequence[T]) -> None:
        """Take one page."""
        if total != self.total:
            invalid(f"{field_name}.total", f"{self.total}, as the first page said", total)
        between(f"{field_name}.first", first, 0, max(self.total - 1, 0))
        if first + len(page) > self.total or (not page and self.total):
            expected = f"1..{self.total - first} entries at {first} of {self.total}"
            invalid(field_name, expected, len(page))
        held = self.pages.get(first)
        if held is None or len(page) >= len(held):
            self.pages[first] = page

    @property
    def received(self) -> int:
        """Entries in a row from the first one on."""
        reached = 0
        for first in sorted(self.pages):
            if first > reached:
                break
            reached = max(reached, first + len(self.pages[first]))
        return reached

    def joined(self) -> list[T] | None:
        """Everything, or ``None`` while something is missing."""
        if self.received < self.total:
            return None
        out: list[T] = []
        for first in sorted(self.pages):
            out.extend(self.pages[first][len(out) - first :] if first < len(out) else self.pages[first])
        return out[: self.total]
