"""vLLM's own weight loading, driven so that nothing is lost in silence. Runs on the worker's main thread only.

vLLM keeps weights in the layout of its kernels and loads them layer by layer through *layerwise reload*: parameters go
to the meta device in checkpoint layout, loaders buffer what comes, and a layer that is complete is processed and copied
into the live tensors. Three things are added here:

* ``survey`` runs the model's loader on tensors without bytes and records where every name goes: what no loader takes,
  what is mis-shaped, and which parameters would stay incomplete is known before the first byte of an update.
* ``load`` counts the elements that the loaders really write and compares them with the survey (CONSUMED evidence).
* Whatever fails, ``restore`` puts the live tensors back, so that the engine stays alive (with a mix in it).

The whole of it happens inside one call to the worker: no forward pass ever sees a model that is on the meta device.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader.reload import layerwise, meta
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors, get_tensor_load_numel

from weightplane.controlplane import failpoints
from weightplane.controlplane.core.manifest import Manifest
from weightplane.inference_agent.engines.mismatch import ProblemKind
from weightplane.transports.dtypes import dtype_of

__all__ = ["LoadFailed", "Survey", "checkpoint_bytes", "load", "restore", "survey"]

_MOST_BAD = 25  # names whose loader refused them, after which the survey ends
#: What some checkpoints hold and every loader drops: tables that the model computes itself.
_COMPUTED = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")

_Key = tuple[str, str]  # (module, tensor in it)


class LoadFailed(RuntimeError):
    """Loading did not do what was declared. ``tensors`` names those concerned."""

    def __init__(self, message: str, tensors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)


@dataclass
class Survey:
    """Where a manifest goes in this worker. ``problems``: (kind, name, text); empty if it can be loaded.

    ``taken``: names that some loader here takes. ``expected``: elements that the loaders write, by (module, tensor).
    ``tied``: modules whose weight is another's and is loaded under that one's name.
    """

    taken: set[str] = field(default_factory=set)
    expected: dict[_Key, int] = field(default_factory=dict)
    problems: list[tuple[str, str, str]] = field(default_factory=list)
    untaken: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    tied: list[str] = field(default_factory=list)

    def problem(self, kind: ProblemKind, name: str, text: str) -> None:
        """Note one."""
        self.problems.append((kind.value, name, text))


def checkpoint_bytes(model: nn.Module) -> int:
    """The size of the parameters as they were before vLLM packed them for its kernels."""
    infos = [layerwise.get_layerwise_info(layer) for layer in model.modules()]
    return sum(p.numel() * p.element_size() for i in infos for p in i.restore_metadata[0].values())


# --- before the first byte ------------------------------------------------------------------------------------------


def survey(model: nn.Module, manifest: Manifest, device: torch.device, quantized: bool) -> Survey:
    """Record where the model's loader puts every tensor of ``manifest``. Nothing is written, the model is whole."""
    out = Survey()
    homes = _homes(model)
    recorder = _Recorder()
    with torch.device(device):
        layerwise.initialize_layerwise_reload(model)
    try:
        recorder.install(model)
        _feed(model, manifest, recorder, out)
        sizes = recorder.sizes
    finally:
        recorder.remove()
        restore(model)
    for name, text in recorder.mistyped.items():
        out.problem(ProblemKind.DTYPE, name, text)
    out.taken = set(recorder.sources_of_name)
    out.expected = dict(recorder.elements)
    _check_complete(model, homes, recorder, sizes, quantized, out)
    _check_names(manifest, recorder, out)
    _check_tied(manifest, homes, recorder, out)
    return out


