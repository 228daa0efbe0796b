"""Defects that a test plants in a running worker: ``--worker-extension-cls tests.vllm.planted.Planted``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


class Planted:
    """Its methods are the worker's, called by ``collective_rpc``."""

    def drop_names(self, part: str) -> None:
        """The model's loader loses, in silence, what has ``part`` in its name. Empty: it is whole again."""
        model: Any = self.get_model()  # type: ignore[attr-defined]
        model.__dict__.pop("load_weights", None)
        whole = model.load_weights
        if not part:
            return

        def load_weights(weights: Iterable[tuple[str, Any]]) -> Any:
            def kept() -> Iterator[tuple[str, Any]]:
                for name, tensor in weights:
                    if part not in name:
                        yield name, tensor

            return whole(kept())

        model.load_weights = load_weights
