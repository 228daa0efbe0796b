"""What the bodies of the cases are written with: named assertions, a small real fleet, every transport.

A body is a plain function named by its case. What it asserts has a name (``check``, ``must``, ``refused``, ``soon``),
and a planted defect (``plants.py``) says which of these names must be the one that fails.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from tests.trainer_agent.fleet import Fleet, fill, fleet
from weightplane.controlplane.core.model import Config
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.transports.dtypes import as_bytes
from weightplane.transports.external import set_mover
from weightplane.transports.ucx_agent import package
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc

T = TypeVar("T")

#: No lease ends while a case runs, however busy the machine is: agents need no heartbeat helper.
QUIET = Config(beat_s=1.0, ttl_s=120.0, quiesce_s=1.0)
#: Those that move bytes themselves, between CPUs, as far as they are installed here.
MOVERS = ("shm", "grpc", *(("ucx",) if package() else ()))
TRANSPORTS = (*MOVERS, "external")


class CaseFailed(AssertionError):
    """A named assertion of a case failed."""


@dataclass(frozen=True)
class Case:
    """One case of the list."""

    id: str
    name: str
    body: Callable[[], None]


CASES: dict[str, Case] = {}


def case(body: Callable[[], None]) -> Callable[[], None]:
    """Register a body; its name begins with the id of its case."""
    id_ = body.__name__.partition("_")[0]
    assert id_ not in CASES, f"two bodies for case {id_}"
    CASES[id_] = Case(id_, body.__name__, body)
    return body


# --- named assertions -----------------------------------------------------------------------------------------------


def check(what: str, holds: object, *found: object) -> None:
    if not holds:
        raise CaseFailed(f"{what}. Found: {'; '.join(map(str, found)) or 'it does not'}")


@contextmanager
def must(what: str) -> Iterator[None]:
    """What the block does must not raise."""
    try:
        yield
    except CaseFailed:
        raise
    except Exception as e:
        raise CaseFailed(f"{what}. Found: {type(e).__name__}: {e}") from e


def refused(what: str, call: Callable[[], Any], *kinds: type[BaseException]) -> Any:
    """``call`` must raise one of ``kinds``; what it raised."""
    try:
        got = call()
    except kinds as e:
        return e
    except Exception as e:
        raise CaseFailed(f"{what}. Found: {type(e).__name__}: {e}") from e
    raise CaseFailed(f"{what}. Found: it returned {got}")


def soon(what: str, look: Callable[[], T], timeout: float = 10.0) -> T:
    """Poll until truthy; the value."""
    end = time.monotonic() + timeout
    while True:
        value = look()
        if value:
            return value
        check(what, time.monotonic() < end, f"not within {timeout} s")
        time.sleep(0.01)


# --- a small fleet --------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """33 KiB in nine tensors: with buckets of 4 KiB an update has some steps."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)])
        fill(self, seed)


class Even(nn.Module):
    """Every element of version k is k; a read takes a break in the middle, so that it shows what changes meanwhile."""

    def __init__(self, layers: int = 6, size: int = 2048) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(size), requires_grad=False) for _ in range(layers))

    def become(self, k: float) -> None:
        with torch.no_grad():
            for p in self.layers:
                p.fill_(k)

    def read(self, pause_s: float = 0.0) -> set[float]:
        seen: set[float] = set()
        for i, p in enumerate(self.layers):
            if pause_s and i == len(self.layers) // 2:
                time.sleep(pause_s)
            seen |= {float(p[0]), float(p[-1])}
        return seen


class Site(Fleet):
    """A fleet without heartbeat helpers, and what a case asks about it."""

    def replica(self, name: str, engine: TorchModuleEngine, **options: Any) -> Any:
        options.setdefault("heartbeat", False)
        return super().replica(name, engine, **options)

    def publisher(self, source: Any, **options: Any) -> Any:
        options.setdefault("bucket_bytes", 4096)
        options.setdefault("update_timeout", 30.0)
        return super().publisher(source, **options)

    @property
    def lives(self) -> dict[str, str]:
        """Every replica's incarnation, as the control plane knows it."""
        return {name: r.incarnation for name, r in self.state().replicas.items()}

    def check_replica(self, name: str, min_version: int = 0) -> fleet_pb2.CheckReplicaResponse:
        """A router's question."""
        with self.agents[name].dial.channel() as channel:
            request = fleet_pb2.CheckReplicaRequest(group="g", replica_id=name, min_version=min_version)
            answer: fleet_pb2.CheckReplicaResponse = fleet_pb2_grpc.FleetServiceStub(channel).CheckReplica(
                request, timeout=10
            )
            return answer

    def idle(self, what: str, timeout: float = 10.0) -> None:
        soon(what, lambda: self.state().open is None, timeout)


@contextmanager
def site(*names: str, config: Config = QUIET, make: Callable[[], nn.Module] = Small, **engine: Any) -> Iterator[Site]:
    """A control plane and a replica of ``make()`` for each name."""
    with fleet(config) as base:
        f = Site.__new__(Site)
        f.__dict__ = base.__dict__
        for name in names:
            f.replica(name, TorchModuleEngine(make(), **engine))
        yield f


class Wire:
    """What the user of ``external`` brings: two movers over a queue."""

    def __init__(self) -> None:
        self._queue: queue.Queue[list[torch.Tensor]] = queue.Queue()

    def send(self, bucket: Any, spans: Any) -> None:
        self._queue.put([s.clone() for s in spans])

    def receive(self, bucket: Any, spans: Any) -> None:
        for mine, theirs in zip(spans, self._queue.get(timeout=20), strict=True):
            mine.copy_(theirs)


@contextmanager
def wired(*members: str) -> Iterator[None]:
    """``external`` works for a trainer of one rank and one worker."""
    wire = Wire()
    set_mover("rank/0", wire.send)
    for member in members:
        set_mover(member, wire.receive)
    try:
        yield
    finally:
        for member in ("rank/0", *members):
            set_mover(member, None)


def bits(module: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter and buffer, also those that no update brings."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {n: as_bytes(t).clone() for n, t in named}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names under which two copies differ."""
    return sorted(n for n in one.keys() | other.keys() if n not in one or n not in other or not one[n].equal(other[n]))


def holds(engine: TorchModuleEngine, module: nn.Module) -> bool:
    """Whether the engine's live tensors are the module's, bit for bit."""
    return not differing(bits(engine.modules[0]), bits(module))
