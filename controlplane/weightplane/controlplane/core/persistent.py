"""A map whose changed copies share what did not change.

A group of a thousand replicas takes a step for each report, and each step makes a state with one replica and one
participant replaced. Copying a dictionary of a thousand entries twice a step (and letting go of the old ones) was a
quarter of the core's work in a start barrier. A copy here is one chunk of 32 and a short tuple of chunks, as in an
array-mapped trie of depth two (Bagwell, "Ideal Hash Trees", 2001), but in the order of insertion, as dictionaries have.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from itertools import chain, islice
from typing import Any, Generic, TypeVar

__all__ = ["PersistentMap"]

V = TypeVar("V")

_CHUNK = 32


class PersistentMap(Mapping[str, V], Generic[V]):
    """Immutable; ``put`` and ``without`` return another. Iterates in the order of insertion. Any thread."""

    __slots__ = ("_chunks", "_where")

    def __init__(self, items: Mapping[str, V] | None = None) -> None:
        rest = iter((items or {}).items())
        chunks: list[dict[str, V]] = []
        while chunk := dict(islice(rest, _CHUNK)):
            chunks.append(chunk)
        self._chunks = tuple(chunks)
        self._where = {key: i for i, chunk in enumerate(chunks) for key in chunk}

    @classmethod
    def of(cls, items: Mapping[str, V]) -> PersistentMap[V]:
        """The same map, or another kind of map as one of these."""
        return items if isinstance(items, PersistentMap) else cls(items)

    @classmethod
    def _made(cls, chunks: tuple[dict[str, V], ...], where: dict[str, int]) -> PersistentMap[V]:
        new: PersistentMap[V] = object.__new__(cls)
        new._chunks, new._where = chunks, where
        return new

    def put(self, key: str, value: V) -> PersistentMap[V]:
        """With one entry replaced, where it is, or added at the end."""
        chunks, i = self._chunks, self._where.get(key)
        if i is not None:
            return self._made((*chunks[:i], {**chunks[i], key: value}, *chunks[i + 1 :]), self._where)
        if not chunks or len(chunks[-1]) >= _CHUNK:
            return self._made((*chunks, {key: value}), {**self._where, key: len(chunks)})
        i = len(chunks) - 1
        return self._made((*chunks[:i], {**chunks[i], key: value}), {**self._where, key: i})

    def put_all(self, items: Mapping[str, V]) -> PersistentMap[V]:
        """With several entries replaced or added."""
        return PersistentMap({**self, **items}) if items else self

    def without(self, key: str) -> PersistentMap[V]:
        """Without one entry. Raises ``KeyError`` if it is not there."""
        if key not in self._where:
            raise KeyError(key)
        return PersistentMap({k: v for k, v in self.items() if k != key})

    # --- as a Mapping ---

    def __getitem__(self, key: str) -> V:
        return self._chunks[self._where[key]][key]

    def get(self, key: str, default: Any = None) -> Any:
        """See ``Mapping``."""
        i = self._where.get(key)
        return default if i is None else self._chunks[i][key]

    def __contains__(self, key: object) -> bool:
        return key in self._where

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self._chunks)

    def __len__(self) -> int:
        return len(self._where)

    def values(self) -> ValuesView[V]:
        """See ``Mapping``."""
        return _Values(self)

    def items(self) -> ItemsView[str, V]:
        """See ``Mapping``."""
        return _Items(self)

    def newest_first(self) -> Iterator[V]:
        """The values in the reverse of their order."""
        return chain.from_iterable(reversed(chunk.values()) for chunk in reversed(self._chunks))

    def __repr__(self) -> str:
        return f"PersistentMap({dict(self.items())!r})"


class _Values(ValuesView[V]):
    _mapping: PersistentMap[V]

    def __iter__(self) -> Iterator[V]:
        return chain.from_iterable(chunk.values() for chunk in _chunks(self._mapping))


class _Items(ItemsView[str, V]):
    _mapping: PersistentMap[V]

    def __iter__(self) -> Iterator[tuple[str, V]]:
        return chain.from_iterable(chunk.items() for chunk in _chunks(self._mapping))


def _chunks(of: PersistentMap[V]) -> Iterable[dict[str, V]]:
    return of._chunks
