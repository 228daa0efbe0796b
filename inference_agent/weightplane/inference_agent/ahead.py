"""Plans that the next update will probably come by: when a replica fetches them, if no update is under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["PlansAhead"]

#: Seconds without other word of plans. When many replicas come at once there is a plan for each number of them, and a
#: fleet that fetched them all would keep the coordinator busy.
QUIET_S = 0.2


class PlansAhead:
    """One life's. The loop thread's alone. ``fetch``: of a manifest (id), these plans (ids); returns at once."""

    def __init__(self, fetch: Callable[[str, Sequence[str]], None]) -> None:
        self._fetch = fetch
        self._heard: tuple[str, tuple[str, ...]] = ("", ())
        self._due = 0.0  # 0: nothing is

    @property
    def waiting(self) -> bool:
        """Whether ``look`` is to be called soon."""
        return self._due > 0

    def hear(self, manifest_id: str, plans: Sequence[str], now: float) -> None:
        """What the newest desired state says. The same again changes nothing."""
        heard = (manifest_id, tuple(plans))
        if heard != self._heard:
            self._heard = heard
            self._due = now + QUIET_S if plans else 0.0

    def look(self, now: float, idle: bool) -> None:
        """Fetch what is due; an update that begins fetches its own."""
        if self._due and (not idle or now >= self._due):
            self._due = 0.0
            if idle:
                self._fetch(*self._heard)
