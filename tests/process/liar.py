"""A third party's plug-ins that lie: an engine whose loader is defective, and a transport that says more than it did.

Which defect is planted is read from a file as each update begins, so that one process shows them all: ``drop``,
``half``, ``flip`` (the engine); ``zeros``, ``counted``, ``silent``, ``stale`` (the transport); none if it is empty.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from google.protobuf.any_pb2 import Any

from tests.process.coded import serve
from weightplane.controlplane.core.plan import Bucket
from weightplane.inference_agent.engines.base import EngineUpdate
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.serve import Served
from weightplane.transports.base import ArmToken, ChannelSpec
from weightplane.transports.shm import ShmReceiveChannel, ShmTransport
from weightplane.v1.transport_pb2 import Rendezvous

TENSOR = "layers.3"
FOLDER = "WEIGHTPLANE_TEST_DEFECTS"  # holds <replica>.defect


def defect(replica: str) -> str:
    path = Path(os.environ.get(FOLDER, "/nowhere")) / f"{replica}.defect"
    return path.read_text() if path.exists() else ""


class LyingEngine(TorchModuleEngine):
    """Its loader spoils ``layers.3``: where bytes are written, before anyone looks whether they were."""

    replica = ""

    def begin(self, update: EngineUpdate) -> None:
        super().begin(update)
        self._defect = defect(self.replica)
        self._before = self._victim.clone()

    @property
    def _victim(self) -> torch.Tensor:
        return self.modules[0].get_parameter(TENSOR).detach()

    def _load(self) -> None:
        victim = self._victim
        with torch.no_grad():
            if self._defect == "drop":
                victim.copy_(self._before)
            elif self._defect == "half":
                half = victim.numel() // 2
                victim[half:] = self._before[half:]
            elif self._defect == "flip":
                victim[-1:].view(torch.int32).bitwise_xor_(1)

    def apply(self, update_id: str) -> None:
        super().apply(update_id)
        self._load()

    def prepare(self, update_id: str) -> None:
        super().prepare(update_id)
        if self._mixed:  # in place
            self._load()


def make(replica: str) -> Served:
    engine = type("Named", (LyingEngine,), {"replica": replica})
    return serve(engine, 0.0)


class LyingReceiver(ShmReceiveChannel):
    def __init__(self, spec: ChannelSpec, member: str, directory: Path) -> None:
        super().__init__(spec, member, directory)
        self._replica = member.partition("/")[0]
        self._last: dict[int, list[torch.Tensor]] = {}
        self._defect = ""
        self._hidden = 0

    def arm(self, token: ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        self._defect = defect(self._replica)
        super().arm(token, buckets, deadline)

    @property
    def bytes_landed(self) -> int:
        return super().bytes_landed - self._hidden

    def receive(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        came = [torch.empty_like(s) for s in spans]
        super().receive(bucket, came)
        last, self._last[bucket.index] = self._last.get(bucket.index, came), came
        if self._defect in ("counted", "silent"):
            self._hidden += bucket.nbytes if self._defect == "silent" else 0
            return
        for span, true, old in zip(spans, came, last, strict=True):
            span.copy_(torch.zeros_like(true) if self._defect == "zeros" else old if self._defect == "stale" else true)


class LiarTransport(ShmTransport):
    """``shm`` under a name of its own, as the entry point of a third party's distribution gives it."""

    name: ClassVar[str] = "liar"

    def offer(self, member: str) -> Rendezvous:
        data = Any()
        data.Pack(super().offer(member).shm)
        return Rendezvous(transport=self.name, any=data)

    def open_receiver(self, spec: ChannelSpec, member: str) -> LyingReceiver:
        self._validate(spec, member, spec.receivers)
        return LyingReceiver(spec, member, self._directory)


def install(folder: Path) -> dict[str, str]:
    """A distribution on ``PYTHONPATH`` that registers the transport; the environment that its users need."""
    info = folder / "weightplane_liar-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weightplane-liar\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[weightplane.transports]\nliar = tests.process.liar:LiarTransport\n")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {"PYTHONPATH": os.pathsep.join(paths), FOLDER: str(folder)}
