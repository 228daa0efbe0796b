"""What a trainer publishes: a manifest, where this rank's bytes lie, and nothing that could change them.

A **source** answers for one rank. Its methods are called from the thread that publishes, except ``tensor``, which is
called from the sending threads, several at once. ``begin(step)`` opens a publish and ``end()`` closes it; in between
the tensors must not change (until the publisher says ``source_free``). A source never writes to its tensors: casts go
to new memory, bit views are read only.

Metadata is read afresh for every publish; a changed model makes a new manifest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.placement import Box, Piece, Placement, full_box, full_placement
from weightplane.transports.dtypes import dtype_of
from weightplane.transports.identity import ModuleLayout

from .naming import WRAPPERS, CastRule, NameMap, NameRules, SourceError, meta_of, storage_key
from .produced import NOTHING_QUEUED, Produced

__all__ = ["Local", "ModuleSource", "NamedTensors", "Source", "StateDictSource", "member_name", "module_tensors"]

#: A tensor held here and the box of the manifest entry that it is.
Local = tuple[torch.Tensor, Box]


def member_name(rank: int) -> str:
    """A trainer rank as the contract names it."""
    return f"rank/{rank}"


class Source(ABC):
    """One rank's part of the model. See the module's text for threads and lifetimes."""

    #: Tensors come from an iterator that runs on every rank (``iterate``), not from ``tensor``.
    gathers: ClassVar[bool] = False

    def begin(self, step: int) -> None:
        """A publish of ``step`` begins; ``manifest`` is asked next."""
        return None

    def end(self) -> None:
        """The publish is over, well or not: let go of what only it needed. May come without ``begin``."""
        return None

    @abstractmethod
    def manifest(self) -> Manifest:
        """All tensors of the model, in a fixed order that is equal on all ranks; read afresh at each call.

        Raises ``ManifestError``, ``SourceError`` or ``TypeError`` naming what cannot be published.
        """

    @abstractmethod
    def placement(self, rank: int) -> Placement:
        """What this rank holds of the last ``manifest()``, as member ``rank/<rank>``."""

    @abstractmethod
    def tensor(self, index: int) -> Local:
        """Entry ``index`` (a root, never an alias) of the last ``manifest()`` as it is held here: any strides, dtype of
        the manifest, shape of the box. ``KeyError`` if this rank holds nothing of it. Any thread."""

    def held(self) -> Sequence[torch.Tensor | None] | None:
        """What ``tensor`` gives, by manifest index (``None``: not held here, or an alias): this source's own, live
        memory. No list at all (the default) if ``tensor`` makes new memory, or may give other tensors each time.

        A publisher then uses again what it worked out for them, for as long as they are the memory that they were.
        """
        return None

    @property
    def transient(self) -> bool:
        """Whether ``tensor`` makes new memory at each call (a cast does): callers then keep results no longer than
        they need them, and ask once rather than often."""
        return False

    @property
    def device_kind(self) -> str:
        """``"cuda"`` if any tensor of the last ``manifest()`` lies there, else ``"cpu"``."""
        return "cpu"

    def settle(self) -> None:
        """Wait until work queued on this thread's devices has written the tensors. Does nothing for CPU tensors."""
        return None

    def produced(self) -> Produced:
        """When what this thread has queued on the devices of the last ``manifest()``'s tensors will have written them;
        called at the start of a publish, in its caller's thread. The default waits here and now (``settle``)."""
        self.settle()
        return NOTHING_QUEUED


