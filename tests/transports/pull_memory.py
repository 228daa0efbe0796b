"""A transport that pulls inside one process: its readers copy from the sender's addresses. For tests of the engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar

import torch

from weightplane.controlplane.core.plan import Bucket
from weightplane.transports.base import Capabilities, ChannelSpec, Probe, TransportError
from weightplane.transports.pull import Entry, Exporter, Importer, Pull, PullReceiveChannel, PullSendChannel
from weightplane.transports.pull_transport import PullTransport
from weightplane.transports.span_cursor import SpanCursor
from weightplane.v1.transport_pb2 import (
    PullEndpoint,
    PullRegion,
    PullWelcome,
    Rendezvous,
    UcxRegion,
    UcxRendezvous,
    UcxSender,
)

PIECE = 2 << 20


class MemoryExporter(Exporter):
    """Each span is a region of its own."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self.held: dict[int, torch.Tensor] = {}
        self._by_address: dict[tuple[int, int], int] = {}
        self.exports = 0

    def welcome(self) -> PullWelcome:
        return PullWelcome(ucx=UcxSender(agent_metadata=b"memory"))

    def export(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> Entry:
        self.exports += 1
        ids = []
        for span in spans:
            key = (span.data_ptr(), span.numel())
            if key not in self._by_address:
                self._by_address[key] = number = next(self._ids)
                self.held[number] = span
            ids.append(self._by_address[key])
        return Entry(tuple(ids), (0,) * len(ids), tuple(s.numel() for s in spans))

    def region(self, region: int) -> PullRegion:
        span = self.held[region]
        return PullRegion(id=region, ucx=UcxRegion(address=span.data_ptr(), nbytes=span.numel(), device=-1))

    def settle(self, entries: Collection[Entry]) -> Collection[int]:
        used = {r for e in entries for r in e.regions}
        gone = [r for r in self.held if r not in used]
        for region in gone:
            span = self.held.pop(region)
            del self._by_address[span.data_ptr(), span.numel()]
        return gone

    def close(self) -> None:
        self.held.clear()


class MemoryImporter(Importer):
    """Copies piece by piece."""

    def __init__(self) -> None:
        self.mapped: dict[str, dict[int, PullRegion]] = {}
        self.attached: list[str] = []

    def attach(self, sender: str, welcome: PullWelcome, check: Callable[[], None]) -> None:
        assert welcome.ucx.agent_metadata == b"memory"
        self.attached.append(sender)
        self.mapped[sender] = {}

    def map(self, sender: str, regions: Sequence[PullRegion]) -> None:
        self.mapped[sender].update((r.id, r) for r in regions)

    def unmap(self, sender: str, regions: Collection[int]) -> None:
        for region in regions:
            del self.mapped[sender][region]

    def pull(self, sender: str, pull: Pull) -> None:
        cursor = SpanCursor(pull.spans)
        for number, offset, size in zip(pull.entry.regions, pull.entry.offsets, pull.entry.sizes, strict=True):
            region = self.mapped[sender][number].ucx
            if offset + size > region.nbytes:
                raise TransportError(f"{sender!r}: a chunk ends behind its region", peers=(sender,))
            for at in range(0, size, PIECE):
                pull.check()
                n = min(PIECE, size - at)
                cursor.write(region.address + offset + at, n)
                pull.landed(n)

    def detach(self, sender: str) -> None:
        self.mapped.pop(sender, None)

    def close(self) -> None:
        self.mapped.clear()


class MemoryTransport(PullTransport):
    """Named ``pull_memory``."""

    name: ClassVar[str] = "pull_memory"
    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cpu"}), one_to_many=True, one_sided=True, cross_host=True, buffered=False
    )

    def probe(self) -> Probe:
        return Probe(True)

    def offer(self, member: str) -> Rendezvous:
        return Rendezvous(transport=self.name, ucx=UcxRendezvous(endpoint=self.endpoint()))

    def endpoint_of(self, offer: Rendezvous) -> PullEndpoint:
        return offer.ucx.endpoint

    def open_sender(self, spec: ChannelSpec, member: str) -> PullSendChannel:
        self.validate(spec, member, spec.senders)
        return self.sender(spec, member, MemoryExporter())

    def open_receiver(self, spec: ChannelSpec, member: str) -> PullReceiveChannel:
        self.validate(spec, member, spec.receivers)
        return self.receiver(spec, member, MemoryImporter())
