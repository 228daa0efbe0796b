"""What the bodies of cases over wires are written with: a trainer here, replicas in another process, on cards or not.

A body takes a ``Wire`` and becomes one test for each wire that it applies to (``test_cards.py``). Control plane,
agents, engines, transports and Publisher are the real ones; a ``Twin`` (``card_child``) holds the replicas.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.cases.base import QUIET, Site, check, must, refused, soon
from tests.cases.card_models import values_of
from tests.cases.children import Child
from tests.cases.wires import Wire
from tests.trainer_agent.fleet import fleet
from weightplane.controlplane.core.states import Phase
from weightplane.trainer_agent.errors import UpdateFailed
from weightplane.trainer_agent.publisher import Publisher

__all__ = ["CARD_CASES", "TWINS", "CardCase", "Stand", "Twin", "cards", "kept_by", "on", "planting_cards"]

Body = Callable[[Wire], None]


@dataclass(frozen=True)
class CardCase:
    """A body, the transports that it applies to, and the wires of these that it leaves out."""

    id: str
    name: str
    body: Body
    transports: frozenset[str]
    but: frozenset[str]

    def applies(self, wire: Wire) -> bool:
        return (
            wire.transport in self.transports and wire.id not in self.but and (wire.id != REFUSED or self.id == "D05")
        )


CARD_CASES: dict[str, CardCase] = {}
ALL = ("shm", "grpc", "ucx", "cuda_ipc", "nccl")
REFUSED = "nccl-same"  # a wire for the one case that shows this


def on(*transports: str, but: Collection[str] = ()) -> Callable[[Body], Body]:
    """Register a body for these transports (none: all), ``but`` for some wires; its name begins with its case's id."""

    def register(body: Body) -> Body:
        id_ = body.__name__.partition("_")[0]
        assert id_ not in CARD_CASES, f"two bodies for case {id_}"
        case = CardCase(id_, body.__name__, body, frozenset(transports or ALL), frozenset(but))
        CARD_CASES[id_] = case
        return body

    return register


# --- the other process ----------------------------------------------------------------------------------------------

_PLANT = ""


@contextmanager
def planting_cards(id_: str) -> Iterator[None]:
    """The other process has the defect too, from its next stand on."""
    global _PLANT
    _PLANT = id_
    try:
        yield
    finally:
        _PLANT = ""


class Twin(Child):
    """A process that holds replicas. Every order is answered; what it raised there is raised here."""

    def __init__(self) -> None:
        super().__init__("tests.cases.card_child")

    def do(self, what: str, timeout: float = 60.0, **arguments: Any) -> Any:
        said = self.ask(timeout, do=what, arguments=arguments)
        if "error" in said:
            raise RuntimeError(f"{what}: {said['error']}")
        return said["value"]


class Twins:
    """One process serves many tests, one after the other; one that was hurt, or still owes an answer, is replaced."""

    def __init__(self) -> None:
        self._idle: list[Twin] = []

    def warm(self, n: int = 1) -> None:
        while len(self._idle) < n:
            self._idle.append(Twin())

    def take(self) -> Twin:
        self._idle = [t for t in self._idle if t.process.poll() is None]
        self.warm()
        return self._idle.pop(0)

    def give(self, twin: Twin) -> None:
        if twin.unheard:  # its next answer would be taken for another's
            twin.close()
            return
        try:
            twin.do("end", 20)
        except Exception:
            twin.close()
        else:
            self._idle.append(twin)

    def close(self) -> None:
        for twin in self._idle:
            twin.close()
        self._idle.clear()


TWINS = Twins()


