"""The coordinator of one store: its groups, its clock, its two kinds of threads, and taking over (again)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from weightplane.controlplane.core.events import Tick, Write
from weightplane.controlplane.core.group import restarted
from weightplane.controlplane.core.group_state import GroupState
from weightplane.controlplane.core.kept import KeptError, check, manifest_of, problem
from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.model import Config
from weightplane.controlplane.core.reasons import Reason
from weightplane.controlplane.store.base import Loaded, Store, StoredGroup, StoreError, StoreHeld, StoreUnknown

from .artifacts import Limits
from .fields import refuse
from .runtime import Group
from .sessions import stepping_down

__all__ = ["Coordinator"]

log = logging.getLogger("weightplane.controlplane")

#: The committed version's manifest, and why that version cannot be proven.
Recalled = tuple[Manifest | None, str]

_TICK_S = 0.1
_MAX_GROUPS = 1000
_REOPEN_S = 0.5
_STAND_BY_S = 0.1
_WATCH_S = 1.0
_NO_LEADER = "this coordinator does not lead now"


class Coordinator:
    """Owns the groups. Made and used on one event loop; ``start`` takes leadership, ``stop`` lets go."""

    def __init__(
        self, store: Store, config: Config, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.store = store
        self.config = config
        self.limits = limits or Limits()
        self.clock = clock
        self.cluster_id = ""
        self.epoch = 0
        self.store_thread = ThreadPoolExecutor(1, "weightplane-store")
        self.workers = ThreadPoolExecutor(2, "weightplane-work")
        self._groups: dict[str, Group] = {}
        self._leads = False
        self._why = _NO_LEADER
        self.led = asyncio.Event()  # set while it leads
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.on_leading: Callable[[bool], None] = lambda leads: None  # called on the event loop

    async def start(self) -> None:
        """Open the store and lead; while another process leads on it, stand by. Raises what the store raises."""
        try:
            self._load(*await asyncio.get_running_loop().run_in_executor(self.store_thread, self._open))
        except StoreHeld as e:
            self.on_leading(False)
            self._wait_for(e)
            self._spawn(self._lead())
        self._spawn(self._tick())
        self._spawn(self._watch())

    async def stop(self) -> None:
        """End every stream, let queued writes finish, close the store."""
        self._stopping, self._leads = True, False
        self.led.clear()
        self.on_leading(False)
        self._end_groups("the coordinator is stopping")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self.store_thread, self.store.close)
        self.store_thread.shutdown(wait=False)
        self.workers.shutdown(wait=False, cancel_futures=True)

    # --- groups ---

    def group(self, name: str) -> Group:
        """A group that exists."""
        self._check()
        group = self._groups.get(name)
        if group is None:
            refuse(Reason.UNKNOWN_GROUP, f"no group {name!r} here")
        return group

    def ensure(self, name: str) -> Group:
        """A group, made with default policies if it is new. ``name`` was checked."""
        self._check()
        group = self._groups.get(name)
        if group is None:
            if len(self._groups) >= _MAX_GROUPS:
                refuse(Reason.LIMIT, f"group: expected at most {_MAX_GROUPS} groups, found one more")
            state = GroupState(name, self.cluster_id, self.epoch, self.config, epoch_began=self.clock())
            group = self._groups[name] = Group(self, replace(state, revision=self.epoch << 32))
            log.info("group %s is made", name, extra={"group": name})
        return group

    def groups(self) -> list[Group]:
        """Every group, by name."""
        self._check()
        return [self._groups[name] for name in sorted(self._groups)]

    def _check(self) -> None:
        if not self._leads:
            raise stepping_down(self._why)

    # --- leadership ---

    def _open(self) -> tuple[Loaded, dict[str, Recalled]]:
        """Open the store, and read what was kept of each group's committed version."""
        loaded = self.store.open()
        return loaded, {name: _recall(stored) for name, stored in loaded.groups.items()}

    def _load(self, loaded: Loaded, recalled: dict[str, Recalled]) -> None:
        """Begin a new epoch over what the store held: undecided updates are aborted, and that is written down."""
        self.cluster_id, self.epoch = loaded.cluster_id, loaded.epoch
        self._groups = {}
        self._leads = True
        for name, stored in loaded.groups.items():
            state, aborted = restarted(
                replace(stored.state, config=self.config), stored.frozen, loaded.epoch, self.clock()
            )
            manifest, unproven = recalled[name]
            state = replace(state, revision=max(state.revision, loaded.epoch << 32), unproven=unproven)
            group = self._groups[name] = Group(self, state)
            if unproven:
                log.error("%s", unproven, extra={"group": name, "version": state.committed.version})
            elif manifest is not None and stored.kept is not None:
                group.artifacts.recall(manifest, stored.kept)
            if aborted is not None:
                group.carry_out(Write(f"w{loaded.epoch}.restart", "close", loaded.epoch, aborted))
                log.warning(
                    "update %s was not decided before the restart: aborted",
                    aborted.update_id,
                    extra={"group": name, "update_id": aborted.update_id, "version": aborted.version},
                )
        self._why = _NO_LEADER
        self.on_leading(True)
        self.led.set()
        log.info("epoch %d of cluster %s, %d group(s)", self.epoch, self.cluster_id, len(self._groups))

    def step_down(self, message: str) -> None:
        """A group can no longer be sure that it leads: end everything, then take over anew, in a later epoch."""
        if self._leads and not self._stopping:
            self._leads = False
            self.led.clear()
            self.on_leading(False)
            self._spawn(self._take_over(message))

    async def _take_over(self, message: str) -> None:
        log.error("stepping down: %s", message)
        self._end_groups(message)
        await self._lead()

    async def _lead(self) -> None:
        """Open the store as soon as it can be had."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                await loop.run_in_executor(self.store_thread, self.store.close)
                self._load(*await loop.run_in_executor(self.store_thread, self._open))
                return
            except StoreHeld as e:
                self._wait_for(e)
                await asyncio.sleep(_STAND_BY_S)
            except (StoreError, StoreUnknown) as e:
                log.error("cannot take over yet: %s", e)
                self._why = f"{_NO_LEADER}: it cannot open its store, and its log says why"
                await asyncio.sleep(_REOPEN_S)

    def _wait_for(self, held: StoreHeld) -> None:
        """Another process leads: say so, once for each."""
        why = f"{held}; this one stands by"
        if why != self._why:
            log.warning("%s, and takes over when that one ends", why)
        self._why = why

    async def _watch(self) -> None:
        """Notice within a second or so that the store is lost: replaced, or led by one that our lock did not stop."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_WATCH_S)
            if not self._leads:
                continue
            epoch, why = self.epoch, "another coordinator leads on this store"
            try:
                leads = await loop.run_in_executor(self.store_thread, self.store.leads, epoch)
            except StoreError as e:
                leads, why = False, str(e)
            if not leads and epoch == self.epoch:
                self.step_down(why)

    def _end_groups(self, message: str) -> None:
        for group in self._groups.values():
            group.stop(stepping_down(message))

    async def _tick(self) -> None:
        """Let time pass: ten times a second (oftener than members beat), for idle groups twice."""
        turn, pause = 0, min(_TICK_S, self.config.beat_s / 4)
        while True:
            await asyncio.sleep(pause)
            turn += 1
            for group in list(self._groups.values()):
                if group.over is None and (turn % 5 == 0 or group.busy):
                    group.submit(Tick())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def done(t: asyncio.Task[None]) -> None:
            self._tasks.discard(t)
            if not t.cancelled() and t.exception() is not None:
                log.error("the coordinator's own task failed", exc_info=t.exception())

        task.add_done_callback(done)


def _recall(stored: StoredGroup) -> Recalled:
    """The manifest of what a group's store says is committed, or why nobody can be caught up to that."""
    s, kept = stored.state, stored.kept
    why = problem(kept, s.committed, s.committed_manifest)
    if why or kept is None or not s.committed.version:
        return None, why
    try:
        check(kept)
        return manifest_of(kept), ""
    except KeptError as e:
        return None, f"version {s.committed.version} (update {s.committed.update_id}) cannot be proven: {e}"
