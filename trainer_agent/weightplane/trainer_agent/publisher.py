"""The Publisher: a trainer rank's whole interface to its fleet.

    with Publisher("127.0.0.1:7777", "policy", ModuleSource(model)) as publisher:
        publisher.wait_for_replicas(2)
        receipt = publisher.publish(step)

Works in any thread, under a running event loop, in a torchrun rank or a Ray actor: it starts daemon threads (and,
unless ``heartbeat`` is "stream", one helper process that holds the lease), installs no signal handler, forks nothing,
runs no loop, and touches CUDA only where the source's tensors are. One publish at a time; ``close``, and the handles of
``publish_async``, may be used from any thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

import torch

from weightplane.controlplane.dial import Dial
from weightplane.transports.retained import Retainer
from weightplane.v1 import fleet_pb2, update_pb2

from .ahead import BindAhead
from .collective import default_incarnation
from .errors import ForkedProcessError, PublisherClosed, UpdateFailed
from .hold import Hold, HoldSettings
from .keeping import Keeping
from .options import PublishOptions, checked_step
from .produced import NOTHING_QUEUED, Produced
from .publishing import Publishing
from .receipt import PublishReceipt
from .sources import Source
from .stop import Stop
from .telling import tell_parity

__all__ = ["PublishHandle", "Publisher"]

log = logging.getLogger(__name__)


class PublishHandle:
    """A publish under way in its own thread. Any thread; ``await handle`` gives the receipt as well.

    ``source_free`` is set once the source's tensors may change: every replica has read everything, or the publish
    failed and nothing reads any more. ``opened``: whether an update was opened for it, known once it is over.
    """

    def __init__(self, *, is_async: bool = True) -> None:
        self.is_async = is_async
        self.opened = False
        self.source_free = threading.Event()
        self._free: Future[None] = Future()
        self._future: Future[PublishReceipt] = Future()
        self._stop: Stop = Stop()
        self._produced: Produced = NOTHING_QUEUED

    def done(self) -> bool:
        """Whether it is over."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> PublishReceipt:
        """The receipt; raises what ``publish`` raises, or ``TimeoutError`` (the publish then goes on)."""
        return self._future.result(timeout)

    def cancel(self, reason: str = "cancelled by its caller") -> None:
        """Abort it, unless it was decided; ``result`` then raises. Returns at once."""
        self._stop.set(PublisherClosed(reason))

    async def wait_source_free(self) -> None:
        """``source_free``, for coroutines."""
        await asyncio.shield(asyncio.wrap_future(self._free))

    def _set_free(self) -> None:
        if not self.source_free.is_set():
            self.source_free.set()
            self._free.set_result(None)

    def __await__(self) -> Any:
        return asyncio.wrap_future(self._future).__await__()


