"""Defects that a test plants in a running worker: ``--worker-extension-cls tests.vllm.planted.Planted``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any


class Planted:
    """Its methods are the worker's, called by ``collective_rpc``."""

    def drop_names(self, part: str) -> None:
        """The model's loader loses, in silence, what has ``part`` in its name. Empty: it is whole again."""
        self._passes_on(part, lambda name, tensor: part not in name)

    def fill_disk(self, part: str) -> None:
        """The loader writes what has ``part`` in its name through to a disk that is full. Empty: it is whole again."""

        def spills(name: str, tensor: Any) -> bool:
            if part in name:
                with Path("/dev/full").open("wb") as disk:
                    disk.write(tensor.numpy().tobytes())
            return True

        self._passes_on(part, spills)

    def on_meta(self) -> list[str]:
        """Parameters without memory."""
        return [n for n, p in self.get_model().named_parameters() if p.is_meta]  # type: ignore[attr-defined]

    def live_bits(self) -> dict[str, str]:
        """A hash of each live parameter."""
        named = self.get_model().named_parameters()  # type: ignore[attr-defined]
        return {n: sha256(p.detach().contiguous().numpy().tobytes()).hexdigest() for n, p in named if p.numel()}

    def _passes_on(self, planted: str, keep: Callable[[str, Any], bool]) -> None:
        model: Any = self.get_model()  # type: ignore[attr-defined]
        model.__dict__.pop("load_weights", None)
        whole = model.load_weights
        if not planted:
            return

        def load_weights(weights: Iterable[tuple[str, Any]]) -> Any:
            return whole((name, tensor) for name, tensor in weights if keep(name, tensor))

        model.load_weights = load_weights
