"""The sessions with vLLM's workers: attached at first, attached again when vLLM is back. The adapter builds on it."""

from __future__ import annotations

import logging
import secrets
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

from weightplane.controlplane.core.model import Condition, Declaration
from weightplane.controlplane.core.states import PauseMode
from weightplane.inference_agent.vllm_plugin.compat import note
from weightplane.inference_agent.vllm_plugin.wire import Hello, Link

from ..base import Engine, EngineError, EngineUpdate, WorkerDevice
from .conditions import conditions_of
from .drivers import Driver
from .links import Listener, WorkerLink
from .pausing import PauseDesk

__all__ = ["Attached"]

log = logging.getLogger("weightplane.inference_agent")

CALL_S = 30.0
QUICK_S = 5.0
_LOOK_S = 0.5
_SAY_S = 30.0
_HAND_S = 5.0  # vLLM's access log has a line of each look
_AGAIN_S = 1.0  # between the look that finds it paused by hand and the one that makes sure
_NO_REASON = "it gives no reason"


class _Waits:
    """Says every ``_SAY_S`` that vLLM does not answer, and since when: who looks at night sees it nowhere else."""

    def __init__(self, about: str) -> None:
        self._about, self._began, self._next = about, time.monotonic(), 0.0
        self._since = time.strftime("%H:%M:%S")

    @property
    def seconds(self) -> float:
        """How long it waits."""
        return time.monotonic() - self._began

    def say(self, driver: Driver) -> None:
        """``driver`` did not answer."""
        if time.monotonic() < self._next:
            return
        level = logging.WARNING if self._next else logging.INFO
        self._next = time.monotonic() + _SAY_S
        text = "waiting for vLLM (%s) since %s (%.0f s, %s): %s"
        log.log(level, text, driver.name, self._since, self.seconds, self._about, driver.trouble or _NO_REASON)


