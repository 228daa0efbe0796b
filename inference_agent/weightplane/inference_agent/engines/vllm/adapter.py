"""``vllm``: a stock vLLM as an engine. Its workers hold sessions to this adapter and take the bytes themselves.

A staged update: bytes land in each worker's slot while vLLM generates; then, paused, each worker loads its slot. In
place: paused, each worker loads tensors as they come. Both go through vLLM's own loaders (``vllm_plugin.loading``), or
past them where the way is known (``vllm_plugin.directly``): then a slot is copied, in place bytes come straight to
live memory, and that is read back. vLLM's weight version becomes ours, caches are handled, and the replica commits.
``held`` and ``mixed`` are the workers' own words.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.model import NONE_HELD, SLEEP_TAGS, Held
from weightplane.controlplane.core.placement import Piece, Placement, full_box
from weightplane.controlplane.core.states import CachePolicy, Evidence, Mode, PauseMode
from weightplane.inference_agent.threads import detached
from weightplane.inference_agent.transfer import Worker
from weightplane.inference_agent.vllm_plugin.wire import manifest_json
from weightplane.transports import registry
from weightplane.v1.transport_pb2 import Rendezvous

from ..base import (
    Description,
    EngineError,
    EngineUpdate,
    LocalTensors,
    Problem,
    ProblemKind,
    Reception,
    Request,
    VersionTag,
    WorkerDevice,
)
from .attached import CALL_S, QUICK_S, Attached
from .drivers import Driver, DriverTimeout
from .remote import open_worker

__all__ = ["VllmEngine"]

log = logging.getLogger("weightplane.inference_agent")

COUNT_S = 1.0  # for vLLM to tell its requests: a pause that is in force is noticed so much later
COUNT_EVERY_S = 2.0  # and how often it is asked
ENTER_S = 20.0  # for vLLM to pass a call on to its workers


class VllmEngine(Attached):
    """See the module text.

    ``socket_dir``: where the workers' socket is made (shared with vLLM where that runs in a container of its own).
    ``max_host_bytes``: per worker; where a copy of the model is more, updates come in place.
    ``direct``: go past vLLM's loaders where that is known to be the same. ``frozen_draft``: a draft model stays as it
    is, and is no reason to refuse updates.
    ``start_timeout_s``: how long to wait for vLLM at first; ``apply_timeout_s``: how long one load may take before the
    replica counts as DIRTY.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        socket_dir: str | None = None,
        max_host_bytes: int | None = None,
        start_timeout_s: float = 600.0,
        apply_timeout_s: float = 300.0,
        direct: bool = True,
        frozen_draft: bool = False,
    ) -> None:
        self._apply_s, self._direct = apply_timeout_s, direct
        self._read_back = False  # the update under way shows what lies in live memory
        self._loads: tuple[Mapping[str, Any], ...] = ()
        self._in_flight, self._count_at, self._uncounted = 0, 0.0, False
        self._streaming: Future[None] | None = None  # in place: vLLM's call that loads what comes
        super().__init__(driver, socket_dir, max_host_bytes, start_timeout_s, frozen_draft)

    # --- what it is and holds

    @property
    def workers(self) -> tuple[WorkerDevice, ...]:
        """See ``Engine``."""
        return self._devices

    @property
    def modes(self) -> tuple[Mode, ...]:
        """IN_PLACE always; STAGED where every worker has room for a copy of what it loads."""
        return (Mode.IN_PLACE,) if self.staging_refusal else (Mode.STAGED, Mode.IN_PLACE)

    @property
    def staging_refusal(self) -> str:
        """See ``Engine``."""
        return "; ".join(sorted({h.staging_refusal for h in self._hellos() if h.staging_refusal}))

    @property
    def pause_modes(self) -> tuple[PauseMode, ...]:
        """The driver's."""
        return self._driver.pause_modes

    @property
    def cache_policies(self) -> tuple[CachePolicy, ...]:
        """CLEAR drops the prefix cache and recomputes what is in flight; KEEP does neither, nor does SALT: there the
        program salts each request (``trajectory``), so that what is kept serves old trajectories only."""
        return (CachePolicy.CLEAR, CachePolicy.KEEP, CachePolicy.SALT)

    @property
    def evidence(self) -> Evidence:
        """CONSUMED: vLLM's kernels keep weights in layouts of their own, which cannot be read back in general. LIVE
        while an update in place is under way that every worker takes past vLLM's loaders."""
        return Evidence.LIVE if self._read_back else Evidence.CONSUMED

    @property
    def loads(self) -> tuple[Mapping[str, Any], ...]:
        """Of each worker's newest load: its ``way`` ("direct", "loaders" and ``why``), ``elements``, ``load_s``, and
        whether live memory was ``read_back``."""
        return self._loads

    @property
    def serving_address(self) -> str:
        """Where vLLM answers, if it is reached over HTTP."""
        return ",".join(getattr(self._driver, "addresses", ()))

    def held(self) -> tuple[Held, ...]:
        """See ``Engine``. A worker whose session is gone holds nothing that anybody knows of.

        While an update writes or is committed one worker is ahead of the next for a moment: that is no mix to fail by,
        and until they agree the replica holds nothing.
        """
        links, writes = self._attached, self._update is not None
        found = tuple(NONE_HELD if k.lost else k.state.held for k in links)
        if writes and len(set(found)) > 1 and not any(k.lost for k in links):
            return (NONE_HELD,) * len(found)
        return found

    def mixed(self) -> str:
        """See ``Engine``."""
        return next((k.state.mixed for k in self._attached if k.state.mixed and not k.lost), "") or self._mixed

    def layout(self) -> int:
        """The same for a life: vLLM's live tensors do not move."""
        return 0

    def describe(self, manifest: Manifest, members: Sequence[str]) -> Description:
        """See ``Engine``. Each worker's loader is followed on tensors without bytes, once per manifest."""
        self._ensure(manifest)
        found = self._each("surveyed", CALL_S, manifest_id=manifest.id)
        problems: dict[tuple[str, str], Problem] = {}
        placements = []
        taken: set[int] = set()
        several = len(found) > 1
        for w, (member, said) in enumerate(zip(members, found, strict=True)):
            mine: list[int] = said["taken"]
            taken |= set(mine)
            placements.append(Placement.of(member, [Piece(i, full_box(manifest.tensors[i].shape)) for i in mine]))
            for kind, name, text in said["problems"]:
                where = f" (worker {w})" if several else ""
                problems.setdefault((kind, name), Problem(ProblemKind(kind), name, f"{text}{where}"))
        nowhere = set.intersection(*(set(s["untaken"]) for s in found)) if found else set()
        for name in sorted(nowhere):
            text = f"the manifest has {name!r}, which no loader of vLLM takes"
            problems.setdefault(("extra", name), Problem(ProblemKind.EXTRA, name, text))
        dropped: set[str] = {n for s in found for n in s["dropped"]}
        for w, said in enumerate(found):
            if why := said.get("indirect"):
                log.info("worker %d: updates go through vLLM's loaders: %s", w, why)
        return Description(tuple(placements), tuple(problems.values()), ignored=tuple(sorted(dropped)))

    def _ensure(self, manifest: Manifest) -> None:
        """Every worker knows the manifest and has followed its loader with it (they remember the newest few)."""
        if all(a["known"] for a in self._each("knows", CALL_S, manifest_id=manifest.id)):
            return
        self._each("manifest", CALL_S, manifest=manifest_json(manifest))
        self._driver.update({"do": "survey", "manifest_id": manifest.id}, lambda: None, self._apply_s)

    # --- workers elsewhere

    def offers(
        self, worker: int, member: str, transports: Sequence[str]
    ) -> tuple[list[Rendezvous], dict[str, str]] | None:
        """See ``Engine``: asked of the worker's process. Where that is gone, that is why of every transport."""
        try:
            said = self._attached[worker].call("offers", CALL_S, member=member, transports=list(transports))
        except EngineError as e:
            why = f"{e}. Is vLLM up? Once it is again the agent attaches by itself"
            return [], dict.fromkeys(registry.names(), why)
        return [Rendezvous.FromString(bytes.fromhex(o)) for o in said["offers"]], dict(said["why"])

    def open_worker(self, worker: int, reception: Reception) -> Worker | None:
        """See ``Engine``."""
        self._open(reception.update_id)
        return open_worker(self._attached[worker], reception)

    def targets(self, worker: int) -> LocalTensors:
        """Not here: the workers receive into memory of their own."""
        raise EngineError("vLLM's workers receive into memory of their own")

    def live(self, worker: int) -> LocalTensors:
        """Not here: vLLM's live tensors cannot be read back in general."""
        raise EngineError("vLLM's live tensors cannot be read back")

    # --- generation

    def pause(self, holder: str, mode: PauseMode) -> None:
        """See ``Engine``."""
        u = self._update
        clear = holder == "update" and u is not None and u.cache is CachePolicy.CLEAR
        self._in_flight, self._count_at, self._uncounted = 0, 0.0, False
        self._desk.pause(holder, mode, clear)

    def wait_paused(self, holder: str, timeout: float) -> bool:
        """See ``Engine``. While an update's is not in force, the requests which that may wait for are counted."""
        stands = self._desk.wait(holder, timeout)
        if stands:
            self._in_flight = 0
        elif timeout and holder == "update" and time.monotonic() >= self._count_at:
            self._count_at = time.monotonic() + COUNT_EVERY_S
            self._count()
        return stands

    def _count(self) -> None:
        """For a text: whatever goes wrong here ends nothing."""
        try:
            self._in_flight = self._driver.in_flight(COUNT_S)
        except Exception as e:
            self._in_flight = 0
            level = logging.DEBUG if self._uncounted else logging.WARNING
            self._uncounted = True
            log.log(level, "generation does not stand still yet, and its requests cannot be counted: %r", e)

    @property
    def running_requests(self) -> int:
        """As counted while an update's pause waits for them; else 0, nobody asks vLLM."""
        return self._in_flight

    def resume(self, holder: str) -> None:
        """See ``Engine``. The fence of a mixed engine stays whoever asks."""
        self._in_flight = 0
        if holder == "dirty" and self.mixed():
            return
        self._desk.resume(holder)

    def holders(self) -> frozenset[str]:
        """See ``Engine``."""
        return self._desk.holders

    # --- sleep

    def sleep(self, level: int) -> None:
        """See ``Engine``. The workers are told first: whoever attaches to them later must know what they lack."""
        if level not in self.sleep_levels:
            raise EngineError(self.sleep_refusal or f"sleep level {level}: this engine has {list(self.sleep_levels)}")
        if self._update is not None or self.asleep():
            what = f"{', '.join(sorted(self.asleep()))} asleep" if self.asleep() else "an update open"
            raise EngineError(f"vLLM cannot fall asleep with {what}")
        self._desk.pause("sleep", PauseMode.KEEP, clear_cache=True)
        if not self._desk.wait("sleep", CALL_S):
            self._desk.resume("sleep")
            raise EngineError(f"vLLM did not stand still within {CALL_S:.0f} s")
        lost = "its weights were dropped by a sleep of level 2" if level == 2 else ""
        self._each("asleep", CALL_S, asleep=SLEEP_TAGS, lost=lost)
        if lost:
            self._fence(lost)
        try:
            self._driver.sleep(level, self._apply_s)
        except DriverTimeout:
            raise  # it may sleep yet: it counts as asleep
        except EngineError:
            self._driver.wake(SLEEP_TAGS, False, CALL_S)
            self._each("asleep", CALL_S, asleep=(), lost="")
            self._desk.resume("sleep")
            raise

    def wake(self, tags: frozenset[str]) -> None:
        """See ``Engine``. vLLM lets generation run as it brings the last of it back: nobody else may hold it then."""
        now = self.asleep()
        woken, left = [t for t in SLEEP_TAGS if t in now & tags], [t for t in SLEEP_TAGS if t in now - tags]
        if not woken:
            return
        if "weights" in left:
            raise EngineError("the weights come first: they may need an update before anything is generated")
        if left:
            self._driver.wake(woken, False, self._apply_s)
        elif mixed := self.mixed():
            raise EngineError(f"awake it would serve weights that are lost: {mixed}. Publish first")
        else:
            self._desk.lift("sleep", lambda: self._driver.wake(woken, True, self._apply_s))
        self._each("asleep", CALL_S, asleep=left, lost="")

    def forward(self, request: Request | None = None) -> AbstractContextManager[VersionTag]:
        """Not here: vLLM runs its own passes."""
        raise EngineError("vLLM generates in its own processes: ask its server")

    def request(self) -> AbstractContextManager[Request]:
        """Not here: vLLM runs its own requests."""
        raise EngineError("vLLM generates in its own processes: ask its server")

    # --- an update

    def begin(self, update: EngineUpdate) -> None:
        """See ``Engine``."""
        if self._update is not None:
            self.abort(self._update.update_id, False, f"update {update.update_id} begins")
        if update.mode not in self.modes:
            raise EngineError(f"mode {update.mode} is not possible: {self.staging_refusal}")
        if update.cache not in self.cache_policies:
            raise EngineError(f"cache policy {update.cache}: this engine has {', '.join(self.cache_policies)}")
        self._check_awake()
        self._ensure(update.manifest)
        ways = self._each(
            "begin",
            CALL_S,
            update_id=update.update_id,
            version=update.version,
            manifest_id=update.manifest.id,
            in_place=update.mode is Mode.IN_PLACE,
            direct=self._direct,
        )
        self._update = update
        self._read_back = update.mode is Mode.IN_PLACE and all(w.get("direct") for w in ways)

    def _check_awake(self) -> None:
        if "weights" in self.asleep():
            raise EngineError("vLLM's weights are asleep: an update would be lost; wake them up first (WakeReplica)")
        # vLLM calls an engine asleep that merely stands still: one that we hold paused cannot be told apart
        if not self._desk.holders and self._driver.is_sleeping(QUICK_S):
            if self.sleep_levels and self._driver.is_paused(QUICK_S):  # its workers would have told of a sleep
                raise EngineError(
                    "vLLM stands still, paused by hand: an update would let it go on. POST /resume first; "
                    "`weightplane pause` holds a replica through updates"
                )
            raise EngineError("vLLM is asleep: an update would be lost; wake it up first (POST /wake_up)")

    def _open(self, update_id: str) -> EngineUpdate:
        u = self._update
        if u is None or u.update_id != update_id:
            raise EngineError(f"update {update_id!r} is not open here (open: {u.update_id if u else 'none'})")
        return u

    def writing(self, update_id: str) -> None:
        """See ``Engine``. One call to vLLM begins, which loads what comes; the workers say when they wait for it."""
        u = self._open(update_id)
        if u.mode is not Mode.IN_PLACE:
            raise EngineError(f"update {update_id} is staged: nothing is written before the apply")
        if self._streaming is not None:
            return  # another call of the same update
        self._check_paused()
        future = self._streaming = Future()

        def label() -> str | None:
            return str(u.version) if self._update is u else None  # dropped meanwhile: what it held is what it is called

        def work() -> None:
            try:
                self._driver.update({"do": "stream", "update_id": update_id}, label, self._apply_s)
            except Exception as e:
                future.set_exception(e)
            else:
                future.set_result(None)

        detached("weightplane-vllm-load", work)
        self._each("streaming", ENTER_S + CALL_S, update_id=update_id, timeout_s=ENTER_S)

    def prepare(self, update_id: str) -> None:
        """See ``Engine``. Staged: the load was followed when the manifest was checked; vLLM must be awake for it.

        In place: vLLM finishes its load, and every worker says how it went.
        """
        u = self._open(update_id)
        gone = [k.hello.rank for k in self._attached if k.lost]
        if gone:
            raise EngineError(f"vLLM's worker(s) {gone} are gone")
        if u.mode is not Mode.IN_PLACE:
            self._check_awake()
            return
        said = self._each("streamed", CALL_S, update_id=update_id)
        self._read_back = self._read_back and all(s.get("read_back") for s in said)
        streaming, self._streaming = self._streaming, None
        if streaming is None:
            raise EngineError(f"update {update_id}: nothing was received, nothing was loaded")
        try:
            streaming.result(self._apply_s)
        except TimeoutError as e:
            raise EngineError(f"vLLM did not finish its load within {self._apply_s:.0f} s") from e
        self._loads = tuple(self._each("applied", CALL_S, update_id=update_id))

    def _check_paused(self) -> None:
        """Whoever resumed vLLM by hand meanwhile costs no update: it is paused again."""
        if not self._desk.restore(QUICK_S):
            raise EngineError(
                "vLLM is not paused, though it was told to: weights change while no forward pass can run only. "
                "Does somebody resume it (POST /resume)? The next publish pauses it again"
            )

    def apply(self, update_id: str) -> None:
        """See ``Engine``. One call to vLLM; how it went is asked of every worker."""
        u = self._open(update_id)
        self._check_awake()
        self._check_paused()
        self._mixed = f"update {update_id} is being applied"
        self._driver.update({"do": "apply", "update_id": update_id}, lambda: str(u.version), self._apply_s)
        self._loads = tuple(self._each("applied", CALL_S, update_id=update_id))

    def commit(self, update_id: str) -> None:
        """See ``Engine``."""
        u = self._open(update_id)
        if u.cache is CachePolicy.CLEAR and not self._desk.cleared("update"):
            self._driver.clear_cache(CALL_S)
        self._each("commit", CALL_S, update_id=update_id, holds=u.held.update_id)
        self._mixed = ""
        self._update, self._streaming, self._read_back = None, None, False
        self._desk.resume("dirty")

    def abort(self, update_id: str, wrote: bool, reason: str) -> None:
        """See ``Engine``."""
        u = self._update
        if u is not None and update_id not in ("", u.update_id):
            return
        applied = u is not None and self._mixed.startswith(f"update {u.update_id} ")
        self._update, self._streaming, self._read_back = None, None, False
        if (wrote and u is not None) or applied:
            wrote = True
            self._fence(reason)
        if u is not None and u.mode is Mode.IN_PLACE:
            for link in self._attached:  # its data thread may wait for the loaders, and they for it
                link.post("abort", update_id=u.update_id, reason=reason)
        for link in self._attached:
            if link.lost:
                continue
            try:
                link.call("drop", QUICK_S, update_id=update_id, wrote=wrote, reason=reason)
            except EngineError as e:
                log.warning("a worker could not be told to drop update %s: %s", update_id, e)

    def abandon(self, update_id: str) -> None:
        """See ``Engine``. The slot is the worker's: it takes nothing else before what is under way there has ended."""
        self._open(update_id)
        self._update = None
