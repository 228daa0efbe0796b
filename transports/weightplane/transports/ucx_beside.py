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
_END_S: Final = 2.0  # seconds that a half may take to end when it must


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
        """READs of pieces of host memory. None if there can be no second agent, which is logged once.

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
        except UcxError as e:  # out of descriptors, or of memory
            log.warning("%s: one agent reads all by itself: %s", self._first.member, e)
            self.close()
            return []

    def _made(self) -> Agent:
        if self._agent is None:
            try:
                agent = Agent(self._first.member, self._first.local)
            except TransportError as e:
                raise UcxError(str(e)) from e
            try:
                self._regions.join(agent)
                agent.register([self._probe_memory])
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
        n = min(64, probe.nbytes)
        read = agent.prepare(
            name, "DRAM", rows([(self._probe.data_ptr(), n, 0)]), *where(probe.device, [(probe.address, n)])
        )
        reads = Reads(agent)
        try:
            reads.run([(read, n)], check, lambda _: None, lambda *_: time.sleep(0.001), partial(self.cut, sender))
        except BaseException:
            self.forget(sender)
            raise
        finally:
            agent.release(read)

    def cut(self, sender: str, flying: Collection[Read]) -> bool:
        """READs that were given up land no more; whether they ended."""
        assert self._agent is not None
        return not flying or Reads(self._agent).quiet(self._known[sender][0], flying)

    def begin(self, sender: str, reads: Sequence[Read]) -> Half:
        """Run them, from now on, in a thread. ``RuntimeError``: none can be made."""
        return Half(self, self.reads(), sender, reads)

    def reads(self) -> Reads:
        """The second agent's."""
        assert self._agent is not None
        return Reads(self._agent)

    def release(self, reads: Iterable[Read]) -> None:
        """Forget READs, none of which runs."""
        if self._agent is not None:
            for read, _ in reads:
                self._agent.release(read)

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
            self._regions.leave(agent)
            with contextlib.suppress(UcxError):
                agent.deregister([self._probe_memory])
            agent.close()


class Half:
    """One run of READs in a thread of its own. Used by the data thread, which calls ``look`` until it says True."""

    def __init__(self, beside: Beside, reads: Reads, sender: str, todo: Sequence[Read]) -> None:
        self._beside, self._reads, self._sender, self._todo = beside, reads, sender, todo
        self._landed: deque[int] = deque()
        self._stop, self._over = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self.stuck = False  # READs that were given up did not end: memory may still be written
        self.slow = False  # a READ takes so long that the sender's processor must work for it
        threading.Thread(target=self._run, name="weightplane-ucx-half", daemon=True).start()

    def look(self, landed: Callable[[int], None]) -> bool:
        """Count what landed since; whether it is over. Raises what ended it."""
        over = self._over.is_set()  # before the counts: those of the end are among them
        while self._landed:
            landed(self._landed.popleft())
        if over and self._error is not None:
            error, self._error = self._error, None  # it holds frames, which hold this
            raise error
        return over

    def wait(self) -> None:
        """A moment, or until it is over."""
        self._over.wait(_LOOK_S)

    def end(self, landed: Callable[[int], None]) -> None:
        """Stop it, wait until nothing of it lands any more, and count the rest. Never raises."""
        self._stop.set()
        if not self._over.wait(_END_S):
            self.stuck = True
        while self._landed:
            with contextlib.suppress(Exception):
                landed(self._landed.popleft())
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
