"""What an inference engine offers to the agent. Adapters register under the entry points ``weightplane.engines``.

**An update**, as the agent drives it (one at a time; each call on one of the agent's threads, never on its loop):

======================  ==============================================  ==============================================
step                    staged                                          in place
======================  ==============================================  ==============================================
``describe``            what each worker holds of the manifest, and every problem; nothing is written
``begin``               take the update; staging is at hand             take the update
``targets``             staging memory, filled while generation runs    live memory, filled while generation is paused
``writing``             not called                                      called before the first byte: now it is mixed
``prepare``             pre-validate the apply                          post-process; still fenced
                        (the replica votes)                             (the agent reads back first; then it votes)
``apply``               staging -> live, post-process; mixed            not called
                        (the agent reads back)
``commit``              the label changes, caches are handled, whole again
``abort``               forget the staged bytes                         if bytes were written: mixed, and fenced
======================  ==============================================  ==============================================

``held`` and ``mixed`` are the truth about memory: they outlive the agent and are what it reports. An engine that is
mixed fences itself with the holder ``"dirty"``; only ``commit`` of a full update makes it whole.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.model import Channel, Condition, Declaration, Held
from weightplane.controlplane.core.plan import Plan
from weightplane.controlplane.core.states import CachePolicy, Evidence, Mode, PauseMode, Verify

from .gate import EngineClosed, PauseGate, Request, RequestAborted, VersionTag
from .mismatch import Description, Problem, ProblemKind

if TYPE_CHECKING:
    import torch

    from weightplane.controlplane.core.placement import Box
    from weightplane.v1.transport_pb2 import Rendezvous

    from ..threads import WorkThread
    from ..transfer import Worker

__all__ = [
    "Description",
    "Engine",
    "EngineClosed",
    "EngineError",
    "EngineUpdate",
    "GatedEngine",
    "LocalTensors",
    "Problem",
    "ProblemKind",
    "Reception",
    "Request",
    "RequestAborted",
    "VersionTag",
    "WorkerDevice",
]

#: By manifest index (aliases included): the tensor a worker holds of the entry, and the box of the entry that it is.
LocalTensors = Mapping[int, "tuple[torch.Tensor, Box]"]


class EngineError(RuntimeError):
    """The engine cannot do what was asked. ``tensors`` names those concerned (all of them; the text shows five)."""

    def __init__(self, message: str, tensors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)


@dataclass(frozen=True, slots=True)
class EngineUpdate:
    """The update to take. ``mode`` is STAGED or IN_PLACE, ``cache`` one of the engine's policies.

    ``holds``: the committed update that this brings, where it is a catch-up, which has an id of its own.
    """

    update_id: str
    version: int
    trainer_step: int
    lineage: str
    mode: Mode
    cache: CachePolicy
    manifest: Manifest
    holds: Held | None = None

    @property
    def held(self) -> Held:
        """What the engine holds once this is committed."""
        return self.holds or Held(self.version, self.update_id)


@dataclass(frozen=True, slots=True)
class WorkerDevice:
    """Where a worker keeps its weights: ``kind`` "cpu" or "cuda"; ``uuid`` of the GPU, else empty."""

    kind: str = "cpu"
    uuid: str = ""


@dataclass(frozen=True)
class Reception:
    """One worker's share of an update: what comes over which channel. ``as_they_come``: hash the bytes as they land.

    ``thread`` is the agent's data thread for this worker.
    """

    update_id: str
    group: str
    member: str
    thread: WorkThread
    channel: Channel
    plan: Plan
    manifest: Manifest
    verify: Verify
    as_they_come: bool


class Engine(ABC):
    """One inference engine of one or more workers. Methods are thread-safe unless the module text says otherwise."""

    #: Name and version, for people.
    name: str = "engine"

    def __init__(self) -> None:
        self._life = uuid.uuid4().hex

    # --- what it is

    @property
    def life(self) -> str:
        """Fresh whenever the engine (any worker) started anew; the agent then becomes a new incarnation."""
        return self._life

    @property
    @abstractmethod
    def workers(self) -> tuple[WorkerDevice, ...]:
        """One entry per worker."""

    @property
    @abstractmethod
    def modes(self) -> tuple[Mode, ...]:
        """STAGED (its memory is reserved), IN_PLACE, or both."""

    @property
    def staging_refusal(self) -> str:
        """Why STAGED is not among the modes; empty if it is."""
        return ""

    @property
    @abstractmethod
    def pause_modes(self) -> tuple[PauseMode, ...]:
        """Pause modes that really work; others are refused, never imitated."""

    @property
    @abstractmethod
    def cache_policies(self) -> tuple[CachePolicy, ...]:
        """Cache policies that really work."""

    @property
    @abstractmethod
    def evidence(self) -> Evidence:
        """The best evidence its receipts can carry."""

    @property
    def post_processes(self) -> bool:
        """Whether ``prepare`` or ``apply`` may write live tensors beyond what the update brings (hooks, repacking)."""
        return True

    @property
    def serving_address(self) -> str:
        """Where routers reach it (host:port), if it serves by itself; else empty."""
        return ""

    # --- what it holds

    @abstractmethod
    def held(self) -> tuple[Held, ...]:
        """What each worker holds, asked of the workers. Never of a version whose bytes are not all in place."""

    @abstractmethod
    def mixed(self) -> str:
        """Why live memory may hold a mix of versions, or bytes that were not verified; empty if it is whole."""

    @abstractmethod
    def layout(self) -> int:
        """Look at the live tensors; a number that changes when one moved, came, went or changed shape or dtype."""

    def glance(self) -> int | None:
        """A quick look: what ``layout`` said last, unless something was moved or replaced; then what it says now.

        What only ``layout`` sees is looked for before anything is armed. Default: None, ``layout`` is quick enough.
        """
        return None

    @abstractmethod
    def describe(self, manifest: Manifest, members: Sequence[str]) -> Description:
        """Compare with a manifest: the placement of each worker (named by ``members``) and every problem. No writes."""

    def conditions(self, declared: Declaration) -> tuple[Condition, ...]:
        """How its settings, as they are in force, compare with what the group declares. May take seconds; called on a
        thread of its own. Default: it has none that could differ."""
        return ()

    # --- workers in other processes: there the transports' ends, the memory and the receipts are theirs

    def offers(
        self, worker: int, member: str, transports: Sequence[str]
    ) -> tuple[list[Rendezvous], dict[str, str]] | None:
        """What the worker's own process offers of ``transports``, and why not the others.

        Default: the worker lives in this process, which offers for it.
        """
        return None

    def open_worker(self, worker: int, reception: Reception) -> Worker | None:
        """The worker's side of the update begun, where it lives elsewhere; ``targets`` and ``live`` are then not asked.

        Default: it lives in this process.
        """
        return None

    # --- generation

    def bind(self, incarnation: str) -> None:
        """Label the passes to come with the replica's incarnation. Default: nothing to label."""
        return None

    @abstractmethod
    def pause(self, holder: str, mode: PauseMode) -> None:
        """Begin a pause for ``holder`` and return at once; no later forward pass starts unless the mode lets it."""

    @abstractmethod
    def wait_paused(self, holder: str, timeout: float) -> bool:
        """Wait until that pause is in force. False after ``timeout`` seconds or when ``holder`` let go. May raise."""

    @abstractmethod
    def resume(self, holder: str) -> None:
        """Remove one holder's pause. Idempotent."""

    @abstractmethod
    def holders(self) -> frozenset[str]:
        """Who holds generation paused."""

    @property
    def paused_by_hand(self) -> bool:
        """Whether generation stands still though nobody here holds it: no router is to send anything. Default: no."""
        return False

    @property
    def running_requests(self) -> int:
        """Requests in flight."""
        return 0

    @property
    def labels(self) -> Mapping[str, str]:
        """What the fleet is to know of it, beside the labels that its agent is given (which win). Default: nothing."""
        return {}

    # --- sleep: the engine's memory is another's for a while; "sleep" then holds generation paused

    @property
    def sleep_levels(self) -> tuple[int, ...]:
        """Levels at which it can sleep: 1 keeps weights on the host, 2 drops them. Default: none."""
        return ()

    @property
    def sleep_refusal(self) -> str:
        """Why it cannot; empty if it can."""
        return "" if self.sleep_levels else f"{self.name} has no sleep"

    def asleep(self) -> frozenset[str]:
        """What is released now: "weights", "kv_cache"."""
        return frozenset()

    def heed_sleep(self) -> None:
        """Somebody else put it to sleep or woke it up, as ``asleep`` says: hold generation, or let go. Default: none
        does."""
        return None

    def sleep(self, level: int) -> None:
        """Stand still and release all. Level 1 keeps requests in flight; level 2 leaves it mixed: its weights are gone.

        Refused while an update is open or a part of it sleeps. Raising says that it does not sleep, or that
        ``asleep`` says how far it came.
        """
        raise EngineError(self.sleep_refusal)

    def wake(self, tags: frozenset[str]) -> None:
        """Bring ``tags`` back, the weights first; with the last one generation goes on. Refused where it would serve
        lost weights."""
        raise EngineError(self.sleep_refusal)

    @abstractmethod
    def forward(self, request: Request | None = None) -> AbstractContextManager[VersionTag]:
        """One forward pass: reads one version from first byte to last, and says which. See ``PauseGate.forward``."""

    @abstractmethod
    def request(self) -> AbstractContextManager[Request]:
        """One output of many passes. See ``PauseGate.request``."""

    # --- an update: see the module text

    @abstractmethod
    def begin(self, update: EngineUpdate) -> None:
        """Take an update; an earlier unfinished one is aborted. ``EngineError`` if the mode is not possible now."""

    @abstractmethod
    def targets(self, worker: int) -> LocalTensors:
        """Where the bytes of the update begun go: staging tensors, or (in place) live ones. Stable until its end."""

    @abstractmethod
    def live(self, worker: int) -> LocalTensors:
        """The live tensors that the update begun concerns: what LIVE evidence is read from."""

    @abstractmethod
    def writing(self, update_id: str) -> None:
        """In place: the first byte is about to land in live memory."""

    def settle(self, update_id: str) -> None:
        """The last bytes of a call are coming in: what ``prepare`` would look at beforehand may be looked at meanwhile.

        Raises what is wrong. Default: nothing.
        """
        return None

    @abstractmethod
    def prepare(self, update_id: str) -> None:
        """Everything landed. Staged: pre-validate. In place: post-process. Raises what is wrong."""

    @abstractmethod
    def apply(self, update_id: str) -> None:
        """Staged, decided, paused: write live memory on all workers and post-process. Raising leaves it mixed."""

    @abstractmethod
    def commit(self, update_id: str) -> None:
        """All workers hold the verified bytes: handle caches, change the label. Raising leaves it mixed."""

    @abstractmethod
    def abort(self, update_id: str, wrote: bool, reason: str) -> None:
        """Forget the update. ``wrote``: live memory was touched. Idempotent; ``""`` aborts whatever is open."""

    def abandon(self, update_id: str) -> None:
        """Forget a staged update whose staging somebody may still write to: that memory is never used again.

        ``EngineError`` if the engine cannot do without it (the default): the update is then waited for.
        """
        raise EngineError(f"{self.name} cannot give up the staging memory of {update_id}")

    def close(self) -> None:
        """Free everything; blocked passes end with ``EngineClosed``. Default: nothing."""
        return None


