"""A worker that says no: no update can follow how its vLLM is set up, or an order would lose weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from weightplane.controlplane.core.model import SLEEP_TAGS
from weightplane.inference_agent.engines.mismatch import ProblemKind

from .compat import DRAFT
from .surveying import Survey
from .worker import WorkerReplica

__all__ = ["RefusingReplica"]

#: Of a worker whose weights a deep sleep dropped, whoever ordered it.
DROPPED = "its weights were dropped by a sleep of level 2"


class RefusingReplica(WorkerReplica):
    """``refusals``: (setting, text) of ``compat.refusals``; every manifest is refused by name for each.

    It is a ``sleeping.Witness``. ``attended``: whether an agent is there, which would bring lost weights back.
    """

    def __init__(self, *args: Any, refusals: Sequence[tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refusals = tuple(refusals)
        self.attended: Callable[[], bool] = lambda: False
        self._frozen = False

    def declare_frozen(self, frozen: bool) -> None:
        """Whether the agent says that a draft model is to stay as it is: then it is no reason to refuse."""
        if frozen is not self._frozen:
            self._frozen = frozen
            self._surveys.clear()

    def survey(self, manifest_id: str) -> None:
        """See ``WorkerReplica``."""
        super().survey(manifest_id)
        found = self._surveys.get(manifest_id)
        if isinstance(found, Survey):
            said = {name for _, name, _ in found.problems}
            for name, text in self._refusals:
                if name not in said and not (self._frozen and name == DRAFT):
                    found.problem(ProblemKind.LAYOUT, name, text)

    # --- sleep, whoever orders it: see ``sleeping.Witness``

    def may_sleep(self, level: int) -> None:
        """Refused while bytes come into live memory."""
        u = self._update
        if u is not None and (u.stream is not None or getattr(u, "before", None) is not None):
            raise RuntimeError(f"weightplane: update {u.update_id} comes in place: sleep when it is over")

    def falls_asleep(self, level: int) -> None:
        """From here on dropped weights are nobody's."""
        if level == 2:
            self._spoil(DROPPED)
        self._tell(asleep=SLEEP_TAGS)

    def wakes_up(self, tags: Collection[str] | None) -> None:
        """Refused where vLLM would go on with lost weights while an agent is there to bring them back."""
        state = self.state
        if not self._left(tags) and state.asleep and state.mixed and self.attended():
            raise RuntimeError(
                f"weightplane: awake it would serve weights that are lost: {state.mixed}. Wake up the weights alone "
                f"(tags=weights), publish, then wake up the rest"
            )

    def woke_up(self, tags: Collection[str] | None) -> None:
        """They are back."""
        self._tell(asleep=self._left(tags))

    def discards(self, tags: Collection[str]) -> None:
        """Released, and not kept."""
        self._tell(asleep=tuple(t for t in SLEEP_TAGS if t in {*self.state.asleep, *tags}))

    def _left(self, tags: Collection[str] | None) -> tuple[str, ...]:
        return tuple(t for t in self.state.asleep if tags and t not in tags)
