"""A worker whose vLLM is set up in a way that no update can follow: every manifest is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weightplane.inference_agent.engines.mismatch import ProblemKind

from .surveying import Survey
from .worker import WorkerReplica

__all__ = ["RefusingReplica"]


class RefusingReplica(WorkerReplica):
    """``refusals``: (setting, text) of ``compat.refusals``; without any it is a ``WorkerReplica``."""

    def __init__(self, *args: Any, refusals: Sequence[tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refusals = tuple(refusals)

    def survey(self, manifest_id: str) -> None:
        """See ``WorkerReplica``."""
        super().survey(manifest_id)
        found = self._surveys.get(manifest_id)
        if isinstance(found, Survey):
            said = {name for _, name, _ in found.problems}
            for name, text in self._refusals:
                if name not in said:
                    found.problem(ProblemKind.LAYOUT, name, text)
