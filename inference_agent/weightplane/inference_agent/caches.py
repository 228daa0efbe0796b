"""A small map that forgets its oldest entries: manifests, plans and what is worked out from them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

__all__ = ["Newest"]


class Newest(OrderedDict[Any, Any]):
    """At most ``limit`` entries, the newest. One thread."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def keep(self, key: Any, value: Any) -> None:
        """Add an entry; the oldest goes."""
        self[key] = value
        while len(self) > self._limit:
            self.popitem(last=False)
