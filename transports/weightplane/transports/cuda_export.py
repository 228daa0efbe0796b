"""The sender's half of ``cuda_ipc``: spans become chunks of exported allocations; events say when they are written.

**Who waits for what.** A receiver reads a bucket once everything has run that was queued, when the channel was armed,
on the arming thread's current stream of each GPU, and, when the bucket was sent, on the sending thread's (or on what
``producer`` names for a device instead). Other streams are the caller's to order before. Nothing waits on the host
where GPUs share events between processes; where they do not (``WEIGHTPLANE_CUDA_IPC_EVENTS=0`` says so too), ``send``
does.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from weightplane.controlplane.core.plan import Bucket
from weightplane.v1.transport_pb2 import CudaIpcHandle, CudaIpcSender, PullRegion, PullWelcome

from . import cuda_own
from .base import TransportError
from .cuda_driver import Cuda, CudaError
from .cuda_memory import Region, Regions
from .pull_abc import Entry, Exporter

if TYPE_CHECKING:
    import torch

__all__ = ["CudaIpcExporter", "Producer"]

log = logging.getLogger(__name__)

#: The stream (its handle) that writes a device's tensors.
Producer = Callable[[int], int]


class _Written:
    """What says that a device's memory is written: an event of ours at the end of a stream of ours.

    That stream does nothing but wait for others; so the event is behind all of them, and theirs stay as they are.
    """

    def __init__(self, cuda: Cuda, device: int) -> None:
        self._cuda, self._device = cuda, device
        self.handle = b""
        with cuda.on(device):
            self._stream, self._passed = cuda.new_stream(), cuda.new_event()
            self._event = 0
            if os.environ.get("WEIGHTPLANE_CUDA_IPC_EVENTS", "1") != "0" and cuda.ipc_events(device):
                try:
                    self._event = cuda.new_event(shared=True)
                    self.handle = cuda.event_handle(self._event)
                    cuda_own.show_event(self.handle, self._event)
                except CudaError as e:
                    log.warning("GPU %d shares no events, so that sends wait for its streams: %s", device, e)

    def behind(self, stream: int) -> None:
        """Be passed only once what is queued on ``stream`` now has run."""
        cuda = self._cuda
        with cuda.on(self._device):
            if cuda.idle(stream):
                return
            cuda.record(self._passed, stream)
            cuda.wait(self._stream, self._passed)
            if self.handle:
                cuda.record(self._event, self._stream)

    def settle(self) -> None:
        """Without an event that receivers wait for: wait here."""
        if not self.handle:
            with self._cuda.on(self._device):
                self._cuda.synchronize(self._stream)

    def close(self) -> None:
        """Free them."""
        cuda_own.hide_event(self.handle)
        with contextlib.suppress(CudaError), self._cuda.on(self._device):
            for event in filter(None, (self._passed, self._event)):
                self._cuda.drop_event(event)
            self._cuda.drop_stream(self._stream)


class _Known:
    """What is known of an entry: its regions, their storages and where these must lie."""

    __slots__ = ("addresses", "changes", "devices", "entry", "foreign", "regions", "storages")

    def __init__(self, entry: Entry, regions: Regions) -> None:
        self.entry, self.changes = entry, regions.changes
        self.regions = tuple(dict.fromkeys(entry.regions))
        found = [regions[r] for r in self.regions]
        self.devices = tuple(dict.fromkeys(r.device for r in found))
        self.storages = [s for r in found for s in r.storages.values()]
        self.addresses = [a for r in found for a in r.storages]
        self.foreign = tuple(r for r in found if not r.owned)


class CudaIpcExporter(Exporter):
    """One channel's exporter. ``producer``: see the module text."""

    def __init__(self, cuda: Cuda, producer: Producer | None = None) -> None:
        self._cuda, self._producer = cuda, producer or cuda.current_stream
        self._regions = Regions(cuda)
        self._written: dict[int, _Written] = {}
        self._known: dict[int, _Known] = {}  # by id of the entry, which is held
        self._closed = False
        for device in range(cuda.count()):
            if cuda.active(device):
                self._written[device] = _Written(cuda, device)
        self._uuids = {d: cuda.uuid(d) for d in self._written}

    def welcome(self) -> PullWelcome:
        """See ``Exporter``. The GPU and the event of a process that uses one; of others, each region tells its own."""
        said = CudaIpcSender()
        if len(self._uuids) == 1:
            ((device, uuid),) = self._uuids.items()
            said = CudaIpcSender(device_uuid=uuid, event=self._written[device].handle)
        return PullWelcome(cuda_ipc=said)

    def armed(self) -> None:
        """See ``Exporter``."""
        for device, written in self._written.items():
            written.behind(self._producer(device))

    def export(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> Entry:
        """See ``Exporter``. Stretches that lie one behind the other become one chunk."""
        regions: list[int] = []
        offsets: list[int] = []
        sizes: list[int] = []
        try:
            for region, offset, n in self._regions.cover(spans):
                if region.device not in self._written:
                    self._uuids = {**self._uuids, region.device: self._cuda.uuid(region.device)}
                    self._written[region.device] = _Written(self._cuda, region.device)
                if regions and regions[-1] == region.id and offsets[-1] + sizes[-1] == offset:
                    sizes[-1] += n
                else:
                    regions.append(region.id)
                    offsets.append(offset)
                    sizes.append(n)
        except TransportError as e:
            raise TransportError(f"bucket {bucket.index}: {e}", bucket=bucket.index) from e
        return Entry(tuple(regions), tuple(offsets), tuple(sizes))

    def region(self, region: int) -> PullRegion:
        """See ``Exporter``."""
        return PullRegion(id=region, cuda_ipc=self._describe(self._regions[region]))

    def _describe(self, region: Region) -> CudaIpcHandle:
        return CudaIpcHandle(
            handle=region.handle,
            storage_bytes=region.allocation.nbytes,
            offset=0,
            event=self._written[region.device].handle,
            memory_generation=region.generation,
            device_uuid=self._uuids[region.device],
        )

    def holds(self, entry: Entry) -> bool:
        """See ``Exporter``. Some 60 ns a storage."""
        known = self._known_of(entry)
        if known is None or [s.data_ptr() for s in known.storages] != known.addresses:
            return False
        return all(map(self._regions.intact, known.foreign))

    def _known_of(self, entry: Entry) -> _Known | None:
        known = self._known.get(id(entry))
        if known is None or known.entry is not entry or known.changes != self._regions.changes:
            if not all(r in self._regions for r in entry.regions):
                return None
            known = self._known[id(entry)] = _Known(entry, self._regions)
        return known

    def publish(self, bucket: Bucket, entry: Entry) -> None:
        """See ``Exporter``."""
        known = self._known_of(entry)
        assert known is not None
        for device in known.devices:
            written = self._written[device]
            written.behind(self._producer(device))
            written.settle()

    def settle(self, entries: Collection[Entry]) -> Collection[int]:
        """See ``Exporter``."""
        kept = {id(e) for e in entries}
        self._known = {i: k for i, k in self._known.items() if i in kept}
        return self._regions.settle({r for e in entries if (k := self._known_of(e)) is not None for r in k.regions})

    def details(self) -> Mapping[str, str]:
        """See ``Exporter``."""
        events = any(w.handle for w in self._written.values())
        return {"gpus": ", ".join(self._uuids.values()), "events": "shared" if events else "waited for by the sender"}

    def close(self) -> None:
        """See ``Exporter``."""
        if self._closed:
            return
        self._closed = True
        self._known.clear()
        self._regions.close()
        for written in self._written.values():
            written.close()
        self._written.clear()