class Stand(Site):
    """One wire with a control plane here. ``twin`` holds the replicas; publishers are made here."""

    wire: Wire
    twin: Twin

    def join(self, name: str, model: str, *, twin: Twin | None = None, **options: Any) -> None:
        """A replica of ``card_models.MODELS[model]`` in the other process, on the wire's receiving device."""
        (twin or self.twin).do("join", address=self.address, name=name, model=model, **options)
        soon(f"{name} is here", lambda: name in self.state().replicas and self.state().replicas[name].reported, 20)

    def publisher(self, source: Any, **options: Any) -> Publisher:
        options.setdefault("transport", self.wire.transport)
        made: Publisher = super().publisher(source, **options)
        return made

    def replace_twin(self) -> None:
        """A fresh process in the other one's place, which is ended."""
        self.twin.close()
        self.twin = TWINS.take()
        self.twin.do("use", wire=self.wire.id, plant=_PLANT)

    # --- what the replicas hold

    def exact(self, what: str, source: Any, name: str = "r0", twin: Twin | None = None) -> None:
        """Every live tensor of the replica is the source's, by the digest that the processor takes of both."""
        found = (twin or self.twin).do("values", name=name)
        wanted = values_of(source)
        wrong = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
        check(what, not wrong, wrong[:5], f"{len(wrong)} of {len(wanted)}")

    def commits(self, what: str, publisher: Publisher, step: int, **options: Any) -> Any:
        with must(what):
            return publisher.publish(step, **options)

    def held_in_transfer(self) -> bool:
        """Whether the open update still moves bytes."""
        opened = self.state().open
        return opened is not None and opened.phase is Phase.TRANSFERRING

    def kept(self, publisher: Publisher) -> dict[str, int]:
        """See ``kept_by``."""
        return kept_by(publisher, self.wire.sender)


def kept_by(publisher: Publisher, device: str) -> dict[str, int]:
    """What a trainer's channels keep of its source, and its process of its card."""
    gc.collect()
    found = {"entries": 0, "bytes": 0}
    for opened in publisher._hold.pool._open.values():
        channel: Any = opened.channel
        if hasattr(channel, "_exporter"):
            regions = list(channel._exporter._regions._by_id.values())
            found["entries"] += len(channel._held) + len(regions)
            found["bytes"] += sum(s.nbytes() for r in regions for s in r.storages.values())
        elif hasattr(channel, "_programs"):
            found["entries"] += len(channel._programs)
    if device != "cpu":
        torch.cuda.synchronize(device)
        found["card"] = torch.cuda.memory_allocated(device)
    return found


@contextmanager
def cards(wire: Wire, model: str = "", **options: Any) -> Iterator[Stand]:
    """A stand, with a replica ``r0`` of that model if one is named."""
    with ExitStack() as stack:
        stack.enter_context(wire.here())
        if wire.sender != "cpu":
            torch.cuda.set_device(wire.sender)
        base = stack.enter_context(fleet(QUIET))
        stand = Stand.__new__(Stand)
        stand.__dict__ = base.__dict__
        stand.wire = wire
        stand.twin = TWINS.take()
        stack.callback(lambda: TWINS.give(stand.twin))
        stand.twin.do("use", wire=wire.id, plant=_PLANT)
        # Publishers before all this: their helpers and threads use the wire.
        with ExitStack() as inner:
            stand.stack = inner
            if model:
                stand.join("r0", model, **options)
            yield stand


def on_sender(wire: Wire, made: nn.Module) -> Any:
    """A trainer's module, where its tensors belong."""
    return made.to(wire.sender)


def turned_off(what: str, stand: Stand, ended: Callable[[], Any], seconds: float, name: str = "r0") -> None:
    """A publish has ended with an error that names the replica, long before its deadline."""
    began = time.monotonic()
    e = refused(f"the trainer raises {what}", ended, UpdateFailed)
    check("long before the deadline", time.monotonic() - began < seconds, f"{time.monotonic() - began:.1f} s", e)
    check("the one that is gone is named", name in str(e), e)


def sizes(kept: Mapping[str, int], before: Mapping[str, int]) -> Sequence[str]:
    """What has grown."""
    return [f"{k}: {before[k]} -> {n}" for k, n in kept.items() if n > before[k]]
