"""A trainer of a hundred lines, and what can be wrong with one: ``--defect NAME`` plants it. Without a defect it keeps
every rule."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import grpc
import torch
from safetensors.torch import load_file

from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.host import host_id
from weightplane.trainer_agent.plans import plan_from_pages
from weightplane.transports.digest import digest_tensor
from weightplane.transports.dtypes import as_bytes, name_of
from weightplane.v1 import tensor_pb2 as tn
from weightplane.v1 import transport_pb2 as tp
from weightplane.v1 import transport_pb2_grpc as tp_grpc
from weightplane.v1 import update_pb2 as up
from weightplane.v1 import weight_transfer_pb2 as wt
from weightplane.v1 import weight_transfer_pb2_grpc as wt_grpc

#: Defect -> the rule that finds it.
DEFECTS = {
    "finishes-before-digests": "order",
    "no-lease": "order",
    "a-call-without-deadline": "deadlines",
    "early-stream": "arming",
    "wrong-byte": "content",
    "deaf-to-aborts": "abort",
    "new-id-for-a-repeat": "repeats",
    "lost-answer-is-failure": "unknown",
    "asks-again-when-fenced": "fenced",
    "takes-over-unasked": "held",
    "never-binds-again": "rebind",
    "keeps-the-group": "close",
}


class Ended(Exception):
    """The update, or the hold, is over; the text says why."""


class Trainer:
    def __init__(self, said: argparse.Namespace) -> None:
        self.said, self.defect = said, said.defect
        self.stub = wt_grpc.WeightTransferServiceStub(grpc.insecure_channel(said.address))
        self.generation, self.incarnation = 0, uuid.uuid4().hex
        self.over: Ended | None = None
        self.lease: Any = None
        self.streams: list[Any] = []
        self.values = load_file(said.file)
        self.manifest = Manifest.of(
            TensorMeta(name, name_of(t.dtype), tuple(t.shape)) for name, t in self.values.items()
        )

    def call(self, method: str, repeat: bool = True, **fields: Any) -> Any:
        named = {"request_id": uuid.uuid4().hex, "group": self.said.group, "generation": self.generation, **fields}
        while True:
            timeout = None if self.defect == "a-call-without-deadline" and method == "PutPlacement" else 30
            try:
                return getattr(self.stub, method)(getattr(wt, f"{method}Request")(**named), timeout=timeout)
            except grpc.RpcError as e:
                if self.over is not None:
                    raise self.over from None
                if e.code() is not grpc.StatusCode.UNAVAILABLE or not repeat:
                    raise
                if self.defect == "new-id-for-a-repeat":
                    named["request_id"] = uuid.uuid4().hex
            time.sleep(0.1)

    def init(self) -> None:
        offers = [tp.Rendezvous(transport="grpc", grpc=tp.GrpcRendezvous())]
        take = (self.said.takeover or self.defect == "takes-over-unasked") and not self.generation
        said = self.call(
            "InitTransfer",
            trainer_id="bad",
            incarnation=self.incarnation,
            world_size=1,
            takeover=take,
            host_id=host_id(),
            offers=offers,
            transport="grpc",
        )
        self.channels = {c.channel_id: c for c in said.channels}
        if said.generation != self.generation:
            self.generation = said.generation
            if self.defect != "no-lease":
                request = wt.WatchUpdateRequest(group=self.said.group, generation=self.generation)
                self.lease = self.stub.WatchUpdate(request)
                self.watching = threading.Thread(target=self.watch, args=(self.lease,), daemon=True)
                self.watching.start()

    def watch(self, lease: Any) -> None:
        with contextlib.suppress(grpc.RpcError):  # ours, as we leave, or the coordinator's: the next call says why
            for news in lease:
                self.heard(news)

    def heard(self, news: wt.WatchUpdateResponse) -> None:
        gone = news.update.phase in (up.UPDATE_PHASE_ABORTING, up.UPDATE_PHASE_ABORTED)
        if news.fenced and self.defect == "asks-again-when-fenced":
            self.generation, self.said.takeover = 0, True
            self.init()
        elif (news.fenced or gone) and self.defect != "deaf-to-aborts":
            self.over = Ended("another trainer took the group" if news.fenced else news.update.failure.message)
            for stream in self.streams:
                stream.cancel()

    def leave(self) -> None:
        """No thread is left inside gRPC as the interpreter ends: that may abort the process."""
        if self.lease is not None:
            self.lease.cancel()
            self.watching.join(5.0)

    def publish(self) -> None:
        self.init()
        m = self.manifest
        metas = [tn.TensorMeta(name=t.name, dtype=t.dtype, shape=t.shape) for t in m]
        self.call("PutManifest", manifest_id=m.id, total=len(metas), tensors=metas)
        self.call("PutPlacement", manifest_id=m.id, placement=tn.Placement(member="rank/0", full=True))
        u = self.start()
        named = {"update_id": u.update_id, "epoch": u.epoch}
        plans = {c.channel_id: plan_from_pages(self.pages(c.plan_id), m) for c in u.channels}
        early = [self.open(c, named, plans[c]) for c in plans] if self.defect == "early-stream" else []
        self.call("UpdateWeights", seq=1, **named)
        if self.defect == "finishes-before-digests":
            early_end = {"request_id": "f", "group": self.said.group, "generation": self.generation, **named}
            self.early = self.stub.FinishUpdate.future(wt.FinishUpdateRequest(**early_end), timeout=30)
            time.sleep(0.3)
        for channel_id, plan in plans.items():
            self.send(early.pop(0) if early else self.open(channel_id, named, plan))
            raw = [digest_tensor(self.values[m.tensors[r.tensor].name]) for r in plan.regions]
            self.call("PutDigests", plan_id=plan.id, digests=raw, total=len(raw), **named)
        self.finish(named)
        if self.defect != "keeps-the-group":
            self.call("CloseTransfer")

    def start(self) -> Any:
        start: dict[str, Any] = {"manifest_id": self.manifest.id, "trainer_step": int(self.said.step)}
        start["request_id"] = uuid.uuid4().hex
        while True:
            try:
                return self.call("StartUpdate", **start)
            except grpc.RpcError as e:
                if "InitTransfer" not in str(e.details()) or self.defect == "never-binds-again":
                    raise
                self.init()

    def finish(self, named: dict[str, Any]) -> None:
        try:
            self.call("FinishUpdate", repeat=False, **named)
        except grpc.RpcError as e:
            if e.code() is not grpc.StatusCode.UNAVAILABLE or self.defect == "lost-answer-is-failure":
                raise
            request = wt.GetUpdateRequest(group=self.said.group, update_id=named["update_id"])
            if self.stub.GetUpdate(request, timeout=10).update.phase != up.UPDATE_PHASE_COMMITTED:
                raise

    def pages(self, plan_id: str) -> Iterator[tn.PlanPage]:
        ask = wt.GetPlanRequest(group=self.said.group, plan_id=plan_id)
        yield self.stub.GetPlan(ask, timeout=30).page  # a model of one page

    def open(self, channel_id: str, named: dict[str, Any], plan: Any) -> list[Any]:
        binding, opened = self.channels[channel_id], []
        for receiver in binding.receivers:
            opening = tp.TransferOpen(
                channel_id=channel_id, generation=self.generation, sender="rank/0", receiver=receiver, **named
            )
            stub = tp_grpc.TensorServiceStub(grpc.insecure_channel(binding.offers[receiver].grpc.address))
            stream = stub.Transfer(self.chunks(opening, plan), metadata=(("weightplane-channel-key-bin", binding.key),))
            self.streams.append(stream)
            opened.append((stream, len(plan.buckets)))
        return opened

    def chunks(self, opening: tp.TransferOpen, plan: Any) -> Iterator[tp.TransferRequest]:
        yield tp.TransferRequest(open=opening)
        for bucket in plan.buckets:
            at = 0
            for s in bucket.segments:
                tensor = as_bytes(self.values[self.manifest.tensors[plan.regions[s.region].tensor].name])
                for first in range(s.offset, s.offset + s.nbytes, 1 << 20):
                    raw = bytearray(tensor[first : min(first + (1 << 20), s.offset + s.nbytes)].numpy().tobytes())
                    raw[0] ^= self.defect == "wrong-byte" and first == 0
                    yield tp.TransferRequest(bucket=bucket.index, offset=at, data=bytes(raw))
                    at += len(raw)

    def send(self, opened: list[Any]) -> None:
        for stream, buckets in opened:
            try:
                for answer in stream:
                    buckets -= answer.bucket >= 0
                    if not buckets:
                        break
            except grpc.RpcError:
                word = time.monotonic() + 2.0  # of the cause: the receiver may have left first
                while self.over is None and time.monotonic() < word:
                    time.sleep(0.02)
                if self.over is None:
                    raise
            if self.over is not None:
                raise self.over


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("address", "group", "file", "step", "defect"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--takeover", action="store_true")
    torch.set_num_threads(1)
    trainer = Trainer(parser.parse_args())
    try:
        trainer.publish()
    except (Ended, grpc.RpcError) as e:
        print(e.details() if isinstance(e, grpc.RpcError) else e)
        return 1
    finally:
        trainer.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
