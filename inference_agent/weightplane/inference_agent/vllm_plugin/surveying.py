"""Where a manifest goes in a worker's model, found before the first byte: the model's own loader is followed.

Runs the loader on tensors without bytes and records every name: what no loader takes, what is mis-shaped, and which
parameters would stay incomplete. Runs on the worker's main thread only; nothing is written.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader.reload import layerwise, meta
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from weightplane.controlplane.core.manifest import Manifest
from weightplane.inference_agent.engines.mismatch import ProblemKind
from weightplane.transports.dtypes import dtype_of

from .compat import is_deferred_attention, load_numel
from .directly import DirectMap, Indirect, direct_map
from .recording import CopyRecorder, Key
from .restoring import restore

__all__ = ["Key", "Survey", "checkpoint_bytes", "cpu_experts", "survey"]

log = logging.getLogger("weightplane.vllm")

_MOST_BAD = 25  # names whose loader refused them, after which the survey ends
#: What some checkpoints hold and every loader drops: tables that the model computes itself.
_COMPUTED = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


@dataclass
class Survey:
    """Where a manifest goes in this worker. ``problems``: (kind, name, text); empty if it can be loaded.

    ``taken``: names that some loader here takes. ``expected``: elements that the loaders write, by (module, tensor).
    ``tied``: modules whose weight is another's and is loaded under that one's name. ``direct``: the way past the
    loaders, or ``indirect`` says why there is none.
    """

    taken: set[str] = field(default_factory=set)
    expected: dict[Key, int] = field(default_factory=dict)
    problems: list[tuple[str, str, str]] = field(default_factory=list)
    untaken: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    tied: list[str] = field(default_factory=list)
    direct: DirectMap | None = None
    indirect: str = ""

    def problem(self, kind: ProblemKind, name: str, text: str) -> None:
        """Note one."""
        self.problems.append((kind.value, name, text))


def checkpoint_bytes(model: nn.Module) -> int:
    """The size of the parameters as they were before vLLM packed them for its kernels."""
    infos = [layerwise.get_layerwise_info(layer) for layer in model.modules()]
    return sum(p.numel() * p.element_size() for i in infos for p in i.restore_metadata[0].values())


def survey(model: nn.Module, manifest: Manifest, device: torch.device, quantized: bool) -> Survey:
    """Record where the model's loader puts every tensor of ``manifest``. Nothing is written, the model is whole."""
    out = Survey()
    homes = _homes(model)
    recorder, seen = _Recorder(), CopyRecorder()
    with torch.device(device):
        layerwise.initialize_layerwise_reload(model)
    try:
        recorder.install(model, seen)
        with seen:
            _feed(model, manifest, recorder, seen, out)
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
    if device.type == "cpu":
        _check_padded_experts(model, out)
    try:
        out.direct = _direct(model, manifest, seen, device, quantized, out)
    except Indirect as e:
        out.indirect = str(e)
    except Exception as e:  # the loaders do without
        log.exception("what vLLM's loaders did was not understood")
        out.indirect = f"what they did was not understood: {type(e).__name__}: {e}"
    return out


def _direct(
    model: nn.Module, manifest: Manifest, seen: CopyRecorder, device: torch.device, quantized: bool, out: Survey
) -> DirectMap:
    if out.problems:
        raise Indirect(out.problems[0][2])
    if quantized:
        raise Indirect("vLLM quantises the weights")
    try:
        from .fitting import unfit
    except ImportError as e:
        raise Indirect(f"this vLLM is not as those that were looked into: {e}") from e
    if why := unfit(model, device, {m for m, _ in out.expected}):
        raise Indirect(why)
    return direct_map(model, manifest, seen, device, out.expected)


