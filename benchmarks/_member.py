"""A sender or a receiver of ``transports.py``, in a process of its own: product code around a transport's channel.

The receiver is what an inference agent does with an update (``Sink``, ``Ledger``), the sender what a trainer does
(``Sending`` over a ``StateDictSource``); nothing is asked of a transport but its contract. What the product keeps from
update to update (spans, plans) is kept from round to round.
"""

from __future__ import annotations

import base64
import hashlib
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from benchmarks._bare_grpc import BareGrpc
from benchmarks._bare_ring import BareRing
from benchmarks._limits import Broadcasts, CardLimits, HostLimits, Sockets, fill
from benchmarks._models import model
from benchmarks._process import TIMEOUT_S, serve
from benchmarks._sampler import Sampler
from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.placement import full_box, full_placement
from weightplane.controlplane.core.plan import Plan
from weightplane.controlplane.core.planner import make_plan
from weightplane.controlplane.core.states import Verify
from weightplane.inference_agent.receipts import Ledger, Sink, WorkerPlan
from weightplane.trainer_agent.channels import OpenChannel
from weightplane.trainer_agent.hashing import RegionDigests
from weightplane.trainer_agent.sending import Lane, Sending
from weightplane.trainer_agent.sources import StateDictSource
from weightplane.trainer_agent.stop import Stop
from weightplane.trainer_agent.supply import DirectSupply
from weightplane.transports import registry
from weightplane.transports.base import ArmToken, ChannelSpec, ReceiveChannel, SendChannel
from weightplane.transports.buckets import buckets_from
from weightplane.transports.digest_cuda import RegionGroup, grouped, unusable
from weightplane.transports.dtypes import as_bytes, dtype_of
from weightplane.v1.transport_pb2 import Rendezvous


@dataclass
class _Way:
    """One open channel and what is replayed over it."""

    spec: ChannelSpec
    channel: SendChannel | ReceiveChannel
    plan: Plan
    share: WorkerPlan
    sink: Sink | None
    update: str = ""


