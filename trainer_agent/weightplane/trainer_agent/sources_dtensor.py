"""FSDP2 and other DTensors as a source: each rank publishes the shards it has, and nothing is gathered.

A rank's placement follows from its DTensors' own placements: ``Shard`` cuts (uneven and empty shards included),
``Replicate`` repeats, so that under HSDP several ranks hold equal boxes and the plan balances them. Plain tensors
beside the DTensors count as whole copies that every rank holds. A pending sum (``Partial``) has no values to send and
is refused by name; so is a strided shard, whose local rows are not one box (gather it with ``GatherSource``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor, Shard

from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.placement import Box, Piece, Placement, full_box
from weightplane.transports.dtypes import check_movable, name_of

from .naming import WRAPPERS, CastRule, NameMap, NameRules, SourceError, storage_key
from .produced import Produced
from .sources import Local, Source, cast_to, device_kind, member_name, module_tensors, settle_devices

__all__ = ["DTensorSource", "local_box"]

State = Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]]


class DTensorSource(Source):
    """Local shards of a module's parameters and persistent buffers (or of a mapping of names to tensors).

    Every rank makes one over its own module; manifests must come out equal. Tied parameters are told by identity of the
    parameter object (or of its storage). FSDP2 modules must be in their sharded state: publish outside forward and
    backward. ``own`` may say that this rank does not offer a plain tensor that all ranks hold: it is given the name.
    """

    def __init__(
        self,
        model: torch.nn.Module | State,
        *,
        rename: NameMap | None = None,
        cast: CastRule | None = None,
        strip: Iterable[str] = WRAPPERS,
        own: Callable[[str], bool] | None = None,
    ) -> None:
        self.rules = NameRules(rename, cast, tuple(strip))
        self._model = model
        self._own = own
        self._manifest: Manifest | None = None
        self._locals: list[Local | None] = []

    def manifest(self) -> Manifest:
        """See ``Source``."""
        entries: list[TensorMeta] = []
        locals_: list[Local | None] = []
        first: dict[object, str] = {}
        for raw, tensor in self._named():
            name = self.rules.name(raw)
            if name is None:
                continue
            local, box, shape = local_box(tensor, name)
            meta = TensorMeta(name, name_of(self.rules.dtype(name, local.dtype)), shape)
            alias = self._alias(first, tensor, local, meta)
            entries.append(meta if not alias else TensorMeta(name, meta.dtype, shape, alias))
            offered = isinstance(tensor, DTensor) or self._own is None or self._own(name)
            locals_.append((local, box) if offered else None)
        self._manifest = Manifest.of(entries)
        self._locals = locals_
        return self._manifest

    def placement(self, rank: int) -> Placement:
        """See ``Source``. ``SourceError`` if ``rank`` is not this process's rank in the process group."""
        if self._manifest is None:
            raise SourceError("manifest() comes before placement()")
        pieces = (Piece(i, local[1]) for i, local in enumerate(self._locals) if local is not None)
        return Placement.of(member_name(rank), pieces)

    def tensor(self, index: int) -> Local:
        """See ``Source``."""
        local = self._locals[index] if self._locals else None
        if local is None or self._manifest is None:
            raise KeyError(index)
        return cast_to(local[0], self._manifest.tensors[index]), local[1]

    def end(self) -> None:
        """See ``Source``."""
        self._locals = []

    def held(self) -> Sequence[torch.Tensor | None] | None:
        """See ``Source``; none if it casts, or asks a callable, which may well make its tensors anew."""
        if self.transient or not isinstance(self._model, torch.nn.Module | Mapping):
            return None
        return [local[0] if local is not None else None for local in self._locals]

    @property
    def transient(self) -> bool:
        """See ``Source``."""
        return self.rules.cast is not None

    @property
    def device_kind(self) -> str:
        """See ``Source``."""
        return device_kind(local[0] if local is not None else None for local in self._locals)

    def settle(self) -> None:
        """See ``Source``."""
        settle_devices(local[0] if local is not None else None for local in self._locals)

    def produced(self) -> Produced:
        """See ``Source``."""
        return Produced({local[0].device for local in self._locals if local is not None})

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(self._model, torch.nn.Module):
            return module_tensors(self._model)
        state = self._model if isinstance(self._model, Mapping) else self._model()
        return iter(state.items())

    @staticmethod
    def _alias(first: dict[object, str], tensor: torch.Tensor, local: torch.Tensor, meta: TensorMeta) -> str:
        """The root that ``meta`` is a second name of, or nothing. Equal on all ranks when names tie by object."""
        keys: list[object] = [("object", id(tensor), meta.dtype)]
        where = storage_key(local)
        if where is not None:
            keys.append((*where, meta.shape, meta.dtype))
        root = next((first[k] for k in keys if k in first), meta.name)
        for k in keys:
            first.setdefault(k, root)
        return "" if root == meta.name else root


def local_box(tensor: torch.Tensor, name: str = "") -> tuple[torch.Tensor, Box, tuple[int, ...]]:
    """(local plain tensor, its box in the whole tensor, shape of the whole) of a DTensor or a plain tensor; no copy.

    Raises ``SourceError`` naming a tensor whose local part is not one box, ``TypeError`` one whose bytes cannot travel.
    """
    if not isinstance(tensor, DTensor):
        plain = tensor.detach()
        check_movable(plain, name)
        return plain, full_box(tuple(plain.shape)), tuple(plain.shape)
    for placement in tensor.placements:
        if placement.is_partial():
            raise SourceError(f"tensor {name!r} is {placement}: a sum that is not done yet; redistribute it first")
        if type(placement).__name__ == "_StridedShard":
            raise SourceError(
                f"tensor {name!r} is {placement}: its local rows are not one box; gather it with GatherSource"
            )
    shape = tuple(tensor.shape)
    box = _box(tensor, shape)
    local: torch.Tensor = tensor.to_local().detach()
    if tensor.device_mesh.get_coordinate() is None:
        local = local.new_empty([0] * len(shape))
    wait = getattr(local, "wait", None)
    if wait is not None:  # an async collective's result
        local = wait()
    check_movable(local, name)
    expected = tuple(stop - start for start, stop in box)
    if tuple(local.shape) != expected:
        raise SourceError(
            f"tensor {name!r}: the local shard has shape {list(local.shape)}, its placements {tensor.placements} on "
            f"{tensor.device_mesh} say {list(expected)}; is the module in its sharded state?"
        )
    return local, box, shape


def _box(tensor: DTensor, shape: tuple[int, ...]) -> Box:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh: it holds nothing
        return tuple((0, 0) for _ in shape)
    box = list(full_box(shape))
    for size, rank, placement in zip(tensor.device_mesh.shape, coordinate, tensor.placements, strict=True):
        if isinstance(placement, Shard):
            dim = placement.dim % len(shape)
            start, stop = box[dim]
            step = -(-(stop - start) // size)  # torch.chunk: full shares first, then fewer, then none
            box[dim] = (min(start + rank * step, stop), min(start + (rank + 1) * step, stop))
    return tuple(box)
