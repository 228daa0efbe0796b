"""``wpd1``: the content hash of a piece's logical bytes, equal on CPU, GPU and in C++.

Leaf j is XXH3_64 (seed 0) of bytes ``[131072 j, min(131072 (j+1), n))``, zero-padded to a multiple of 1024 (only the
last leaf can need it). The digest is XXH3_64 of the leaves as little-endian u64 followed by n as little-endian u64.
A digest is an ``int`` in [0, 2**64); ``hex_digest`` shows it as 16 hex digits. Hashing frees the GIL leaf by leaf.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from struct import pack

import torch
import xxhash

from .dtypes import as_bytes, check_movable, int_view, is_row_major

__all__ = ["LEAF_BYTES", "Digest", "digest_bytes", "digest_spans", "digest_tensor", "hex_digest", "memory_of"]

LEAF_BYTES = 131072
_BLOCK = 1024
_GROUP = 256  # leaves between two calls of the outer hash: bounds the list of leaves held
_SLAB = 32 << 20  # bytes of a strided or device tensor copied at a time

_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view.restype = ctypes.py_object
_READ, _WRITE = 0x100, 0x200


def memory_of(span: torch.Tensor, *, writable: bool = False) -> memoryview:
    """The memory of a contiguous 1-D uint8 CPU tensor, no copy. It does not keep the tensor alive: the caller must."""
    n = span.numel()
    if span.dtype != torch.uint8 or span.device.type != "cpu" or not span.is_contiguous():
        raise ValueError(f"expected a contiguous uint8 CPU tensor, got {span.dtype} on {span.device}")
    if not n:
        return memoryview(bytearray())
    view: memoryview = _view(span.data_ptr(), n, _WRITE if writable else _READ)
    return view


def hex_digest(value: int) -> str:
    """A digest as people see it: 16 lower-case hex digits."""
    return f"{value:016x}"


class Digest:
    """A ``wpd1`` fed with successive bytes, cut anywhere: feed it bucket by bucket and hashing overlaps the wire.

    One thread at a time. ``value`` may be read at any point and is the digest of the bytes so far.
    """

    __slots__ = ("_outer", "_part", "_part_bytes", "nbytes")

    def __init__(self) -> None:
        self._outer = xxhash.xxh3_64()
        self._part = xxhash.xxh3_64()
        self._part_bytes = 0
        self.nbytes = 0

    def update(self, data: bytes | bytearray | memoryview | torch.Tensor) -> None:
        """Append bytes: a contiguous buffer, or a contiguous 1-D uint8 tensor (copied by slabs if not on the CPU)."""
        if isinstance(data, torch.Tensor):
            if data.device.type != "cpu":
                for slab in torch.split(data, _SLAB):
                    self.update(slab.cpu())
                return
            view = memory_of(data)
        else:
            view = memoryview(data)
            if view.format != "B" or view.ndim != 1:
                view = view.cast("B")
        n = len(view)
        self.nbytes += n
        at = 0
        if self._part_bytes:
            at = min(LEAF_BYTES - self._part_bytes, n)
            self._part.update(view[:at])
            self._part_bytes += at
            if self._part_bytes < LEAF_BYTES:
                return
            self._outer.update(pack("<Q", self._part.intdigest()))
            self._part.reset()
            self._part_bytes = 0
        leaf = xxhash.xxh3_64_intdigest
        whole = at + (n - at) // LEAF_BYTES * LEAF_BYTES
        while at < whole:
            end = min(whole, at + _GROUP * LEAF_BYTES)
            leaves = [leaf(view[i : i + LEAF_BYTES]) for i in range(at, end, LEAF_BYTES)]
            self._outer.update(pack(f"<{len(leaves)}Q", *leaves))
            at = end
        if at < n:
            self._part.update(view[at:])
            self._part_bytes = n - at

    @property
    def value(self) -> int:
        """The digest of all bytes so far."""
        outer = self._outer.copy()
        if self._part_bytes:
            part = self._part.copy()
            part.update(bytes(-self._part_bytes % _BLOCK))
            outer.update(pack("<Q", part.intdigest()))
        outer.update(pack("<Q", self.nbytes))
        return outer.intdigest()

    def hexdigest(self) -> str:
        """``value`` as 16 hex digits."""
        return hex_digest(self.value)


def digest_bytes(data: bytes | bytearray | memoryview) -> int:
    """The digest of one buffer."""
    n = len(data) if isinstance(data, bytes | bytearray) else data.nbytes
    if 0 < n <= LEAF_BYTES:  # the many small pieces of a model: no objects but the answer
        padded = bytes(data) + bytes(-n % _BLOCK) if n % _BLOCK else data
        return xxhash.xxh3_64_intdigest(pack("<2Q", xxhash.xxh3_64_intdigest(padded), n))
    digest = Digest()
    digest.update(data)
    return digest.value


def digest_spans(spans: Iterable[torch.Tensor]) -> int:
    """The digest of 1-D uint8 spans in order, as if they were one buffer."""
    digest = Digest()
    for span in spans:
        digest.update(span)
    return digest.value


def digest_tensor(tensor: torch.Tensor, name: str = "") -> int:
    """The digest of a tensor's logical bytes, row-major, whatever its strides, dtype (not quantised) or device.

    A tensor that is not contiguous on the CPU is copied at most 32 MiB at a time. ``TypeError`` names a tensor whose
    bytes cannot travel (see ``dtypes.check_movable``).
    """
    check_movable(tensor, name)
    if tensor.device.type == "cpu" and is_row_major(tensor):
        flat = as_bytes(tensor)
        return digest_bytes(memory_of(flat))
    digest = Digest()
    _feed(digest, int_view(tensor.detach().resolve_conj().resolve_neg()))
    return digest.value


def _feed(digest: Digest, plain: torch.Tensor) -> None:
    """Append a strided integer tensor slab by slab along its outermost dimensions."""
    nbytes = plain.numel() * plain.element_size()
    if nbytes <= _SLAB or plain.dim() == 0:
        digest.update(as_bytes(plain.cpu()))
        return
    row = nbytes // plain.shape[0]
    if row > _SLAB:
        for part in plain:
            _feed(digest, part)
    else:
        for part in torch.split(plain, max(1, _SLAB // row)):
            digest.update(as_bytes(part.cpu()))
