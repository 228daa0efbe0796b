"""A replica's retained copy: taken from its live tensors after each apply, and sent to replicas that are caught up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weightplane.controlplane.core import replica as core
from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.model import Held
from weightplane.controlplane.core.placement import Box, Placement
from weightplane.controlplane.core.plan import Plan
from weightplane.controlplane.core.states import Evidence
from weightplane.transports.base import Transport, TransportError
from weightplane.transports.retained import Piece, Retainer, RetainError
from weightplane.transports.serving import Serving

from .engines.base import Engine, LocalTensors
from .faults import failure_of
from .rpc import Abandoned, AgentCalls, CallFailed

__all__ = ["Keeping", "live_pieces", "why_not"]

log = logging.getLogger("weightplane.inference_agent")

_FETCH_S = 30.0
_PLACE_S = 10.0


def why_not(engine: Engine) -> str:
    """Why an engine's weights cannot be retained by its agent; empty if they can."""
    if engine.evidence < Evidence.LIVE:
        return f"{engine.name} cannot be read back: retain at the trainer, or at another replica"
    return ""


def live_pieces(live: LocalTensors, placement: Placement, manifest: Manifest) -> list[Piece]:
    """A worker's live tensors as pieces to copy, each root's box once, whatever its names."""
    out: dict[tuple[int, Box], Piece] = {}
    for piece in placement.pieces:
        local, root = live.get(piece.tensor), manifest.root(piece.tensor)
        if local is not None and local[1] == piece.box:
            out.setdefault((root, piece.box), (root, piece.box, local[0]))
    return list(out.values())


class Keeping:
    """One life's copy and what is sent from it. ``take`` on the work thread; ``serving`` from any."""

    def __init__(
        self,
        retainer: Retainer,
        members: Sequence[str],
        group: str,
        calls: AgentCalls,
        transports: Mapping[str, Transport],
        emit: Callable[[Any], None],
    ) -> None:
        self._retainer, self._members, self._group = retainer, members, group
        self._calls, self._transports, self._emit = calls, transports, emit
        self.serving = Serving(group, members, retainer, self._transport, self._plan, self._failed)

    def take(self, held: Held, manifest: Manifest, members: Mapping[str, Sequence[Piece]]) -> None:
        """Copy what the workers hold now, which is ``held``. Generation goes on; the next update waits for it.

        Whatever goes wrong is logged: the update that was applied is none the worse for it.
        """
        began = time.monotonic()
        self._retainer.keep(None)  # nobody is caught up to the version before any more: its room is the next one's
        try:
            copy = self._retainer.take(held, manifest, members)
        except Exception as e:
            expected = isinstance(e, RetainError)
            text = "group %s: version %d is not retained: %s"
            log.warning(text, self._group, held.version, e, exc_info=None if expected else e)
            self._emit(core.Kept(None))
            return
        self._retainer.keep(copy)
        what = f"{copy.nbytes} bytes in {time.monotonic() - began:.2f} s"
        log.info("group %s: version %d is retained, %s", self._group, held.version, what)
        self._emit(core.Kept(copy.says))

    def place(self, incarnation: str, cancelled: Callable[[], bool]) -> None:
        """Say where the pieces of our copy are, to a coordinator that may not know: it restarted, or this life is new.

        Without that nobody is caught up from the copy until the next update. On the work thread.
        """
        copy = self._retainer.get()
        if copy is None or set(copy.members) != set(self._members):
            return
        end = time.monotonic() + _PLACE_S
        try:
            for member in self._members:
                self._calls.put_placement(incarnation, copy.placement(member), copy.manifest, end, cancelled)
        except Abandoned:
            return
        except Exception as e:
            trace = None if isinstance(e, CallFailed) else e
            text = "group %s: from the copy of version %d nobody is caught up before the next update: %s"
            log.warning(text, self._group, copy.held.version, e, exc_info=trace)

    def _transport(self, name: str) -> Transport:
        found = self._transports.get(name)
        if found is None:
            raise TransportError(f"transport {name!r} is not enabled here")
        return found

    def _plan(self, plan_id: str, manifest: Manifest) -> Plan:
        return self._calls.plan(plan_id, manifest, time.monotonic() + _FETCH_S, lambda: False)

    def _failed(self, catch_up_id: str, error: BaseException) -> None:
        failure = failure_of(error, self._members[0].rpartition("/")[0], "sending from the retained copy")
        self._emit(core.ServeFailed(catch_up_id, failure))
