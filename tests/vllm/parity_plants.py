"""Defects of parity planted in a running worker: ``--worker-extension-cls tests.vllm.parity_plants.ParityPlants``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .planted import Planted


class ParityPlants(Planted):
    """Its methods are the worker's, called by ``collective_rpc``. Settings stay as they were reported."""

    def plant(self, what: str, tensor: str, old: str) -> None:
        """``what``: raw | temperature | head16 | tied | tensors (those with ``tensor`` in their name stay ``old``'s, at
        each load) | nan (one value of them, at each load) | nothing: everything is whole again. ``old``: a folder."""
        self._heal()
        if not what:  # vLLM keeps NaN in freed blocks, and they come up again in requests long after (docs/parity.md)
            for cache in self.model_runner.kv_caches:  # type: ignore[attr-defined]
                cache.zero_()
        elif what == "raw":
            sampler = self._sampler()
            sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = "raw_logprobs"
        elif what == "temperature":
            self._sampler().apply_temperature = lambda logits, temperature, all_random: logits
        elif what == "head16":
            self._head16()
        elif what == "tied":
            from weightplane.inference_agent.vllm_plugin import loading

            whole = loading._repack_tied
            loading._repack_tied = lambda model, found: None
            loading._repack_tied.whole = whole  # type: ignore[attr-defined]
        elif what in ("tensors", "nan"):
            self._spoil(tensor, old, what == "nan")
        else:
            raise ValueError(what)

    def _sampler(self) -> Any:
        return self.model_runner.sampler  # type: ignore[attr-defined]

    def _heal(self) -> None:
        sampler, model = self._sampler(), self.get_model()  # type: ignore[attr-defined]
        sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = "processed_logprobs"
        sampler.__dict__.pop("apply_temperature", None)
        model.logits_processor.__dict__.pop("_get_logits", None)
        model.__dict__.pop("load_weights", None)
        from weightplane.inference_agent.vllm_plugin import loading

        loading._repack_tied = getattr(loading._repack_tied, "whole", loading._repack_tied)

    def _head16(self) -> None:
        """Hidden states, weights and logits of the last projection in bfloat16."""
        import torch

        model: Any = self.get_model()  # type: ignore[attr-defined]

        def get_logits(hidden: Any, head: Any, bias: Any, skip_gather: bool = False) -> Any:
            weight = model.model.embed_tokens.weight.data  # tied: the head's own is packed
            return torch.nn.functional.linear(hidden.bfloat16(), weight.bfloat16()).float()

        model.logits_processor._get_logits = get_logits

    def _spoil(self, part: str, old: str, nan: bool) -> None:
        from safetensors.torch import load_file

        before = load_file(Path(old) / "model.safetensors")

        def spoilt(name: str, tensor: Any) -> Any:
            if part not in name or tensor.is_meta:
                return tensor
            if not nan:
                return before[name]
            tensor = tensor.clone()
            tensor.flatten()[7] = float("nan")
            return tensor

        self._maps(spoilt)

    def _maps(self, change: Callable[[str, Any], Any]) -> None:
        model: Any = self.get_model()  # type: ignore[attr-defined]
        whole = model.load_weights

        def load_weights(weights: Iterable[tuple[str, Any]]) -> Any:
            return whole((name, change(name, tensor)) for name, tensor in weights)

        model.load_weights = load_weights
