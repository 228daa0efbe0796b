"""Receipts as they come: page by page (PutReceipt), or whole, beside the vote that they are for."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from weightplane.controlplane.core import catching
from weightplane.controlplane.core.events import Report
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import Phase, Stage, Verify
from weightplane.v1 import update_pb2

from .artifacts import Receipt
from .enums import EVIDENCE
from .errors import Refused
from .fields import between, invalid, refuse
from .runtime import Group
from .uploads import Pages

__all__ = ["take", "take_with_vote", "worker_of"]

log = logging.getLogger("weightplane.controlplane")


def take(group: Group, replica_id: str, incarnation: str, r: update_pb2.Receipt) -> bool:
    """A page of one worker's receipt; True once every digest is in. Raises ``Refused``: stale, or not as planned."""
    worker = worker_of(group, replica_id, incarnation, r.member)
    plan_id, off = _expected(group, replica_id, incarnation, r.update_id, worker)
    if plan_id != r.plan_id:
        invalid("receipt.plan_id", plan_id or "a plan that is made", r.plan_id)
    receipt = Receipt(
        r.plan_id,
        EVIDENCE.core("receipt.evidence", r.evidence),
        between("receipt.bytes_received", r.bytes_received, 0, 1 << 62),
        between("receipt.elements_written", r.elements_written, 0, 1 << 62),
        Pages(between("receipt.total", r.total, 0, 1 << 30)),
    )
    return group.artifacts.put_receipt(r.update_id, r.member, receipt, r.first, r.digests, off)


def take_with_vote(group: Group, vote: Report, receipts: Iterable[update_pb2.Receipt]) -> None:
    """The receipts beside a vote. Raises ``Refused`` for what can never be right.

    What has become stale on the way counts for nothing, like the vote itself: nobody waits for an answer to it.
    """
    for r in receipts:
        if r.update_id != vote.update_id or vote.stage is not Stage.PREPARED:
            invalid("report.receipts", f"receipts of {vote.update_id!r}, with stage PREPARED", r.update_id)
        try:
            take(group, vote.replica_id, vote.incarnation, r)
        except Refused as e:
            if e.failure.reason is Reason.INVALID_ARGUMENT:
                raise
            log.debug("a receipt of %s counts for nothing: %s", r.member, e)


def _expected(group: Group, replica_id: str, incarnation: str, update_id: str, worker: int) -> tuple[str, bool]:
    """What a receipt must be of: the worker's plan in its update or catch-up, and whether nothing is hashed there."""
    c = catching.owns(group.state, replica_id, update_id)
    if c is not None and c.incarnation == incarnation:
        if c.decision:
            failure = c.failure or Failure(Reason.WRONG_PHASE, f"catch-up {update_id} is decided: no receipt counts")
            raise group.refusal(failure)
        return c.plan.plan_id if c.plan is not None else "", False
    u = group.find(update_id)
    part = u.parts.get(replica_id) if u is not None else None
    if u is None or part is None or part.incarnation != incarnation:
        message = f"replica {replica_id} takes no part in an update {update_id!r}"
        refuse(Reason.UNKNOWN_UPDATE, message, replica_id)
    if u.closed or u.phase not in (Phase.PREPARING, Phase.TRANSFERRING, Phase.VERIFYING):
        failure = u.failure or Failure(Reason.WRONG_PHASE, f"update {u.update_id} is {u.phase}: no receipt counts")
        raise group.refusal(failure, u.update_id)
    plan = u.plans.get(part.channels[worker]) if worker < len(part.channels) else None
    return plan.plan_id if plan is not None else "", u.options.verify is Verify.OFF


def worker_of(group: Group, replica_id: str, incarnation: str, member: str) -> int:
    """The index of the worker that ``member`` names; refuses a stale life."""
    r = group.replica(replica_id)
    if r.incarnation != incarnation:
        message = f"replica {replica_id}: expected incarnation {r.incarnation!r}, found {incarnation!r}, which is over"
        refuse(Reason.MEMBER_RESTARTED, message, replica_id)
    for w in r.workers:
        if member == f"{replica_id}/{w.index}":
            return w.index
    expected = f"'{replica_id}/0' .. '{replica_id}/{len(r.workers) - 1}'"
    invalid("member", expected, member)
