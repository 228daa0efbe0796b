"""The receiver's half of ``ucx``: chunks at a sender become READs into one's own registered memory.

A bucket is read in pieces, a few of them in flight. Where both are on one host and UCX copies by itself, a whole piece
is copied inside the call that starts it; a piece is small enough that an abort is seen in milliseconds all the same.
There a second agent reads every other piece of a large bucket at the same time (``ucx_beside``): one core copies at
half of what memory gives.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch

from weightplane.v1.transport_pb2 import PullRegion, PullWelcome, UcxRegion

from .base import PeerLost, TransportError
from .pull_abc import Entry, Importer, Pull
from .ucx_agent import Agent, UcxError
from .ucx_beside import Beside, Half, Piece
from .ucx_export import describe
from .ucx_memory import Regions, on_device
from .ucx_reads import Read, Reads, rows, slow_after, where

__all__ = ["UcxImporter"]

PIECE: Final = 8 << 20  # bytes of one READ; a CPU may copy them all before it looks up again
PIECE_GPU: Final = 64 << 20  # where a GPU is at an end: never copied by the CPU, and faster than Python turns around


class _Remote:
    """A sender's agent, as this agent knows it."""

    def __init__(self, sender: str, welcome: PullWelcome, check: Callable[[], None]) -> None:
        self.sender, self.welcome, self.check = sender, welcome, check
        self.name = ""  # NIXL's; empty: not connected
        self.regions: dict[int, UcxRegion] = {}
        self.stale: list[tuple[int, int, int]] = []  # device, begin, end of regions that are gone
        self.outdated = False
        self.serves = False
        self.plans: dict[int, _Plan] = {}
        self.planned: set[int] = set()  # buckets that ever had one


class _Plan:
    """The READs of one bucket, good for one entry and one list of spans."""

    def __init__(self, entry: Entry, spans: Sequence[torch.Tensor], regions: set[int]) -> None:
        self.entry, self.spans, self.regions = entry, spans, regions
        self.reads: list[Read] = []
        self.beside: list[Read] = []  # the second agent's