class Member:
    """See the module's text. Commands come one after another; times are ``time.monotonic()``."""

    host: HostLimits
    sockets: Sockets
    bare_grpc: BareGrpc
    bare_ring: BareRing
    card: CardLimits
    broadcasts: Broadcasts
    sampler: Sampler
    _groups: list[RegionGroup] | None

    def start(self, member: str, device: str, peer: str) -> str:
        """``device`` is this member's own, ``peer`` the sender's; returns the UUID of its card."""
        torch.set_num_threads(1)
        self.member, self._device, self._peer = member, device, peer
        self._ways: dict[str, _Way] = {}
        self.sampler = Sampler()
        if device == "cpu":
            return ""
        torch.cuda.set_device(device)
        return str(torch.cuda.get_device_properties(device).uuid)

    def load(self, name: str, sender: str, receivers: list[str], scratch: int) -> int:
        """Make the tensors, of random bytes, and what the limits need; returns the model's bytes."""
        shapes = model(name)
        self._sends = self.member == sender
        self._manifest = Manifest.of(TensorMeta(n, dtype, shape, "") for n, dtype, shape in shapes)
        self._tensors = [torch.empty(s, dtype=dtype_of(d), device=self._device) for _, d, s in shapes]
        self._bytes = [as_bytes(t) for t in self._tensors]
        for seed, flat in enumerate(self._bytes):
            fill(flat, seed)
        self._members, self._groups = (sender, receivers), None
        self._source = StateDictSource(dict(zip((n for n, _, _ in shapes), self._tensors, strict=True)))
        self._targets = {i: (t, full_box(tuple(t.shape))) for i, t in enumerate(self._tensors)}
        self.broadcasts = Broadcasts(self._device, self._bytes)
        if self._device == "cpu":
            self.host = HostLimits(self._tensors, self._bytes, scratch)
            self.sockets = Sockets(self._bytes)
            self.bare_grpc = BareGrpc(sum(flat.numel() for flat in self._bytes))
            self.bare_ring = BareRing(sum(flat.numel() for flat in self._bytes))
        elif not self._sends and not hasattr(self, "card"):
            self.card = CardLimits(self._device, self._peer)
        return sum(flat.numel() for flat in self._bytes)

    def mark(self, number: int) -> None:
        """Sender: change both ends of every tensor, so that a round's bytes are its own."""
        for flat in self._bytes:
            flat[:8] = number % 251
            flat[-8:] = number % 251
        self._settle()

    def check(self, number: int) -> None:
        """Receiver: both ends of every tensor are the round's."""
        ends = torch.cat([part for flat in self._bytes if flat.numel() for part in (flat[:1], flat[-1:])]).cpu()
        wrong = int((ends != number % 251).sum())
        if wrong:
            raise AssertionError(f"{self.member}: {wrong} of {ends.numel()} ends are not those of round {number}")

    def _settle(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()

    # --- channels

    def available(self) -> dict[str, Any]:
        """Every registered transport: why it does not work here, or what it can do."""
        found: dict[str, Any] = {}
        for name, probe in registry.available().items():
            found[name] = {"reason": "" if probe.ok else probe.reason or "it does not work here"}
            if probe.ok:
                said = asdict(registry.get(name).capabilities)
                found[name]["capabilities"] = {**said, "device_kinds": sorted(said["device_kinds"])}
        return found

    def offer(self, transport: str) -> str:
        """What this member offers for a new channel."""
        return base64.b64encode(registry.get(transport).offer(self.member).SerializeToString()).decode()

    def open(self, way: str, spec: dict[str, Any]) -> int:
        """Open this member's side; returns how many buckets the plan has."""
        offers = {m: Rendezvous.FromString(base64.b64decode(o)) for m, o in spec["offers"].items()}
        lists = {k: tuple(spec[k]) for k in ("senders", "receivers")}
        made = ChannelSpec(**{**spec, **lists, "key": bytes.fromhex(spec["key"]), "offers": offers})
        sender, receivers = self._members
        holds = [full_placement(m, self._manifest) for m in (sender, *receivers)]
        plan = make_plan(self._manifest, holds[:1], holds[1:], made.bucket_bytes)
        transport = registry.get(made.transport)
        opened = transport.open_sender if self._sends else transport.open_receiver
        share = WorkerPlan(plan, self._manifest, self.member)
        sink = None if self._sends else Sink(share, self._targets)
        self._ways[way] = _Way(made, opened(made, self.member), plan, share, sink)
        return len(plan.buckets)

    def arm(self, way: str, number: int) -> None:
        """Arm for all of this member's buckets."""
        w = self._ways[way]
        w.update = f"u-{number}"
        if self._sends:
            self._source.begin(number)
            self._source.manifest()
        buckets = buckets_from(w.plan, self.member) if self._sends else w.plan.buckets_for(self.member)
        w.channel.arm(ArmToken(w.update, 1, 1), buckets, time.monotonic() + TIMEOUT_S)

    def wire(self, way: str, digests: bool, look: bool = False) -> dict[str, Any]:
        """Send or receive one update. ``end``: complete here; with digests, hashed too. ``look``: profile it."""
        with self.sampler.look() if look else nullcontext():
            return self._send(self._ways[way], digests) if self._sends else self._receive(self._ways[way], digests)

    def _receive(self, w: _Way, digests: bool) -> dict[str, Any]:
        assert w.sink is not None and isinstance(w.channel, ReceiveChannel)
        level = Verify.FULL if digests else Verify.OFF
        ledger = Ledger(w.share, w.update, level, as_they_come=True, sink=w.sink)
        start = time.monotonic()
        buckets = ledger.share.buckets
        for n, bucket in enumerate(buckets, 1):
            spans, memory = w.sink.spans(bucket)
            if n < len(buckets) and (coming := w.sink.lasting(buckets[n])) is not None:
                w.channel.ahead(buckets[n], coming)
            w.channel.receive(bucket, spans)
            w.sink.complete(bucket)
            ledger.feed(bucket, spans, memory)
        values = {self._key(w.plan, i): v for i, v in ledger.digests.items()}
        return {"start": start, "end": time.monotonic(), "bytes": w.plan.nbytes, "digest": _summary(values)}

    def _send(self, w: _Way, digests: bool) -> dict[str, Any]:
        assert isinstance(w.channel, SendChannel)
        buckets = buckets_from(w.plan, self.member)
        values = RegionDigests([w.plan], self.member, share=True) if digests else None
        opened = OpenChannel(w.spec, self.member, registry.get(w.spec.transport), w.channel)
        lane = Lane(0, opened, w.plan, buckets)
        supply = DirectSupply(self._source, [(w.plan, buckets)])
        sending = Sending([lane], self._manifest, supply, values, Stop())
        start = time.monotonic()
        sending.start()
        if not sending.wait(start + TIMEOUT_S):
            raise TimeoutError(f"{self.member} could not send in time")
        end = time.monotonic() if digests else start
        self._source.end()
        found = _summary(values.values) if values is not None else ""
        return {"start": start, "end": end, "bytes": w.plan.nbytes, "digest": found}

    def digest(self) -> dict[str, float]:
        """Hash all of a model in the card's memory, as a publish does: tables made once, replayed."""
        if self._groups is None:
            why = unusable(self._bytes[0].device)
            if why:
                raise RuntimeError(why)
            self._groups = grouped(list(enumerate(self._bytes)), 1 << 62)
        start = time.monotonic()
        for group in self._groups:
            group.start()
        count = sum(len(group.values()) for group in self._groups)
        assert count == len(self._bytes)
        return {"start": start, "end": time.monotonic(), "bytes": sum(flat.numel() for flat in self._bytes)}

    @staticmethod
    def _key(plan: Plan, region: int) -> tuple[int, Any]:
        return plan.regions[region].tensor, plan.regions[region].box

    def shut(self, way: str) -> None:
        """Close one channel."""
        self._ways.pop(way).channel.close()

    def unload(self) -> None:
        """Close everything and let go of the tensors."""
        for way in list(self._ways):
            self.shut(way)
        self.broadcasts.leave()
        if self._device == "cpu":
            self.sockets.close()
            self.bare_grpc.close()
            self.bare_ring.close()
            del self.host
        self._source.end()
        del self._tensors, self._bytes, self._source, self._targets, self._groups
        if self._device != "cpu":
            torch.cuda.empty_cache()


def _summary(values: dict[Any, int]) -> str:
    return hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()


if __name__ == "__main__":
    serve(Member())
    registry.shutdown()