class NamedTensors(Source):
    """Base of sources that hold plain, whole tensors under names. Subclasses give ``named`` anew for each publish."""

    def __init__(
        self,
        *,
        rename: NameMap | None = None,
        cast: CastRule | None = None,
        strip: Iterable[str] = WRAPPERS,
        manifest: Manifest | None = None,
    ) -> None:
        self.rules = NameRules(rename, cast, tuple(strip))
        self._fixed = manifest
        self._manifest: Manifest | None = None
        self._tensors: list[torch.Tensor | None] = []
        self._full: tuple[str, int, Placement] | None = None  # the last full placement: equal ones need not be made

    @abstractmethod
    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(raw name, tensor) in order; tied tensors under each of their names."""

    def manifest(self) -> Manifest:
        """See ``Source``. With a fixed manifest (one that ranks holding different names agreed on) the tensors held
        here must be in it as they are."""
        entries, tensors = collect(self.named(), self.rules)
        if self._fixed is not None:
            self._tensors = fit(self._fixed, entries, tensors)
            self._manifest = self._fixed
        else:
            self._manifest = Manifest.of(entries)
            self._tensors = list(tensors)
        return self._manifest

    def placement(self, rank: int) -> Placement:
        """See ``Source``: every entry whole; with a fixed manifest, those held here."""
        manifest = self._known()
        if self._fixed is None:
            if self._full is None or self._full[:2] != (manifest.id, rank):
                self._full = (manifest.id, rank, full_placement(member_name(rank), manifest))
            return self._full[2]
        return held_whole(member_name(rank), manifest, self._tensors)

    def tensor(self, index: int) -> Local:
        """See ``Source``."""
        tensor = self._tensors[index] if self._tensors else None
        meta = self._known().tensors[index]
        if tensor is None:
            raise KeyError(meta.name)
        return cast_to(tensor.detach(), meta), full_box(meta.shape)

    def held(self) -> Sequence[torch.Tensor | None] | None:
        """See ``Source``; none if it casts, or if a subclass has a ``tensor`` of its own."""
        return self._tensors if not self.transient and type(self).tensor is NamedTensors.tensor else None

    @property
    def transient(self) -> bool:
        """See ``Source``."""
        return self.rules.cast is not None

    @property
    def device_kind(self) -> str:
        """See ``Source``."""
        return device_kind(self._tensors)

    def settle(self) -> None:
        """See ``Source``."""
        settle_devices(self._tensors)

    def produced(self) -> Produced:
        """See ``Source``."""
        return Produced({t.device for t in self._tensors if t is not None})

    def end(self) -> None:
        """See ``Source``."""
        self._tensors = []

    def _known(self) -> Manifest:
        if self._manifest is None:
            raise SourceError("manifest() comes before placement() and tensor()")
        return self._manifest


class StateDictSource(NamedTensors):
    """A mapping of names to plain tensors, in its order; a callable is asked for the mapping at each publish.

    Entries that share all their bytes (tied parameters) become aliases. ``manifest`` fixes the whole model's entries
    for a rank that holds only some of them (see ``merge_manifests``); tensors outside it are refused. ``TypeError``
    names an entry that is not a tensor.
    """

    def __init__(
        self,
        state: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        *,
        rename: NameMap | None = None,
        cast: CastRule | None = None,
        strip: Iterable[str] = WRAPPERS,
        manifest: Manifest | None = None,
    ) -> None:
        super().__init__(rename=rename, cast=cast, strip=strip, manifest=manifest)
        self._state = state

    def held(self) -> Sequence[torch.Tensor | None] | None:
        """See ``Source``; none of a callable, which may well make its tensors anew."""
        return super().held() if isinstance(self._state, Mapping) else None

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``NamedTensors``."""
        state = self._state if isinstance(self._state, Mapping) else self._state()
        for name, tensor in state.items():
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"entry {name!r} of the state dict is a {type(tensor).__name__}, not a tensor")
            yield name, tensor


