"""How values become JSON and come back checked: the building blocks of ``codec.py``. Pure, thread-safe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .base import StoreError

__all__ = ["CodecError", "Kind", "enum", "floating", "mapping", "optional", "plain", "record", "seq", "struct"]


class CodecError(StoreError):
    """A document is not what this release writes: another version, a missing or foreign field, a wrong type."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How values of one type are written and read. ``encode`` None: as they are."""

    encode: Callable[[Any], Any] | None
    decode: Callable[[Any], Any]


def plain(*types: type) -> Kind:
    """Values that JSON has as they are, of exactly these types."""

    def decode(doc: Any) -> Any:
        if type(doc) not in types:
            raise CodecError(f"expected {types[0].__name__}, found {type(doc).__name__} {str(doc)[:60]!r}")
        return doc

    return Kind(None, decode)


def floating() -> Kind:
    """Numbers; an integer is taken for one."""
    number = plain(float, int)
    return Kind(None, lambda doc: float(number.decode(doc)))


def enum(cls: type[Enum]) -> Kind:
    """Members, by value."""
    values = {member.value: member for member in cls}

    def decode(doc: Any) -> Any:
        if isinstance(doc, (str, int)) and doc in values:
            return values[doc]
        raise CodecError(f"no {cls.__name__} is called {str(doc)[:60]!r}")

    return Kind(lambda value: value.value, decode)


def seq(item: Kind, make: Callable[[Any], Any] = tuple, order: Callable[[Any], Any] = list) -> Kind:
    """Items in a list: ``order`` lists them, ``make`` collects them again."""
    listed = plain(list)
    one = item.encode
    encode = order if one is None else lambda values: [one(v) for v in order(values)]
    return Kind(encode, lambda doc: make(item.decode(v) for v in listed.decode(doc)))


def struct(*items: Kind) -> Kind:
    """A tuple of fixed length."""
    listed = plain(list)

    def encode(value: Any) -> Any:
        return [v if k.encode is None else k.encode(v) for k, v in zip(items, value, strict=True)]

    def decode(doc: Any) -> Any:
        if len(listed.decode(doc)) != len(items):
            raise CodecError(f"expected {len(items)} values, found {len(doc)}")
        return tuple(k.decode(v) for k, v in zip(items, doc, strict=True))

    return Kind(encode, decode)


def mapping(item: Kind) -> Kind:
    """A mapping from strings."""
    mapped = plain(dict)
    one = item.encode
    encode = dict if one is None else lambda value: {k: one(v) for k, v in value.items()}
    return Kind(encode, lambda doc: {k: item.decode(v) for k, v in mapped.decode(doc).items()})


def optional(item: Kind) -> Kind:
    """None, or an item."""
    one = item.encode
    return Kind(
        lambda value: None if value is None else value if one is None else one(value),
        lambda doc: None if doc is None else item.decode(doc),
    )


def record(cls: type[Any], fields: dict[str, Kind], row: bool = False) -> Kind:
    """A dataclass, by name; as a ``row``, by position: for what comes in thousands."""
    kinds = list(fields.items())
    shape = plain(list if row else dict)

    def values(value: Any) -> list[Any]:
        return [getattr(value, n) if k.encode is None else k.encode(getattr(value, n)) for n, k in kinds]

    def decode(doc: Any) -> Any:
        shape.decode(doc)
        if row and len(doc) != len(kinds):
            raise CodecError(f"{cls.__name__}: expected {len(kinds)} values, found {len(doc)}")
        if not row and doc.keys() != fields.keys():
            odd = sorted(doc.keys() ^ fields.keys())
            raise CodecError(f"{cls.__name__}: fields missing or foreign: {odd[:5]}")
        got = {}
        for i, (name, kind) in enumerate(kinds):
            try:
                got[name] = kind.decode(doc[i if row else name])
            except CodecError as e:
                raise CodecError(f"{cls.__name__}.{name}: {e}") from None
        return cls(**got)

    return Kind(values if row else lambda value: dict(zip(fields, values(value), strict=True)), decode)
