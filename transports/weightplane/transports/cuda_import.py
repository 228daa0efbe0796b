"""The receiver's half of ``cuda_ipc``: other processes' allocations are mapped once, and buckets copied out of them.

A bucket's copies are prepared when its chunks or its spans are new (``cuda_copy``); afterwards a pull queues a few
launches and waits for their end. The sender's event is waited for on the host, before anything is queued: so nothing of
ours can hang behind a sender that died, and what is queued ends by itself within a fraction of a second.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import torch

from weightplane.v1.transport_pb2 import CudaIpcHandle, PullRegion, PullWelcome

from . import cuda_own
from .base import PeerLost, TransportError
from .cuda_copy import Card, Flight, Part
from .cuda_driver import Cuda, CudaError
from .cuda_facts import Device, Facts, pair_problem
from .cuda_wait import Pace
from .gather_table import cut
from .pull_abc import Entry, Importer, Pull

__all__ = ["CudaIpcImporter"]

log = logging.getLogger(__name__)

_IN_FLIGHT: Final = 4 << 30  # bytes queued at most: what an abort has to wait for ...
_IN_FLIGHT_S: Final = 0.25  # ... and not for longer than this
_QUIET_S: Final = 5.0  # seconds that what is queued may take to end, after an abort


class _Mapped:
    """One allocation, mapped for one of our devices. ``opened``: by a handle (else it is this process's own)."""

    __slots__ = ("address", "device", "opened", "regions")

    def __init__(self, device: int, address: int, opened: bool) -> None:
        self.device, self.address, self.opened = device, address, opened
        self.regions: set[tuple[str, int]] = set()  # sender, region


class _Source:
    """A sender: its regions, and what was prepared for its buckets."""

    def __init__(self) -> None:
        self.event = b""
        self.regions: dict[int, CudaIpcHandle] = {}
        self.plans: dict[int, _Plan] = {}


class _Plan:
    """A bucket's parts, good for one entry and one list of spans (both are held)."""

    def __init__(
        self,
        entry: Entry,
        spans: Sequence[torch.Tensor],
        places: list[tuple[int, int, int]],  # device, address and bytes of each span
        card: Card | None,
        parts: list[Part],
    ) -> None:
        self.entry, self.spans, self.places, self.card, self.parts = entry, spans, places, card, parts
        self.regions = frozenset(entry.regions)
        self.events: tuple[int, ...] = ()


class _Running:
    """A bucket that is being copied: parts queued and not counted yet, and how many were queued."""

    __slots__ = ("flights", "plan", "queued")

    def __init__(self, plan: _Plan) -> None:
        self.plan = plan
        self.flights: deque[Flight] = deque()
        self.queued = 0


class CudaIpcImporter(Importer):
    """One channel's importer. ``facts``: of this process. ``part_bytes``: of a launch; 0: as the case wants."""

    maps = True

    def __init__(self, cuda: Cuda, facts: Facts, part_bytes: int = 0) -> None:
        self._cuda, self._facts, self._part_bytes = cuda, facts, part_bytes
        self._sources: dict[str, _Source] = {}
        self._cards: dict[int, Card] = {}
        self._mapped: dict[tuple[int, bytes], _Mapped] = {}
        self._events: dict[bytes, tuple[int, int]] = {}  # opened ones, and for which device
        self._uuids: dict[int, str] = {}
        self._paths: dict[str, None] = {}
        self._running: dict[tuple[str, int], _Running] = {}
        self._in_flight = 0
        self._pace = Pace()
        self._broken = ""
        self._stuck: list[_Running] = []  # what is still being written, should it never end

    @property
    def broken(self) -> str:
        """See ``Importer``."""
        return self._broken

    def details(self) -> Mapping[str, str]:
        """See ``Importer``."""
        return {"paths": ", ".join(list(self._paths)) or "none yet", "mapped": str(len(self._mapped))}

    # --- senders

    def attach(self, sender: str, welcome: PullWelcome, check: Callable[[], None]) -> None:
        """See ``Importer``. What can be tried without knowing the target's GPU is: peers, the event, the kernel."""
        if welcome.WhichOneof("sender") != "cuda_ipc":
            raise TransportError(f"{sender!r} does not speak cuda_ipc", peers=(sender,))
        said = welcome.cuda_ipc
        active = [d for d in range(self._cuda.count()) if self._cuda.active(d)]
        problems = [p for d in active if (p := self._problem(d, said.device_uuid))]
        if active and len(problems) == len(active):
            raise TransportError(f"{sender!r} cannot be read: {problems[0]}", peers=(sender,))
        self._sources[sender] = source = _Source()
        source.event = said.event
        for device in active:
            self._cuda.gather_problem(device)  # compiles the kernel
            check()
            if said.event and not self._problem(device, said.device_uuid):
                self._event(sender, device, said.event)

    def _problem(self, device: int, uuid: str) -> str:
        own = self._uuid(device)
        return pair_problem(Device(uuid), self._facts.device(own) or Device(own, device), self._facts)

    def _uuid(self, device: int) -> str:
        found = self._uuids.get(device)
        if found is None:
            found = self._uuids[device] = self._cuda.uuid(device)
        return found

    def map(self, sender: str, regions: Sequence[PullRegion]) -> None:
        """See ``Importer``. They are mapped when a bucket first needs them, for the GPU that it goes to."""
        source = self._sources[sender]
        for region in regions:
            found = region.cuda_ipc
            if region.WhichOneof("location") != "cuda_ipc" or found.storage_bytes <= 0 or found.offset < 0:
                raise TransportError(f"{sender!r} declared a region that is none of cuda_ipc", peers=(sender,))
            source.regions[region.id] = found

    def unmap(self, sender: str, regions: Collection[int]) -> None:
        """See ``Importer``."""
        self._quiet()
        source = self._sources[sender]
        for bucket in [b for b, p in source.plans.items() if not p.regions.isdisjoint(regions)]:
            del source.plans[bucket]
        for number in regions:
            source.regions.pop(number, None)
        self._close_unused({(sender, r) for r in regions})

    def detach(self, sender: str) -> None:
        """See ``Importer``."""
        source = self._sources.get(sender)
        if source is not None:
            self.unmap(sender, list(source.regions))
            del self._sources[sender]
        if not self._sources:
            self._drop_events()

    def _close_unused(self, gone: Collection[tuple[str, int]] | None = None) -> None:
        """Close mappings that no region uses any more; ``None``: that no prepared bucket uses."""
        if gone is None:
            used = {(s, r) for s, source in self._sources.items() for p in source.plans.values() for r in p.regions}
            gone = {r for m in self._mapped.values() for r in m.regions} - used
        for key, mapped in list(self._mapped.items()):
            mapped.regions.difference_update(gone)
            if not mapped.regions and not self._stuck:
                del self._mapped[key]
                if mapped.opened:
                    try:
                        with self._cuda.on(mapped.device):
                            self._cuda.close(mapped.address)
                    except CudaError as e:  # its exporter is dead, say
                        log.warning("a mapping of GPU memory could not be closed: %s", e)

    # --- pulling

    def begin(self, sender: str, pull: Pull) -> None:
        """See ``Importer``. Queues a bucket behind what runs, if it can at once."""
        source, key = self._sources[sender], (sender, pull.bucket.index)
        plan = self._known(source, pull)
        if key in self._running or (plan is None and pull.bucket.index in source.plans):
            return
        try:
            if plan is None:
                plan = source.plans[pull.bucket.index] = self._prepare(sender, source, pull)
            with self._on(plan):
                if all(map(self._cuda.passed, plan.events)):
                    self._running[key] = running = _Running(plan)
                    self._feed(running)
        except (TransportError, ValueError) as e:
            log.debug("bucket %d could not be begun ahead: %s", pull.bucket.index, e)  # ``pull`` will say it

    def pull(self, sender: str, pull: Pull) -> None:
        """See ``Importer``."""
        source, key = self._sources[sender], (sender, pull.bucket.index)
        try:
            plan = self._plan(sender, source, pull)
            running = self._running.get(key)
            if running is not None and running.plan is not plan:
                self._quiet()
                running = None
            with self._on(plan):
                if running is None:
                    self._pace.until(lambda: all(map(self._cuda.passed, plan.events)), 0.0, pull.check)
                    running = self._running[key] = _Running(plan)
                self._finish(running, pull)
            del self._running[key]
        except BaseException as e:
            written = sum(f.nbytes for r in self._running.values() for f in r.flights)
            self._quiet()
            if written:  # it has been, whatever is said of the bucket
                with contextlib.suppress(Exception):
                    pull.landed(written)
            if isinstance(e, CudaError):
                pull.check()  # a sender that has left explains it
                raise PeerLost(f"{sender!r} cannot be read: {e}", peers=(sender,), bucket=pull.bucket.index) from e
            raise

    def _on(self, plan: _Plan) -> contextlib.AbstractContextManager[None]:
        return self._cuda.on(plan.card.device) if plan.card is not None else contextlib.nullcontext()

    def _feed(self, running: _Running) -> None:
        """Queue as many parts as may be queued."""
        parts, card = running.plan.parts, running.plan.card
        most = min(_IN_FLIGHT, self._pace.rate * _IN_FLIGHT_S)
        while running.queued < len(parts) and (self._in_flight < most or not self._in_flight):
            assert card is not None
            part = parts[running.queued]
            running.flights.append(card.launch(part))
            running.queued += 1
            self._in_flight += part.nbytes

    def _finish(self, running: _Running, pull: Pull) -> None:
        card = running.plan.card
        while running.queued < len(running.plan.parts) or running.flights:
            assert card is not None
            self._feed(running)
            flight = running.flights[0]
            self._pace.until(lambda f=flight: card.done(f), flight.nbytes, pull.check)  # type: ignore[misc]
            running.flights.popleft()
            self._in_flight -= flight.nbytes
            card.recycle((flight,))
            pull.landed(flight.nbytes)

    def quiet(self) -> None:
        """See ``Importer``."""
        self._quiet()

    def _quiet(self) -> None:
        """See to it that nothing lands any more: what is queued is short, so wait for its end."""
        running, self._running = self._running, {}
        if not any(r.flights for r in running.values()):
            return
        until = time.monotonic() + _QUIET_S
        try:
            for card in self._cards.values():
                while not card.idle():
                    if time.monotonic() > until:
                        raise TransportError(f"copies to GPU {card.device} did not end within {_QUIET_S:g} s")
                    time.sleep(0.0002)
        except TransportError as e:
            self._broken = str(e)
            self._stuck.extend(running.values())
            log.error("%s", e)
            return
        for r in running.values():
            if r.plan.card is not None:
                r.plan.card.recycle(r.flights)
            self._in_flight -= sum(f.nbytes for f in r.flights)

    # --- preparing

    def _known(self, source: _Source, pull: Pull) -> _Plan | None:
        """What was prepared for this very bucket, if it is good still."""
        plan = source.plans.get(pull.bucket.index)
        if plan is None or plan.entry is not pull.entry:
            return None
        if plan.spans is not pull.spans:  # another list of the same memory, perhaps
            if plan.places != self._places(pull.spans):
                return None
            plan.spans = pull.spans
        return plan

    def _places(self, spans: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
        return [(self._target(i, s), s.data_ptr(), s.numel()) for i, s in enumerate(spans)]

    def _plan(self, sender: str, source: _Source, pull: Pull) -> _Plan:
        plan = self._known(source, pull)
        if plan is not None:
            return plan
        running = self._running.get((sender, pull.bucket.index))
        if running is not None:
            self._quiet()
        try:
            plan = self._prepare(sender, source, pull)
        except CudaError:
            if not self._mapped:
                raise
            # Whatever is mapped and not needed just now may stand in the way: let go of it and try once more.
            source.plans.pop(pull.bucket.index, None)
            self._quiet()
            self._close_unused()
            plan = self._prepare(sender, source, pull)
        source.plans[pull.bucket.index] = plan
        return plan

    def _prepare(self, sender: str, source: _Source, pull: Pull) -> _Plan:
        places = self._places(pull.spans)
        devices = {d for d, _, n in places if n}
        if len(devices) > 1:
            raise TransportError(f"bucket {pull.bucket.index} goes to several GPUs of one member: {sorted(devices)}")
        if not devices:
            return _Plan(pull.entry, pull.spans, places, None, [])
        (device,) = devices
        card = self._cards.get(device)
        if card is None:
            card = self._cards[device] = Card(self._cuda, device)
        bases = {r: self._address(sender, source, device, r) for r in dict.fromkeys(pull.entry.regions)}
        entry = pull.entry
        chunks = []
        for region, offset, n in zip(entry.regions, entry.offsets, entry.sizes, strict=True):
            if offset + n > source.regions[region].storage_bytes:
                raise TransportError(f"{sender!r} declared a chunk behind the end of its region", peers=(sender,))
            chunks.append((bases[region] + offset, n))
        used = [source.regions[r] for r in bases]
        borders = {self._mapped[device, h.handle].address for h in used} | self._allocations(device, pull.spans)
        copies = cut(chunks, [(at, n) for _, at, n in places], borders)
        colocated = all(h.device_uuid == self._uuid(device) for h in used)
        self._paths["same GPU" if colocated else "peer"] = None
        with self._cuda.on(device):
            parts = card.prepare(copies, colocated=colocated, part_bytes=self._part_bytes)
        plan = _Plan(entry, pull.spans, places, card, parts)
        events = dict.fromkeys(h.event for h in used if h.event) or dict.fromkeys(filter(None, (source.event,)))
        plan.events = tuple(self._event(sender, device, raw) for raw in events)
        return plan

    def _allocations(self, device: int, spans: Sequence[torch.Tensor]) -> set[int]:
        """Where the allocations begin that the spans lie in; a storage's own begin where the driver does not know."""
        storages = {s.data_ptr(): s.nbytes() for s in (span.untyped_storage() for span in spans if span.numel())}
        found: set[int] = set()
        with self._cuda.on(device):
            for at, nbytes in storages.items():
                try:
                    found.add(self._cuda.allocation(at, nbytes).base)
                except CudaError:
                    found.add(at)
        return found

    def _target(self, index: int, span: torch.Tensor) -> int:
        plain = span.dtype == torch.uint8 and span.dim() == 1 and span.is_contiguous()
        if not plain or span.device.type != self._cuda.kind:
            found = f"{span.dtype} {span.device} {tuple(span.shape)}, strides {span.stride()}"
            raise ValueError(f"span {index}: expected contiguous 1-D uint8 of a GPU, found {found}")
        return span.device.index or 0

    def _address(self, sender: str, source: _Source, device: int, region: int) -> int:
        """Where a region is mapped for a device of ours."""
        handle = source.regions[region]
        key = device, handle.handle
        mapped = self._mapped.get(key)
        if mapped is None:
            if problem := self._problem(device, handle.device_uuid):
                raise TransportError(f"{sender!r} cannot be read: {problem}", peers=(sender,))
            with self._cuda.on(device):
                own = cuda_own.memory(handle.handle)
                if own is not None:
                    if own[0] != device:
                        self._cuda.enable_peer(own[0])
                    mapped = _Mapped(device, own[1], False)
                else:
                    mapped = _Mapped(device, self._cuda.open(handle.handle), True)
            self._mapped[key] = mapped
        mapped.regions.add((sender, region))
        return mapped.address + handle.offset

    def _event(self, sender: str, device: int, raw: bytes) -> int:
        found = self._events[raw][0] if raw in self._events else cuda_own.event(raw)
        if not found:
            try:
                with self._cuda.on(device):
                    found = self._cuda.open_event(raw)
                self._events[raw] = found, device
            except CudaError as e:
                text = f"{e}; WEIGHTPLANE_CUDA_IPC_EVENTS=0 at {sender!r} goes without events"
                raise TransportError(text, peers=(sender,)) from e
        return found

    # --- the end

    def _drop_events(self) -> None:
        for event, device in self._events.values():
            with contextlib.suppress(CudaError), self._cuda.on(device):
                self._cuda.drop_event(event)
        self._events.clear()

    def close(self) -> None:
        """See ``Importer``."""
        self._quiet()
        for sender in list(self._sources):
            self.detach(sender)
        self._drop_events()
        if not self._stuck:
            for card in self._cards.values():
                with contextlib.suppress(CudaError):
                    card.close()
            self._cards.clear()
