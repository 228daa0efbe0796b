"""Planted defects: for each case one of its kind, in product code only, and the assertion that must find it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch

from tests.cases.children import planting
from weightplane.controlplane.core import ending, group, members, progress, replica, starting, trainers
from weightplane.controlplane.core.events import Beat, CallGone, StartUpdate
from weightplane.controlplane.core.model import NONE_HELD
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import Admin, Process
from weightplane.controlplane.server import runtime
from weightplane.controlplane.server.errors import Refused
from weightplane.inference_agent import operations, receipts, transfer
from weightplane.inference_agent.engines import fit, gate, torch_module
from weightplane.inference_agent.engines.mismatch import Description, ProblemKind
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.trainer_agent import attempt, plans, publisher, sources
from weightplane.transports import buckets, external

__all__ = ["PLANTS", "Plant", "planted"]

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Plant:
    """One defect. ``found_by``: how the assertion that must fail begins."""

    what: str
    found_by: str
    patch: Callable[[Patch], None]


PLANTS: dict[str, Plant] = {}


def plant(id_: str, found_by: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Register the defect of a case."""

    def register(patch: Callable[[Patch], None]) -> Callable[[Patch], None]:
        PLANTS[id_] = Plant((patch.__doc__ or "").strip(), found_by, patch)
        return patch

    return register


@contextmanager
def planted(id_: str) -> Iterator[None]:
    """Run with the defect in the product."""
    with pytest.MonkeyPatch.context() as m:
        PLANTS[id_].patch(m)
        planting(id_)
        try:
            yield
        finally:
            planting("")


# --- control --------------------------------------------------------------------------------------------------------


def handler(m: Patch, table: Any, event: type[Any], function: Callable[..., Any]) -> None:
    """Replace what the core does about an event."""
    m.setitem(table, event, function)


@plant("C01", "the restarted trainer's start succeeds")
def _(m: Patch) -> None:
    """A takeover leaves the dead trainer's update open."""
    grant = trainers._grant

    def lazy(tx: Any, e: Any) -> Any:
        u = tx.state.open
        tx.set(open=None)
        t = grant(tx, e)
        tx.set(open=u)
        return t

    m.setattr(trainers, "_grant", lazy)


@plant("C02", "the replacement is neither ready nor routable")
def _(m: Patch) -> None:
    """Whatever an engine holds counts as a version of this group."""
    m.setattr(members, "_ours", lambda state, held: True)


@plant("C03", "nobody switched")
def _(m: Patch) -> None:
    """A replica applies as soon as it has voted (its first update is spared: there must be versions to mix)."""
    prepared = replica._HANDLERS[replica.Prepared]

    def eager(tx: Any, e: Any) -> None:
        prepared(tx, e)
        t = tx.state.taking
        if t is not None and t.voted and t.want.version > 1:
            replica._commit(tx)

    handler(m, replica._HANDLERS, replica.Prepared, eager)


@plant("C04", "generation is blocked")
def _(m: Patch) -> None:
    """An abort in place is taken for one before the first byte."""
    m.setattr(transfer.Transfer, "wrote", property(lambda self: False))


@plant("C06", "the engine's state is bit-identical")
def _(m: Patch) -> None:
    """A post-load step is applied to what is loaded already."""
    post = TorchModuleEngine._post_process

    def scaled(self: Any) -> None:
        post(self)
        with torch.no_grad():
            for module in self.modules:
                for p in module.parameters():
                    if p.dtype is torch.float32:
                        p.mul_(1.001)

    m.setattr(TorchModuleEngine, "_post_process", scaled)


@plant("C07", "an update of 20,000 long names commits")
def _(m: Patch) -> None:
    """A manifest is sent in one message."""
    m.setattr(plans, "_PAGE_BYTES", 1 << 40)


@plant("C08", "who sleeps is in no update")
def _(m: Patch) -> None:
    """Whether a replica sleeps is not asked when an update begins, nor by its engine."""
    may_join = members.may_join
    m.setattr(members, "may_join", lambda r, *rest: may_join(dataclasses.replace(r, asleep=()), *rest))
    m.setitem(members._ADMIN_JOINS, Admin.ASLEEP, (True, True))


@plant("C11", "the failed update is over")
def _(m: Patch) -> None:
    """An aborted update is never closed."""
    m.setattr(ending, "maybe_aborted", lambda tx, u: None)


@plant("C13", "the update completes although a paused request is in flight")
def _(m: Patch) -> None:
    """WAIT waits for every request, also for those that another holder keeps standing."""
    m.setattr(
        gate.PauseGate, "_still", lambda self, holder, hold: not self._passes and (hold.hard or not self._requests)
    )


