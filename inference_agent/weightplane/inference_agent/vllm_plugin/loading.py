"""vLLM's own weight loading, driven so that nothing is lost in silence. Runs on the worker's main thread only.

vLLM keeps weights in the layout of its kernels and loads them layer by layer through *layerwise reload*: parameters go
to the meta device in checkpoint layout, loaders buffer what comes, and a layer that is complete is processed and copied
into the live tensors. Two things are added here (``surveying`` has looked before that all will fit):

* ``load`` counts the elements that the loaders really write and compares them with the survey (CONSUMED evidence).
* Whatever fails, ``restore`` puts the live tensors back, so that the engine stays alive (with a mix in it).

The whole of it happens inside one call to the worker: no forward pass ever sees a model that is on the meta device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader.reload import layerwise, meta
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from weightplane.controlplane import failpoints

from .restoring import restore
from .surveying import Key, Survey, cpu_experts

__all__ = ["LoadFailed", "load"]


class LoadFailed(RuntimeError):
    """Loading did not do what was declared. ``tensors`` names those concerned."""

    def __init__(self, message: str, tensors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)


class _Counter:
    """Counts what the loaders write into real memory. Stays installed; ``reset`` begins a load."""

    def __init__(self) -> None:
        self.elements: dict[Key, int] = {}

    def install(self, model: nn.Module) -> None:
        for module_name, layer in model.named_modules():
            for name, tensor in get_layer_tensors(layer).items():
                online = getattr(tensor, "weight_loader", None)
                if online is None or online.__name__ != "online_process_loader":
                    continue
                inner = online.__wrapped__
                inner = getattr(inner, "weightplane_inner", inner)
                online.__wrapped__ = self._counting((module_name, name), inner)

    def _counting(self, key: Key, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)  # vLLM reads its signature
        def counting(*args: Any, **kwargs: Any) -> Any:
            with meta.CopyCounter() as counter:
                result = inner(*args, **kwargs)
            self.elements[key] = self.elements.get(key, 0) + counter.copied_numel
            return result

        counting.weightplane_inner = inner  # type: ignore[attr-defined]
        return counting


def _forget_counters(model: nn.Module) -> None:
    """vLLM leaves loaders of ours on the tensors that stay live through a reload: they get their own back."""
    for tensor in model.parameters():
        inner = getattr(getattr(tensor, "weight_loader", None), "weightplane_inner", None)
        if inner is not None:
            tensor.weight_loader = inner  # type: ignore[attr-defined]


def load(
    model: nn.Module,
    model_config: Any,
    device: torch.device,
    weights: Iterable[tuple[str, torch.Tensor]],
    found: Survey,
    failpoint: str = "vllm.load.inside",
) -> int:
    """Load ``weights`` (the names that the survey took) into the live model; the elements written.

    Whatever it raises, the live tensors are back in place; they then hold new layers beside old ones.
    """
    counter, given = _Counter(), _Given(weights, failpoint)
    try:
        restore(model)  # a load that somebody else left half done must not be counted in
        with torch.device(device):
            layerwise.initialize_layerwise_reload(model)
            counter.install(model)
            model.load_weights(given)  # type: ignore[operator]
            layerwise.finalize_layerwise_reload(model, model_config)
        _repack_tied(model, found)
        if device.type == "cpu":
            _repack_experts(model)
        _check_written(model, counter, found)
    except LoadFailed:
        restore(model)
        raise
    except Exception as e:
        restore(model)
        if given.source_failed or not given.current:
            raise
        text = f"vLLM's loader failed at {given.current!r}: {type(e).__name__}: {str(e)[:300]}"
        raise LoadFailed(text, [given.current]) from e
    except BaseException:
        restore(model)
        raise
    finally:
        _forget_counters(model)
    return sum(counter.elements.values())


class _Given:
    """Hands the weights to vLLM and remembers which it works on, for whoever asks what failed."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]], failpoint: str) -> None:
        self._weights, self._failpoint = iter(weights), failpoint
        self.current = ""
        self.source_failed = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            try:
                name, tensor = next(self._weights)
            except StopIteration:
                return
            except BaseException:
                self.source_failed = True
                raise
            self.current = name
            failpoints.hit(self._failpoint)
            yield name, tensor


def _check_written(model: nn.Module, counter: _Counter, found: Survey) -> None:
    left = [n for n, p in model.named_parameters() if p.is_meta]
    if left:
        raise LoadFailed(f"{len(left)} parameter(s) were left without memory: {', '.join(left[:5])}", left)
    wrote = counter.elements
    short = [(".".join(k), wrote.get(k, 0), n) for k, n in found.expected.items() if wrote.get(k, 0) < n]
    if short:
        lines = ", ".join(f"{name}: {got} of {want}" for name, got, want in short[:5])
        raise LoadFailed(
            f"vLLM's loaders wrote fewer elements than were declared, in {len(short)} parameter(s): {lines}",
            [name for name, _, _ in short],
        )


def _repack_tied(model: nn.Module, found: Survey) -> None:
    """On CPU a linear layer computes from a packed copy of its weight; a tied head's is not renewed by vLLM."""
    for name in found.tied:
        layer = model.get_submodule(name)
        if hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)  # type: ignore[union-attr, operator]


def _repack_experts(model: nn.Module) -> None:
    """On CPU vLLM packs experts for its kernel at start-up only: a reload leaves them plain, which computes nonsense.

    The packed values go into the live tensors' own memory.
    """
    for layer, experts in cpu_experts(model):
        live = {n: p for n, p in layer._parameters.items() if p is not None}
        experts.process_weights_after_loading(layer)
        for name, param in live.items():
            packed = layer._parameters[name]
            if packed is not None and packed is not param:
                param.data.copy_(packed.data)
                layer._parameters[name] = param
