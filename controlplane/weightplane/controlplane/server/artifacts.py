"""What a group's calls exchange by id: manifests, placements, plans, digests, receipts. Bounded; in memory.

Built from pages; big work (decoding, validating, planning, comparing) runs in a worker thread, so that the loop, and
with it every lease, goes on. What proves the committed version is stored with its decision (``kept``) and comes back
after a restart (``recalled``); the rest members send again, once they are told that it is unknown.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from weightplane.controlplane.core import kept as proofs
from weightplane.controlplane.core.events import Compare, MakePlan
from weightplane.controlplane.core.kept import Kept
from weightplane.controlplane.core.manifest import Manifest, ManifestError, TensorMeta
from weightplane.controlplane.core.placement import Box, Piece, Placement, full_placement, placement_problems
from weightplane.controlplane.core.plan import PlanError
from weightplane.controlplane.core.planner import make_plan
from weightplane.controlplane.core.progress import live_channels
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import Evidence, Verify
from weightplane.controlplane.core.update_state import PlanSummary, Update
from weightplane.controlplane.core.verify import (
    PlanIndex,
    WorkerReceipt,
    compare,
    compare_known,
    expected_table,
    known_digests,
)
from weightplane.v1 import tensor_pb2

from . import convert
from .fields import between, invalid, refuse
from .uploads import Lru, Pages

__all__ = ["Artifacts", "Limits", "Receipt"]

log = logging.getLogger("weightplane.controlplane")

#: Entries (tensors, pieces, regions) that are worked on at once, without a thread: well under a millisecond.
_SMALL = 256
#: Catch-ups whose receipts are kept at once: more than are ever under way.
_CATCH_UPS = 256

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one group may keep."""

    replicas: int = 4096
    tensors: int = 1_000_000
    pieces: int = 4_000_000
    manifests: int = 16
    layouts: int = 256
    plans: int = 32
    buckets: int = 1_000_000  # of a plan
    uploads: int = 4096  # in pages, at once: every worker of a fleet may send its placement


@dataclass
class Receipt:
    """One worker's receipt being uploaded."""

    plan_id: str
    evidence: Evidence
    bytes_received: int
    elements_written: int
    digests: Pages[int]

    def complete(self) -> WorkerReceipt | None:
        """The whole, once it is there."""
        digests = self.digests.joined()
        if digests is None:
            return None
        return WorkerReceipt(
            self.plan_id, self.evidence, self.bytes_received, self.elements_written, array("Q", digests)
        )


@dataclass
class OfUpdate:
    """What is kept for the open update alone: expected digests by (plan, rank), receipts by member.

    ``tables``: the expected digests of all ranks by plan, once they are complete.
    """

    update_id: str
    digests: dict[tuple[str, int], Pages[int]] = field(default_factory=dict)
    receipts: dict[str, Receipt] = field(default_factory=dict)
    tables: dict[str, array[int]] = field(default_factory=dict)