class _Recorder:
    """Stands in for the loaders of every parameter: runs the original on meta tensors and counts."""

    seen: CopyRecorder

    def __init__(self) -> None:
        self.current = self.failing = ""
        self.given: dict[int, str] = {}
        self.doubles: set[str] = set()  # names that come as float64
        self.elements: dict[Key, int] = {}
        self.sizes: dict[Key, int] = {}
        self.names: dict[Key, list[str]] = {}
        self.sources_of_name: dict[str, list[Key]] = {}
        self.mistyped: dict[str, str] = {}
        self._replaced: list[tuple[Any, Any]] = []

    def install(self, model: nn.Module, seen: CopyRecorder) -> None:
        self.seen = seen
        for module_name, layer in model.named_modules():
            for name, tensor in get_layer_tensors(layer).items():
                if tensor.is_meta:
                    seen.target((module_name, name), tensor)
            if is_deferred_attention(layer):
                continue  # scales of attention: optional in every checkpoint
            for name, tensor in get_layer_tensors(layer).items():
                wrapped = getattr(tensor, "weight_loader", None)
                if wrapped is None or wrapped.__name__ != "online_process_loader":
                    continue
                key = (module_name, name)
                self.sizes[key] = load_numel(tensor) if name in layer._parameters else 0
                original = layerwise._get_original_loader(tensor)
                self._replaced.append((tensor, wrapped))
                tensor.weight_loader = self._stand_in(key, original)

    def _stand_in(self, key: Key, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def record(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = [v for k, v in bound.arguments.items() if k != "param"]
            name = self._name_of(given)
            param: Any = bound.arguments.get("param")
            if isinstance(param, torch.Tensor):
                self._check_dtype(name, given, param)
                if not param.is_meta:  # biases stay where they are during a reload: nothing may be written to them
                    stand_in = bound.arguments["param"] = meta.to_meta_tensor(param)
                    self.seen.target(key, stand_in)
            self.failing = name
            numel, result = meta.get_numel_loaded(original, bound)
            self.failing = ""
            self.elements[key] = self.elements.get(key, 0) + numel
            self.names.setdefault(key, []).append(name)
            self.sources_of_name.setdefault(name, []).append(key)
            return result

        return record

    def _check_dtype(self, name: str, given: list[Any], param: torch.Tensor) -> None:
        """Loaders cast as they copy: between floating types that is meant, between other kinds it is a mistake.

        So is float64: half of what it says would be lost without a word, also where the model casts before its loaders.
        """
        dtypes = [t.dtype for t in given if isinstance(t, torch.Tensor)]
        if name in self.doubles:
            dtypes.append(torch.float64)
        for dtype in dtypes:
            if dtype == param.dtype:
                continue
            if not (dtype.is_floating_point and param.dtype.is_floating_point):
                self.mistyped[name] = f"the manifest has {name!r} as {dtype}, vLLM takes {param.dtype}"
            elif dtype is torch.float64:
                text = f"the manifest has {name!r} as {dtype}, vLLM takes {param.dtype}: cast it before it is published"
                self.mistyped[name] = text

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


def _feed(model: nn.Module, manifest: Manifest, recorder: _Recorder, seen: CopyRecorder, out: Survey) -> None:
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
            seen.source(t.name, tensor)
            recorder.given[id(tensor)] = recorder.current = t.name
            if tensor.dtype is torch.float64:
                recorder.doubles.add(t.name)
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


def _homes(model: nn.Module) -> dict[Key, int]:
    """Which tensor lies behind each (module, parameter): equal numbers are one tensor (tied)."""
    return {(m, n): id(p) for m, layer in model.named_modules() for n, p in layer._parameters.items() if p is not None}


def _check_complete(
    model: nn.Module, homes: dict[Key, int], recorder: _Recorder, sizes: dict[Key, int], quantized: bool, out: Survey
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


def _absent(key: Key, parts: dict[str, list[str]], recorder: _Recorder) -> list[str]:
    """The checkpoint names of a fused parameter that nobody gave."""
    given = set(recorder.names.get(key, ()))
    return [n for n in _names_of_set(key, parts) if n not in given]


def _names_of_set(key: Key, parts: dict[str, list[str]]) -> list[str]:
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


def _check_tied(manifest: Manifest, homes: dict[Key, int], recorder: _Recorder, out: Survey) -> None:
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


def cpu_experts(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Layers of unquantised experts that vLLM's CPU kernel packs, with what packs them."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if experts is not None and hasattr(experts, "_pad_moe_intermediate"):
            yield layer, experts


def _check_padded_experts(model: nn.Module, out: Survey) -> None:
    """A size that the kernel pads cannot be loaded again: vLLM copies the plain weights over the padded ones."""
    names = {id(layer): name for name, layer in model.named_modules()}
    for layer, experts in cpu_experts(model):
        size = experts.moe_config.intermediate_size_per_partition
        padded = experts._padded_intermediate_size(experts.moe_config)
        if size != padded:
            name = f"{names[id(layer)]}.w13_weight"
            text = f"{name}: vLLM's CPU kernel pads its {size} rows per worker to {padded}, and cannot reload it then"
            out.problem(ProblemKind.SHAPE, name, f"{text}: use a moe_intermediate_size that needs no padding")
