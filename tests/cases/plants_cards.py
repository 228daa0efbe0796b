"""Planted defects of the cases over wires: in both processes, and found by the assertion that each names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

import tests.cases.plants_transfer  # noqa: F401 - registers the defects that are used here too
from tests.cases.plants import PLANTS, Patch, handler
from tests.cases.wires import Wire
from weightplane.controlplane.core import group, negotiate
from weightplane.controlplane.core.events import Leave
from weightplane.inference_agent import transfer
from weightplane.trainer_agent import channels, produced, replay, sending
from weightplane.transports import (
    collective_receive,
    cuda_copy,
    cuda_export,
    cuda_memory,
    nccl,
    pull,
    ucx_memory,
)

__all__ = ["CARD_PLANTS", "CardPlant", "card_planted"]


@dataclass(frozen=True)
class CardPlant:
    """A defect, the assertion that must find it, and where it is shown."""

    found_by: str
    patch: Callable[[Patch], None]
    shown: Callable[[Wire], bool]


CARD_PLANTS: dict[str, CardPlant] = {}
#: There UCX itself may fall over memory that is taken from it while it is read, and the test's process with it.
_UCX_ON_CARDS = ("ucx-same", "ucx-across")


def card_plant(
    id_: str, found_by: str, *transports: str, but: tuple[str, ...] = ()
) -> Callable[[Callable[[Patch], None]], None]:
    """Register the defect of a case, shown on these transports (none: on every one that the case applies to)."""

    def shown(w: Wire) -> bool:
        return (not transports or w.transport in transports) and w.id not in but

    def register(patch: Callable[[Patch], None]) -> None:
        CARD_PLANTS[id_] = CardPlant(found_by, patch, shown)

    return register


def again(id_: str, found_by: str, *transports: str, but: tuple[str, ...] = ()) -> None:
    """The defect of the case's body without wires."""
    card_plant(id_, found_by, *transports, but=but)(PLANTS[id_].patch)


@contextmanager
def card_planted(id_: str) -> Iterator[None]:
    """This process has the defect."""
    with pytest.MonkeyPatch.context() as m:
        CARD_PLANTS[id_].patch(m)
        yield


again("M01", "every layer is exact", "cuda_ipc", "nccl")
again("M04", "the update commits", "cuda_ipc", "nccl")
again("M07", "the live parameter holds the value", "cuda_ipc", "nccl")
again("T02", "the update commits", "cuda_ipc", "nccl")
again("T10", "each tensor is under its own name", "cuda_ipc", "nccl")
again("D04", "the update commits", "cuda_ipc")
again("D11", "each worker holds its own rows", "cuda_ipc")
again("X03", "the receiver has all the old values", "cuda_ipc", "nccl")
again("X14", "finish waits for the bytes", "cuda_ipc", "nccl")
again("X06", "long before the deadline", "cuda_ipc", "ucx", "nccl", but=("ucx-host",))


@card_plant("X05", "long before the deadline", "cuda_ipc", "ucx", "nccl", but=("ucx-host",))
def _(m: Patch) -> None:
    """A goodbye is noted and no more; a lost peer is waited for."""
    PLANTS["X06"].patch(m)
    handler(m, group._HANDLERS, Leave, lambda tx, e: tx.quietly("goodbye"))


@card_plant("X07", "the new data is delivered", "cuda_ipc", "ucx", "nccl")
def _(m: Patch) -> None:
    """What was once found of a tensor's memory is believed for ever."""
    look = replay.ChannelReplay.look

    def once(self: Any, *args: Any) -> None:
        if not self.live:
            look(self, *args)

    m.setattr(replay.ChannelReplay, "look", once)
    m.setattr(channels, "forget", lambda _: None)


class _Forgetful(list[Any]):
    def extend(self, _: Any) -> None:
        return None