class Artifacts:
    """One group's artifacts. Its methods run on the event loop; ``pinned`` names what live state refers to,
    ``committed`` the update whose digests are kept for catch-ups."""

    def __init__(
        self, executor: Executor, limits: Limits, pinned: Callable[[], set[str]], committed: Callable[[], str]
    ) -> None:
        self.executor = executor
        self.limits = limits
        self.manifests: Lru[Manifest] = Lru(limits.manifests, pinned)
        self._layouts: Lru[tuple[Piece, ...]] = Lru(limits.layouts, pinned)
        self._plans: Lru[PlanIndex] = Lru(limits.plans, pinned)
        self._plan_of: Lru[str] = Lru(4 * limits.plans)
        self._full: Lru[str] = Lru(limits.manifests)
        self._uploads: Lru[Pages[Any]] = Lru(limits.uploads)
        self.plan_pages: Lru[asyncio.Future[list[tensor_pb2.PlanPage]]] = Lru(limits.plans, pinned)
        self.update = OfUpdate("")
        self._committed = committed
        self._kept = OfUpdate("")  # of the committed update, once another is open
        self._recalled: Kept | None = None  # of the committed update, if it was committed before a restart of ours
        self._bodies: Lru[tuple[str, bytes]] = Lru(limits.manifests + limits.plans, pinned)  # see core.kept
        self._catch_ups: Lru[OfUpdate] = Lru(_CATCH_UPS)

    async def _work(self, size: int, work: Callable[..., V], *args: Any) -> V:
        """Do it here if it is small (a switch of threads costs more), else in a worker thread."""
        if size <= _SMALL:
            return work(*args)
        return await asyncio.get_running_loop().run_in_executor(self.executor, work, *args)

    # --- manifests ---

    async def put_manifest(
        self, manifest_id: str, first: int, total: int, page: Sequence[tensor_pb2.TensorMeta]
    ) -> tuple[bool, int]:
        """A page of a manifest: (complete, tensors so far)."""
        if self.manifests.get(manifest_id) is not None:
            return True, total
        if total > self.limits.tensors:
            refuse(Reason.LIMIT, f"total: expected at most {self.limits.tensors} tensors, found {total}")
        between("total", total, 0, self.limits.tensors)
        decoded = await self._work(len(page), convert.tensors, first, page)
        pages = self._upload(f"manifest {manifest_id}", total)
        pages.add("tensors", first, total, decoded)
        tensors = pages.joined()
        if tensors is None:
            return False, pages.received
        try:
            manifest = await self._work(total, _manifest, tensors)
        except ManifestError as e:
            self._uploads.pop(f"manifest {manifest_id}")
            refuse(Reason.INVALID_ARGUMENT, str(e))
        if manifest.id != manifest_id:
            self._uploads.pop(f"manifest {manifest_id}")
            invalid("manifest_id", f"the content's hash, {manifest.id}", manifest_id)
        self._uploads.pop(f"manifest {manifest_id}")
        self.manifests.put(manifest_id, manifest)
        return True, total

    def manifest(self, manifest_id: str) -> Manifest:
        """A complete manifest, or a refusal."""
        manifest = self.manifests.get(manifest_id)
        if manifest is None:
            refuse(Reason.UNKNOWN_MANIFEST, f"no complete manifest {manifest_id!r} here: send it with PutManifest")
        return manifest

    def _upload(self, key: str, total: int) -> Pages[Any]:
        pages = self._uploads.get(key)
        if pages is None or pages.total != total:
            pages = Pages(total)
            self._uploads.put(key, pages)
        return pages

    # --- placements ---

    async def put_placement(
        self, manifest_id: str, member: str, p: tensor_pb2.Placement, first: int, total: int
    ) -> str:
        """A page of a member's placement: its layout's id once it is complete, else empty."""
        manifest = self.manifest(manifest_id)
        if p.member != member:
            invalid("placement.member", repr(member), p.member)
        if p.full:
            if p.pieces:
                invalid("placement.pieces", "none, since the placement is full", len(p.pieces))
            if first or total not in (0, len(manifest)):
                invalid("total", f"0 or {len(manifest)} with first 0, since the placement is full", f"{first}/{total}")
            return await self._full_layout(manifest)
        if total > self.limits.pieces:
            refuse(Reason.LIMIT, f"total: expected at most {self.limits.pieces} pieces, found {total}")
        between("total", total, 0, self.limits.pieces)
        key = f"placement {manifest_id} {member}"
        decoded = await self._work(len(p.pieces), _pieces, manifest, p.pieces)
        pages = self._upload(key, total)
        pages.add("placement.pieces", first, total, decoded)
        pieces = pages.joined()
        if pieces is None:
            return ""
        self._uploads.pop(key)
        placement = await self._work(total, _placement, manifest, member, pieces)
        self._layouts.put(placement.layout_id, placement.pieces)
        return placement.layout_id

    async def _full_layout(self, manifest: Manifest) -> str:
        layout_id = self._full.get(manifest.id)
        if layout_id is None or self._layouts.get(layout_id) is None:
            placement = await self._work(len(manifest), _full, manifest)
            layout_id = placement.layout_id
            self._full.put(manifest.id, layout_id)
            self._layouts.put(layout_id, placement.pieces)
        return layout_id

    # --- plans ---

    async def make_plan(self, e: MakePlan) -> PlanSummary:
        """The plan of a channel, made or remembered. Raises ``PlanError``."""
        key = repr((e.manifest_id, e.senders, e.receivers, e.bucket_bytes))
        plan_id = self._plan_of.get(key)
        index = self._plans.get(plan_id) if plan_id is not None else None
        if index is None:
            manifest = self.manifests.get(e.manifest_id)
            if manifest is None:
                raise PlanError([f"manifest {e.manifest_id} is gone: PutManifest again"])
            members = self._placements((*e.senders, *e.receivers))
            senders, receivers = members[: len(e.senders)], members[len(e.senders) :]
            size = sum(len(m.pieces) for m in members) + self._buckets(manifest, e.bucket_bytes)
            index = await self._work(size, _plan, manifest, senders, receivers, e.bucket_bytes)
            self._plan_of.put(key, index.plan.id)
            self._plans.put(index.plan.id, index)
        plan = index.plan
        if not is_catch_up(e.update_id):
            await self._make_bodies(index)
        return PlanSummary(plan.id, len(plan.buckets), plan.nbytes, index.bytes_for)

    async def _make_bodies(self, index: PlanIndex) -> None:
        """What is stored of the manifest and of a plan with every decision that uses them: made here, where there is
        time, and once."""
        for key, make, what in (
            (index.manifest.id, proofs.manifest_body, index.manifest),
            (index.plan.id, proofs.regions_body, index.plan),
        ):
            if self._bodies.get(key) is None:
                size = len(index.manifest) + len(index.plan.regions)
                self._bodies.put(key, await self._work(size, make, what))

    def _buckets(self, manifest: Manifest, bucket_bytes: int) -> int:
        """About how many buckets a plan will have; refuses what would keep the server busy for minutes."""
        found = manifest.nbytes // bucket_bytes
        if found > self.limits.buckets:
            raise PlanError(
                [
                    f"{manifest.nbytes} bytes in buckets of {bucket_bytes} are {found} buckets: expected at most "
                    f"{self.limits.buckets}. Ask for larger bucket_bytes in InitTransfer"
                ]
            )
        return found

    def _placements(self, members: Iterable[tuple[str, str]]) -> list[Placement]:
        out: list[Placement] = []
        problems: list[str] = []
        for member, layout_id in members:
            pieces = self._layouts.get(layout_id)
            if pieces is None:
                problems.append(f"{member}: no placement here of this manifest: put it (again)")
            else:
                out.append(Placement(member, pieces))
        if problems:
            raise PlanError(problems)
        return out

    def plan(self, plan_id: str) -> PlanIndex:
        """A plan, or a refusal."""
        index = self._plans.get(plan_id)
        if index is None:
            refuse(Reason.UNKNOWN_PLAN, f"no plan {plan_id!r} here")
        return index

    # --- digests and receipts of the open update ---

    def of(self, update_id: str) -> OfUpdate:
        """What is kept for the open update, or for a catch-up. What was kept for another update is dropped, but for the
        digests of the committed one."""
        if is_catch_up(update_id):
            found = self._catch_ups.get(update_id)
            if found is None:
                found = OfUpdate(update_id)
                self._catch_ups.put(update_id, found)
            return found
        if self.update.update_id != update_id:
            if self.update.update_id and self.update.update_id == self._committed():
                self._kept = replace(self.update, receipts={})
            self.update = OfUpdate(update_id)
            if self._recalled is not None and self._recalled.update_id != self._committed():
                self._recalled = None
        return self.update

    # --- what outlives us ---

    def recall(self, manifest: Manifest, kept: Kept) -> None:
        """After a restart: what proves the committed version, as it was stored with its decision."""
        self.manifests.put(manifest.id, manifest)
        self._recalled = kept

    def kept(self, u: Update) -> Kept | None:
        """What is to be stored with the decision of the open update; ``None`` if that cannot be: it is decided all the
        same, and nobody is caught up to it after a restart."""
        of, plans = self.update, dict.fromkeys(u.plans[c].plan_id for c in live_channels(u))
        bodies = {key: self._bodies.get(key) for key in (u.options.manifest_id, *plans)}
        tables = {p: self._table(of, self.plan(p)) for p in plans} if u.options.verify is not Verify.OFF else {}
        digests: list[tuple[str, bytes]] = []
        for plan_id, table in tables.items():
            body = bodies[plan_id]
            if body is not None and not isinstance(table, Failure):
                digests.append((body[0], proofs.pack(table)))
        there = dict(body for body in bodies.values() if body is not None)
        made = Kept(u.update_id, u.options.manifest_id, u.options.verify.value, tuple(digests), there)
        why = ""
        if of.update_id != u.update_id or len(digests) < len(tables) or None in bodies.values():
            why = "they are gone from memory"
        elif made.nbytes > proofs.MOST_BYTES:
            why = f"they take {made.nbytes} bytes, and {proofs.MOST_BYTES} are allowed"
        if why:
            text = "update %s: its digests are not stored: %s. After a restart nobody is caught up to it"
            log.warning(text, u.update_id, why, extra={"update_id": u.update_id, "version": u.version})
        return None if why else made

    async def compare_catch_up(self, e: Compare, committed_under: Verify) -> tuple[Evidence, Failure | None]:
        """A caught-up replica's receipts against the digests of the committed update that it is brought to."""
        source = next((u for u in (self.update, self._kept) if u.update_id == e.against), None)
        known: dict[tuple[int, Box], int] = {}
        stored = self._recalled
        if source is None and stored is not None and stored.update_id == e.against:
            committed_under = Verify(stored.verify)
            known = await self._work(sum(len(d) for _, d in stored.digests) // 8, proofs.known, stored)
        for plan_id in {plan_id for plan_id, _ in source.digests} if source is not None else ():
            index = self.plan(plan_id)
            assert source is not None
            table = self._table(source, index)
            if not isinstance(table, Failure):
                size = len(index.plan.regions)
                known.update(await self._work(size, known_digests, index, e.against, committed_under, table))
        kept = self.of(e.update_id)
        [(plan_id, members)] = e.plans
        receipts = {m: done for m in members if m in kept.receipts and (done := kept.receipts[m].complete())}
        every = committed_under is Verify.FULL
        index = self.plan(plan_id)
        size = len(index.plan.regions) * len(members)
        return await self._work(size, compare_known, index, known, every, members, receipts)

    def put_digests(self, update_id: str, plan_id: str, rank: int, first: int, total: int, page: Sequence[int]) -> bool:
        """A page of a rank's expected digests; True once they are complete."""
        want = len(self.plan(plan_id).sent_by(f"rank/{rank}"))
        if total != want:
            invalid("total", f"{want}, the regions that rank/{rank} sends in plan {plan_id}", total)
        kept = self.of(update_id)
        kept.tables.pop(plan_id, None)
        pages = kept.digests.setdefault((plan_id, rank), Pages(total))
        pages.add("digests", first, total, page)
        return pages.received == total

    def put_receipt(self, update_id: str, member: str, r: Receipt, first: int, page: Sequence[int], off: bool) -> bool:
        """A page of a worker's receipt; True once it is complete. ``off``: nothing is hashed."""
        want = len(self.plan(r.plan_id).received_by(member))
        if r.digests.total != want and not (off and r.digests.total == 0):
            invalid("receipt.total", f"{want}, the regions that {member} receives in plan {r.plan_id}", r.digests.total)
        receipts = self.of(update_id).receipts
        old = receipts.get(member)
        if old is not None and first != 0 and old.digests.total == r.digests.total:
            r.digests = old.digests
        r.digests.add("receipt.digests", first, r.digests.total, page)
        receipts[member] = r
        return r.digests.received == r.digests.total

    async def compare(self, e: Compare) -> tuple[Evidence, Failure | None]:
        """A participant's receipts against the expected digests, plan by plan. The weakest evidence counts."""
        weakest = Evidence.LIVE
        for plan_id, members in e.plans:
            evidence, failure = await self._compare(e, plan_id, members)
            if failure is not None:
                return Evidence.NONE, failure
            weakest = min(weakest, evidence)
        return weakest, None

    async def _compare(self, e: Compare, plan_id: str, members: Sequence[str]) -> tuple[Evidence, Failure | None]:
        kept, index = self.of(e.update_id), self.plan(plan_id)
        table = array("Q") if e.verify is Verify.OFF else self._table(kept, index)
        if isinstance(table, Failure):
            return Evidence.NONE, table
        receipts = {m: done for m in members if m in kept.receipts and (done := kept.receipts[m].complete())}
        size = len(index.plan.regions) * len(members)
        return await self._work(size, compare, index, e.update_id, e.verify, table, members, receipts)

    def _table(self, kept: OfUpdate, index: PlanIndex) -> array[int] | Failure:
        """Made once for all participants."""
        table = kept.tables.get(index.plan.id)
        if table is not None:
            return table
        expected = {
            f"rank/{rank}": digests
            for (plan_id, rank), pages in kept.digests.items()
            if plan_id == index.plan.id and (digests := pages.joined()) is not None
        }
        made = expected_table(index, expected)
        if not isinstance(made, Failure):
            kept.tables[index.plan.id] = made
        return made


def is_catch_up(update_id: str) -> bool:
    """Whether it is a catch-up's id, and no update's."""
    return update_id.startswith("k-")


def _full(manifest: Manifest) -> Placement:
    placement = full_placement("any", manifest)
    _ = placement.layout_id
    return placement


def _manifest(tensors: list[TensorMeta]) -> Manifest:
    manifest = Manifest.of(tensors)
    _ = manifest.id  # hashed here, not on the loop
    return manifest


def _pieces(manifest: Manifest, page: Iterable[tensor_pb2.Piece]) -> list[Piece]:
    """Pieces of a page; no ranges mean the whole tensor."""
    out: list[Piece] = []
    for p in page:
        if not 0 <= p.tensor < len(manifest):
            invalid("placement.pieces.tensor", f"0..{len(manifest) - 1}", p.tensor)
        box: Box = tuple((r.start, r.stop) for r in p.box)
        out.append(Piece(p.tensor, box or tuple((0, d) for d in manifest.tensors[p.tensor].shape)))
    return out


def _placement(manifest: Manifest, member: str, pieces: list[Piece]) -> Placement:
    placement = Placement.of(member, pieces)
    problems = placement_problems(manifest, placement)
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        refuse(Reason.PLACEMENT_MISMATCH, f"{'; '.join(problems[:5])}{more}", member)
    _ = placement.layout_id
    return placement


def _plan(manifest: Manifest, senders: list[Placement], receivers: list[Placement], bucket_bytes: int) -> PlanIndex:
    index = PlanIndex(make_plan(manifest, senders, receivers, bucket_bytes), manifest)
    _ = index.bytes_for, index.sent_by("")  # worked out here, not on the loop
    return index
