"""Buckets of a plan as byte spans of a member's own tensors: what a transport sends, and what it fills.

A *local* is a tensor a member holds and the box of the manifest tensor it holds (``full_box`` for a whole copy). Spans
are contiguous 1-D uint8 views of locals wherever the bytes of a segment lie contiguous in memory; elsewhere a segment
is packed into, or lands in, reusable scratch. Scratch never exceeds one bucket (plus 16 bytes a segment).

One thread at a time per object. Source tensors are never written. Spans of a bucket are valid until the next call of
``spans`` on the same object (for ever with ``keep=True``); they keep the tensors they view alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import torch

from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.placement import Box
from weightplane.controlplane.core.plan import Bucket, Plan, Region

from .digest import Digest
from .dtypes import check_movable, flat_bytes, int_view, is_row_major

__all__ = ["Local", "Locals", "PieceDigests", "SinkSpans", "SourceSpans", "SpanError", "buckets_from", "buckets_to"]

#: A tensor and the box of the manifest entry it holds.
Local = tuple[torch.Tensor, Box]
#: By manifest index: one local, or several when a member holds several boxes of one entry. Absent: ``KeyError``.
Locals = Mapping[int, Local | Sequence[Local]] | Callable[[int], Local | Sequence[Local]]

_ALIGN = 16


class SpanError(ValueError):
    """A member's tensors do not serve the plan; the text names tensor, member, expected and found."""


def buckets_from(plan: Plan, member: str) -> tuple[Bucket, ...]:
    """The buckets ``member`` sends, in plan order."""
    return tuple(b for b in plan.buckets if b.sender == member)


def buckets_to(plan: Plan, member: str) -> tuple[Bucket, ...]:
    """The buckets ``member`` receives, in plan order."""
    return tuple(b for b in plan.buckets if member in b.receivers)


