"""What a worker works out of a plan, kept from update to update, and from plan to plan where only others changed."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.plan import Plan

from .caches import Newest
from .engines.base import LocalTensors
from .receipts import WorkerPlan
from .sink import Sink

__all__ = ["Shares"]


class Shares:
    """Shares of plans with their sinks: the ``limit`` newest. One thread.

    When a replica joins or leaves, those that stay get another plan, in which the same bytes come in the same buckets:
    a sink that was found for the one (``WorkerPlan.reception``) serves the other.
    """

    def __init__(self, limit: int) -> None:
        self._plans, self._shares, self._sinks = Newest(limit), Newest(limit), Newest(limit)

    def ahead(self, plan: Plan, manifest: Manifest, member: str) -> WorkerPlan:
        """A worker's share, worked out, if it is none yet; what memory it goes to is not asked."""
        share: WorkerPlan | None = self._plans.get((plan.id, member))
        if share is None:
            share = WorkerPlan(plan, manifest, member)
            assert share.reception  # it asks for the regions and buckets too
            self._plans.keep((plan.id, member), share)
        return share

    def get(
        self,
        plan: Plan,
        manifest: Manifest,
        member: str,
        kinds: frozenset[str],
        where: Hashable,
        targets: Callable[[], LocalTensors],
    ) -> tuple[WorkerPlan, Sink]:
        """``where`` names the memory that ``targets`` gives: equal while that stays. ``kinds``: as for ``Sink``."""
        key = (plan.id, member, kinds, where)
        if key not in self._shares:
            share = self.ahead(plan, manifest, member)
            at = (share.reception, member, kinds, where)
            if at not in self._sinks:
                self._sinks.keep(at, Sink(share, targets(), kinds))
            self._shares.keep(key, (share, self._sinks[at]))
        found: tuple[WorkerPlan, Sink] = self._shares[key]
        return found

    def clear(self) -> None:
        """The memory is another, or is to be let go. Shares of plans alone stay."""
        self._shares.clear()
        self._sinks.clear()