class ModuleSource(NamedTensors):
    """All parameters and persistent buffers of an ``nn.Module``, read live at each publish.

    Tied parameters appear under each of their names, as aliases; so do shared submodules. Non-persistent buffers are
    left to the engine. Sharded parameters (DTensor) are refused by name: use ``DTensorSource``.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        rename: NameMap | None = None,
        cast: CastRule | None = None,
        strip: Iterable[str] = WRAPPERS,
        manifest: Manifest | None = None,
    ) -> None:
        super().__init__(rename=rename, cast=cast, strip=strip, manifest=manifest)
        self.module = module
        self._layout: ModuleLayout | None = None
        self._places: list[int | None] = []  # by manifest index: the tensor's place in the layout

    def manifest(self) -> Manifest:
        """See ``NamedTensors``. The very object of the last call while the module is as it was."""
        if callable(self.rules.rename) or callable(self.rules.cast) or type(self).named is not ModuleSource.named:
            return super().manifest()
        if self._layout is None or self._layout.module is not self.module:
            self._layout = ModuleLayout(self.module)
        layout, self._layout = self._layout, None  # whatever is raised below: look afresh
        if layout.changed() or self._manifest is None:
            manifest = super().manifest()
            places = {id(t): i for i, t in enumerate(layout.tensors())}
            self._places = [places[id(raw)] if raw is not None else None for raw in self._tensors]
        else:
            manifest, held = self._manifest, layout.tensors()
            self._tensors = [held[i] if i is not None else None for i in self._places]
        self._layout = layout
        return manifest

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``NamedTensors``."""
        return module_tensors(self.module)


def module_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers under every name they have, in the order of ``state_dict``."""
    for prefix, sub in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in sub._parameters.items():
            if parameter is not None:
                yield dot + name, parameter
        for name, buffer in sub._buffers.items():
            if buffer is not None and name not in sub._non_persistent_buffers_set:
                yield dot + name, buffer


def collect(named: Iterable[tuple[str, torch.Tensor]], rules: NameRules) -> tuple[list[TensorMeta], list[torch.Tensor]]:
    """Manifest entries with ties found by storage, and the tensors beside them, as they were given."""
    entries: list[TensorMeta] = []
    tensors: list[torch.Tensor] = []
    first: dict[tuple[object, ...], str] = {}
    for raw, tensor in named:
        name = rules.name(raw)
        if name is None:
            continue
        plain = tensor.detach()
        meta = meta_of(name, plain, rules)
        key = storage_key(plain)
        if key is not None:
            root = first.setdefault((*key, meta.dtype), name)
            if root != name:
                meta = TensorMeta(meta.name, meta.dtype, meta.shape, root)
        entries.append(meta)
        tensors.append(tensor)
    return entries, tensors


def fit(manifest: Manifest, entries: list[TensorMeta], tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """``tensors`` by manifest index. ``SourceError`` names each that the manifest lacks or holds differently."""
    out: list[torch.Tensor | None] = [None] * len(manifest)
    problems: list[str] = []
    for meta, tensor in zip(entries, tensors, strict=True):
        want = manifest.get(meta.name)
        if want is None:
            problems.append(f"{meta.name!r} is not in the manifest")
        elif (want.dtype, want.shape) != (meta.dtype, meta.shape):
            problems.append(
                f"{meta.name!r}: expected {want.dtype} {list(want.shape)}, found {meta.dtype} {list(meta.shape)}"
            )
        else:
            i = manifest.index[meta.name]
            if out[i] is not None:
                problems.append(f"{meta.name!r} is held twice")
            out[i] = tensor
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise SourceError(f"{len(problems)} tensor(s) do not fit the manifest: {'; '.join(problems[:5])}{more}")
    for i, held in enumerate(out):  # who holds one name of tied bytes holds them all
        root = manifest.root(i)
        if held is not None and out[root] is None:
            out[root] = held
    return out


def held_whole(member: str, manifest: Manifest, tensors: list[torch.Tensor | None]) -> Placement:
    """The placement of a member that holds these entries whole."""
    held = (i for i, t in enumerate(tensors) if t is not None)
    return Placement.of(member, (Piece(i, full_box(manifest.tensors[i].shape)) for i in held))


def cast_to(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """``tensor`` itself, or ``tensor.to(dtype)`` in new memory."""
    dtype = dtype_of(meta.dtype)
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def device_kind(tensors: Iterable[torch.Tensor | None]) -> str:
    """``"cuda"`` if one of them lies there, else ``"cpu"``."""
    return "cuda" if any(t is not None and t.device.type == "cuda" for t in tensors) else "cpu"


def settle_devices(tensors: Iterable[torch.Tensor | None]) -> None:
    """Wait for this thread's current stream of every CUDA device among ``tensors``."""
    for device in {t.device for t in tensors if t is not None and t.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