class GatedEngine(Engine):
    """An engine whose generation runs in this process, behind a ``PauseGate``. Adapters may build on it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = PauseGate()
        self._mixed = ""

    @property
    def pause_modes(self) -> tuple[PauseMode, ...]:
        """All three."""
        return (PauseMode.KEEP, PauseMode.WAIT, PauseMode.ABORT)

    def mixed(self) -> str:
        """See ``Engine``."""
        return self._mixed

    def soil(self, reason: str) -> None:
        """Live memory may hold a mix from here on: fence it. The first reason stays until ``commit``."""
        self._mixed = self._mixed or reason
        self.gate.pause("dirty", PauseMode.ABORT)

    def bind(self, incarnation: str) -> None:
        """See ``Engine``."""
        tag = self.gate.tag
        self.gate.relabel(VersionTag(tag.version, tag.update_id, tag.trainer_step, tag.lineage, incarnation))

    def pause(self, holder: str, mode: PauseMode) -> None:
        """See ``Engine``."""
        self.gate.pause(holder, mode)

    def wait_paused(self, holder: str, timeout: float) -> bool:
        """See ``Engine``."""
        return self.gate.wait_still(holder, timeout)

    def resume(self, holder: str) -> None:
        """See ``Engine``. The ``dirty`` hold of a mixed engine stays whoever asks."""
        if holder == "dirty" and self._mixed:
            return
        self.gate.resume(holder)

    def holders(self) -> frozenset[str]:
        """See ``Engine``."""
        return self.gate.holders

    @property
    def running_requests(self) -> int:
        """See ``Engine``."""
        return self.gate.running_requests

    def forward(self, request: Request | None = None) -> AbstractContextManager[VersionTag]:
        """See ``Engine``."""
        return self.gate.forward(request)

    def request(self) -> AbstractContextManager[Request]:
        """See ``Engine``."""
        return self.gate.request()

    def close(self) -> None:
        """See ``Engine``."""
        self.gate.close()
