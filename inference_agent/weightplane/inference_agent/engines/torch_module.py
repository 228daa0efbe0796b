"""``torch_module``: any ``nn.Module`` as an inference engine.

It holds every parameter and persistent buffer under every name (tied ones once, under both); non-persistent buffers
are never touched. Live tensors keep their ``data_ptr`` for ever; writing raises ``tensor._version``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from weightplane.controlplane import failpoints
from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.model import NONE_HELD, Held
from weightplane.controlplane.core.placement import Box, full_box
from weightplane.controlplane.core.states import CachePolicy, Evidence, Mode, PauseMode
from weightplane.transports.digest_cuda import digest_tensors
from weightplane.transports.identity import ModuleLayout

from .arena import Arena, StagingRefused
from .base import Description, EngineError, EngineUpdate, GatedEngine, LocalTensors, VersionTag, WorkerDevice
from .fit import fit
from .live import Copies, LiveTensor, bump_version, collect, versioned
from .sharding import BoxOf

__all__ = ["PostUpdateHook", "TorchModuleEngine"]

#: Called with each worker's module after its live tensors were written, generation paused: refresh derived copies.
PostUpdateHook = Callable[[nn.Module], None]


@dataclass(frozen=True)
class _Map:
    """What an update of one manifest and mode takes, found once: by worker, and over all of them."""

    targets: list[LocalTensors]
    live: list[LocalTensors]
    written: list[torch.Tensor]  # the live tensors that it brings, those that have a version
    devices: frozenset[torch.device]  # the CUDA devices among theirs
    copies: Copies  # from their staging slots (in place: none)


class TorchModuleEngine(GatedEngine):
    """One module per worker, all in this process.

    ``staged``: reserve staging memory of the model's size now; where that fails the engine is in place only and says
    why. ``boxes``: which box of each manifest entry a worker's tensor is (default: the whole; see ``cut``).
    ``allow_extra`` / ``allow_missing``: name patterns (``fnmatch``) that a manifest may bring in vain / may leave out;
    everything else must match both ways. ``on_cache``: called with the policy at each commit; raising makes the
    replica DIRTY. Without it only CLEAR is offered: whoever keeps caches drops them when the tag changes.
    """

    name = f"torch_module (torch {torch.__version__})"

    def __init__(
        self,
        module: nn.Module | Sequence[nn.Module],
        *,
        staged: bool = True,
        boxes: BoxOf | None = None,
        allow_extra: Sequence[str] = (),
        allow_missing: Sequence[str] = (),
        hooks: Iterable[PostUpdateHook] = (),
        on_cache: Callable[[CachePolicy], None] | None = None,
        cache_policies: Sequence[CachePolicy] = (CachePolicy.CLEAR,),
        staging_limit: int | None = None,
    ) -> None:
        super().__init__()
        self.modules = [module] if isinstance(module, nn.Module) else list(module)
        if not self.modules:
            raise ValueError("an engine needs at least one module")
        if on_cache is None and set(cache_policies) != {CachePolicy.CLEAR}:
            raise ValueError("cache policies other than CLEAR need on_cache")
        self.hooks = list(hooks)
        self.cache_epoch = 0
        self._boxes = boxes or (lambda meta, _: full_box(meta.shape))
        self._extra, self._missing = tuple(allow_extra), tuple(allow_missing)
        self._on_cache, self._policies = on_cache, tuple(cache_policies)
        self._wants_staging, self._limit = staged, staging_limit
        self._held = NONE_HELD
        self._update: EngineUpdate | None = None
        self._settled = False  # its tensors were looked at as its last bytes came
        self._map: _Map | None = None
        self._layout = 0
        self._layouts: list[ModuleLayout] = []
        self._maps: dict[tuple[str, Mode], _Map] = {}
        self._live: list[list[LiveTensor]] = []
        self._arenas: list[Arena] = []
        self._refusal = "" if staged else "staging was turned off for this engine"
        self.layout()

    # --- what it is and holds

    @property
    def workers(self) -> tuple[WorkerDevice, ...]:
        """One per module; the device of its first tensor."""
        out = []
        for live in self._live:
            device = live[0].tensor.device if live else torch.device("cpu")
            cuda = device.type == "cuda"
            uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", "")) if cuda else ""
            out.append(WorkerDevice(device.type, uuid))
        return tuple(out)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """STAGED first where its memory is reserved."""
        return (Mode.IN_PLACE,) if self._refusal else (Mode.STAGED, Mode.IN_PLACE)

    @property
    def staging_refusal(self) -> str:
        """See ``Engine``."""
        return self._refusal

    @property
    def cache_policies(self) -> tuple[CachePolicy, ...]:
        """As given."""
        return self._policies

    @property
    def evidence(self) -> Evidence:
        """LIVE: its layout is the manifest's, or a cut of it."""
        return Evidence.LIVE

    @property
    def post_processes(self) -> bool:
        """Only if it has hooks."""
        return bool(self.hooks)

    @property
    def staging_bytes(self) -> int:
        """Bytes reserved for staging, all workers."""
        return sum(a.nbytes for a in self._arenas)

    def held(self) -> tuple[Held, ...]:
        """See ``Engine``."""
        return (self._held,) * len(self.modules)

    def live_digests(self) -> dict[str, int]:
        """The LIVE digest of every tensor under every name (of worker w of several: ``"w/name"``), read from memory."""
        several = len(self._live) > 1
        out: dict[str, int] = {}
        for w, worker in enumerate(self._live):
            found = digest_tensors([live.tensor for live in worker], [live.names[0] for live in worker])
            for live, digest in zip(worker, found, strict=True):
                out.update({f"{w}/{n}" if several else n: digest for n in live.names})
        return out

    def layout(self) -> int:
        """See ``Engine``. Reserves staging anew when it changed. ``TypeError`` names a tensor that cannot travel."""
        looks = self._layouts or [ModuleLayout(m) for m in self.modules]
        self._layouts = []  # whatever is raised below: look afresh
        if sum(look.changed() for look in looks):  # each is asked
            self._live = [collect(m) for m in self.modules]
            self._layout += 1
            self._maps.clear()
            self._reserve()
        self._layouts = looks
        return self._layout

    def glance(self) -> int | None:
        """See ``Engine``: whether the same tensors have the same addresses."""
        if not self._layouts or any(look.moved() for look in self._layouts):
            return self.layout()
        return self._layout

    def _reserve(self) -> None:
        self._arenas = []
        if not self._wants_staging:
            return
        self._refusal = ""
        try:
            for live in self._live:
                self._arenas.append(Arena([t.tensor for t in live], self._limit))
        except StagingRefused as e:
            self._arenas, self._refusal = [], str(e)

    def describe(self, manifest: Manifest, members: Sequence[str]) -> Description:
        """See ``Engine``. What an update of the manifest takes is found too, where it fits."""
        said = fit(manifest, members, self._live, self._boxes, self._extra, self._missing)
        if said.failure("") is None:
            self._found(manifest, self.modes[0])
        return said

    # --- an update

    def begin(self, update: EngineUpdate) -> None:
        """See ``Engine``."""
        if self._update is not None:
            self.abort(self._update.update_id, False, f"update {update.update_id} begins")
        if update.mode not in self.modes:
            raise EngineError(f"mode {update.mode} is not possible: {self._refusal}")
        if update.cache not in self._policies:
            raise EngineError(f"cache policy {update.cache}: this engine has {', '.join(self._policies)}")
        self._map = self._found(update.manifest, update.mode)
        self._update, self._settled = update, False

    def _found(self, manifest: Manifest, mode: Mode) -> _Map:
        key = (manifest.id, mode)
        if key not in self._maps:
            self._maps.clear()
            self._maps[key] = self._find(manifest, mode is Mode.STAGED)
        return self._maps[key]

    def _find(self, manifest: Manifest, staged: bool) -> _Map:
        """What an update takes whose manifest fits."""
        all_targets: list[LocalTensors] = []
        all_live: list[LocalTensors] = []
        written: list[torch.Tensor] = []
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for w, worker in enumerate(self._live):
            targets: dict[int, tuple[torch.Tensor, Box]] = {}
            current: dict[int, tuple[torch.Tensor, Box]] = {}
            for i, live in enumerate(worker):
                slot = self._arenas[w].staged[i] if staged else None
                indices = [k for n in live.names if (k := manifest.index.get(n)) is not None]
                for index in indices:
                    box = self._boxes(manifest.tensors[index], w)
                    current[index] = (live.tensor, box)
                    targets[index] = (live.tensor if slot is None else slot, box)
                if indices:
                    written.append(live.tensor)
                    if slot is not None:
                        pairs.append((live.tensor, slot))
            all_targets.append(targets)
            all_live.append(current)
        devices = frozenset(t.device for t in written if t.device.type == "cuda")
        return _Map(all_targets, all_live, versioned(written), devices, Copies(pairs))

    def targets(self, worker: int) -> LocalTensors:
        """See ``Engine``."""
        self._open()
        return self._known().targets[worker]

    def live(self, worker: int) -> LocalTensors:
        """See ``Engine``."""
        self._open()
        return self._known().live[worker]

    def _known(self) -> _Map:
        assert self._map is not None
        return self._map

    def _open(self, update_id: str = "") -> EngineUpdate:
        u = self._update
        if u is None or (update_id and u.update_id != update_id):
            raise EngineError(f"update {update_id!r} is not open here (open: {u.update_id if u else 'none'})")
        return u

    def writing(self, update_id: str) -> None:
        """See ``Engine``."""
        u = self._open(update_id)
        if u.mode is not Mode.IN_PLACE:
            raise EngineError(f"update {update_id} is staged: nothing is written before the apply")
        if not self.holders():
            raise EngineError("live weights are written while generation is paused only")
        self._quiet()
        self._fence(f"update {update_id} is being written in place")

    def _quiet(self) -> None:
        """Wait until nothing runs on the devices, on any stream, that could still read the weights."""
        for device in self._known().devices:
            torch.cuda.synchronize(device)

    def _fence(self, why: str) -> None:
        """Mixed from here on. Held with KEEP: requests in flight may go on if it ends well."""
        self._mixed = self._mixed or why
        self.gate.pause("dirty", PauseMode.KEEP)

    def settle(self, update_id: str) -> None:
        """See ``Engine``."""
        self._open(update_id)
        self._same_layout()
        self._settled = True

    def prepare(self, update_id: str) -> None:
        """See ``Engine``."""
        u = self._open(update_id)
        if not self._settled:
            self._same_layout()
        if u.mode is Mode.IN_PLACE:
            with self.gate.exclusive():
                bump_version(self._known().written)
                self._post_process()

    def _same_layout(self) -> None:
        if not self._layouts or any(look.moved() for look in self._layouts):
            self.layout()
            raise EngineError("live tensors were replaced or moved since the update began")

    def apply(self, update_id: str) -> None:
        """See ``Engine``."""
        u = self._open(update_id)
        if u.mode is not Mode.STAGED:
            raise EngineError(f"update {update_id} is in place: it was applied as it came")
        with self.gate.exclusive():
            self._quiet()
            self._fence(f"update {update_id} is being applied")
            for _ in self._known().copies.steps():
                failpoints.hit("replica.apply.inside")
            self._post_process()

    def _post_process(self) -> None:
        if not self.hooks:
            return
        for module in self.modules:
            for hook in self.hooks:
                with torch.no_grad():
                    hook(module)
        if any(look.changed() for look in self._layouts):
            self._layouts = []
            raise EngineError("a post-update hook moved or replaced live tensors: write into them instead")

    def commit(self, update_id: str) -> None:
        """See ``Engine``."""
        u = self._open(update_id)
        with self.gate.exclusive():
            if self._on_cache is not None:
                self._on_cache(u.cache)
            self.cache_epoch += u.cache is CachePolicy.CLEAR
            incarnation = self.gate.tag.incarnation
            self._held = u.held
            self.gate.relabel(VersionTag(u.version, u.update_id, u.trainer_step, u.lineage, incarnation))
            self._mixed = ""
        self._forget()
        self.gate.resume("dirty")

    def abort(self, update_id: str, wrote: bool, reason: str) -> None:
        """See ``Engine``."""
        u = self._update
        if u is None or (update_id and u.update_id != update_id):
            return
        if wrote or (self._mixed and not update_id):
            self.spoil(reason)
        elif u.mode is Mode.IN_PLACE and self._mixed.startswith(f"update {u.update_id} "):
            self._mixed = ""  # fenced for it, and not one byte came
            self.gate.resume("dirty")
        self._forget()

    def abandon(self, update_id: str) -> None:
        """See ``Engine``. Reserves other staging memory at the next look at the layout."""
        u = self._open(update_id)
        if u.mode is not Mode.STAGED:
            raise EngineError(f"update {update_id} is in place: its writer cannot be left behind")
        self._forget()
        self._layouts = []

    def spoil(self, reason: str) -> None:
        """Declare live memory mixed: nothing is held, generation is fenced until a full update commits."""
        self._held = NONE_HELD
        self.soil(reason)

    def _forget(self) -> None:
        self._update = self._map = None
