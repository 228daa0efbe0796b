"""What a replica holds of a manifest: asked of its engine, told to the coordinator, once each; also ahead of updates.

Runs on the work thread of the replica's operations, but for ``claim`` and ``forget``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from weightplane.controlplane.core.manifest import Manifest

from .caches import Newest
from .engines.base import Description, Engine, EngineError
from .faults import Refusal
from .rpc import Abandoned, AgentCalls, CallFailed

__all__ = ["Placing"]

log = logging.getLogger("weightplane.inference_agent")

_KEPT = 4  # manifests and descriptions remembered
_PLACED = 8  # the coordinator remembers the newest 15
_AHEAD_S = 30.0  # for what the next update would ask for anyway


class Placing:
    """One life's. ``moved`` is called when the engine's memory is laid out anew."""

    def __init__(
        self,
        engine: Engine,
        calls: AgentCalls,
        replica_id: str,
        incarnation: str,
        members: Sequence[str],
        moved: Callable[[], None],
    ) -> None:
        self._engine, self._calls, self._moved = engine, calls, moved
        self._replica_id, self._incarnation, self._members = replica_id, incarnation, members
        self._manifests, self._described = Newest(_KEPT), Newest(_KEPT)
        self._placed = Newest(_PLACED * len(members))
        self._layout = 0
        self._ahead = ""

    def forget(self) -> None:
        """The coordinator may have forgotten what it was told."""
        self._placed.clear()
        self._ahead = ""

    def claim(self, manifest_id: str) -> bool:
        """Take on saying this one ahead: False if that was done in this session, or there is none."""
        new = bool(manifest_id) and manifest_id != self._ahead
        self._ahead = manifest_id or self._ahead
        return new

    def manifest(self, manifest_id: str, deadline: float, cancelled: Callable[[], bool]) -> Manifest:
        """The manifest, fetched once. Raises ``CallFailed``, ``Abandoned``."""
        manifest: Manifest | None = self._manifests.get(manifest_id)
        if manifest is None:
            manifest = self._calls.manifest(manifest_id, deadline, cancelled)
            self._manifests.keep(manifest.id, manifest)
        return manifest

    def known(self, manifest_id: str, layout: int) -> Description | None:
        """What the engine made of it under this layout, if it was asked."""
        found: Description | None = self._described.get((manifest_id, layout))
        return found

    def describe(self, manifest: Manifest) -> tuple[int | None, int, Description]:
        """The engine's layout by a glance and as it is taken to be, and what it makes of the manifest. Raises
        ``Refusal`` where they do not fit."""
        engine = self._engine
        quick = engine.glance()
        said = self.known(manifest.id, quick) if quick is not None else None
        layout = quick if quick is not None and said is not None else engine.layout()
        if layout != self._layout:
            self._layout = layout
            self._moved()
        said = said or self.known(manifest.id, layout)
        if said is None:
            said = engine.describe(manifest, self._members)
            failure = said.failure(self._replica_id)
            if failure is not None:
                raise Refusal(failure)
            self._described.keep((manifest.id, layout), said)
            for what, names in (("ignores", said.ignored), ("keeps, unsent,", said.kept)):
                if names:
                    log.info("replica %s %s %d tensor(s): %s", self._replica_id, what, len(names), names[:5])
        return quick, layout, said

    def place(
        self,
        said: Description,
        manifest: Manifest,
        layout: int,
        epoch: int,
        deadline: float,
        cancelled: Callable[[], bool],
    ) -> None:
        """Tell the coordinator where each worker's pieces are, once in each of its epochs."""
        for placement in said.placements:
            place = (manifest.id, layout, placement.member, epoch)
            if place not in self._placed:
                self._calls.put_placement(self._incarnation, placement, manifest, deadline, cancelled)
                self._placed.keep(place, True)

    def ahead(self, manifest_id: str, epoch: int, cancelled: Callable[[], bool]) -> None:
        """Say now what the next update of this manifest will ask for. Whatever is wrong is that update's to say."""
        end = time.monotonic() + _AHEAD_S
        try:
            if self._engine.asleep():
                return
            manifest = self.manifest(manifest_id, end, cancelled)
            _, layout, said = self.describe(manifest)
            self.place(said, manifest, layout, epoch, end, cancelled)
        except Abandoned:
            return
        except Exception as e:
            known = isinstance(e, Refusal | CallFailed | EngineError)
            text = "replica %s: an update of manifest %s may be refused: %s"
            log.info(text, self._replica_id, manifest_id, e, exc_info=None if known else e)