class _Recorder:
    """Stands in for the loaders of every parameter: runs the original on meta tensors and counts."""

    def __init__(self) -> None:
        self.current = self.failing = ""
        self.given: dict[int, str] = {}
        self.elements: dict[_Key, int] = {}
        self.sizes: dict[_Key, int] = {}
        self.names: dict[_Key, list[str]] = {}
        self.sources_of_name: dict[str, list[_Key]] = {}
        self.mistyped: dict[str, str] = {}
        self._replaced: list[tuple[Any, Any]] = []

    def install(self, model: nn.Module) -> None:
        for module_name, layer in model.named_modules():
            if layerwise.is_deferred_attention_layer(layer):
                continue  # scales of attention: optional in every checkpoint
            for name, tensor in get_layer_tensors(layer).items():
                wrapped = getattr(tensor, "weight_loader", None)
                if wrapped is None or wrapped.__name__ != "online_process_loader":
                    continue
                key = (module_name, name)
                self.sizes[key] = get_tensor_load_numel(tensor) if name in layer._parameters else 0
                original = layerwise._get_original_loader(tensor)
                self._replaced.append((tensor, wrapped))
                tensor.weight_loader = self._stand_in(key, original)

    def _stand_in(self, key: _Key, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def record(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = [v for k, v in bound.arguments.items() if k != "param"]
            name = self._name_of(given)
            param = bound.arguments.get("param")
            if isinstance(param, torch.Tensor):
                self._check_dtype(name, given, param)
                if not param.is_meta:  # biases stay where they are during a reload: nothing may be written to them
                    bound.arguments["param"] = meta.to_meta_tensor(param)
            self.failing = name
            numel, result = meta.get_numel_loaded(original, bound)
            self.failing = ""
            self.elements[key] = self.elements.get(key, 0) + numel
            self.names.setdefault(key, []).append(name)
            self.sources_of_name.setdefault(name, []).append(key)
            return result

        return record

    def _check_dtype(self, name: str, given: list[Any], param: torch.Tensor) -> None:
        """Loaders cast as they copy: between floating types that is meant, between other kinds it is a mistake."""
        for t in given:
            if not isinstance(t, torch.Tensor) or t.dtype == param.dtype:
                continue
            if not (t.dtype.is_floating_point and param.dtype.is_floating_point):
                self.mistyped[name] = f"the manifest has {name!r} as {t.dtype}, vLLM takes {param.dtype}"

    def _name_of(self, arguments: list[Any]) -> str:
        """Which of the tensors given this is (a part) of; a loader that keeps no trace works on the newest."""
        for a in arguments:
            if isinstance(a, torch.Tensor):
                for t in (a, a._base):
                    if t is not None and id(t) in self.given:
                        return self.given[id(t)]
        return self.current

    def remove(self) -> None:
        for tensor, wrapped in self._replaced:
            tensor.weight_loader = wrapped
        self._replaced.clear()


def _feed(model: nn.Module, manifest: Manifest, recorder: _Recorder, out: Survey) -> None:
    """Give every name to the loader. One that it refuses is a problem by name; the others are given again.

    (Loaders read ahead and group what they read: what was given when one failed may have been lost with it.)
    """
    alive: list[torch.Tensor] = []  # an id names a tensor only while that lives
    refused: set[str] = set()

    def give() -> Iterator[tuple[str, torch.Tensor]]:
        for t in manifest:
            if t.name in refused or t.name in recorder.sources_of_name:
                continue
            tensor = torch.empty(t.shape, dtype=dtype_of(t.dtype), device="meta")
            alive.append(tensor)
            recorder.given[id(tensor)] = recorder.current = t.name
            yield t.name, tensor

    while len(refused) < _MOST_BAD:
        recorder.failing = ""
        try:
            model.load_weights(give())  # type: ignore[operator]
            return
        except Exception as e:
            text = str(e).splitlines()[0][:300] if str(e) else type(e).__name__
            if "skipped because it is tied" in text:
                return  # said once all was given; whether the other of the pair came is checked below
            name = recorder.failing or recorder.current
            refused.add(name)
            unknown = not recorder.failing and ("no module or parameter" in text or isinstance(e, KeyError))
            kind = ProblemKind.EXTRA if unknown else ProblemKind.SHAPE
            meta_of = manifest.get(name)
            shape = list(meta_of.shape) if meta_of is not None else "?"
            out.problem(kind, name, f"vLLM's loader refuses {name!r} {shape}: {type(e).__name__}: {text}")


def _homes(model: nn.Module) -> dict[_Key, int]:
    """Which tensor lies behind each (module, parameter): equal numbers are one tensor (tied)."""
    return {(m, n): id(p) for m, layer in model.named_modules() for n, p in layer._parameters.items() if p is not None}


def _check_complete(
    model: nn.Module, homes: dict[_Key, int], recorder: _Recorder, sizes: dict[_Key, int], quantized: bool, out: Survey
) -> None:
    """Every parameter that loaders fill must be filled whole: part of a fused set corrupts in silence."""
    loaded = {homes[k] for k in recorder.elements if k in homes}
    refused = {name for _, name, _ in out.problems}
    modules = dict(model.named_modules())
    parts = getattr(model, "packed_modules_mapping", None) or {}
    for key, size in sizes.items():
        got = recorder.elements.get(key, 0)
        size = _without_padding(modules[key[0]], key[1], size)
        if not size or got >= size:
            continue
        if not got and homes.get(key) in loaded:
            out.tied.append(key[0])
            continue
        if quantized and not got and key[1] not in ("weight", "bias"):
            continue  # scales of an online quantisation are computed
        whole = ".".join(key)
        given = list(dict.fromkeys(recorder.names.get(key, ())))
        fact = f"vLLM's {whole} gets {got} of its {size} elements"
        if given:
            fact += f" (from {', '.join(map(repr, given[:4]))})"
        absent = _absent(key, parts, recorder)
        if not absent and not any(n in refused for n in (whole, *_names_of_set(key, parts))):
            out.problem(ProblemKind.MISSING, whole, fact)
        for name in absent:
            if name not in refused:
                out.problem(ProblemKind.MISSING, name, f"{name!r} is missing: {fact}")


def _absent(key: _Key, parts: dict[str, list[str]], recorder: _Recorder) -> list[str]:
    """The checkpoint names of a fused parameter that nobody gave."""
    given = set(recorder.names.get(key, ()))
    return [n for n in _names_of_set(key, parts) if n not in given]


def _names_of_set(key: _Key, parts: dict[str, list[str]]) -> list[str]:
    """The checkpoint names that vLLM fuses into a parameter; none if it fuses nothing."""
    prefix, _, leaf = key[0].rpartition(".")
    return [f"{prefix}.{p}.{key[1]}" if prefix else f"{p}.{key[1]}" for p in parts.get(leaf, ())]


def _without_padding(layer: nn.Module, name: str, size: int) -> int:
    """Elements of a parameter that a checkpoint can fill: an embedding's rows beyond the vocabulary are padding."""
    rows = getattr(getattr(layer, "shard_indices", None), "num_org_elements", None)
    tensor = getattr(layer, name, None)
    width = getattr(layer, "embedding_dim", None)
    if rows is None or tensor is None or width is None or name not in ("weight", "bias"):
        return size
    return min(size, int(rows) * (int(width) if name == "weight" else 1))


def _check_names(manifest: Manifest, recorder: _Recorder, out: Survey) -> None:
    """A name that no loader took: an alias of one that was, a table that the model computes, or a mistake."""
    bad = {name for _, name, _ in out.problems}
    by_root: dict[int, bool] = {}
    for i, t in enumerate(manifest):
        by_root[manifest.root(i)] = by_root.get(manifest.root(i), False) or t.name in recorder.sources_of_name
    for i, t in enumerate(manifest):
        if t.name in recorder.sources_of_name or t.name in bad:
            continue
        if by_root[manifest.root(i)]:
            out.taken.add(t.name)
        elif t.name.endswith(_COMPUTED):
            out.dropped.append(t.name)
        else:
            out.untaken.append(t.name)


def _check_tied(manifest: Manifest, homes: dict[_Key, int], recorder: _Recorder, out: Survey) -> None:
    """One tensor of the engine must not come as two: during a reload vLLM takes both, and the later one wins."""
    sources: dict[int, dict[int, str]] = {}
    for key, names in recorder.names.items():
        if key in homes:
            for name in names:
                if name in manifest.index:
                    sources.setdefault(homes[key], {}).setdefault(manifest.root(manifest.index[name]), name)
    shared = {h for h, n in Counter(homes.values()).items() if n > 1}
    for home, by_root in sources.items():
        if home in shared and len(by_root) > 1:
            first, second = list(by_root.values())[:2]
            text = f"{first!r} and {second!r} are one tensor in the engine (tied), the manifest sends two"
            out.problem(ProblemKind.DUPLICATE, second, f"{text}: declare one as alias_of the other")


# --- the load -------------------------------------------------------------------------------------------------------


class _Counter:
    """Counts what the loaders write into real memory. Stays installed; ``reset`` begins a load."""

    def __init__(self) -> None:
        self.elements: dict[_Key, int] = {}

    def install(self, model: nn.Module) -> None:
        for module_name, layer in model.named_modules():
            for name, tensor in get_layer_tensors(layer).items():
                online = getattr(tensor, "weight_loader", None)
                if online is None or online.__name__ != "online_process_loader":
                    continue
                inner = online.__wrapped__
                inner = getattr(inner, "weightplane_inner", inner)
                online.__wrapped__ = self._counting((module_name, name), inner)

    def _counting(self, key: _Key, inner: Callable[..., Any]) -> Callable[..., Any]:
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
) -> int:
    """Load ``weights`` (the names that the survey took) into the live model; the elements written.

    Whatever it raises, the live tensors are back in place; they then hold new layers beside old ones.
    """
    counter = _Counter()
    try:
        restore(model)  # a load that somebody else left half done must not be counted in
        with torch.device(device):
            layerwise.initialize_layerwise_reload(model)
            counter.install(model)
            model.load_weights(_each(weights))  # type: ignore[operator]
            layerwise.finalize_layerwise_reload(model, model_config)
        _repack_tied(model, found)
        _check_written(model, counter, found)
    except BaseException:
        restore(model)
        raise
    finally:
        _forget_counters(model)
    return sum(counter.elements.values())


def _each(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        failpoints.hit("vllm.load.inside")
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


def restore(model: nn.Module) -> None:
    """Put the live tensors of every layer back that is in the middle of a reload, and forget what was buffered."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
        info.reset()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
    layerwise.LOADING_LAYERS.clear()