def _drops_what_it_sent(m: Patch) -> None:
    """Nobody keeps what is being read: not the channel, not its regions, not the lane."""
    send, init = pull.PullSendChannel.send, sending._Packing.__init__

    def careless(self: Any, *args: Any) -> None:
        send(self, *args)
        for held in self._held.values():
            held.spans = ()
        getattr(self._exporter, "_known", {}).clear()
        for region in self._exporter._regions._by_id.values():
            region.storages.clear()

    def packing(self: Any, *args: Any) -> None:
        init(self, *args)
        self.retained = _Forgetful()

    m.setattr(pull.PullSendChannel, "send", careless)
    m.setattr(sending._Packing, "__init__", packing)


for _id in ("M08", "T04"):
    card_plant(_id, "the update commits with exact values", "cuda_ipc", "ucx", but=_UCX_ON_CARDS)(_drops_what_it_sent)


@card_plant("M03", "the trainer's side has not grown", "cuda_ipc", "ucx")
def _(m: Patch) -> None:
    """What was exported stays so after everybody has read it."""
    for kind in (cuda_memory.Regions, ucx_memory.Regions):
        m.setattr(kind, "settle", lambda self, keep: set())


def _says_so_when_it_is_queued(m: Patch) -> None:
    """A bucket is there when its copies are queued."""

    def queued(self: Any, flight: Any) -> None:
        for _, nbytes in flight.marks:
            self._landed, self._begun = self._landed + nbytes, self._begun - nbytes
            self._inside(nbytes)

    m.setattr(cuda_copy.Card, "done", lambda self, flight: True)
    m.setattr(collective_receive.CollectiveReceiveChannel, "_land", queued)


card_plant("X10", "every value is final", "cuda_ipc", "nccl")(_says_so_when_it_is_queued)
card_plant("X11", "what the consumer cloned on its stream is final")(_says_so_when_it_is_queued)


@card_plant("X12", "the values are those that were being written")
def _(m: Patch) -> None:
    """Nothing waits for the stream that writes the source."""
    m.setattr(produced.Produced, "wait", lambda self: None)
    m.setattr(produced.Produced, "order", lambda self: None)
    m.setattr(cuda_export._Written, "behind", lambda self, stream: None)


@card_plant("X08", "the update commits")
def _(m: Patch) -> None:
    """No transfer takes place, and every bucket is said to be there."""

    def claimed(self: Any, bucket: Any) -> None:
        spans, memory = self.sink.spans(bucket)
        self.sink.complete(bucket)
        self.ledger.feed(bucket, spans, memory)

    m.setattr(transfer.LocalWorker, "take", claimed)
    m.setattr(transfer.LocalWorker, "ahead", lambda self, bucket: None)


def _receives(m: Patch, then: Callable[[Any, Any, Any], None]) -> None:
    """``then(worker, bucket, spans)`` in the place of a channel's receive."""

    def take(self: Any, bucket: Any) -> None:
        spans, memory = self.sink.spans(bucket)
        then(self, bucket, spans)
        self.sink.complete(bucket)
        self.ledger.feed(bucket, spans, memory)

    m.setattr(transfer.LocalWorker, "take", take)
    m.setattr(transfer.LocalWorker, "ahead", lambda self, bucket: None)


@card_plant("X04", "the update commits", "cuda_ipc", "nccl")
def _(m: Patch) -> None:
    """The last tensor of a bucket is said to be there before it has landed: it is zeros."""

    def early(worker: Any, bucket: Any, spans: Any) -> None:
        worker.channel.receive(bucket, spans)
        spans[-1].zero_()

    _receives(m, early)


@card_plant("T16", "the update commits", "cuda_ipc", "nccl")
def _(m: Patch) -> None:
    """What lies at the end of the model is left out, and said to have been moved."""

    def most(worker: Any, bucket: Any, spans: Any) -> None:
        last = bucket.index >= 9
        worker.channel.receive(bucket, [s.clone() for s in spans] if last else spans)

    _receives(m, most)


@card_plant("D05", "one GPU twice is refused")
def _(m: Patch) -> None:
    """Nobody compares the cards."""
    m.setattr(negotiate, "_DISTINCT_DEVICES", frozenset())
    m.setattr(nccl, "_check_members", lambda spec, everybody, member: None)