class Attached(Engine):
    """An engine whose workers dial a socket of ours. ``start_timeout_s``: how long to wait for vLLM at first."""

    def __init__(
        self,
        driver: Driver,
        socket_dir: str | None,
        max_host_bytes: int | None,
        start_timeout_s: float,
        frozen_draft: bool = False,
    ) -> None:
        super().__init__()
        self._driver, self._most_host, self._frozen = driver, max_host_bytes, frozen_draft
        self._lock = threading.Condition()
        self._tokens: dict[str, int] = {}
        self._links: dict[tuple[int, int], WorkerLink] = {}
        self._twice = False
        self._attached: tuple[WorkerLink, ...] = ()
        self._devices: tuple[WorkerDevice, ...] = ()
        self._update: EngineUpdate | None = None
        self._mixed = ""
        self._by_hand, self._seen, self._look_at = False, False, 0.0
        self._closed = threading.Event()
        self._desk = PauseDesk(driver, self._note_pause, lambda: bool(self.asleep()))
        self._listener = Listener(socket_dir, self._met)
        try:
            self._attach_first(start_timeout_s)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._watch, name="weightplane-vllm-watch", daemon=True).start()

    # --- the workers' sessions

    def _attach_first(self, timeout: float) -> None:
        waits = _Waits(f"up to {timeout:.0f} s; until it answers this replica is not in `weightplane status`")
        while not self._driver.alive(QUICK_S):
            waits.say(self._driver)
            if waits.seconds >= timeout:
                why = self._driver.trouble or _NO_REASON
                raise EngineError(f"vLLM ({self._driver.name}) does not answer after {timeout:.0f} s: {why}")
            if self._closed.wait(_LOOK_S):
                raise EngineError("closed while waiting for vLLM")
        self._attach(anew=True)
        for text in sorted({note(h.vllm) for h in self._hellos()} - {""}):
            log.warning("%s", text)
        for refusal in sorted({h.staging_refusal for h in self._hellos() if h.staging_refusal}):
            log.warning("updates come in place only: %s", refusal)
        if self.sleep_levels and all(h.device == "cpu" for h in self._hellos()):
            log.info("asleep this vLLM would stand still and keep its memory: on CPU vLLM releases none")

    def _attach(self, anew: bool = False) -> None:
        """Make every worker dial us. Raises ``EngineError`` if not all of them do."""
        tokens = [secrets.token_hex(16) for _ in range(self._driver.instances)]
        with self._lock:
            for link in self._links.values():
                link.close()
            self._links.clear()
            self._twice = False
            self._tokens = {t: i for i, t in enumerate(tokens)}
        self._listener.expect(set(tokens))
        most = self._most_host or 0
        mine = {"socket": self._listener.path, "max_host_bytes": most, "frozen_draft": self._frozen}
        infos = [{**mine, "token": t} for t in tokens]
        self._driver.initialise(infos, CALL_S)
        with self._lock:
            if not self._lock.wait_for(self._complete, CALL_S):
                raise EngineError(f"not every worker of vLLM dialled {self._listener.path}: {sorted(self._links)} did")
            if self._twice:  # one of the two would be left behind at every update
                raise EngineError(
                    "two workers of vLLM say that they are the same one: data-parallel instances of a model without "
                    "experts are engines of their own, run each as its own server or program (--data-parallel-rank)"
                )
            links = tuple(link for _, link in sorted(self._links.items()))
            self._attached = links
            self._devices = tuple(WorkerDevice(k.hello.device, k.hello.uuid) for k in links)
            self._life = uuid.uuid4().hex
            self._update = None
        self._by_hand, self._seen, self._look_at = False, False, 0.0
        first = links[0].hello
        self.name = f"vllm {first.vllm} ({self._driver.name}, {len(links)} worker(s))"
        mixed = next((k.state.mixed for k in links if k.state.mixed), "")
        self._mixed = ""
        if mixed:
            self._fence(mixed)
        left_by = tuple({h for k in links for h in k.state.paused_by} - {"sleep"})
        if self.asleep():
            self._desk.adopt("sleep")
        else:
            self._desk.forget("sleep")  # it started anew
        if anew:  # later it is our own word that counts, and the state machine's, which knows no hold but that
            self._desk.inherit(left_by)
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
            self._twice = self._twice or (instance, hello.rank) in self._links
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
        said, waits = "", _Waits("its replica holds nothing meanwhile")
        while not self._closed.wait(_LOOK_S):
            lost = any(k.lost for k in self._attached)
            try:
                if not lost:
                    waits = _Waits("its replica holds nothing meanwhile")
                    self._keep_held()
                    self._look_by_hand()
                elif not self._driver.alive(QUICK_S):
                    waits.say(self._driver)
                    continue
                else:
                    self._attach()
                said = ""
            except Exception as e:
                if str(e) != said:
                    what = "be attached again yet" if lost else "be kept still"
                    log.warning("vLLM cannot %s: %s", what, e)
                    said = str(e)

    def _keep_held(self) -> None:
        """What is held between updates stands still, whoever resumes vLLM by hand. (An update looks for itself.)"""
        holders = self._desk.holders
        if holders & {"dirty", "operator"} and not holders & {"update", "sleep"}:
            self._desk.restore(QUICK_S)

    def _look_by_hand(self) -> None:
        """Whether somebody else paused vLLM, every ``_HAND_S``. What cannot be told now stays as it was."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _HAND_S
        try:
            seen = self._desk.paused_by_hand(QUICK_S)
        except (EngineError, TimeoutError) as e:
            log.debug("vLLM did not tell whether it is paused: %s", e)
            return
        # Twice: a pause of ours that is given up as it is made, or a sleep that waits for requests, is none by hand.
        self._by_hand, self._seen = seen and self._seen, seen
        if seen and not self._by_hand:
            self._look_at = time.monotonic() + _AGAIN_S

    @property
    def paused_by_hand(self) -> bool:
        """See ``Engine``. (What is held by order stands still for that.)"""
        return self._by_hand and not self._desk.holders

    def _hellos(self) -> list[Hello]:
        return [k.hello for k in self._attached]

    def conditions(self, declared: Declaration) -> tuple[Condition, ...]:
        """See ``Engine``. Without a server where vLLM lives in this process."""
        versions = {h.version for h in self.held()}
        return conditions_of(self._driver, declared, versions.pop() if len(versions) == 1 else None, CALL_S)

    @property
    def sleep_levels(self) -> tuple[int, ...]:
        """Both, where every worker has vLLM's sleep mode."""
        return () if self.sleep_refusal else (1, 2)

    @property
    def sleep_refusal(self) -> str:
        """See ``Engine``."""
        return "; ".join(sorted({h.sleep_refusal for h in self._hellos() if h.sleep_refusal}))

    @property
    def labels(self) -> Mapping[str, str]:
        """See ``Engine``: a draft model that was declared frozen."""
        return {"draft": "frozen"} if self._frozen and any(h.draft for h in self._hellos()) else {}

    def asleep(self) -> frozenset[str]:
        """See ``Engine``. As noted with the workers: it is they who are without their memory, whoever the agent is."""
        return frozenset(t for k in self._attached if not k.lost for t in k.state.asleep)

    def heed_sleep(self) -> None:
        """See ``Engine``. Awake, vLLM goes on by itself: whoever else holds it pauses it again."""
        if self.asleep():
            if "sleep" not in self._desk.holders:
                self._desk.adopt("sleep")
        elif "sleep" in self._desk.holders:
            self._desk.forget("sleep")
            self._desk.again()

    def _note_pause(self, holders: tuple[str, ...]) -> None:
        self._by_hand = self._seen = False  # ours is in its place, and ends it
        for link in self._attached:
            link.post("paused_by", holders=list(holders))

    def _each(self, do: str, timeout: float, **fields: Any) -> list[dict[str, Any]]:
        return [link.call(do, timeout, **fields) for link in self._attached]

    def _fence(self, reason: str) -> None:
        self._mixed = self._mixed if self._mixed and not self._mixed.endswith("is being applied") else reason
        have = self._driver.pause_modes
        self._desk.pause("dirty", PauseMode.ABORT if PauseMode.ABORT in have else PauseMode.KEEP)

    def close(self) -> None:
        """Let the workers go; vLLM runs on with what it holds."""
        self._closed.set()
        for link in (*self._attached, *self._links.values()):
            link.close()
        self._listener.close()
        self._desk.close()
        self._driver.close()
