"""A second agent of one receiver, which reads half of a large bucket on another core while the first reads the rest.

Where both sides are on one host, the thread that starts a READ copies its bytes, in the kernel: 4 to 5 GB/s where
memory gives twice that and the next core is idle. The second agent is made when the first bucket is found to go that
way, and works in a thread of its own for the time of one ``pull``; the data thread counts for it, and hears its errors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch

from weightplane.v1.transport_pb2 import PullWelcome, UcxRegion

from .base import TransportError
from .ucx_agent import Agent, UcxError
from .ucx_memory import Regions
from .ucx_reads import Read, Reads, rows, slow_after, where

__all__ = ["Beside", "Half"]

log = logging.getLogger(__name__)

LEAST: Final = 24 << 20  # bytes of a bucket below which one agent reads it all
#: UCX transports whose bytes the reading thread copies.
_COPIED: Final = ("cma/", "knem/", "xpmem/")
#: Rows here, rows there (as ``Agent.prepare`` takes them), bytes.
Piece = tuple[Any, Any, int]
_LOOK_S: Final = 0.001
_END_S: Final = 0.5  # seconds that a half may take to end when it must
CONNECT_S: Final = 1.0  # and a sender to work for a second agent: without one the bucket is read as well


class _Stopped(Exception):
    """The other half ended in an error."""


class Beside:
    """See the module text. The data thread, but what ``Half`` runs. ``first``: the agent that reads the other half."""

    def __init__(self, first: Agent, regions: Regions) -> None:
        self._first, self._regions = first, regions
        self._agent: Agent | None = None
        self._known: dict[str, tuple[str, set[int]]] = {}  # sender -> its agent's name, its regions that are known
        self._probe = torch.zeros(64, dtype=torch.uint8)
        self._probe_memory = ("DRAM", self._probe.data_ptr(), 64, 0)
        self._unable = len(os.sched_getaffinity(0)) < 2

    @property
    def copied(self) -> bool:
        """Whether the thread that starts a READ of host memory copies its bytes: all senders are on this host."""
        return self._first.local and any(lane.startswith(_COPIED) for lane in self._first.transports())

    def wanted(self, nbytes: int) -> bool:
        """Whether a bucket of so many bytes, of host memory on both sides, is read by two."""
        return not self._unable and nbytes >= LEAST and self.copied

    def prepare(
        self, sender: str, welcome: PullWelcome, regions: Mapping[int, UcxRegion], check: Callable[[], None],
        pieces: Sequence[Piece],
    ) -> list[Read]:  # fmt: skip
        """READs of pieces of host memory. None if there can be no second agent.

        The first for a sender connects to it, which the sender must work for; ``check`` is called meanwhile, and may
        raise.
        """
        try:
            agent = self._made()
            if sender not in self._known:
                self._connect(agent, sender, welcome, check)
            name, known = self._known[sender]
            for number, region in regions.items():
                if number not in known:
                    agent.add(region.metadata)
                    known.add(number)
            return [(agent.prepare(name, "DRAM", mine, "DRAM", other), nbytes) for mine, other, nbytes in pieces]
        except UcxError as e:
            self.give_up(e)
            return []

    def give_up(self, why: object) -> None:
        """There is no second agent any more, on this channel: out of descriptors, memory or threads. Logged once."""
        if not self._unable:
            log.warning("%s: one agent reads all by itself: %s", self._first.member, why)
        self.close()

    def _made(self) -> Agent:
        if self._agent is None:
            try:
                agent = Agent(self._first.member, self._first.local)
            except TransportError as e:
                raise UcxError(str(e)) from e
            try:
                agent.register([self._probe_memory])
                self._regions.join(agent, self.give_up)
            except BaseException:
                agent.close()
                raise
            self._agent = agent
        return self._agent

    def _connect(self, agent: Agent, sender: str, welcome: PullWelcome, check: Callable[[], None]) -> None:
        """Reads a few bytes: from then on the sender's processor has no part in it."""
        probe = welcome.ucx.probe
        name = agent.add(welcome.ucx.agent_metadata)
        self._known[sender] = name, set()
        agent.add(probe.metadata)
        n, until = min(64, probe.nbytes), time.monotonic() + CONNECT_S
        here, there = rows([(self._probe.data_ptr(), n, 0)]), where(probe.device, [(probe.address, n)])
        read = agent.prepare(name, "DRAM", here, *there)

        def look() -> None:
            check()
            if time.monotonic() > until:
                raise UcxError(f"{sender!r} did not work for it within {CONNECT_S:g} s")

        try:
            Reads(agent).run([(read, n)], look, _uncounted, _moment, partial(self.cut, sender))
        except BaseException:
            self.forget(sender)
            raise
        finally:
            agent.release(read)

    def cut(self, sender: str, flying: Collection[Read]) -> bool:
        """READs that were given up land no more; whether they ended."""
        if not flying:
            return True
        if self._agent is None or sender not in self._known:
            return False
        return Reads(self._agent).quiet(self._known[sender][0], flying)

    def begin(self, sender: str, reads: Sequence[Read], spans: Sequence[torch.Tensor]) -> Half:
        """Run them, from now on, in a thread. ``RuntimeError``: none can be made."""
        assert self._agent is not None
        return Half(self, Reads(self._agent), sender, reads, spans)

    def release(self, reads: Iterable[Read]) -> None:
        """Forget READs, none of which runs."""
        if self._agent is not None:
            for read, _ in reads:
                self._agent.release(read)

    def abandon(self) -> None:
        """The second agent is left to its thread, which is in it and does not come back."""
        agent, self._agent, self._unable = self._agent, None, True
        self._known.clear()
        if agent is not None:
            self._regions.leave(agent, deregister=False)

    def knows(self, sender: str) -> bool:
        """Whether the second agent is connected to it."""
        return sender in self._known

    def forget(self, sender: str) -> None:
        """Disconnect, after its READs were released."""
        name = self._known.pop(sender, ("", set()))[0]
        if name and self._agent is not None:
            with contextlib.suppress(UcxError):
                self._agent.remove(name)

    def close(self) -> None:
        """Let go of everything."""
        for sender in list(self._known):
            self.forget(sender)
        agent, self._agent, self._unable = self._agent, None, True
        if agent is not None:
            self._regions.leave(agent, deregister=True)
            with contextlib.suppress(UcxError):
                agent.deregister([self._probe_memory])
            agent.close()


