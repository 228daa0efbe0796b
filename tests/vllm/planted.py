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

    def touch_draft(self) -> None:
        """One bit of the draft model."""
        import torch

        norm = self.get_draft_model().model.norm.weight  # type: ignore[attr-defined]
        norm.data.view(torch.int32)[0] ^= 1

    def draft_kernels(self) -> dict[str, tuple[int, str]]:
        """Of each layer of the draft model: which object its kernel is, and a hash of what it computes."""
        import torch

        found = {}
        for name, module in self.get_draft_model().named_modules():  # type: ignore[attr-defined]
            kernel = getattr(module, "cpu_linear", None)
            if kernel is not None and hasattr(module, "quant_method"):
                columns = getattr(module, "input_size_per_partition", getattr(module, "embedding_dim", 0))
                x = torch.randn(3, columns, generator=torch.Generator().manual_seed(1))
                y = module.quant_method.apply(module, x.to(next(self.get_model().parameters()).dtype))  # type: ignore[attr-defined]
                found[name] = id(kernel), sha256(y.contiguous().numpy().tobytes()).hexdigest()
        for name, p in self.get_draft_model().named_parameters():  # type: ignore[attr-defined]
            found[name] = p.data_ptr(), sha256(p.detach().contiguous().numpy().tobytes()).hexdigest()
        return found

    def _passes_on(self, planted: str, keep: Callable[[str, Any], bool]) -> None:
        model: Any = self.get_model()  # type: ignore[attr-defined]
        model.__dict__.pop("load_weights", None)
        whole = model.load_weights
        if not planted:
            return

        def load_weights(weights: Iterable[tuple[str, Any]]) -> Any:
            return whole((name, tensor) for name, tensor in weights if keep(name, tensor))

        model.load_weights = load_weights
