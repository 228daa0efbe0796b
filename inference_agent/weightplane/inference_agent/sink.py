"""Where one worker's bytes go: spans of its targets, found once and replayed, or of host memory on the way to them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from weightplane.controlplane.core.plan import Bucket
from weightplane.transports.buckets import SinkSpans
from weightplane.transports.digest import memory_of
from weightplane.transports.dtypes import is_row_major

from .engines.base import LocalTensors
from .regions import Arrivals

if TYPE_CHECKING:
    from .receipts import WorkerPlan

__all__ = ["Sink"]

_ALL = frozenset({"cpu", "cuda"})


class _Known:
    """What is known of a bucket: the spans that a transport fills and their host memory, for ever the same lists.

    ``home``: where a bounced bucket's bytes go from there; ``None`` if that is scratch, which comes anew each time.
    """

    __slots__ = ("bounced", "home", "memory", "spans")

    def __init__(self, spans: list[torch.Tensor], home: list[torch.Tensor] | None, *, bounced: bool) -> None:
        self.spans, self.home, self.bounced = spans, home, bounced
        self.memory = [memory_of(s, writable=True) if s.device.type == "cpu" else None for s in spans]


class Sink:
    """What a bucket's spans are is found once and replayed while the targets stay.

    A bucket all of whose spans are the targets' own memory needs no scattering and is handed out again as it is: the
    very same list, so that a transport that knows it has nothing to work out. Any other goes through ``SinkSpans`` each
    time. ``kinds``: the devices that the transport can write; a bucket with targets elsewhere is received into host
    memory (pinned, of one bucket's size, made when first needed) and copied on from there by ``complete``.

    One thread; every ``spans`` is followed by its ``complete``, after which the bytes are in place for everybody.
    """

    def __init__(self, share: WorkerPlan, targets: LocalTensors, kinds: frozenset[str] = _ALL) -> None:
        self._share, self._targets, self._kinds = share, targets, kinds
        self._sink = SinkSpans(share.plan, share.manifest, share.member, targets)
        self._known: dict[int, _Known | None] = {}  # None: spans are scratch in part, and come anew each time
        self._now: list[torch.Tensor] = []

    @cached_property
    def arrivals(self) -> Arrivals:
        """What of the targets lies on devices, to be hashed there."""
        return Arrivals(self._share, self._targets)

    @cached_property
    def _bounce(self) -> torch.Tensor:
        size = max(b.nbytes for b in self._share.buckets)
        return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def spans(self, bucket: Bucket) -> tuple[list[torch.Tensor], Sequence[memoryview | None]]:
        """The bucket's spans, and their memory where it is host memory that stays."""
        known = self._known.get(bucket.index)
        if known is not None:
            if known.bounced:
                self._now = known.home if known.home is not None else self._sink.spans(bucket)
            return known.spans, known.memory
        spans = self._now = self._sink.spans(bucket)
        if bucket.index in self._known:
            return spans, [None] * len(spans)
        direct = all(self._is_direct(r) for r in dict.fromkeys(s.region for s in bucket.segments))
        if not {s.device.type for s in spans} <= self._kinds:
            host = list(torch.split(self._bounce[: bucket.nbytes], [s.numel() for s in spans]))
            known = _Known(host, spans if direct else None, bounced=True)
        elif direct:
            known = _Known(spans, spans, bounced=False)
        self._known[bucket.index] = known
        return (known.spans, known.memory) if known is not None else (spans, [None] * len(spans))

    def lasting(self, bucket: Bucket) -> list[torch.Tensor] | None:
        """The list that ``spans`` will give for a bucket, if its bytes go straight to targets that are known by now."""
        known = self._known.get(bucket.index)
        return known.spans if known is not None and not known.bounced else None

    def complete(self, bucket: Bucket) -> None:
        """The spans are filled: put in place what is not there yet."""
        known = self._known.get(bucket.index)
        if known is not None and not known.bounced:
            return
        if known is not None:
            with torch.inference_mode():  # tensors made in inference mode can be written nowhere else
                for home, span in zip(self._now, known.spans, strict=True):
                    home.copy_(span, non_blocking=True)
            for device in {s.device for s in self._now if s.is_cuda}:
                torch.cuda.current_stream(device).synchronize()
        if known is None or known.home is None:
            self._sink.complete(bucket)

    def _is_direct(self, region: int) -> bool:
        homes = list(self._share.homes(region, self._targets))
        return is_row_major(homes[0]) and len({(h.data_ptr(), h.stride()) for h in homes}) == 1