class Half:
    """One run of READs in a thread of its own, which holds ``spans``. Used by the data thread: it calls ``look`` until
    that says True, or ``end``."""

    def __init__(
        self, beside: Beside, reads: Reads, sender: str, todo: Sequence[Read], spans: Sequence[torch.Tensor]
    ) -> None:
        self._beside, self._reads, self._sender, self._todo, self._spans = beside, reads, sender, todo, spans
        self._landed: deque[int] = deque()
        self._left = sum(n for _, n in todo)  # bytes that are not counted yet
        self._stop, self._over = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self.stuck = False  # it does not end: memory may still be written
        self.slow = False  # a READ takes so long that the sender's processor must work for it
        threading.Thread(target=self._run, name="weightplane-ucx-half", daemon=True).start()

    def look(self, landed: Callable[[int], None]) -> bool:
        """Count what landed since; whether it is over. Raises what ended it."""
        over = self._over.is_set()  # before the counts: those of the end are among them
        self._count(landed)
        if over and self._error is not None:
            error, self._error = self._error, None  # it holds frames, which hold this
            raise error
        return over

    def _count(self, landed: Callable[[int], None]) -> None:
        while self._landed:
            n = self._landed.popleft()
            self._left -= n
            landed(n)

    def wait(self) -> None:
        """A moment, or until it is over."""
        self._over.wait(_LOOK_S)

    def stop(self) -> None:
        """It begins no READ any more."""
        self._stop.set()

    def end(self, landed: Callable[[int], None]) -> None:
        """Stop it, wait until nothing of it lands any more, and count what may have landed. Never raises."""
        self.stop()
        over = self._over.wait(_END_S)
        while self._landed:
            with contextlib.suppress(Exception):  # each is counted, whatever counting another raises
                self._count(landed)
        if not over:
            self.stuck = True
            with contextlib.suppress(Exception):
                landed(self._left)
        self._error = None

    def _run(self) -> None:
        try:
            self._reads.run(self._todo, self._check, self._landed.append, self._idle, self._give_up)
        except BaseException as e:
            self._error = e
        finally:
            self._over.set()

    def _check(self) -> None:
        if self._stop.is_set():
            raise _Stopped

    def _idle(self, seconds: float, nbytes: int) -> None:
        self.slow = self.slow or seconds > slow_after(nbytes)
        if seconds > 0.001:
            self._stop.wait(0.0005)

    def _give_up(self, flying: Collection[Read]) -> None:
        if not self._beside.cut(self._sender, flying):
            self.stuck = True


def _uncounted(nbytes: int) -> None:
    """Of a probe: nobody's bytes."""
    del nbytes


def _moment(seconds: float, nbytes: int) -> None:
    del seconds, nbytes
    time.sleep(0.001)
