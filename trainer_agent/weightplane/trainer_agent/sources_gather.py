"""Tensors that a function gathers while they are published: the user's own collectives, on all ranks, in lock step.

``fn(step)`` is an iterator of ``(name, tensor)``; it runs on every rank, in the thread that publishes, and may issue
any collective between two yields. One rank (``sender_rank``) sends what it is given; on the others a yield only moves
the iteration on. Weightplane pulls the next tensor when every byte that a bucket needs has been gathered here and the
transports want more: on CUDA never while one of them is moving bytes, and always after the stream that gathered has
been waited for. So a gather never queues behind a transfer, and no collective of ours touches the user's groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import ClassVar

import torch

from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.placement import Placement, full_box, full_placement

from .naming import WRAPPERS, CastRule, NameMap, NameRules, SourceError, meta_of
from .sources import Local, Source, cast_to, member_name

__all__ = ["GatherSource"]

Yielded = tuple[str, torch.Tensor | None]


class GatherSource(Source):
    """A source whose tensors exist one after the other, whole, on one rank.

    ``manifest`` says what ``fn`` will yield, in its order; without one ``fn`` is run once, all ranks together, at the
    first publish and again after a publish in which it yielded something else. On ranks that do not send, a tensor on
    the meta device does, and ``None`` if there is a manifest. ``aliases`` are further names of yielded ones.

    ``device`` says where they lie ("cpu", "cuda"); by default it is "cuda" if this process uses CUDA at all.

    A yielded tensor stays unchanged until the publish is over. If ``fn`` yields memory that it reuses, pass
    ``reuses=True``: each tensor is copied before ``fn`` goes on. With ``publish_async`` (and ``asyncio``) ``fn`` runs
    in a thread of ours: keep your own collectives out of its way until ``source_free``.
    """

    gathers: ClassVar[bool] = True

    def __init__(
        self,
        fn: Callable[[int], Iterable[Yielded]],
        *,
        manifest: Manifest | None = None,
        sender_rank: int = 0,
        aliases: Mapping[str, str] | None = None,
        rename: NameMap | None = None,
        cast: CastRule | None = None,
        strip: Iterable[str] = WRAPPERS,
        reuses: bool = False,
        device: str = "",
    ) -> None:
        self.rules = NameRules(rename, cast, tuple(strip))
        self.sender_rank = sender_rank
        self.reuses = reuses
        self._device = device
        self._fn = fn
        self._aliases = dict(aliases or {})
        self._manifest = manifest
        self._scanned = manifest is None
        self._step = 0

    def begin(self, step: int) -> None:
        """See ``Source``."""
        self._step = step

    def manifest(self) -> Manifest:
        """See ``Source``. Runs ``fn`` (on all ranks at once) if it is not known what it yields."""
        if self._manifest is None:
            self._manifest = self._scan()
        return self._manifest

    def placement(self, rank: int) -> Placement:
        """See ``Source``: everything at the sending rank, nothing elsewhere."""
        member = member_name(rank)
        return full_placement(member, self.manifest()) if rank == self.sender_rank else Placement(member, ())

    def tensor(self, index: int) -> Local:
        """Not how this source is read: see ``iterate``."""
        raise SourceError("a GatherSource is iterated, all ranks together; it has no tensor by index")

    @property
    def device_kind(self) -> str:
        """See ``Source``; as ``device`` said, else as CUDA is in use in this process or not."""
        if not self._device:
            self._device = "cuda" if torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]
        return self._device

    @property
    def transient(self) -> bool:
        """See ``Source``."""
        return True

    def iterate(self, *, sends: bool) -> Iterator[tuple[int, Local | None]]:
        """(manifest index, local) of every root in manifest order; ``None`` for a local on a rank that does not send.

        Runs ``fn`` in the calling thread. Raises ``SourceError`` naming the first tensor that differs from the manifest
        (the next publish then looks anew), or whatever ``fn`` raises.
        """
        manifest = self.manifest()
        roots = [i for i, meta in enumerate(manifest) if not meta.alias_of]
        at = 0
        try:
            for raw, tensor in self._fn(self._step):
                name = self.rules.name(raw)
                if name is None:
                    continue
                if at == len(roots):
                    raise SourceError(f"tensor {name!r}: the manifest ends before it")
                index, meta = roots[at], manifest.tensors[roots[at]]
                at += 1
                self._check(name, tensor, meta, sends)
                yield index, (self._take(tensor, meta), full_box(meta.shape)) if sends and tensor is not None else None
            if at < len(roots):
                names = [manifest.tensors[i].name for i in roots[at : at + 5]]
                raise SourceError(f"{len(roots) - at} tensor(s) of the manifest were not yielded, first {names}")
        except SourceError:
            if self._scanned:
                self._manifest = None
            raise

    def _take(self, tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
        plain = tensor.detach()
        taken = cast_to(plain, meta)
        if self.reuses and taken is plain:
            taken = plain.clone()
        if taken.device.type == "cuda":
            torch.cuda.current_stream(taken.device).synchronize()
        return taken

    def _check(self, name: str, tensor: torch.Tensor | None, meta: TensorMeta, sends: bool) -> None:
        if name != meta.name:
            raise SourceError(f"expected tensor {meta.name!r} next, found {name!r}: fn's order is the manifest's")
        if tensor is None:
            if sends:
                raise SourceError(f"tensor {name!r}: the sending rank yielded None")
            return
        found = meta_of(name, tensor.detach(), self.rules, allow_meta=not sends)
        if (found.dtype, found.shape) != (meta.dtype, meta.shape):
            raise SourceError(
                f"tensor {name!r}: expected {meta.dtype} {list(meta.shape)}, found {found.dtype} {list(found.shape)}"
            )

    def _scan(self) -> Manifest:
        entries: list[TensorMeta] = []
        for raw, tensor in self._fn(self._step):
            name = self.rules.name(raw)
            if name is None:
                continue
            if tensor is None:
                raise SourceError(
                    f"tensor {name!r}: this rank yielded None, and there is no manifest to say what it is: yield a "
                    "tensor on the meta device, or pass manifest="
                )
            entries.append(meta_of(name, tensor.detach(), self.rules, allow_meta=True))
        named = {e.name: e for e in entries}
        for alias, root in self._aliases.items():
            if root not in named:
                raise SourceError(f"alias {alias!r} of {root!r}: fn does not yield it")
            entries.append(TensorMeta(alias, named[root].dtype, named[root].shape, root))
        return Manifest.of(entries)
