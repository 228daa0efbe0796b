"""Planted defects of the cases about distribution, memory and transports; see ``plants.py``."""

from __future__ import annotations

import dataclasses
import threading
from contextlib import suppress
from typing import Any

from tests.cases.plants import Patch, handler, plant
from weightplane.controlplane.core import group, planner
from weightplane.controlplane.core.events import Beat, InitTransfer
from weightplane.controlplane.core.states import Process
from weightplane.inference_agent import receipts, transfer
from weightplane.inference_agent.engines import sharding, torch_module
from weightplane.inference_agent.engines.mismatch import Description
from weightplane.trainer_agent import attempt, naming, sending
from weightplane.trainer_agent import transfer as trainer_transfer
from weightplane.transports import buckets, nccl
from weightplane.transports.base import PeerLost

__all__: list[str] = []


# --- distribution ---------------------------------------------------------------------------------------------------


@plant("D01", "all ranks complete over shm")
def _(m: Patch) -> None:
    """Ranks that send nothing join the gathers once the transfer is over."""
    pump = trainer_transfer.Transfer._pump

    def behind(self: Any, source: Any, window: Any, going: Any) -> None:
        if self._rank.rank != source.sender_rank:
            self._stop.wait(lambda: False, self._deadline)
        pump(self, source, window, going)

    m.setattr(trainer_transfer.Transfer, "_pump", behind)


@plant("D04", "the update commits over shm")
def _(m: Patch) -> None:
    """A worker knows its number within a replica, and takes the payload of the first replica's."""
    get = transfer.Channels.get

    def first(self: Any, c: Any, member: str) -> Any:
        number = member.rpartition("/")[2]
        return get(self, c, next(r for r in c.receivers if r.rpartition("/")[2] == number))

    m.setattr(transfer.Channels, "get", first)


@plant("D07", "a missing half is an error")
def _(m: Patch) -> None:
    """What nobody holds is left out of the plan without a word."""
    cover = planner._Holders.cover
    m.setattr(planner._Holders, "cover", lambda self, piece: (cover(self, piece)[0], []))


@plant("D08", "a name of two ranks is refused")
def _(m: Patch) -> None:
    """Equal names are taken for replicas."""
    merge = naming.merge_manifests
    m.setattr(naming, "merge_manifests", lambda parts, **_: merge(parts, replicated=True))


@plant("D09", "both inits succeed in the order (1, 0)")
def _(m: Patch) -> None:
    """A rank that comes before the one below it waits for a turn that is over."""
    init = group._HANDLERS[InitTransfer]

    def in_turn(tx: Any, e: Any) -> None:
        init(tx, e)
        t = tx.state.trainer
        if e.rank and e.rank - 1 not in t.ranks:
            tx.put_trainer(dataclasses.replace(t, waiters=tuple(w for w in t.waiters if w.rank != e.rank)))

    handler(m, group._HANDLERS, InitTransfer, in_turn)


@plant("D11", "each worker holds its own rows over shm")
def _(m: Patch) -> None:
    """The number of a worker is left at its default."""
    box = sharding.grid_box  # type: ignore[attr-defined]
    m.setattr(sharding, "grid_box", lambda shape, cuts: box(shape, [(dim, of, 0) for dim, of, _ in cuts]))


@plant("D12", "everybody connects")
def _(m: Patch) -> None:
    """Ranks are counted over one replica's workers, and not over the replicas."""
    opened = nccl.NcclTransport._open

    def one_engine(self: Any, spec: Any, member: str, side: Any) -> Any:
        first = spec.receivers[0].rpartition("/")[0]
        cut = dataclasses.replace(spec, receivers=tuple(r for r in spec.receivers if r.startswith(f"{first}/")))
        return opened(self, cut, member, cut.senders if member in cut.senders else cut.receivers)

    m.setattr(nccl.NcclTransport, "_open", one_engine)


# --- memory ---------------------------------------------------------------------------------------------------------


@plant("M01", "every layer is exact over shm")
def _(m: Patch) -> None:
    """Buckets are put in their places when all have come; scratch is used again before."""

    def deferred(self: Any, bucket: Any) -> None:
        kept = self.__dict__.setdefault("kept", [])
        kept.append((bucket, self._open[1]))
        if bucket.index == self.buckets[-1].index:
            for one in kept:
                self._scatter(*one)
            kept.clear()

    m.setattr(buckets.SinkSpans, "complete", deferred)


@plant("M04", "the update commits in buckets of 1048576 over shm")
def _(m: Patch) -> None:
    """A receiver cuts the regions by a size of its own."""

    def own(self: Any) -> Any:
        cut = planner._pack(list(self.plan.regions), {r.sender: 0 for r in self.plan.regions}, 64 << 10)
        return tuple(b for b in cut if self.member in b.receivers)

    m.setattr(receipts.WorkerPlan, "buckets", property(own))


@plant("M07", "the live parameter holds the value in_place over shm")
def _(m: Patch) -> None:
    """What is received for a strided parameter stays in the contiguous copy of it."""
    m.setattr(buckets.SinkSpans, "_scatter", staticmethod(lambda bucket, sinks: None))


# --- transport ------------------------------------------------------------------------------------------------------


@plant("X03", "the receiver has all the old values over shm")
def _(m: Patch) -> None:
    """The source is called free as soon as the update is open."""
    start = attempt.Attempt._start

    def early(self: Any, deadline: float) -> None:
        start(self, deadline)
        self.on_source_free()

    m.setattr(attempt.Attempt, "_start", early)


@plant("X06", "long before the deadline over shm")
def _(m: Patch) -> None:
    """A lost peer is waited for, and word of a death taken for a beat of the living."""
    patiently = sending.Sending._patiently

    def forever(self: Any, lane: Any, step: Any) -> None:
        try:
            patiently(self, lane, step)
        except PeerLost:
            self._stop.wait(lambda: False, 1e12)

    beat = group._HANDLERS[Beat]
    m.setattr(sending.Sending, "_patiently", forever)
    handler(m, group._HANDLERS, Beat, lambda tx, e: beat(tx, dataclasses.replace(e, process=Process.RUNNING)))


@plant("X14", "the update commits over shm")
def _(m: Patch) -> None:
    """A receiver says that all is there when it has asked for all of it."""
    receive = transfer.Transfer.receive

    def meanwhile(*args: Any) -> None:
        with suppress(Exception):
            receive(*args)

    def asked(self: Any, *rest: Any) -> None:
        threading.Thread(target=meanwhile, args=(self, *rest), daemon=True).start()

    m.setattr(transfer.Transfer, "receive", asked)


# --- tensor content -------------------------------------------------------------------------------------------------


@plant("T14", "no name matches: an error also if the lists allow all")
def _(m: Patch) -> None:
    """A list that allows every name excuses also an update that brings none."""
    compare = torch_module.fit  # type: ignore[attr-defined]

    def lenient(manifest: Any, members: Any, workers: Any, boxes: Any, extra: Any, missing: Any) -> Description:
        said: Description = compare(manifest, members, workers, boxes, extra, missing)
        return dataclasses.replace(said, problems=()) if "*" in extra else said

    m.setattr(torch_module, "fit", lenient)
