"""``vllm``: a stock vLLM as an engine. Its workers hold sessions to this adapter and take the bytes themselves.

An update here: bytes land in each worker's host slot while vLLM generates; then, paused, each worker loads its slot
through vLLM's own loaders (``vllm_plugin.loading``), vLLM's weight version becomes ours, caches are handled, and the
replica commits. ``held`` and ``mixed`` are the workers' own words.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.model import NONE_HELD, CachePolicy, Evidence, Held, Mode, PauseMode
from weightplane.controlplane.core.placement import Piece, Placement, full_box
from weightplane.inference_agent.transfer import Worker
from weightplane.inference_agent.vllm_plugin.wire import Hello, Link, manifest_json
from weightplane.v1.transport_pb2 import Rendezvous

from ..base import (
    Description,
    Engine,
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
from .drivers import Driver
from .links import Listener, WorkerLink
from .pausing import PauseDesk
from .remote import open_worker

__all__ = ["VllmEngine"]

log = logging.getLogger("weightplane.inference_agent")

_CALL_S = 30.0
_QUICK_S = 5.0
_LOOK_S = 0.5


class VllmEngine(Engine):
    """See the module text.

    ``socket_dir``: where the workers' socket is made (shared with vLLM where that runs in a container of its own).
    ``max_host_bytes``: of staging, per worker. ``start_timeout_s``: how long to wait for vLLM at first;
    ``apply_timeout_s``: how long one load may take before the replica counts as DIRTY.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        socket_dir: str | None = None,
        max_host_bytes: int | None = None,
        start_timeout_s: float = 600.0,
        apply_timeout_s: float = 300.0,
    ) -> None:
        super().__init__()
        self._driver = driver
        self._most_host, self._apply_s = max_host_bytes, apply_timeout_s
        self._lock = threading.Condition()
        self._tokens: dict[str, int] = {}
        self._links: dict[tuple[int, int], WorkerLink] = {}
        self._attached: tuple[WorkerLink, ...] = ()
        self._devices: tuple[WorkerDevice, ...] = ()
        self._update: EngineUpdate | None = None
        self._mixed = ""
        self._closed = threading.Event()
        self._desk = PauseDesk(driver, self._note_pause)
        self._listener = Listener(socket_dir, self._met)
        try:
            self._attach_first(start_timeout_s)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._watch, name="weightplane-vllm-watch", daemon=True).start()

    # --- the workers' sessions

    def _attach_first(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        said = False
        while not self._driver.alive(_QUICK_S):
            if not said:
                log.info("waiting for vLLM (%s), up to %.0f s", self._driver.name, timeout)
                said = True
            if time.monotonic() >= end:
                raise EngineError(f"vLLM ({self._driver.name}) does not answer after {timeout:.0f} s")
            if self._closed.wait(_LOOK_S):
                raise EngineError("closed while waiting for vLLM")
        self._attach()
        refusals = {h.staging_refusal for h in self._hellos() if h.staging_refusal}
        if refusals:
            raise EngineError(f"vLLM's workers cannot stage a copy of the model: {'; '.join(sorted(refusals))}")

    def _attach(self) -> None:
        """Make every worker dial us. Raises ``EngineError`` if not all of them do."""
        tokens = [secrets.token_hex(16) for _ in range(self._driver.instances)]
        with self._lock:
            for link in self._links.values():
                link.close()
            self._links.clear()
            self._tokens = {t: i for i, t in enumerate(tokens)}
        self._listener.expect(set(tokens))
        most = self._most_host or 0
        infos = [{"socket": self._listener.path, "token": t, "max_host_bytes": most} for t in tokens]
        self._driver.initialise(infos, _CALL_S)
        with self._lock:
            if not self._lock.wait_for(self._complete, _CALL_S):
                raise EngineError(f"not every worker of vLLM dialled {self._listener.path}: {sorted(self._links)} did")
            links = tuple(link for _, link in sorted(self._links.items()))
            self._attached = links
            self._devices = tuple(WorkerDevice(k.hello.device, k.hello.uuid) for k in links)
            self._life = uuid.uuid4().hex
            self._update = None
        first = links[0].hello
        self.name = f"vllm {first.vllm} ({self._driver.name}, {len(links)} worker(s))"
        mixed = next((k.state.mixed for k in links if k.state.mixed), "")
        self._mixed = ""
        if mixed:
            self._fence(mixed)
        left_by = tuple({h for k in links for h in k.state.paused_by})
        if not mixed:
            self._desk.let_go(left_by)
        self._desk.again()
        log.info("%s: %s attached", self.name, first.model)

    def _met(self, token: str, link: Link, hello: Hello) -> None:
        with self._lock:
            instance = self._tokens.get(token)
            if instance is None:
                link.close()
                return
            self._links[instance, hello.rank] = WorkerLink(link, hello, self._lost)
            self._lock.notify_all()

    def _complete(self) -> bool:
        for i in range(self._driver.instances):
            mine = [k.hello for (instance, _), k in self._links.items() if instance == i]
            if not mine or len(mine) != mine[0].world:
                return False
        return True

    def _lost(self, link: WorkerLink) -> None:
        if link not in self._attached or self._closed.is_set():
            return
        log.error("vLLM's worker %d (pid %d) is gone: %s", link.hello.rank, link.hello.pid, link.lost)
        with self._lock:
            self._life = uuid.uuid4().hex  # whatever it was, it holds nothing that we know of
            self._lock.notify_all()

    def _watch(self) -> None:
        """Attach again when vLLM is back. A worker that merely lost its session keeps what it holds."""
        said = ""
        while not self._closed.wait(_LOOK_S):
            if all(not k.lost for k in self._attached):
                continue
            try:
                if self._driver.alive(_QUICK_S):
                    self._attach()
                    said = ""
            except Exception as e:
                if str(e) != said:
                    log.warning("vLLM cannot be attached again yet: %s", e)
                    said = str(e)

    def _hellos(self) -> list[Hello]:
        return [k.hello for k in self._attached]

    def _note_pause(self, holders: tuple[str, ...]) -> None:
        for link in self._attached:
            link.post("paused_by", holders=list(holders))

    def _each(self, do: str, timeout: float, **fields: Any) -> list[dict[str, Any]]:
        return [link.call(do, timeout, **fields) for link in self._attached]

    # --- what it is and holds

    @property
    def workers(self) -> tuple[WorkerDevice, ...]:
        """See ``Engine``."""
        return self._devices

    @property
    def modes(self) -> tuple[Mode, ...]:
        """STAGED."""
        return (Mode.STAGED,)

    @property
    def pause_modes(self) -> tuple[PauseMode, ...]:
        """The driver's."""
        return self._driver.pause_modes

    @property
    def cache_policies(self) -> tuple[CachePolicy, ...]:
        """CLEAR drops the prefix cache and recomputes what is in flight; KEEP does neither."""
        return (CachePolicy.CLEAR, CachePolicy.KEEP)

    @property
    def evidence(self) -> Evidence:
        """CONSUMED: vLLM's kernels keep weights in layouts of their own, which cannot be read back in general."""
        return Evidence.CONSUMED

    @property
    def serving_address(self) -> str:
        """Where vLLM answers, if it is reached over HTTP."""
        return ",".join(getattr(self._driver, "addresses", ()))

    def held(self) -> tuple[Held, ...]:
        """See ``Engine``. A worker whose session is gone holds nothing that anybody knows of."""
        return tuple(NONE_HELD if k.lost else k.state.held for k in self._attached)

    def mixed(self) -> str:
        """See ``Engine``."""
        return next((k.state.mixed for k in self._attached if k.state.mixed and not k.lost), "") or self._mixed

    def layout(self) -> int:
        """The same for a life: vLLM's live tensors do not move."""
        return 0

    def describe(self, manifest: Manifest, members: Sequence[str]) -> Description:
        """See ``Engine``. Each worker's loader is followed on tensors without bytes, once per manifest."""
        self._ensure(manifest)
        found = self._each("surveyed", _CALL_S, manifest_id=manifest.id)
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
        return Description(tuple(placements), tuple(problems.values()), ignored=tuple(sorted(dropped)))

    def _ensure(self, manifest: Manifest) -> None:
        """Every worker knows the manifest and has followed its loader with it (they remember the newest few)."""
        if all(a["known"] for a in self._each("knows", _CALL_S, manifest_id=manifest.id)):
            return
        self._each("manifest", _CALL_S, manifest=manifest_json(manifest))
        self._driver.update({"do": "survey", "manifest_id": manifest.id}, None, self._apply_s)

    # --- workers elsewhere

    def offers(
        self, worker: int, member: str, transports: Sequence[str]
    ) -> tuple[list[Rendezvous], dict[str, str]] | None:
        """See ``Engine``: asked of the worker's process."""
        try:
            said = self._attached[worker].call("offers", _CALL_S, member=member, transports=list(transports))
        except EngineError as e:
            return [], {n: str(e) for n in transports}
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
        self._desk.pause(holder, mode, clear)

    def wait_paused(self, holder: str, timeout: float) -> bool:
        """See ``Engine``."""
        return self._desk.wait(holder, timeout)

    def resume(self, holder: str) -> None:
        """See ``Engine``. The fence of a mixed engine stays whoever asks."""
        if holder == "dirty" and self.mixed():
            return
        self._desk.resume(holder)

    def holders(self) -> frozenset[str]:
        """See ``Engine``."""
        return self._desk.holders

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
            raise EngineError(f"mode {update.mode} is not possible: vLLM's workers take staged updates only")
        if update.cache not in self.cache_policies:
            raise EngineError(f"cache policy {update.cache}: this engine has {', '.join(self.cache_policies)}")
        self._ensure(update.manifest)
        self._each("begin", _CALL_S, update_id=update.update_id, version=update.version, manifest_id=update.manifest.id)
        self._update = update

    def _open(self, update_id: str) -> EngineUpdate:
        u = self._update
        if u is None or u.update_id != update_id:
            raise EngineError(f"update {update_id!r} is not open here (open: {u.update_id if u else 'none'})")
        return u

    def writing(self, update_id: str) -> None:
        """Not here: no update is in place."""
        raise EngineError(f"update {update_id} is staged: nothing is written before the apply")

    def prepare(self, update_id: str) -> None:
        """See ``Engine``. The load itself was followed when the manifest was checked; vLLM must be awake for it."""
        self._open(update_id)
        gone = [k.hello.rank for k in self._attached if k.lost]
        if gone:
            raise EngineError(f"vLLM's worker(s) {gone} are gone")
        # vLLM calls an engine asleep that merely stands still: one that we hold paused cannot be told apart
        if not self._desk.holders and self._driver.is_sleeping(_QUICK_S):
            raise EngineError("vLLM is asleep: an update would be lost; wake it up first (POST /wake_up)")

    def apply(self, update_id: str) -> None:
        """See ``Engine``. One call to vLLM; how it went is asked of every worker."""
        u = self._open(update_id)
        if not self._desk.in_force() or not self._driver.is_paused(_QUICK_S):
            raise EngineError("vLLM is not paused: weights change while no forward pass can run only")
        self._mixed = f"update {update_id} is being applied"
        self._driver.update({"do": "apply", "update_id": update_id}, str(u.version), self._apply_s)
        self._each("applied", _CALL_S, update_id=update_id)

    def commit(self, update_id: str) -> None:
        """See ``Engine``."""
        u = self._open(update_id)
        if u.cache is CachePolicy.CLEAR:
            self._driver.clear_cache(_CALL_S)
        self._each("commit", _CALL_S, update_id=update_id)
        self._mixed = ""
        self._update = None
        self._desk.resume("dirty")

    def abort(self, update_id: str, wrote: bool, reason: str) -> None:
        """See ``Engine``."""
        u = self._update
        if u is not None and update_id not in ("", u.update_id):
            return
        applied = u is not None and self._mixed.startswith(f"update {u.update_id} ")
        self._update = None
        if (wrote and u is not None) or applied:
            wrote = True
            self._fence(reason)
        for link in self._attached:
            if link.lost:
                continue
            try:
                link.call("drop", _QUICK_S, update_id=update_id, wrote=wrote, reason=reason)
            except EngineError as e:
                log.warning("a worker could not be told to drop update %s: %s", update_id, e)

    def _fence(self, reason: str) -> None:
        self._mixed = self._mixed if self._mixed and not self._mixed.endswith("is being applied") else reason
        self._desk.pause("dirty", PauseMode.ABORT)

    def abandon(self, update_id: str) -> None:
        """See ``Engine``. The slot is the worker's: it takes nothing else before what is under way there has ended."""
        self._open(update_id)
        self._update = None

    def close(self) -> None:
        """Let the workers go; vLLM runs on with what it holds."""
        self._closed.set()
        for link in (*self._attached, *self._links.values()):
            link.close()
        self._listener.close()
        self._desk.close()
        self._driver.close()