class UcxImporter(Importer):
    """Owns its agent. ``require_rdma``: refuse a sender that UCX reaches by anything less."""

    def __init__(self, agent: Agent, require_rdma: bool = False) -> None:
        self._agent, self._require_rdma = agent, require_rdma
        self._regions = Regions(agent)
        self._reads = Reads(agent)
        self._beside = Beside(agent, self._regions)
        self._remotes: dict[str, _Remote] = {}
        self._broken = ""
        self._closed = False
        self._probe = torch.zeros(64, dtype=torch.uint8)
        self._probe_memory = ("DRAM", self._probe.data_ptr(), 64, 0)
        agent.register([self._probe_memory])
        self._known: Mapping[str, str] = {}

    @property
    def broken(self) -> str:
        """See ``Importer``."""
        return self._broken

    def details(self) -> Mapping[str, str]:
        """See ``Importer``. As of the last sender that was attached."""
        return self._known

    # --- senders

    def attach(self, sender: str, welcome: PullWelcome, check: Callable[[], None]) -> None:
        """See ``Importer``. Connects and reads a few bytes, so that the path is known to work."""
        if welcome.WhichOneof("sender") != "ucx" or not welcome.ucx.probe.nbytes:
            raise TransportError(f"{sender!r} does not speak ucx", peers=(sender,))
        self._remotes[sender] = remote = _Remote(sender, welcome, check)
        self._connect(sender, remote)
        self._known = describe(self._agent)
        if self._require_rdma and not self._agent.rdma:
            found = self._known["ucx_transports"]
            text = (
                f"WEIGHTPLANE_UCX_REQUIRE_RDMA=1, but UCX reaches {sender!r} by {found}: none of these is RDMA. "
                "See UCX_NET_DEVICES and UCX_TLS on both sides, and leave UCX_LOG_LEVEL and UCX_LOG_FILE unset"
            )
            raise TransportError(text, peers=(sender,))

    def _connect(self, sender: str, remote: _Remote) -> None:
        probe = remote.welcome.ucx.probe
        try:
            remote.name = self._agent.add(remote.welcome.ucx.agent_metadata)
            self._agent.add(probe.metadata)
            for region in remote.regions.values():
                self._agent.add(region.metadata)
            n = min(64, probe.nbytes)
            mine = rows([(self._probe.data_ptr(), n, 0)])
            read = self._agent.prepare(remote.name, "DRAM", mine, *where(probe.device, [(probe.address, n)]))
        except UcxError as e:
            raise PeerLost(f"{sender!r} cannot be reached by UCX: {e}", peers=(sender,)) from e
        try:
            self._run(sender, remote, [(read, n)], remote.check, lambda _: None, connecting=True)
        except UcxError as e:
            raise PeerLost(f"{sender!r} cannot be reached by UCX: {e}", peers=(sender,)) from e
        finally:
            self._agent.release(read)

    def map(self, sender: str, regions: Sequence[PullRegion]) -> None:
        """See ``Importer``.

        NIXL cannot forget one region: where a new one overlaps one that is gone, the next ``pull`` connects anew.
        """
        remote = self._remotes[sender]
        again = False
        for region in regions:
            found = region.ucx
            if region.WhichOneof("location") != "ucx" or found.nbytes <= 0:
                raise TransportError(f"{sender!r} declared a region that is none of ucx", peers=(sender,))
            remote.regions[region.id] = found
            again = again or any(
                d == found.device and a < found.address + found.nbytes and found.address < b for d, a, b in remote.stale
            )
        if again or remote.outdated or not remote.name:
            remote.outdated = True  # not now: reads may be in flight
            return
        for region in regions:
            try:
                self._agent.add(region.ucx.metadata)
            except UcxError as e:
                raise TransportError(f"memory of {sender!r} cannot be mapped: {e}", peers=(sender,)) from e

    def _reconnect(self, sender: str, remote: _Remote) -> None:
        """Disconnect and connect anew, with the regions that are there now."""
        self._forget(remote)
        remote.stale.clear()
        remote.outdated = False
        if not remote.serves:
            self.ask_serve(sender, True)
        self._connect(sender, remote)
        if not remote.serves:
            self.ask_serve(sender, False)

    def unmap(self, sender: str, regions: Collection[int]) -> None:
        """See ``Importer``."""
        remote = self._remotes[sender]
        for bucket in [b for b, p in remote.plans.items() if not p.regions.isdisjoint(regions)]:
            self._drop(remote.plans.pop(bucket))
        for number in regions:
            gone = remote.regions.pop(number)
            remote.stale.append((gone.device, gone.address, gone.address + gone.nbytes))

    def detach(self, sender: str) -> None:
        """See ``Importer``."""
        remote = self._remotes.pop(sender, None)
        if remote is not None:
            self._forget(remote)

    def _forget(self, remote: _Remote) -> None:
        for plan in remote.plans.values():
            self._drop(plan)
        remote.plans.clear()
        self._beside.forget(remote.sender)
        name, remote.name = remote.name, ""
        if name:
            with contextlib.suppress(UcxError):
                self._agent.remove(name)

    def _drop(self, plan: _Plan) -> None:
        for read, _ in plan.reads:
            self._agent.release(read)
        self._beside.release(plan.beside)

    def close(self) -> None:
        """See ``Importer``."""
        if self._closed:
            return
        self._closed = True
        for sender in list(self._remotes):
            self.detach(sender)
        self._beside.close()
        self._regions.close()
        with contextlib.suppress(UcxError):
            self._agent.deregister([self._probe_memory])
        self._agent.close()

    # --- bytes

    def pull(self, sender: str, pull: Pull) -> None:
        """See ``Importer``."""
        remote = self._remotes[sender]
        if remote.outdated or not remote.name:  # not named: a read was given up since
            self._reconnect(sender, remote)
        plan = remote.plans.get(pull.bucket.index)
        known = plan is not None and (not plan.beside or self._beside.knows(sender))
        if plan is None or not known or plan.entry is not pull.entry or plan.spans is not pull.spans:
            plan = None  # it may hold the last reference to its memory
            plan = self._plan(sender, remote, pull)
        half: Half | None = None
        if plan.beside:
            try:
                half = self._beside.begin(sender, plan.beside, pull.spans)
            except RuntimeError as e:  # no thread can be made
                self._beside.give_up(e)
                plan = self._plan(sender, remote, pull)
        device = pull.spans[0].device if pull.spans else None
        with on_device(device):
            try:
                if half is not None:
                    self._run_both(sender, remote, plan, pull, half)
                else:
                    self._run(sender, remote, plan.reads, pull.check, pull.landed)
            except UcxError as e:
                by, bucket = describe(self._agent)["ucx_transports"], pull.bucket
                what = f"bucket {bucket.index} of {bucket.nbytes} bytes, into {device or 'nothing'}, by UCX over {by}"
                raise PeerLost(f"{sender!r} cannot be read: {what}: {e}", peers=(sender,), bucket=bucket.index) from e
        if remote.serves and half is not None:  # a new connection wants it for a moment; then it takes a core from two
            remote.serves = False
            self.ask_serve(sender, False)

    def _run_both(self, sender: str, remote: _Remote, plan: _Plan, pull: Pull, half: Half) -> None:
        ended = True

        def check() -> None:
            pull.check()
            if half.slow:
                self._serve(sender, remote)
            half.look(pull.landed)

        def give_up(flying: Collection[Read]) -> None:
            nonlocal ended
            half.stop()
            ended = self._cut(remote, flying)

        try:
            self._reads.run(plan.reads, check, pull.landed, partial(self._idle, sender, remote), give_up)
            while not half.look(pull.landed):
                half.wait()
                check()
        except BaseException:
            half.end(pull.landed)  # before anything that it uses is let go of
            if half.stuck:
                self._beside.abandon()
            if half.stuck or not ended:
                self._give_up_all()
            else:
                self._forget(remote)  # the second agent may have disconnected
            raise

    def _plan(self, sender: str, remote: _Remote, pull: Pull) -> _Plan:
        index = pull.bucket.index
        moved = index in remote.planned
        remote.planned.add(index)
        if index in remote.plans:
            self._drop(remote.plans.pop(index))
        before = len(self._regions)
        try:
            covered = self._regions.cover(pull.spans)
        except UcxError as e:
            text = f"bucket {index} of {pull.bucket.nbytes} bytes: {e} (locked memory: ulimit -l)"
            raise TransportError(text, bucket=index) from e
        if moved and len(self._regions) != before:  # memory moves here: let go of what is used no more
            self._regions.settle(())
        entry, plan = pull.entry, _Plan(pull.entry, pull.spans, set(pull.entry.regions))
        local = [(r.kind, r.device, r.address + offset, n) for r, offset, n in covered]
        try:
            pieces = list(self._pieces(sender, remote, entry, local))
            mine = pieces
            if self._beside.wanted(pull.bucket.nbytes) and all(p[0] == p[2][0] == "DRAM" for p in pieces):
                others = [(here, there[1], n) for _, here, there, n in pieces[1::2]]
                plan.beside = self._prepare_beside(sender, remote, others)
                mine = pieces[::2] if plan.beside else pieces
            for kind, here, there, nbytes in mine:
                plan.reads.append((self._agent.prepare(remote.name, kind, here, *there), nbytes))
        except BaseException as e:
            self._drop(plan)
            if isinstance(e, UcxError):
                text = f"bucket {pull.bucket.index} of {sender!r}: {e}"
                raise PeerLost(text, peers=(sender,), bucket=pull.bucket.index) from e
            raise
        remote.plans[pull.bucket.index] = plan
        return plan

    def _prepare_beside(self, sender: str, remote: _Remote, pieces: Sequence[Piece]) -> list[Read]:
        asks = not remote.serves and not self._beside.knows(sender)
        if asks:
            self.ask_serve(sender, True)
        try:
            return self._beside.prepare(sender, remote.welcome, remote.regions, remote.check, pieces)
        finally:
            if asks:
                self.ask_serve(sender, False)

    def _pieces(
        self, sender: str, remote: _Remote, entry: Entry, local: Sequence[tuple[str, int, int, int]]
    ) -> Iterator[tuple[str, Any, tuple[str, Any], int]]:
        """The bucket cut where either side or a piece ends: kind and rows of both sides, and the bytes."""
        mine: list[tuple[int, int, int]] = []
        other: list[tuple[int, int, int]] = []
        kinds, size, most = ("", ""), 0, PIECE
        at = iter(local)
        kind, device, address, left = next(at)
        for number, offset, nbytes in zip(entry.regions, entry.offsets, entry.sizes, strict=True):
            region = remote.regions[number]
            if offset + nbytes > region.nbytes:
                raise TransportError(f"{sender!r} declared a chunk behind the end of its region", peers=(sender,))
            other_kind, other_device = ("DRAM", 0) if region.device < 0 else ("VRAM", region.device)
            start = region.address + offset
            while nbytes:
                if not left:
                    kind, device, address, left = next(at)
                if mine and (size == most or kinds != (kind, other_kind)):
                    yield kinds[0], rows(mine), (kinds[1], rows(other)), size
                    mine, other, size = [], [], 0
                kinds = kind, other_kind
                most = PIECE_GPU if "VRAM" in kinds else PIECE
                n = min(nbytes, left, most - size)
                mine.append((address, n, device))
                other.append((start, n, other_device))
                address, start = address + n, start + n
                left, nbytes, size = left - n, nbytes - n, size + n
        if mine:
            yield kinds[0], rows(mine), (kinds[1], rows(other)), size

    def _run(
        self,
        sender: str,
        remote: _Remote,
        reads: Sequence[Read],
        check: Callable[[], None],
        landed: Callable[[int], None],
        connecting: bool = False,
    ) -> None:
        """See ``Reads.run``."""

        def give_up(flying: Collection[Read]) -> None:
            if not self._cut(remote, flying):
                self._give_up_all()
            elif flying:
                self._forget(remote)

        self._reads.run(reads, check, landed, partial(self._idle, sender, remote, connecting=connecting), give_up)

    def _cut(self, remote: _Remote, flying: Collection[Read]) -> bool:
        """READs that were given up land no more: it disconnects; whether they ended."""
        if not flying:
            return True
        name, remote.name = remote.name, ""
        return self._reads.quiet(name, flying)

    def _idle(self, sender: str, remote: _Remote, passed: float, nbytes: int, *, connecting: bool = False) -> None:
        """Between two looks at a READ that is not done: the longer it takes, the longer."""
        if not connecting and passed > slow_after(nbytes):
            self._serve(sender, remote)
        if connecting or passed > 1.0:
            time.sleep(0.001)
        elif passed > 0.05:
            time.sleep(0.0001)

    def _serve(self, sender: str, remote: _Remote) -> None:
        """The sender's processor is to work for its readers."""
        if not remote.serves:
            remote.serves = True
            self.ask_serve(sender, True)

    def _give_up_all(self) -> None:
        self._broken = "reads that were given up did not end"
        self.close()