def passes_go_on(m: Patch) -> None:
    """A pause stops no pass, and a write waits for none."""

    @contextmanager
    def at_once(self: Any, timeout: float | None = None) -> Iterator[None]:
        yield

    m.setattr(gate.PauseGate, "_still", lambda self, holder, hold: True)
    m.setattr(gate.PauseGate, "_admits", lambda self, request: True)
    m.setattr(gate.PauseGate, "exclusive", at_once)


@plant("C15", "every output is of one version")
def _(m: Patch) -> None:
    """Requests that come during a pause slip in, and their passes run."""

    @contextmanager
    def slips_in(self: Any) -> Iterator[gate.Request]:
        request = gate.Request()
        self._requests.add(request)
        token = self._request.set(request)
        try:
            yield request
        finally:
            self._request.reset(token)
            self._requests.discard(request)

    m.setattr(gate.PauseGate, "request", slips_in)
    passes_go_on(m)


@plant("C16", "every rank raises the receiver's own error")
def _(m: Patch) -> None:
    """A participant that fails is noted, and the update goes on to its deadline."""
    m.setattr(progress, "part_failed", lambda tx, u, replica_id, failure: None)
    m.setattr(progress, "_own_words", lambda tx, u, part, failure: u)


@plant("C17", "a new init succeeds once the lease is over")
def _(m: Patch) -> None:
    """A hold whose init never came about lives for ever."""
    m.setattr(trainers, "rank_lives", lambda rank, now: True)


@plant("C18", "the sender raises")
def _(m: Patch) -> None:
    """The sender takes whatever answer ends an update for success."""
    m.setattr(attempt.Attempt, "_end", lambda self, error: self._settle(None))


@plant("C20", "no pass is torn")
def _(m: Patch) -> None:
    """A pause stops no pass, and a write waits for none."""
    passes_go_on(m)


@plant("C21", "the server answers after a cancelled call")
def _(m: Patch) -> None:
    """The cancellation of one call passes by every "except Exception" and ends the group."""
    call = runtime.Group.call

    async def fatal(self: Any, make: Any) -> Any:
        try:
            return await call(self, make)
        except asyncio.CancelledError:
            self.stop(Refused(Failure(Reason.INTERNAL, "a task was cancelled")))
            raise

    m.setattr(runtime.Group, "call", fatal)


@plant("C22", "the control plane says what the engine holds")
def _(m: Patch) -> None:
    """A caller that leaves is taken for an update that did not come about."""

    def forget(tx: Any, e: Any) -> None:
        u = tx.state.open
        if u is not None:
            tx.set(open=None, committed=NONE_HELD)
        tx.quietly("a caller left")

    handler(m, group._HANDLERS, CallGone, forget)


@plant("C24", "of two concurrent starts one is refused")
def _(m: Patch) -> None:
    """Whether an update is open is looked at before, and not as, another one begins."""
    start = starting.start

    def racing(tx: Any, e: Any) -> None:
        tx.set(open=None)
        start(tx, e)

    handler(m, group._HANDLERS, StartUpdate, racing)


# --- processes ------------------------------------------------------------------------------------------------------


@plant("P01", "the trainer gets the receiver's error text")
def _(m: Patch) -> None:
    """A receiver keeps its failure to itself."""
    m.setattr(operations.Operations, "_failed", lambda self, t, error, doing, applying: None)


@plant("P02", "the forked child is told at once")
def _(m: Patch) -> None:
    """A publisher does not notice that it was forked."""
    check = publisher.Publisher._check

    def anywhere(self: Any) -> None:
        self._pid = os.getpid()
        check(self)

    m.setattr(publisher.Publisher, "_check", anywhere)


@plant("P03", "its full update succeeds")
def _(m: Patch) -> None:
    """A receiver keeps its first communicator, whoever is on the other side."""
    get = transfer.Channels.get

    def first(self: Any, c: Any, member: str) -> Any:
        held = self.__dict__.setdefault("first", {})
        if member not in held:
            held[member] = get(self, c, member)
        return held[member]

    m.setattr(transfer.Channels, "get", first)


@plant("P05", "it is found at once")
def _(m: Patch) -> None:
    """Word of a death is taken for a beat of the living."""
    beat = group._HANDLERS[Beat]

    def alive(tx: Any, e: Any) -> None:
        beat(tx, dataclasses.replace(e, process=Process.RUNNING))

    handler(m, group._HANDLERS, Beat, alive)


@plant("P07", "a new client's init succeeds")
def _(m: Patch) -> None:
    """A hold ends only by its holder's own goodbye."""
    m.setattr(trainers, "rank_lives", lambda rank, now: True)


# --- tensor content -------------------------------------------------------------------------------------------------


