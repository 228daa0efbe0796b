"""A small trainer over the contract: every rank in this process, whatever transport. It does what a Publisher would."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.model import Channel, Offer
from weightplane.controlplane.core.placement import Placement, full_placement
from weightplane.controlplane.core.plan import Plan
from weightplane.controlplane.core.states import Mode, PauseMode, Verify
from weightplane.controlplane.core.verify import sampled_regions
from weightplane.controlplane.dial import Dial
from weightplane.controlplane.host import host_id
from weightplane.inference_agent import codec
from weightplane.inference_agent.transfer import channel_spec
from weightplane.transports import registry
from weightplane.transports.base import ArmToken, SendChannel
from weightplane.transports.buckets import SourceSpans
from weightplane.transports.digest import digest_tensor
from weightplane.v1 import agent_pb2, common_pb2, tensor_pb2, weight_transfer_pb2_grpc
from weightplane.v1 import weight_transfer_pb2 as wt

Values = Mapping[int, torch.Tensor]


class Trainer:
    """``publish`` runs a whole update. ``spoil`` hooks let a test break one thing."""

    def __init__(
        self, address: str, manifest: Manifest, transport: str = "", ranks: int = 1, bucket_bytes: int = 1 << 16
    ) -> None:
        self.dial = Dial(address)
        self.manifest, self.transport, self.ranks, self.bucket_bytes = manifest, transport, ranks, bucket_bytes
        self.channel = self.dial.channel()
        self.stub = weight_transfer_pb2_grpc.WeightTransferServiceStub(self.channel)
        self.pool = ThreadPoolExecutor(max(4, 2 * ranks))
        self.incarnation = uuid.uuid4().hex
        self.generation = 0
        self.channels: list[Channel] = []
        self.open: dict[tuple[str, str], SendChannel] = {}
        self.watch: Any = None
        self.placements: list[Placement] = [full_placement(f"rank/{r}", manifest) for r in range(ranks)]
        self.update_id, self.epoch = "", 0

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        for c in self.open.values():
            c.abort("test ends")
            c.close()
        if self.watch is not None:
            self.watch.cancel()
        self.channel.close()
        self.pool.shutdown(wait=False)

    # --- steps

    def call(self, method: str, timeout: float = 20, **fields: Any) -> Any:
        request = getattr(wt, f"{method}Request")(request_id=uuid.uuid4().hex, group="g", **fields)
        return getattr(self.stub, method)(request, timeout=timeout)

    def ours(self, method: str, **fields: Any) -> Any:
        return self.call(method, generation=self.generation, update_id=self.update_id, epoch=self.epoch, **fields)

    def everyone(self, one: Callable[[int], Any]) -> list[Any]:
        return list(self.pool.map(one, range(self.ranks)))

    def init(self, **more: Any) -> None:
        names = [self.transport] if self.transport else [n for n in registry.names() if registry.get(n).probe().ok]

        def one(rank: int) -> Any:
            return self.call(
                "InitTransfer",
                trainer_id="t",
                incarnation=self.incarnation,
                rank=rank,
                world_size=self.ranks,
                generation=self.generation,
                host_id=host_id(),
                offers=[registry.get(n).offer(f"rank/{rank}") for n in names],
                transport=self.transport,
                bucket_bytes=self.bucket_bytes,
                **more,
            )

        said = self.everyone(one)[0]
        self.generation, self.epoch = said.generation, said.epoch
        self.channels = [
            Channel(
                c.channel_id,
                c.transport,
                c.key,
                tuple(c.senders),
                tuple(c.receivers),
                (),
                (),
                c.bucket_bytes,
                {m: Offer(o.transport, o.SerializeToString()) for m, o in c.offers.items()},
            )
            for c in said.channels
        ]
        if self.watch is None:
            self._hold()
        tensors = [
            tensor_pb2.TensorMeta(name=t.name, dtype=t.dtype, shape=t.shape, alias_of=t.alias_of) for t in self.manifest
        ]
        for first in range(0, len(tensors), 4000):
            self.call(
                "PutManifest",
                generation=self.generation,
                manifest_id=self.manifest.id,
                first=first,
                total=len(tensors),
                tensors=tensors[first : first + 4000],
            )
        for rank, placement in enumerate(self.placements):
            for page, first, total in codec.placement_pages(placement, self.manifest):
                self.call(
                    "PutPlacement",
                    generation=self.generation,
                    manifest_id=self.manifest.id,
                    rank=rank,
                    placement=page,
                    first=first,
                    total=total,
                )

    def _hold(self) -> None:
        """Every rank's lease: a WatchUpdate stream."""
        watches = [
            self.stub.WatchUpdate(wt.WatchUpdateRequest(group="g", generation=self.generation, rank=r))
            for r in range(self.ranks)
        ]

        class All:
            def cancel(self) -> None:
                for w in watches:
                    w.cancel()

        def drain(w: Any) -> None:
            try:
                for _ in w:
                    pass
            except Exception as e:
                print("watch ended:", e)

        for w in watches:
            threading.Thread(target=drain, args=(w,), daemon=True).start()
        self.watch = All()

    def start(
        self,
        step: int,
        mode: Mode = Mode.ANY,
        pause: PauseMode = PauseMode.KEEP,
        verify: Verify = Verify.FULL,
        timeout: float = 15,
        **more: Any,
    ) -> Any:
        said = self.call(
            "StartUpdate",
            generation=self.generation,
            manifest_id=self.manifest.id,
            trainer_step=step,
            mode=codec.number(mode),
            pause_mode=codec.number(pause),
            verify=codec.number(verify),
            update_timeout_ms=int(timeout * 1000),
            **more,
        )
        self.update_id, self.epoch, self.verify = said.update_id, said.epoch, verify
        return said

    def plan(self, plan_id: str) -> Plan:
        pages: list[Any] = []
        while not pages or len(pages) < pages[0].pages:
            pages.append(
                self.stub.GetPlan(wt.GetPlanRequest(group="g", plan_id=plan_id, page=len(pages)), timeout=10).page
            )
        return codec.plan(pages, self.manifest)

    def sender(self, channel: Channel, member: str) -> SendChannel:
        key = (channel.channel_id, member)
        if key not in self.open:
            transport = registry.get(channel.transport)
            self.open[key] = transport.open_sender(channel_spec(channel, "g"), member)
        return self.open[key]

    def send(
        self,
        started: Any,
        values: Values,
        spoil: Callable[[Any, Any], None] | None = None,
        hashed: Values | None = None,
        apart: bool = False,
    ) -> None:
        """Arm, declare everything in one call (``apart``: each channel in its own, one after the other), send, flush,
        on every rank at once. Digests are of ``hashed``."""
        deadline = time.monotonic() + 20
        token = ArmToken(self.update_id, self.epoch, self.generation)
        plans = {c.channel_id: self.plan(c.plan_id) for c in started.channels}

        def one(rank: int) -> None:
            member = f"rank/{rank}"
            held = self.placements[rank]
            mine: dict[int, list[Any]] = {}
            for p in held.pieces:
                root = self.manifest.root(p.tensor)
                local = values[root][tuple(slice(a, b) for a, b in p.box)]
                mine.setdefault(root, []).append((local, p.box))
            work = []
            for c in self.channels:
                plan = plans.get(c.channel_id)
                if plan is None:
                    continue
                work.append((c, plan, SourceSpans(plan, self.manifest, member, mine), self.sender(c, member)))
            for seq, some in enumerate([[w] for w in work] if apart else [work], 1):
                one_call(rank, seq, some)

        def one_call(rank: int, seq: int, work: list[Any]) -> None:
            for _, _, spans, sender in work:
                sender.arm(token, spans.buckets, deadline)
            named = [agent_pb2.BucketRange(channel_id=c.channel_id) for c, *_ in work] if apart else []
            self.ours("UpdateWeights", rank=rank, seq=seq, buckets=named)
            for _, _, spans, sender in work:
                for bucket in spans.buckets:
                    out = spans.spans(bucket)
                    if spoil is not None:
                        spoil(bucket, out)
                    sender.send(bucket, out)
            for _, plan, _, sender in work:
                sender.flush()
                self.put_digests(rank, plan, values if hashed is None else hashed)

        self.everyone(one)

    def put_digests(self, rank: int, plan: Plan, values: Values) -> None:
        regions = [i for i, r in enumerate(plan.regions) if r.sender == f"rank/{rank}"]
        wanted = set(regions)
        if self.verify is Verify.OFF:
            return
        if self.verify is Verify.SAMPLED:
            wanted &= set(sampled_regions(self.update_id, len(plan.regions)))
        digests = [
            digest_tensor(values[plan.regions[i].tensor][tuple(slice(a, b) for a, b in plan.regions[i].box)])
            if i in wanted
            else 0
            for i in regions
        ]
        self.ours("PutDigests", rank=rank, plan_id=plan.id, digests=digests, total=len(digests))

    def finish(self) -> Any:
        def one(rank: int) -> Any:
            return self.ours("FinishUpdate", rank=rank).update

        return self.everyone(one)[0]

    def publish(self, values: Values, step: int, **options: Any) -> Any:
        started = self.start(step, **options)
        self.send(started, values)
        return self.finish()

    def abort(self, reason: str = "test") -> Any:
        return self.call("AbortUpdate", generation=self.generation, update_id=self.update_id, reason=reason).update


def state_of(outcome: Any) -> str:
    from weightplane.v1 import update_pb2

    return str(update_pb2.WeightsState.Name(outcome.state)).removeprefix("WEIGHTS_STATE_")


__all__ = ["Trainer", "agent_pb2", "common_pb2", "state_of"]
