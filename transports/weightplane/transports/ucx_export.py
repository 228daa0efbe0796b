"""The sender's half of ``ucx``: spans become chunks of registered regions."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import torch

from weightplane.controlplane.core.plan import Bucket
from weightplane.v1.transport_pb2 import PullRegion, PullWelcome, UcxRegion, UcxSender

from .base import TransportError
from .huge_pages import Collapser
from .pull_abc import Entry, Exporter
from .ucx_agent import Agent, UcxError
from .ucx_memory import Region, Regions, on_device

__all__ = ["UcxExporter", "describe"]

log = logging.getLogger(__name__)

PROBE_BYTES: Final = 64
_CONNECTING_S: Final = 0.001  # between two rounds of work while receivers connect
_ROUNDS: Final = 8  # of work for emulated reads, between two looks at the connections


def describe(agent: Agent) -> Mapping[str, str]:
    """What is known of how an agent moves bytes."""
    found = agent.transports()
    return {"ucx_transports": ", ".join(found) or "unknown", "rdma": "yes" if agent.rdma else "no"}


class UcxExporter(Exporter):
    """Owns its agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._regions = Regions(agent)
        self._probe = torch.zeros(PROBE_BYTES, dtype=torch.uint8)
        self._probe_memory = ("DRAM", self._probe.data_ptr(), PROBE_BYTES, 0)
        agent.register([self._probe_memory])
        probe = UcxRegion(
            address=self._probe.data_ptr(),
            nbytes=PROBE_BYTES,
            device=-1,
            metadata=agent.metadata_of(self._probe_memory),
        )
        self._welcome = PullWelcome(ucx=UcxSender(agent_metadata=agent.connection(), probe=probe))
        self._collapser = Collapser()
        self._settled: set[int] = set()
        self._device: torch.device | None = None
        self._closed = False
        self._failed = False

    def welcome(self) -> PullWelcome:
        """See ``Exporter``."""
        return self._welcome

    def export(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> Entry:
        """See ``Exporter``. A chunk is a stretch of a region."""
        try:
            found = self._regions.cover(spans)
        except UcxError as e:
            text = f"bucket {bucket.index}: {e} (locked memory: ulimit -l)"
            raise TransportError(text, bucket=bucket.index) from e
        return Entry(tuple(r.id for r, _, _ in found), tuple(at for _, at, _ in found), tuple(n for _, _, n in found))

    def region(self, region: int) -> PullRegion:
        """See ``Exporter``."""
        return PullRegion(id=region, ucx=self._describe(self._regions[region]))

    def _describe(self, region: Region) -> UcxRegion:
        return UcxRegion(
            address=region.address,
            nbytes=region.nbytes,
            device=-1 if region.kind == "DRAM" else region.device,
            metadata=self._agent.metadata_of(region.memory),
        )

    def holds(self, entry: Entry) -> bool:
        """See ``Exporter``."""
        return self._regions.valid(set(entry.regions))

    def publish(self, bucket: Bucket, entry: Entry) -> None:
        """See ``Exporter``. What the current stream of a GPU still writes is waited for: others read past streams."""
        for device in {r.device for r in map(self._regions.__getitem__, set(entry.regions)) if r.kind == "VRAM"}:
            torch.cuda.current_stream(device).synchronize()
            self._device = torch.device("cuda", device)

    def settle(self, entries: Collection[Entry]) -> Collection[int]:
        """See ``Exporter``. Host memory that stays is put onto huge pages."""
        gone = self._regions.settle({r for e in entries for r in e.regions})
        fresh = [r for r in self._regions if r.id not in self._settled]
        self._settled = (self._settled | {r.id for r in fresh}) - gone
        if fresh and not self._agent.rdma:  # what a NIC holds cannot be moved, and need not be
            self._collapser.add((r.address, r.nbytes) for r in fresh if r.kind == "DRAM")
        return gone

    def pace(self, serving: bool) -> float | None:
        """See ``Exporter``."""
        return 0.0 if serving else _CONNECTING_S

    def serve(self) -> None:
        """See ``Exporter``."""
        try:
            with on_device(self._device):
                for _ in range(_ROUNDS):
                    self._agent.progress()
        except Exception as e:
            if not self._failed:
                self._failed = True
                log.error("UCX fails to work for its readers: %s", e)

    def details(self) -> Mapping[str, str]:
        """See ``Exporter``."""
        return {} if self._closed else describe(self._agent)

    def close(self) -> None:
        """See ``Exporter``."""
        if self._closed:
            return
        self._closed = True
        self._collapser.close()
        self._regions.close()
        with contextlib.suppress(UcxError):
            self._agent.deregister([self._probe_memory])
        self._agent.close()
