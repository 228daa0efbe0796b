"""Messages that are nearly right: filled from their descriptors with what is live, then changed byte by byte."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

__all__ = ["Maker", "mutated"]

_F = FieldDescriptor
_INTEGERS = (0, 1, 2, 3, 7, 127, 128, 255, 4096, 65535, 65536, 1 << 20, (1 << 31) - 1)
_WIDE = (*_INTEGERS, 1 << 40, (1 << 62) + 1, (1 << 63) - 1)
_TEXTS = ("", "r0", "r1", "r0/0", "rank/0", "job", "shm", "grpc", "m-0", "p-0", "\x00", "é" * 70, "a" * 300, "../x")


class Maker:
    """Fills messages. ``live``: field name -> values that mean something now."""

    def __init__(self, rng: random.Random, live: dict[str, list[Any]]) -> None:
        self.rng, self.live = rng, live

    def make(self, descriptor: Descriptor) -> bytes:
        """A serialised message of this type, or something near one."""
        data = self._filled(descriptor).SerializeToString()
        return data if self.rng.random() < 0.4 else mutated(self.rng, data)

    def make_json(self, descriptor: Descriptor) -> bytes:
        """The same as JSON."""
        try:
            data = json_format.MessageToJson(self._filled(descriptor)).encode()
        except TypeError:  # an Any of no type
            data = b'{"group": "g", "offers": [{"transport": "x", "custom": {"@type": "r0/0"}}]}'
        return data if self.rng.random() < 0.4 else mutated(self.rng, data)

    def _filled(self, descriptor: Descriptor) -> Message:
        message = message_factory.GetMessageClass(descriptor)()
        self._fill(message, 0)
        return message

    def _fill(self, message: Message, depth: int) -> None:
        rng = self.rng
        sure = 0.85 if depth == 0 else 0.55
        for field in message.DESCRIPTOR.fields:
            if rng.random() > sure or (depth > 3 and field.type == _F.TYPE_MESSAGE):
                continue
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                continue
            if field.is_repeated:
                for _ in range(rng.choice((0, 1, 1, 2, 5))):
                    self._add(message, field, depth)
            elif field.type == _F.TYPE_MESSAGE:
                getattr(message, field.name).SetInParent()
                self._fill(getattr(message, field.name), depth + 1)
            else:
                setattr(message, field.name, self._value(field))

    def _add(self, message: Message, field: Any, depth: int) -> None:
        many = getattr(message, field.name)
        if field.type == _F.TYPE_MESSAGE:
            self._fill(many.add(), depth + 1)
        else:
            many.append(self._value(field))

    def _value(self, field: Any) -> Any:
        rng = self.rng
        known = [v for v in self.live.get(field.name, ()) if isinstance(v, str) == (field.type == _F.TYPE_STRING)]
        if known and field.type not in (_F.TYPE_ENUM, _F.TYPE_BYTES) and rng.random() < 0.8:
            return rng.choice(known)
        if field.type == _F.TYPE_STRING:
            return f"id-{rng.getrandbits(32):x}" if field.name == "request_id" else rng.choice(_TEXTS)
        if field.type == _F.TYPE_BYTES:
            return rng.randbytes(rng.choice((0, 1, 32, 128, 5000)))
        if field.type == _F.TYPE_BOOL:
            return rng.random() < 0.5
        if field.type == _F.TYPE_ENUM:
            assert field.enum_type is not None
            return rng.choice([*field.enum_type.values_by_number, 99])
        if field.type in (_F.TYPE_DOUBLE, _F.TYPE_FLOAT):
            return rng.choice((0.0, 1.0, -1.0, 1e300, float("inf"), float("nan")))
        number = rng.choice(_WIDE if "64" in _NAMES.get(field.type, "64") else _INTEGERS)
        signed = field.type in (_F.TYPE_INT32, _F.TYPE_INT64, _F.TYPE_SINT32, _F.TYPE_SINT64)
        return -number if signed and rng.random() < 0.15 else number


_NAMES = {_F.TYPE_INT32: "32", _F.TYPE_UINT32: "32", _F.TYPE_SINT32: "32", _F.TYPE_FIXED32: "32"}


def mutated(rng: random.Random, data: bytes) -> bytes:
    """One to four changes: bits, bytes, lengths, pieces cut, doubled or moved."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        if not out:
            out += rng.randbytes(rng.randrange(1, 40))
            continue
        at, kind = rng.randrange(len(out)), rng.randrange(7)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at] = rng.choice((0, 0x7F, 0x80, 0xFF))
        elif kind == 2:
            out[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 3:
            del out[at : at + rng.randrange(1, 9)]
        elif kind == 4:
            out[at:at] = out[at : at + rng.randrange(1, 200)]
        elif kind == 5:
            del out[at:]
        else:
            out[at:at] = b"\xff" * rng.randrange(1, 11)
    return bytes(out)
