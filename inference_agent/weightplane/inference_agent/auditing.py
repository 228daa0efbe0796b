"""How an engine's settings compare with what its group declares: judged as its replica joins, and when that changes;
where a version of the weights is declared, also when the engine holds another; again, later, if it could not be."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from weightplane.controlplane.core.model import Condition, Declaration

from .codec import short
from .engines.base import Engine
from .threads import detached

__all__ = ["Auditor"]

log = logging.getLogger("weightplane.inference_agent")

_AGAIN_S, _SELDOM_S = 2.0, 300.0  # an engine that could not be asked: may be starting, or may never tell
_MOST = 40  # whose longest texts are within the 64 KiB of a session's message


class Auditor:
    """Of one life of a replica. ``tell`` gets the conditions, on a thread of ours: an engine may be slow to answer."""

    def __init__(self, engine: Engine, tell: Callable[[Sequence[Condition]], None]) -> None:
        self._engine, self._tell = engine, tell
        self._changed = threading.Condition()
        self._wanted: Declaration | None = None
        self._held: frozenset[int] = frozenset()

    def stop(self) -> None:
        """The life is over: nothing is judged again. Does not wait."""
        with self._changed:
            self._wanted = None
            self._changed.notify_all()

    def judge(self, declared: Declaration) -> None:
        """Begin, unless it is what was judged last. Returns at once."""
        if declared == self._wanted:
            return
        self._begin(declared)

    def holds(self, versions: Iterable[int]) -> None:
        """The engine's workers hold these now. No other setting changes while it runs, so mostly nothing is asked."""
        before, self._held = self._held, frozenset(versions)
        if self._held != before and self._wanted is not None and "weight_version" in self._wanted.values:
            self._begin(replace(self._wanted))  # another object: what is being judged now is no longer wanted

    def _begin(self, declared: Declaration) -> None:
        with self._changed:
            self._wanted = declared
            self._changed.notify_all()
        detached("weightplane-audit", lambda: self._judge(declared))

    def _judge(self, declared: Declaration) -> None:
        told: Sequence[Condition] = ()
        wait = _AGAIN_S
        while True:
            found = self._found(declared, again=bool(told))
            judged = all(c.status != "Unknown" for c in found if c.type == "Audit")
            with self._changed:
                if declared is not self._wanted:  # one that was asked for later tells, or has told
                    return
                if found and found != told:
                    _log(found)
                    self._tell(found)
                if judged or self._changed.wait_for(lambda: declared is not self._wanted, wait):
                    return
            told, wait = found, min(2 * wait, _SELDOM_S)

    def _found(self, declared: Declaration, again: bool) -> Sequence[Condition]:
        try:
            found = self._engine.conditions(declared)
            _told(found)
        except Exception as e:
            log.log(logging.DEBUG if again else logging.ERROR, "the engine's settings could not be judged", exc_info=e)
            found = (Condition("Audit", "Unknown", "Failed", f"{type(e).__name__}: {e}"),)
        return found


def _log(found: Sequence[Condition]) -> None:
    for c in found:
        if c.status == "False":
            log.warning("%s: %s; set: %s", c.type, short(c.message, 1024), short(c.setting, 256))


def _told(found: Sequence[Condition]) -> None:
    """Whether the coordinator would take them: what it refuses ends the session, again after each reconnect, and an
    engine that judges itself wrongly would be out of the fleet. ``ValueError``."""
    types = [c.type for c in found]
    if len(found) > _MOST or len(set(types)) < len(types):
        raise ValueError(f"conditions: expected at most {_MOST}, each type once, found {sorted(types)}")
    for c in found:
        if not c.type or any(len(t.encode("utf-8", "replace")) > 64 or not t.isprintable() for t in (c.type, c.reason)):
            raise ValueError(f"condition {c.type!r}: expected type and reason as printable words of at most 64 bytes")
        if not c.setting.isprintable():
            raise ValueError(f"condition {c.type!r}: expected a printable setting, found {c.setting!r}")
        if c.status not in ("True", "False", "Unknown"):
            raise ValueError(f"condition {c.type!r}: expected the status True, False or Unknown, found {c.status!r}")
