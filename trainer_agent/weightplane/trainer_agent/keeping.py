"""A rank's snapshot of what it published: taken before the source is free, kept once that is committed, and sent to
replicas that are caught up while the trainer goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from weightplane.controlplane.core.holders import SERVES
from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.model import Held
from weightplane.controlplane.core.placement import Piece as Placed
from weightplane.controlplane.core.plan import Plan
from weightplane.controlplane.host import host_id
from weightplane.transports import registry
from weightplane.transports.buckets import Local
from weightplane.transports.retained import Piece, RetainedCopy, Retainer, RetainError
from weightplane.transports.serving import Serving, order_of
from weightplane.v1 import agent_pb2, common_pb2

from .errors import RpcRefused, Unanswered
from .hold import Hold
from .sources import Source, member_name

__all__ = ["Keeping"]

log = logging.getLogger(__name__)

_FETCH_S = 30.0
_PLACE_S = 10.0


class Keeping:
    """One rank's. ``snapshot``, ``keep`` and ``drop`` come from the publishing thread; orders from the watch thread."""

    def __init__(self, hold: Hold, retainer: Retainer) -> None:
        self._hold, self._retainer = hold, retainer
        self._taken: RetainedCopy | None = None
        self._failures: list[tuple[str, str]] = []
        member = member_name(hold.settings.rank)
        self.serving = Serving(hold.group, [member], retainer, registry.get, self._plan, self._failed)
        hold.told.append(self._orders)
        hold.says = self._report
        hold.welcomed = self._welcomed

    def snapshot(self, source: Source, manifest: Manifest, held: Held) -> None:
        """Copy the source as it is, if it was not copied for this update yet.

        Whatever goes wrong is logged: the publish is none the worse for it.
        """
        if self._taken is not None and self._taken.held == held:
            return
        self.drop()
        rank = self._hold.settings.rank
        began = time.monotonic()
        try:
            pieces = _pieces(source, source.placement(rank).pieces, manifest)
            self._taken = self._retainer.take(held, manifest, {member_name(rank): pieces})
        except Exception as e:
            trace = None if isinstance(e, RetainError) else e
            text = "group %s: version %d is not retained: %s"
            log.warning(text, self._hold.group, held.version, e, exc_info=trace)
            self._retainer.keep(None)
            self._hold.report()
            return
        what = f"{self._taken.nbytes} bytes in {time.monotonic() - began:.2f} s"
        log.info("group %s: a snapshot of version %d was taken, %s", self._hold.group, held.version, what)

    def keep(self, held: Held) -> None:
        """It is committed: from now on others are caught up from it."""
        if self._taken is not None and self._taken.held == held:
            self._retainer.keep(self._taken)
            self._taken = None
            self._hold.report()

    def drop(self) -> None:
        """It was not committed."""
        if self._taken is not None:
            self._retainer.give_up(self._taken)
            self._taken = None

    def close(self) -> None:
        """Send nothing any more."""
        self.serving.close()
        self._retainer.keep(None)

    def _welcomed(self) -> None:
        """The coordinator may have restarted: it asks nobody for the placement of what is retained."""
        copy = self._retainer.get()
        if copy is not None:
            threading.Thread(target=self._place, args=(copy,), name="weightplane-placing", daemon=True).start()

    def _place(self, copy: RetainedCopy) -> None:
        try:
            [member] = copy.members
            self._hold.place(copy.manifest, copy.placement(member), time.monotonic() + _PLACE_S)
        except Exception as e:
            trace = None if isinstance(e, (RpcRefused, Unanswered)) else e
            text = "group %s: from the snapshot of version %d nobody is caught up before the next publish: %s"
            log.warning(text, self._hold.group, copy.held.version, e, exc_info=trace)

    def _report(self) -> agent_pb2.TrainerReport:
        message = agent_pb2.TrainerReport()
        copy = self._retainer.get()
        if copy is not None:
            held = common_pb2.HeldVersion(version=copy.held.version, update_id=copy.held.update_id)
            message.retained.CopyFrom(agent_pb2.RetainedCopy(held=held, manifest_id=copy.manifest.id))
            message.host_id = host_id()
            message.offers.extend(o for o in self._hold.offers if o.transport in SERVES)
        for catch_up_id, why in self._failures:
            failure = common_pb2.Failure(reason=common_pb2.REASON_TRANSPORT, message=why)
            failure.member = member_name(self._hold.settings.rank)
            message.serve_failures.add(catch_up_id=catch_up_id, failure=failure)
        return message

    def _orders(self, message: agent_pb2.DesiredTrainer) -> None:
        self.serving.orders([order_of(m, self._hold.group) for m in message.serve])

    def _plan(self, plan_id: str, manifest: Manifest) -> Plan:
        return self._hold.plan(plan_id, manifest, time.monotonic() + _FETCH_S)

    def _failed(self, catch_up_id: str, error: BaseException) -> None:
        self._failures = [*self._failures, (catch_up_id, f"{type(error).__name__}: {error}"[:1500])][-8:]
        self._hold.report()


def _pieces(source: Source, placed: tuple[Placed, ...], manifest: Manifest) -> list[Piece]:
    """What the source holds of what it placed, by root."""
    out: dict[tuple[int, Any], Piece] = {}
    for piece in placed:
        root = manifest.root(piece.tensor)
        if (root, piece.box) in out:
            continue
        for tensor, box in _locals(source.tensor(root)):
            if box == piece.box:
                out[root, box] = (root, box, tensor)
    return list(out.values())


def _locals(found: Any) -> list[Local]:
    one = isinstance(found, tuple)
    return [found] if one else list(found)