@plant("T01", "the last shard's head holds B")
def _(m: Patch) -> None:
    """Whoever holds only a tied tensor's second name is left out of the placements."""
    fit_one = fit._fit_one

    def without_aliases(manifest: Any, *rest: Any) -> Any:
        return [p for p in fit_one(manifest, *rest) if not manifest.tensors[p.tensor].alias_of]

    m.setattr(fit, "_fit_one", without_aliases)


@plant("T02", "every strided tensor holds its logical values over shm")
def _(m: Patch) -> None:
    """The sender takes address and element count, and not the strides."""
    m.setattr(buckets, "is_row_major", lambda tensor: True)


@plant("T05", "the second update is in the live tensors")
def _(m: Patch) -> None:
    """The engine's tensors are looked up once, at its first update."""
    layout = TorchModuleEngine.layout
    m.setattr(TorchModuleEngine, "layout", lambda self: self._layout or layout(self))
    m.setattr(TorchModuleEngine, "_same_layout", lambda self: None)


@plant("T07", "the unsent buffer is unchanged")
def _(m: Patch) -> None:
    """Every update sets runtime buffers back to their default."""
    post = TorchModuleEngine._post_process

    def reset(self: Any) -> None:
        post(self)
        for module in self.modules:
            for owner in module.modules():
                for name in owner._non_persistent_buffers_set:
                    owner._buffers[name].zero_()

    m.setattr(TorchModuleEngine, "_post_process", reset)


@plant("T10", "each tensor holds its own values over shm")
def _(m: Patch) -> None:
    """Data comes grouped by dtype, in another order than the manifest's."""
    collect = sources.collect

    def regrouped(*args: Any) -> Any:
        entries, tensors = collect(*args)
        groups: dict[Any, list[torch.Tensor]] = {}
        for t in tensors:
            groups.setdefault((t.dtype, t.shape), []).append(t)
        return entries, [groups[t.dtype, t.shape].pop() for t in tensors]

    m.setattr(sources, "collect", regrouped)


@plant("T11", "packed names are refused at the start")
def _(m: Patch) -> None:
    """An engine takes part whatever its description says."""
    m.setattr(Description, "failure", lambda self, member: None)


@plant("T12", "a shape of equal size is refused at the start")
def _(m: Patch) -> None:
    """Shapes are compared by their number of elements."""
    fit_one = fit._fit_one

    def by_count(manifest: Any, worker: int, where: str, live: Any, boxes: Any, problems: list[Any]) -> Any:
        mine: list[Any] = []
        pieces = fit_one(manifest, worker, where, live, boxes, mine)
        same = all(prod(b - a for a, b in p.box) == live.tensor.numel() for p in pieces)
        problems.extend(p for p in mine if not (same and p.kind is ProblemKind.SHAPE))
        return pieces

    m.setattr(fit, "_fit_one", by_count)
    m.setattr(buckets._Spans, "_check", lambda self, index, tensor, box: None)


@plant("T16", "every transport updates the same names")
def _(m: Patch) -> None:
    """One transport leaves out what lies at the end of the model, and says that it moved it."""
    receive = external._Receiver.receive

    def most(self: Any, bucket: Any, spans: Any) -> None:
        receive(self, bucket, [torch.empty_like(s) for s in spans] if bucket.index >= 8 else spans)

    m.setattr(external._Receiver, "receive", most)


@plant("T18", "the dtype is refused at the start")
def _(m: Patch) -> None:
    """Dtypes are not compared before the transfer."""
    fit_one = fit._fit_one

    def any_dtype(manifest: Any, worker: int, where: str, live: Any, boxes: Any, problems: list[Any]) -> Any:
        mine: list[Any] = []
        pieces = fit_one(manifest, worker, where, live, boxes, mine)
        problems.extend(p for p in mine if p.kind is not ProblemKind.DTYPE)
        return pieces

    m.setattr(fit, "_fit_one", any_dtype)


@plant("T20", "a name that no rule maps is an error")
def _(m: Patch) -> None:
    """What matches no rule is skipped as if a list allowed it."""
    m.setattr(fit, "_matches", lambda name, patterns: True)


@plant("T21", "the apply that went wrong is noticed by tensor")
def _(m: Patch) -> None:
    """The digest of what came by the wire is all that is compared."""
    read_back = receipts.Ledger.read_back
    m.setattr(receipts.Ledger, "read_back", lambda self, live: None if self.digests else read_back(self, live))


@plant("T23", "unknown names are an error by default")
def _(m: Patch) -> None:
    """Names that match nothing are dropped without a word."""
    compare = torch_module.fit  # type: ignore[attr-defined]

    def silent(*args: Any) -> Description:
        said: Description = compare(*args)
        names = (ProblemKind.MISSING, ProblemKind.EXTRA)
        return dataclasses.replace(said, problems=tuple(p for p in said.problems if p.kind not in names))

    m.setattr(torch_module, "fit", silent)