class _Scratch:
    """One growing uint8 buffer per device, handed out from the start again after ``reset``."""

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._buffers: dict[torch.device, torch.Tensor] = {}
        self._used: dict[torch.device, int] = {}

    def reset(self) -> None:
        if self._keep:
            self._buffers.clear()
        self._used.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers in use."""
        return sum(b.numel() for b in self._buffers.values())

    def take(self, nbytes: int, device: torch.device, at_least: int) -> torch.Tensor:
        """``nbytes`` of scratch, aligned; a new buffer holds ``at_least`` bytes. Earlier takes stay valid."""
        start = self._used.get(device, 0)
        buffer = self._buffers.get(device)
        if buffer is None or buffer.numel() < start + nbytes:
            buffer = torch.empty(max(at_least, nbytes), dtype=torch.uint8, device=device)
            self._buffers[device] = buffer  # spans already handed out keep the old one alive
            start = 0
        self._used[device] = start + nbytes + (-nbytes % _ALIGN)
        return buffer[start : start + nbytes]


def _as_locals(entry: Local | Sequence[Local]) -> Sequence[Local]:
    one = isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], torch.Tensor)
    return (cast("Local", entry),) if one else cast("Sequence[Local]", entry)


def _lookup(source: Locals, index: int) -> Sequence[Local]:
    try:
        return _as_locals(source[index] if isinstance(source, Mapping) else source(index))
    except KeyError:
        return ()


def _sub(tensor: torch.Tensor, have: Box, want: Box) -> torch.Tensor:
    """The view of ``tensor`` (which holds ``have``) that is ``want``."""
    for dim, ((start, stop), (base, end)) in enumerate(zip(want, have, strict=True)):
        if (start, stop) != (base, end):
            tensor = tensor.narrow(dim, start - base, stop - start)
    return tensor


def _inside(want: Box, have: Box) -> bool:
    return len(want) == len(have) and all(h0 <= w0 and w1 <= h1 for (w0, w1), (h0, h1) in zip(want, have, strict=True))


def _row_range(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Views of ``tensor`` that, in order and row-major, are its elements ``[start, stop)``."""
    if start >= stop:
        return
    if tensor.dim() == 0 or (start == 0 and stop == tensor.numel()):
        yield tensor
        return
    row = tensor.numel() // tensor.shape[0]
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        yield from _row_range(tensor[last], start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _row_range(tensor[first - 1], start - (first - 1) * row, row)
    if first < last:
        yield tensor[first:last]
    if last * row < stop:
        yield from _row_range(tensor[last], 0, stop - last * row)


def _pack(scratch: torch.Tensor, view: torch.Tensor, start: int, stop: int, *, unpack: bool = False) -> None:
    """Copy logical bytes ``[start, stop)`` of ``view`` to ``scratch``, or back with ``unpack``. Bits, not values."""
    size = view.element_size()
    whole = start % size == 0 and stop % size == 0
    # A cut inside an element (a plan may cut anywhere) goes byte by byte: a trailing byte dimension fits any strides.
    if view.is_complex():
        view = torch.view_as_real(view)
    view = int_view(view) if whole else view.unsqueeze(-1).view(torch.uint8)
    unit = view.element_size()
    at = 0
    for part in _row_range(view, start // unit, stop // unit):
        n = part.numel() * unit
        flat = scratch[at : at + n].view(view.dtype).view(part.shape)
        if unpack:
            part.copy_(flat)
        else:
            flat.copy_(part)
        at += n


class _Spans:
    def __init__(self, plan: Plan, manifest: Manifest, member: str, tensors: Locals, keep: bool) -> None:
        self.plan, self.manifest, self.member = plan, manifest, member
        self._tensors = tensors
        self._scratch = _Scratch(keep)

    def _check(self, index: int, tensor: torch.Tensor, box: Box) -> None:
        meta = self.manifest.tensors[index]
        dtype = check_movable(tensor, meta.name)
        shape = tuple(b - a for a, b in box)
        if dtype != meta.dtype or tuple(tensor.shape) != shape:
            raise SpanError(
                f"tensor {meta.name!r} of {self.member!r}: the plan expects {meta.dtype} {list(shape)}, "
                f"box {list(box)}; found {dtype} {list(tensor.shape)}"
            )


class SourceSpans(_Spans):
    """The bytes ``member`` sends.

    ``tensors`` maps a manifest index (of a root entry) to a local whose box holds the region, or to several. A callable
    is asked anew at every bucket, so that it may gather or load on demand. ``keep=True``: every bucket gets its own
    scratch, for transports that read spans after ``send`` has returned. Raises ``SpanError`` naming what does not fit.
    """

    def __init__(self, plan: Plan, manifest: Manifest, member: str, tensors: Locals, *, keep: bool = False) -> None:
        super().__init__(plan, manifest, member, tensors, keep)
        self.buckets = buckets_from(plan, member)
        self._views: dict[int, tuple[torch.Tensor, tuple[object, ...], torch.Tensor]] = {}  # by region

    def spans(self, bucket: Bucket) -> list[torch.Tensor]:
        """1-D uint8 tensors whose bytes, in order, are the bucket's. See the module text for how long they live."""
        self._scratch.reset()
        out: list[torch.Tensor] = []
        at, view, flat = -1, None, None
        for segment in bucket.segments:
            if segment.region != at:
                at = segment.region
                view, flat = self._region(at)
            assert view is not None
            stop = segment.offset + segment.nbytes
            if flat is not None:
                whole = segment.offset == 0 and stop == flat.numel()
                out.append(flat if whole else flat[segment.offset : stop])
            else:
                span = self._scratch.take(segment.nbytes, view.device, bucket.nbytes + _ALIGN * len(bucket.segments))
                _pack(span, view, segment.offset, stop)
                out.append(span)
        return out

    @property
    def scratch_bytes(self) -> int:
        """Memory that the last bucket's spans took beside the member's tensors."""
        return self._scratch.nbytes

    def live(self, region: int) -> torch.Tensor | None:
        """The bytes of a region where a local tensor holds them, as a 1-D uint8 view; ``None`` if they do not lie so
        (strided, or lazily conjugated). Keeps that memory alive. Raises ``SpanError`` as ``spans``."""
        want = self.plan.regions[region]
        found = _lookup(self._tensors, want.tensor)
        for tensor, box in found:
            if _inside(want.box, box):
                self._check(want.tensor, tensor, box)
                view = _sub(tensor.detach(), box, want.box)
                return flat_bytes(view) if is_row_major(view) else None
        raise self._lacks(want, found)

    def _region(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A region of a local tensor, and its live bytes if they are contiguous."""
        region = self.plan.regions[index]
        found = _lookup(self._tensors, region.tensor)
        known = self._views.get(index)
        if known is not None:  # 10,000 small tensors are looked at anew only if one was replaced
            tensor, state, flat = known
            if any(t is tensor for t, _ in found) and _state(tensor) == state:
                return tensor, flat
        for tensor, box in found:
            if _inside(region.box, box):
                self._check(region.tensor, tensor, box)
                view = _sub(tensor.detach().resolve_conj().resolve_neg(), box, region.box)
                if not is_row_major(view):
                    return view, None
                flat = flat_bytes(view)
                if isinstance(self._tensors, dict) and view.data_ptr() == tensor.data_ptr():
                    self._views[index] = (tensor, _state(tensor), flat)
                return view, flat
        raise self._lacks(region, found)

    def _lacks(self, region: Region, found: Sequence[Local]) -> SpanError:
        held = [list(box) for _, box in found] or "nothing"
        name = self.manifest.tensors[region.tensor].name
        return SpanError(f"tensor {name!r}: {self.member!r} must send box {list(region.box)} but holds {held}")


def _state(tensor: torch.Tensor) -> tuple[object, ...]:
    """Changes when a tensor object gets other memory, or shows it otherwise (``.data =``)."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class _Sink:
    """Where one segment lands: the span, its home if the span is scratch, and further copies of it."""

    __slots__ = ("also", "home", "span")

    def __init__(self, span: torch.Tensor, home: torch.Tensor | None, also: list[torch.Tensor]) -> None:
        self.span, self.home, self.also = span, home, also


class SinkSpans(_Spans):
    """Where the bytes ``member`` receives go.

    ``targets`` maps a manifest index, aliases included, to the local(s) held of it; every local whose box equals a
    region's ``piece_box`` and whose entry shares the region's bytes is written (two names of a tied pair that are
    separate storages both are). Resolved once, then replayed: targets keep their storage while this object lives.
    Call ``spans``, let the transport fill them, call ``complete``. Raises ``SpanError`` naming what does not fit.
    """

    def __init__(self, plan: Plan, manifest: Manifest, member: str, targets: Locals, *, keep: bool = False) -> None:
        super().__init__(plan, manifest, member, targets, keep)
        self.buckets = buckets_to(plan, member)
        self._entries: dict[int, list[int]] = {}
        for i in range(len(manifest)):
            self._entries.setdefault(manifest.root(i), []).append(i)
        self._homes: dict[tuple[int, Box], list[torch.Tensor]] = {}
        self._regions: dict[int, tuple[list[torch.Tensor], torch.Tensor | None]] = {}
        self._open: tuple[Bucket, list[_Sink]] | None = None

    def spans(self, bucket: Bucket) -> list[torch.Tensor]:
        """1-D uint8 tensors to fill, in order, with the bucket's bytes: live memory where it is contiguous."""
        self._scratch.reset()
        sinks: list[_Sink] = []
        at, views, flat = -1, [], None
        for segment in bucket.segments:
            if segment.region != at:
                at = segment.region
                known = self._regions.get(at)
                if known is None:
                    views = self._region(self.plan.regions[at])
                    known = (views, flat_bytes(views[0]) if is_row_major(views[0]) else None)
                    self._regions[at] = known
                views, flat = known
            stop = segment.offset + segment.nbytes
            if flat is not None:
                whole = segment.offset == 0 and stop == flat.numel()
                sinks.append(_Sink(flat if whole else flat[segment.offset : stop], None, views[1:]))
            else:
                span = self._scratch.take(
                    segment.nbytes, views[0].device, bucket.nbytes + _ALIGN * len(bucket.segments)
                )
                sinks.append(_Sink(span, views[0], views[1:]))
        self._open = (bucket, sinks)
        return [s.span for s in sinks]

    def complete(self, bucket: Bucket) -> None:
        """Scatter what landed in scratch, and copy what has several homes. Call once, after the spans are filled.

        Afterwards the bytes are in place for every stream, and scratch may be filled anew.
        """
        if self._open is None or self._open[0].index != bucket.index:
            raise SpanError(f"complete(bucket {bucket.index}) without spans() of that bucket")
        _, sinks = self._open
        self._open = None
        with torch.inference_mode():  # tensors made in inference mode can be written nowhere else
            self._scatter(bucket, sinks)
        for device in {s.span.device for s in sinks if s.span.is_cuda and (s.home is not None or s.also)}:
            torch.cuda.current_stream(device).synchronize()

    @staticmethod
    def _scatter(bucket: Bucket, sinks: list[_Sink]) -> None:
        for segment, sink in zip(bucket.segments, sinks, strict=True):
            start, stop = segment.offset, segment.offset + segment.nbytes
            if sink.home is not None:
                _pack(sink.span, sink.home, start, stop, unpack=True)
            for other in sink.also:
                if is_row_major(other):
                    flat_bytes(other)[start:stop].copy_(sink.span)
                else:
                    _pack(_aligned(sink.span), other, start, stop, unpack=True)

    def _region(self, region: Region) -> list[torch.Tensor]:
        """Distinct destinations of a region, contiguous ones first."""
        key = (region.tensor, region.piece_box)
        homes = self._homes.get(key)
        if homes is None:
            homes = self._resolve(region)
            self._homes[key] = homes
        if region.box == region.piece_box:
            return homes
        return sorted((_sub(h, region.piece_box, region.box) for h in homes), key=lambda t: not is_row_major(t))

    def _resolve(self, region: Region) -> list[torch.Tensor]:
        homes: list[torch.Tensor] = []
        seen: set[tuple[object, ...]] = set()
        for index in self._entries.get(region.tensor, ()):
            for tensor, box in _lookup(self._tensors, index):
                if box != region.piece_box:
                    continue
                self._check(index, tensor, box)
                plain = tensor.detach()
                if plain.is_conj() or plain.is_neg():
                    raise SpanError(
                        f"tensor {self.manifest.tensors[index].name!r} is a lazy conjugate or negative view"
                    )
                where = (plain.device, plain.data_ptr(), plain.stride(), plain.shape)
                if where not in seen or not plain.numel():
                    seen.add(where)
                    homes.append(plain)
        if not homes:
            name = self.manifest.tensors[region.tensor].name
            raise SpanError(
                f"tensor {name!r}: {self.member!r} must receive box {list(region.piece_box)} but holds none"
            )
        return sorted(homes, key=lambda t: not is_row_major(t))


def _aligned(span: torch.Tensor) -> torch.Tensor:
    """``span`` itself, or a copy that can be viewed as any wider integer."""
    return span if span.storage_offset() % _ALIGN == 0 else span.clone()


class PieceDigests:
    """Digests of the pieces that pass through a member's buckets, taken bucket by bucket while they pass.

    A piece whose bytes pass in row-major order in one go (one region that is the whole piece: the usual case) is hashed
    as it passes; ``late`` lists the others, which must be hashed from the tensors once all their bytes are there. Keys
    are ``(root manifest index, piece box)``; each is hashed once, however many receivers it has. One thread.
    """

    def __init__(self, plan: Plan, buckets: Sequence[Bucket]) -> None:
        self._plan = plan
        self._digests: dict[int, Digest] = {}
        self._of: dict[tuple[int, Box], int] = {}
        late: dict[tuple[int, Box], None] = {}
        for bucket in buckets:
            for segment in bucket.segments:
                region = plan.regions[segment.region]
                key = (region.tensor, region.piece_box)
                if region.box != region.piece_box:
                    late[key] = None
                elif self._of.setdefault(key, segment.region) == segment.region:
                    self._digests.setdefault(segment.region, Digest())
        self.late = tuple(late)

    def feed(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        """Hash one bucket's spans; buckets come in plan order, each once. Raises ``SpanError`` if one was skipped."""
        for segment, span in zip(bucket.segments, spans, strict=True):
            digest = self._digests.get(segment.region)
            if digest is None:
                continue
            if digest.nbytes != segment.offset:
                raise SpanError(
                    f"bucket {bucket.index}: region {segment.region} goes on at byte {segment.offset}, "
                    f"but was hashed to {digest.nbytes}"
                )
            digest.update(span)

    def values(self) -> dict[tuple[int, Box], int]:
        """The digests of the pieces that have passed whole."""
        sizes = self._plan.regions
        return {k: self._digests[r].value for k, r in self._of.items() if self._digests[r].nbytes == sizes[r].nbytes}
