"""Whether what workers hold is what the trainer sent: receipts against the plan and the expected digests. Pure.

**Counts** are compared at every level but are never proof of content: payload bytes must equal the plan's for that
worker; elements written (where the evidence claims CONSUMED or LIVE) must equal the elements of its regions, each
counted once however many names it has. **Digests** are compared for every region (FULL) or for a sample (SAMPLED).
The sample is drawn from the update's id, which is minted after the trainer's weights are fixed: both sides compute it
by ``sampled_regions`` and hash the regions in it; the other slots of the packed field hold 0 and are not looked at.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from .manifest import DTYPE_BYTES, Manifest
from .placement import Box, box_text
from .plan import Plan
from .reasons import Failure, Reason
from .states import Evidence, Verify

__all__ = [
    "PlanIndex",
    "WorkerReceipt",
    "compare",
    "compare_known",
    "expected_table",
    "known_digests",
    "sampled_regions",
]

_MASK = (1 << 64) - 1


def sampled_regions(update_id: str, regions: int) -> list[int]:
    """Indices (into ``Plan.regions``, rising) that SAMPLED hashes: one in sixteen, at least 16, at most 4096.

    splitmix64, seeded by the FNV-1a hash of the update's id, drives a selection by Floyd: any language can repeat it.
    """
    count = min(regions, max(16, min(4096, regions // 16)))
    seed = 0xCBF29CE484222325
    for byte in update_id.encode():
        seed = (seed ^ byte) * 0x100000001B3 & _MASK
    chosen: set[int] = set()
    for j in range(regions - count, regions):
        seed = (seed + 0x9E3779B97F4A7C15) & _MASK
        z = (seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
        pick = (z ^ (z >> 31)) % (j + 1)
        chosen.add(j if pick in chosen else pick)
    return sorted(chosen)


@dataclass(frozen=True)
class PlanIndex:
    """A plan's regions by sender and by receiver, worked out once; equal receivers share what is theirs."""

    plan: Plan
    manifest: Manifest

    @cached_property
    def _by_sender(self) -> dict[str, array[int]]:
        out: dict[str, array[int]] = {}
        for i, r in enumerate(self.plan.regions):
            out.setdefault(r.sender, array("q")).append(i)
        return out

    @cached_property
    def _shares(self) -> dict[str, _Share]:
        by_set: dict[tuple[str, ...], array[int]] = {}
        for i, r in enumerate(self.plan.regions):
            by_set.setdefault(r.receivers, array("q")).append(i)
        sets_of: dict[str, list[tuple[str, ...]]] = {}
        for receivers in by_set:
            for member in receivers:
                sets_of.setdefault(member, []).append(receivers)
        shares: dict[tuple[tuple[str, ...], ...], _Share] = {}
        out: dict[str, _Share] = {}
        for member, sets in sets_of.items():
            key = tuple(sets)
            if key not in shares:
                shares[key] = self._share(sorted(i for s in sets for i in by_set[s]))
            out[member] = shares[key]
        return out

    def _share(self, indices: Sequence[int]) -> _Share:
        regions = [self.plan.regions[i] for i in indices]
        size = [DTYPE_BYTES[t.dtype] for t in self.manifest.tensors]
        elements = sum(r.nbytes // size[r.tensor] for r in regions)
        return _Share(array("q", indices), sum(r.nbytes for r in regions), elements)

    @cached_property
    def bytes_for(self) -> dict[str, int]:
        """Payload bytes per receiving member."""
        return {member: share.nbytes for member, share in self._shares.items()}

    def elements_for(self, member: str) -> int:
        """Elements that ``member`` receives, each region once."""
        share = self._shares.get(member)
        return share.elements if share is not None else 0

    def sent_by(self, sender: str) -> Sequence[int]:
        """Indices of the regions that ``sender`` sends, in plan order."""
        return self._by_sender.get(sender, array("q"))

    def received_by(self, member: str) -> array[int]:
        """Indices of the regions that ``member`` receives, in plan order."""
        share = self._shares.get(member)
        return share.regions if share is not None else array("q")


@dataclass(frozen=True, slots=True)
class _Share:
    """What one receiver gets: region indices, and their sizes in all."""

    regions: array[int]
    nbytes: int
    elements: int


@dataclass(frozen=True, slots=True)
class WorkerReceipt:
    """One worker's complete receipt. ``digests`` are of its regions, in plan order; none when nothing is hashed."""

    plan_id: str
    evidence: Evidence
    bytes_received: int
    elements_written: int
    digests: array[int]


def expected_table(index: PlanIndex, expected: Mapping[str, Sequence[int]]) -> array[int] | Failure:
    """Expected digests in the order of ``Plan.regions``, from those of each sender; or whose are missing."""
    table = array("Q", bytes(8 * len(index.plan.regions)))
    for sender in sorted({r.sender for r in index.plan.regions}):
        regions, digests = index.sent_by(sender), expected.get(sender)
        if digests is None or len(digests) != len(regions):
            found = "none" if digests is None else str(len(digests))
            message = f"{sender}: expected {len(regions)} digests of plan {index.plan.id}, found {found}"
            return Failure(Reason.DIGESTS_REQUIRED, message, sender)
        for i, digest in zip(regions, digests, strict=True):
            table[i] = digest
    return table


def compare(
    index: PlanIndex,
    update_id: str,
    verify: Verify,
    table: array[int],
    members: Sequence[str],
    receipts: Mapping[str, WorkerReceipt],
) -> tuple[Evidence, Failure | None]:
    """The weakest evidence of these workers, and what is wrong if anything is. ``table``: see ``expected_table``."""
    sample = frozenset(sampled_regions(update_id, len(table))) if verify is Verify.SAMPLED else None
    if verify is Verify.OFF:
        sample = frozenset()
    return _compared(index, sample, table, members, receipts)


def _compared(
    index: PlanIndex,
    sample: frozenset[int] | None,
    table: array[int],
    members: Sequence[str],
    receipts: Mapping[str, WorkerReceipt],
) -> tuple[Evidence, Failure | None]:
    """``sample``: the regions to look at; ``None``: all."""
    weakest = Evidence.LIVE
    for member in members:
        receipt = receipts.get(member)
        failure = _counts(index, member, receipt)
        if failure is not None:
            return Evidence.NONE, failure
        assert receipt is not None
        weakest = min(weakest, receipt.evidence)
    if sample is not None and not sample:
        return weakest, None
    for member in members:
        failure = _digests(index, member, table, receipts[member].digests, sample)
        if failure is not None:
            return Evidence.NONE, failure
    return weakest, None


def known_digests(index: PlanIndex, update_id: str, verify: Verify, table: array[int]) -> dict[tuple[int, Box], int]:
    """What an update's expected digests say of the manifest: by root tensor and box. None where nothing was hashed."""
    regions = index.plan.regions
    if verify is Verify.OFF:
        return {}
    which = sampled_regions(update_id, len(table)) if verify is Verify.SAMPLED else range(len(table))
    return {(regions[i].tensor, regions[i].box): table[i] for i in which}


def compare_known(
    index: PlanIndex,
    known: Mapping[tuple[int, Box], int],
    every: bool,
    members: Sequence[str],
    receipts: Mapping[str, WorkerReceipt],
) -> tuple[Evidence, Failure | None]:
    """A catch-up's receipts against what the trainer said of the committed version (``known_digests``).

    ``every``: each region must be known (the version was committed under FULL); else those that are must be equal, and
    there must be some.
    """
    table, sample, missing = array("Q", bytes(8 * len(index.plan.regions))), set(), []
    for i, r in enumerate(index.plan.regions):
        digest = known.get((r.tensor, r.box))
        if digest is None:
            missing.append(r)
        else:
            table[i] = digest
            sample.add(i)
    if (every and missing) or not sample:
        name = index.manifest.tensors[missing[0].tensor].name if missing else ""
        where = f"{name!r}, box {box_text(missing[0].box)}" if missing else "any tensor"
        message = (
            f"the trainer gave no digest of {where}: of {len(missing)} piece(s) of this layout nothing proves what was "
            "committed. The next full update takes the replica along"
        )
        return Evidence.NONE, Failure(Reason.DIGESTS_REQUIRED, message)
    return _compared(index, None if not missing else frozenset(sample), table, members, receipts)


def _counts(index: PlanIndex, member: str, receipt: WorkerReceipt | None) -> Failure | None:
    if receipt is None:
        message = f"{member} voted without a complete receipt: PutReceipt comes first"
    elif receipt.plan_id != index.plan.id:
        message = f"{member}: expected a receipt of plan {index.plan.id}, found one of {receipt.plan_id!r}"
    elif receipt.evidence is Evidence.NONE:
        message = f"{member}: expected a receipt with evidence, found none"
    elif receipt.bytes_received != index.bytes_for.get(member, 0):
        want = index.bytes_for.get(member, 0)
        message = f"{member}: expected {want} payload bytes, found {receipt.bytes_received} in place"
    elif receipt.evidence >= Evidence.CONSUMED and receipt.elements_written != index.elements_for(member):
        want, found = index.elements_for(member), receipt.elements_written
        message = f"{member}: expected {want} elements written by the engine, found {found}"
    else:
        return None
    return Failure(Reason.INCOMPLETE, message, member)


def _digests(
    index: PlanIndex, member: str, table: array[int], found: array[int], sample: frozenset[int] | None
) -> Failure | None:
    regions = index.received_by(member)
    if len(found) != len(regions):
        message = f"{member}: expected {len(regions)} digests, found {len(found)}: a region was not hashed"
        return Failure(Reason.INCOMPLETE, message, member)
    if len(regions) == len(table) and found == table:
        return None  # it receives everything, and all is equal: said at the speed of memory
    wrong = [
        i for i, digest in zip(regions, found, strict=True) if digest != table[i] and (sample is None or i in sample)
    ]
    if not wrong:
        return None
    plan, tensors = index.plan, index.manifest.tensors
    names = list(dict.fromkeys(tensors[plan.regions[i].tensor].name for i in wrong))
    by_region = dict(zip(regions, found, strict=True))
    first = plan.regions[wrong[0]]
    message = (
        f"{member}: {len(wrong)} of {len(regions)} regions differ from the trainer's, in {len(names)} tensor(s): "
        f"{', '.join(map(repr, names[:5]))}{' and more' if len(names) > 5 else ''}. First: {names[0]!r}, box "
        f"{box_text(first.box)} from {first.sender}: expected digest {table[wrong[0]]:016x}, "
        f"found {by_region[wrong[0]]:016x}"
    )
    return Failure(Reason.DIGEST_MISMATCH, message, member, "", tuple(names[:5]), len(names))
