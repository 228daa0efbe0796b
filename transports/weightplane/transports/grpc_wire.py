"""Framing of the ``grpc`` transport: ``TransferRequest`` encoded and decoded around the payload, which is copied once.

The bytes on the wire are plain proto3 (any generated stub reads and writes them). Python's own protobuf copies a
payload into the message, out of it and into the wire buffer; here it is copied once, from the spans into the wire
buffer, and read in place on the other side.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from weightplane.v1.transport_pb2 import TransferOpen, TransferRequest

from .span_cursor import SpanCursor

__all__ = [
    "CHUNK_BYTES",
    "KEEPALIVE",
    "KEY_METADATA",
    "METHOD",
    "SERVICE",
    "Chunk",
    "decode",
    "decode_or_say",
    "encode_chunk",
    "encode_open",
    "reuse_freed_memory",
]

SERVICE = "weightplane.v1.TensorService"
METHOD = "Transfer"
KEY_METADATA = "weightplane-channel-key-bin"
#: Payload of one message. The contract allows up to 2 MiB.
CHUNK_BYTES = 2 << 20
_MAX_CHUNK = 2 << 20
#: A connection whose other host answers neither pings nor bytes is given up after one to two minutes, not after the
#: kernel's quarter of an hour. Longer than any engine may be busy: updates and leases decide who is lost, not this.
KEEPALIVE: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 60_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 30_000),  # as a server: the other side's pings are welcome
)
_FREED = 24 << 20  # below 32 MiB, above which glibc does not learn from it

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)
_at = ctypes.pythonapi.PyBytes_AsString
_at.restype = ctypes.c_void_p
_at.argtypes = (ctypes.py_object,)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One decoded message: an opening, or payload ``[address, address + nbytes)`` kept alive by ``owner``."""

    open: TransferOpen | None
    bucket: int
    offset: int
    address: int
    nbytes: int
    owner: bytes
    error: str = ""  # why the message is none; gRPC itself would tell its sender INTERNAL


@functools.cache
def reuse_freed_memory() -> None:
    """Let glibc reuse the memory of freed messages, from the first call in a process on.

    It gives each back to the kernel until the process has freed one larger block; then every message is mapped, faulted
    in and cleared anew, which halved the receiver's speed. So free one, never touched. glibc then keeps up to twice its
    size at the top of a heap: more than the messages in flight, or they would be given back after all (with 16 MiB one
    process in two faulted in up to a fifth of what it received). Other allocators ignore it. Once, because a second one
    would come out of the calling thread's own heap, cleared: as much memory for each heap, kept for good.
    """
    bytes(_FREED)


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def encode_open(message: TransferOpen) -> bytes:
    """The first message of a stream."""
    return TransferRequest(open=message).SerializeToString()


def encode_chunk(bucket: int, offset: int, cursor: SpanCursor, nbytes: int) -> bytes:
    """The next ``nbytes`` under ``cursor`` as one message. One copy, the GIL free for large ones."""
    header = b"\x10" + _varint(bucket) + b"\x18" + _varint(offset) + b"\x22" + _varint(nbytes)
    message: bytes = _new_bytes(None, len(header) + nbytes)  # filled below, before anyone else sees it
    start = _at(message)
    ctypes.memmove(start, header, len(header))
    cursor.read(start + len(header), nbytes)
    return message


def decode_or_say(message: bytes) -> Chunk:
    """``decode``, for gRPC to call: bytes that are no message become a ``Chunk`` with an ``error``."""
    try:
        return decode(message)
    except DecodeError as e:
        return Chunk(None, 0, 0, 0, 0, b"", str(e) or "no message")


def decode(message: bytes) -> Chunk:
    """A ``TransferRequest`` without copying its payload. Raises ``DecodeError`` for bytes that are none."""
    bucket = offset = start = length = 0
    i, end = 0, len(message)
    while i < end:
        tag = message[i]
        i += 1
        if tag == 0x22:
            length, i = _read_varint(message, i)
            if length > _MAX_CHUNK or i + length > end:
                raise DecodeError(f"a chunk of {length} bytes; at most {_MAX_CHUNK}, and not past the message's end")
            start, i = i, i + length
        elif tag == 0x10:
            bucket, i = _read_varint(message, i)
        elif tag == 0x18:
            offset, i = _read_varint(message, i)
        else:  # an opening, or a field of a later version: protobuf's own parser
            parsed = TransferRequest.FromString(message)
            data = parsed.data
            opening = parsed.open if parsed.HasField("open") else None
            return Chunk(opening, parsed.bucket, parsed.offset, _at(data), len(data), data)
    if bucket >= 1 << 31 or offset >= 1 << 63:
        raise DecodeError(f"bucket {bucket}, offset {offset}: out of range")
    return Chunk(None, bucket, offset, _at(message) + start, length, message)


def _read_varint(message: bytes, i: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if i >= len(message) or shift > 63:
            raise DecodeError("a truncated or overlong varint")
        byte = message[i]
        i += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, i
        shift += 7