class Publisher:
    """See the module's text. One per trainer rank; on several ranks every rank makes one and makes the same calls.

    ``target``: the control plane's host:port (loopback), or a ``Dial`` with TLS or a token. ``incarnation`` names this
    life of the job and is equal on its ranks; by default torchrun's run id and restart count, or random for one rank.
    ``bucket_bytes``: upper bound of a bucket; by default what suits each channel (``InitTransfer``), and 64 MiB where
    the source makes tensors on a GPU as they are sent (a gather, a cast): as much of them is in memory at once.
    ``transport``: use this one for every worker of every replica, or refuse; by default each gets the best that both
    sides can use. ``takeover``: fence a trainer that still holds the group. ``resume_step``: the step of the checkpoint
    that training resumes from. ``heartbeat``: "helper" (a process) or "stream".
    ``hold_source``: what is worked out for the source's memory is kept from publish to publish, and that memory in use
    with it, also if the model is moved elsewhere meanwhile; turn it off, or call ``release``, to move it. ``retain``:
    "memory" or a folder: keep a copy of what was published, of at most ``retain_bytes`` (0: no bound), from which
    replicas that come later, or come back, are caught up without a publish; it is taken before ``source_free``.
    The publish
    options (mode, pause, cache, verify, commit_policy, failure, update_timeout, ...: see ``PublishOptions``) are
    defaults that ``publish`` may override.

    Methods raise ``ForkedProcessError`` in a forked child, ``PublisherClosed`` after ``close``, ``TrainerFenced`` once
    another trainer took over.
    """

    def __init__(
        self,
        target: str | Dial,
        group: str,
        source: Source,
        *,
        rank: int = 0,
        world_size: int = 1,
        trainer_id: str = "",
        incarnation: str = "",
        transport: str = "",
        bucket_bytes: int = 0,
        init_timeout: float = 60.0,
        takeover: bool = False,
        resume_step: int | None = None,
        heartbeat: str = "helper",
        hold_source: bool = True,
        retain: str = "",
        retain_bytes: int = 0,
        **options: Any,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank: expected 0..{world_size - 1}, found {rank}")
        if heartbeat not in ("helper", "stream"):
            raise ValueError(f"heartbeat: expected 'helper' or 'stream', found {heartbeat!r}")
        self.options = PublishOptions().override(options)
        self.source = source
        self.rank, self.world_size = rank, world_size
        settings = HoldSettings(
            dial=target if isinstance(target, Dial) else Dial(target),
            group=group,
            trainer_id=trainer_id or (socket.gethostname() if world_size == 1 else "trainer"),
            incarnation=incarnation or default_incarnation(world_size),
            rank=rank,
            world_size=world_size,
            transport=transport,
            bucket_bytes=bucket_bytes,
            transient=source.gathers or source.transient,
            takeover=takeover,
            resume_step=resume_step,
            helper=heartbeat == "helper",
        )
        self.init_timeout = init_timeout
        self.hold_source = hold_source
        retainer = _retainer(retain, retain_bytes, source, heartbeat)
        self._hold = Hold(settings)
        self._keeping = Keeping(self._hold, retainer) if retainer is not None else None
        self._pid = os.getpid()
        self._busy = threading.Lock()
        self._ahead = BindAhead(self._hold, self._busy)
        self._count = 0
        self._stale = 0
        self._closed = False
        self._current: PublishHandle | None = None

    # --- init ---

    def init(self) -> None:
        """Take the hold on the group and bind to its replicas, all ranks together. ``publish`` does it if need be.

        Raises ``TrainerHeld``, ``CallRefused``, ``CoordinatorUnreachable``. A repeat binds again.
        """
        self._check()
        with self._busy:
            self._init()

    def _init(self) -> None:
        if not self.source.gathers:
            self.source.manifest()
        self._hold.init(time.monotonic() + self.init_timeout, self.source.device_kind)

    def wait_for_replicas(self, count: int, timeout: float = 60.0) -> tuple[str, ...]:
        """Wait until that many replicas are alive and may take part in an update; their ids.

        Raises ``TimeoutError`` that names those seen and why the others may not.
        """
        self._check()
        return self._hold.questions.wait_for_replicas(count, time.monotonic() + timeout, self._hold.check)

    def out_of_reach(self) -> dict[str, str]:
        """The replicas that no transport reached when the publisher was bound last (``init`` binds again), each with
        the reasons: they take no part in updates, and are ``absent`` in receipts. Any thread."""
        out: dict[str, str] = {}
        for c in self._hold.choices:
            if not c.transport:
                why = ", ".join((c.reason, *(f"{r.transport}: {r.reason}" for r in c.refusals)))
                out[c.replica_id] = max(out.get(c.replica_id, ""), why, key=len)  # of its workers, the one with causes
        return out

    # --- publish ---

    def publish(self, step: int, **overrides: Any) -> PublishReceipt:
        """Put the source's weights of ``step`` on every replica, or on none; returns when the replicas serve them.

        ``overrides``: publish options for this call. Raises ``UpdateFailed`` (``UpdateRefused`` if none was opened,
        ``OutcomeUnknown`` if it could not be learnt) naming each replica and reason, or what the source raised. Ctrl-C
        aborts the update, then goes on as usual.
        """
        step = checked_step(step)
        handle = PublishHandle(is_async=False)
        options = self._begin(handle, overrides)
        try:
            return self._publish(handle, step, options)
        finally:
            self._finish(handle)

    def publish_async(self, step: int, **overrides: Any) -> PublishHandle:
        """``publish`` in a thread of its own. Do not change the source before the handle's ``source_free``.

        Work that this thread queued on the source's devices is waited for before anything is read. A ``GatherSource``
        runs its function in that thread. A publish begun while one is under way waits for it. Under ``failure="retry"``
        the source is held for a second attempt, and ``source_free`` comes at the end; under a group's RETRY it comes
        early and there is no second attempt after it.
        """
        step = checked_step(step)
        handle = PublishHandle()
        options = self._begin(handle, overrides, wait=False)
        device = torch.cuda.current_device() if self._uses_cuda() else None

        def work() -> None:
            with self._busy:
                self._current = handle
                try:
                    if device is not None:
                        torch.cuda.set_device(device)
                    receipt = self._publish(handle, step, options)
                except BaseException as e:
                    handle._set_free()
                    self._current = None
                    handle._future.set_exception(e)
                else:
                    handle._set_free()
                    self._current = None
                    handle._future.set_result(receipt)
            self._ahead.begin()

        threading.Thread(target=work, name=f"weightplane-publish-{step}", daemon=True).start()
        return handle

    async def apublish(self, step: int, **overrides: Any) -> PublishReceipt:
        """``publish`` for coroutines: the loop goes on meanwhile. Cancelling it aborts the update, unless decided."""
        handle = self.publish_async(step, **overrides)
        future = asyncio.wrap_future(handle._future)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            handle.cancel()
            await asyncio.wait([future])
            if not future.cancelled():
                future.exception()  # seen: the caller wanted no answer
            raise

    async def ainit(self) -> None:
        """``init`` for coroutines."""
        await asyncio.get_running_loop().run_in_executor(None, self.init)

    def release(self) -> None:
        """Let go of the source's memory, so that a model which is now moved off the GPU (or replaced) frees it.

        Spans, registrations and tables are dropped; the next publish works them out anew. Waits for one under way.
        """
        self._check()
        with self._busy:
            self._hold.pool.release()

    def outcome(self, update_id: str, timeout: float = 10.0) -> update_pb2.UpdateInfo:
        """What became of an update (after ``OutcomeUnknown``). Raises ``CallRefused`` if it is not known."""
        self._check()
        return self._hold.questions.outcome(update_id, time.monotonic() + timeout)

    def replicas(self, timeout: float = 10.0) -> list[fleet_pb2.ReplicaInfo]:
        """The group's replicas as the control plane knows them. Raises ``CallRefused``, ``CoordinatorUnreachable``."""
        self._check()
        return self._hold.questions.replicas(time.monotonic() + timeout)

    def tell_parity(self, update_id: str, results: Sequence[update_pb2.ParityResult], timeout: float = 10.0) -> None:
        """Let the control plane have parity checks of a committed update (``weightplane.parity.loop`` makes them).

        Raises as ``replicas``.
        """
        self._check()
        tell_parity(self._hold, update_id, results, time.monotonic() + timeout)

    # --- close ---

    def close(self) -> None:
        """Abort what is under way, give up the hold, and stop every thread and process of ours. Idempotent, bounded."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            return
        self._ahead.close()
        current = self._current
        if current is not None:
            current.cancel("the publisher is being closed")
        got = self._busy.acquire(timeout=10.0)
        try:
            if self._keeping is not None:
                self._keeping.close()
            self._hold.close()
        finally:
            if got:
                self._busy.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    # --- parts ---

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                f"this Publisher was made in process {self._pid} and is used in {os.getpid()}, a fork of it: make the "
                "Publisher in the child, or start the child with 'spawn'"
            )
        if self._closed:
            raise PublisherClosed
        self._hold.check()

    def _begin(self, handle: PublishHandle, overrides: Mapping[str, Any], *, wait: bool = True) -> PublishOptions:
        self._check()
        options = self.options.override(overrides)
        if not self.source.gathers and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self.source.manifest()
            handle._produced = self.source.produced()
        if wait:
            self._busy.acquire()
            self._current = handle
        return options

    def _finish(self, handle: PublishHandle) -> None:
        handle._set_free()
        self._current = None
        self._busy.release()
        self._ahead.begin()

    def _publish(self, handle: PublishHandle, step: int, options: PublishOptions) -> PublishReceipt:
        self._check()
        self._count += 1
        if not self._hold.bound:
            self._init()
        free = handle._set_free if handle.is_async else None
        work = Publishing(
            self._hold,
            self.source,
            options,
            step,
            self._count,
            handle._stop,
            free,
            handle._produced,
            hold_source=self.hold_source,
            keeping=self._keeping,
        )
        try:
            try:
                receipt = work.run()
            finally:
                handle.opened = work.opened
        except UpdateFailed as e:
            self._stale += 1
            if not work.goes_stale(e, self._stale - 1):
                raise
            log.warning("group %s goes on with old weights (%d in a row): %s", self._hold.group, self._stale, e)
            return work.stale_receipt(e, self._stale)
        self._stale = 0
        return receipt

    def _uses_cuda(self) -> bool:
        return self.source.device_kind == "cuda" and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _retainer(retain: str, retain_bytes: int, source: Source, heartbeat: str) -> Retainer | None:
    if not retain:
        return None
    if source.gathers:
        raise ValueError("retain: a GatherSource gives its tensors once; retain at a replica instead")
    if heartbeat != "helper":
        raise ValueError("retain: needs heartbeat='helper', which tells the control plane what is retained")
    return Retainer(retain, retain_bytes)
