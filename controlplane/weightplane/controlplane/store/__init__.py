"""Durable state: memory for tests, SQLite embedded, etcd for clusters."""

from __future__ import annotations

from .base import Loaded, Store, StoredGroup, StoreError, StoreHeld, StoreUnknown

__all__ = ["Loaded", "Store", "StoreError", "StoreHeld", "StoreUnknown", "StoredGroup", "open_store"]


def open_store(url: str) -> Store:
    """The store that ``url`` names: ``memory:`` or ``sqlite:PATH``. It is made, not opened: call ``open()``.

    Raises ``StoreError`` if the URL names none.
    """
    scheme, colon, rest = url.partition(":")
    if colon and scheme == "memory" and not rest:
        from .memory import MemoryStore

        return MemoryStore()
    if colon and scheme == "sqlite" and rest and rest != ":memory:":
        from .sqlite import SqliteStore

        return SqliteStore(rest)
    if scheme == "etcd":
        raise StoreError("the etcd store is not built yet: use sqlite:PATH")
    raise StoreError(f"no store is called {url!r}: expected memory: or sqlite:PATH")
