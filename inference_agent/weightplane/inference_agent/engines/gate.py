"""The gate between generation and weight updates: pause holders, forward passes, requests.

A *forward pass* runs inside ``forward()`` and reads one version from its first byte to its last: the version changes
only while no pass is inside. A *request* (one output, many passes) runs inside ``request()``. Generation stands still
while any *holder* ("operator", "trainer", "update", "dirty", ...) is there; each removes only its own hold.

=========  ==========================================================================================================
KEEP       passes in flight finish, the next ones block; requests go on where they were after the last ``resume``
WAIT       requests in flight finish first (their passes are let in), new requests wait; then as KEEP
ABORT      requests in flight are marked: their next ``forward`` raises ``RequestAborted``; then as KEEP
=========  ==========================================================================================================

WAIT never waits for requests that another holder keeps standing (they cannot finish), so a paused engine can be
updated. All methods are thread-safe; only ``forward``, ``request``, ``wait_still`` and ``exclusive`` block.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from weightplane.controlplane.core.states import PauseMode

__all__ = ["EngineClosed", "PauseGate", "Request", "RequestAborted", "VersionTag"]


class RequestAborted(Exception):
    """A pause with ABORT ended this request: return what it has so far."""


class EngineClosed(RuntimeError):
    """The engine is shut down: no pass will run again."""


@dataclass(frozen=True, slots=True)
class VersionTag:
    """Which weights one forward pass used; equal tags mean equal weights. ``version`` 0: what the engine was born with.

    ``trainer_step`` -1 and empty strings mean none. ``incarnation`` is the replica's life.
    """

    version: int = 0
    update_id: str = ""
    trainer_step: int = -1
    lineage: str = ""
    incarnation: str = ""


class Request:
    """One output in the making. ``aborted``: a pause asked it to end early and return what it has. Any thread."""

    __slots__ = ("reason",)

    def __init__(self) -> None:
        self.reason = ""

    @property
    def aborted(self) -> bool:
        """Whether it should end now."""
        return bool(self.reason)


class _Hold:
    """One holder. ``hard``: it blocks every pass (a WAIT becomes hard once it drained)."""

    __slots__ = ("hard", "mode")

    def __init__(self, mode: PauseMode) -> None:
        self.mode = mode
        self.hard = mode is not PauseMode.WAIT


class PauseGate:
    """See the module text. ``tag`` is what the next pass is labelled with."""

    def __init__(self, tag: VersionTag | None = None) -> None:
        self._cond = threading.Condition()
        self._tag = tag or VersionTag()
        self._holds: dict[str, _Hold] = {}
        self._requests: set[Request] = set()
        self._passes = 0
        self._exclusive = False
        self._closed = False
        self._request: ContextVar[Request | None] = ContextVar("weightplane_request", default=None)
        self._inside: ContextVar[bool] = ContextVar("weightplane_forward", default=False)

    # --- generation

    @contextmanager
    def forward(self, request: Request | None = None) -> Iterator[VersionTag]:
        """Run one forward pass; yields the tag of the weights it reads.

        ``request`` defaults to the one entered in this context. Raises ``RequestAborted`` (its request was asked to
        end), ``EngineClosed``. A nested call in the same context joins the outer pass.
        """
        if self._inside.get():
            yield self._tag
            return
        mine = request or self._request.get()
        with self._cond:
            while True:
                if self._closed:
                    raise EngineClosed("the engine is shut down")
                if mine is not None and mine.reason:
                    raise RequestAborted(mine.reason)
                if not self._exclusive and self._admits(mine):
                    break
                self._cond.wait()
            self._passes += 1
            tag = self._tag
        token = self._inside.set(True)
        try:
            yield tag
        finally:
            self._inside.reset(token)
            with self._cond:
                self._passes -= 1
                if not self._passes:
                    self._cond.notify_all()

    @contextmanager
    def request(self) -> Iterator[Request]:
        """Produce one output; blocks while anyone holds a pause. A nested call joins the outer request."""
        outer = self._request.get()
        if outer is not None:
            yield outer
            return
        request = Request()
        with self._cond:
            while self._holds or self._exclusive:
                if self._closed:
                    break
                self._cond.wait()
            if self._closed:
                raise EngineClosed("the engine is shut down")
            self._requests.add(request)
        token = self._request.set(request)
        try:
            yield request
        finally:
            self._request.reset(token)
            with self._cond:
                self._requests.discard(request)
                self._cond.notify_all()

    def _admits(self, request: Request | None) -> bool:
        if not self._holds:
            return True
        return request in self._requests and not any(h.hard for h in self._holds.values())

    # --- pauses

    def pause(self, holder: str, mode: PauseMode) -> None:
        """Begin a pause; returns at once (``wait_still`` waits). Again by the same holder: the stronger mode counts."""
        if mode not in (PauseMode.KEEP, PauseMode.WAIT, PauseMode.ABORT):
            raise ValueError(f"pause mode: expected KEEP, WAIT or ABORT, found {mode}")
        with self._cond:
            old = self._holds.get(holder)
            if old is None:
                self._holds[holder] = _Hold(mode)
            elif mode is not PauseMode.WAIT:
                old.mode, old.hard = mode, True
            if mode is PauseMode.ABORT:
                for r in self._requests:
                    r.reason = r.reason or f"generation was paused by {holder!r} with ABORT"
            self._cond.notify_all()

    def wait_still(self, holder: str, timeout: float | None = None) -> bool:
        """Block until ``holder``'s pause is in force: no pass inside, and for WAIT no request that could go on.

        False after ``timeout`` seconds, or when ``holder`` let go meanwhile (or never held).
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._cond:
            while True:
                hold = self._holds.get(holder)
                if hold is None or self._closed:
                    return False
                if self._still(holder, hold):
                    hold.hard = True
                    return True
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._cond.wait(left)

    def _still(self, holder: str, hold: _Hold) -> bool:
        if self._passes:
            return False
        return hold.hard or not self._requests or any(h.hard for n, h in self._holds.items() if n != holder)

    def resume(self, holder: str) -> None:
        """Remove one holder; without it a no-op. Generation runs once none is left."""
        with self._cond:
            if self._holds.pop(holder, None) is not None:
                self._cond.notify_all()

    @property
    def holders(self) -> frozenset[str]:
        """Who holds generation paused."""
        with self._cond:
            return frozenset(self._holds)

    @property
    def running_requests(self) -> int:
        """Requests in flight."""
        with self._cond:
            return len(self._requests)

    # --- updates

    @property
    def tag(self) -> VersionTag:
        """The label of the weights in place."""
        with self._cond:
            return self._tag

    @contextmanager
    def exclusive(self, timeout: float | None = None) -> Iterator[None]:
        """No pass is inside, none comes in: what the body writes is atomic to them. ``TimeoutError`` if one stays.

        Must not be entered from inside a pass.
        """
        if self._inside.get():
            raise RuntimeError("weights cannot change from inside a forward pass")
        end = None if timeout is None else time.monotonic() + timeout
        with self._cond:
            while self._exclusive or self._passes:
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"{self._passes} forward pass(es) did not end within {timeout} s")
                self._cond.wait(left)
            self._exclusive = True
        try:
            yield
        finally:
            with self._cond:
                self._exclusive = False
                self._cond.notify_all()

    def relabel(self, tag: VersionTag) -> None:
        """Change the label of the passes to come. While other weights are written, inside ``exclusive`` only."""
        with self._cond:
            self._tag = tag

    def close(self) -> None:
        """Wake everyone who waits; every later pass raises ``EngineClosed``. Idempotent."""
        with self._cond:
            self._closed = True
            self._cond.notify_all()
