"""NCCL by ``nccl4py``: unique ids, connecting within a deadline, and the communicator of ``collective_abc``.

Communicators are nonblocking: no call waits for a peer, so each can be given up and aborted from another thread at any
time. A call is looked at until the library has queued it ("in progress" until then; nothing else may be queued on the
stream meanwhile). ``nccl4py`` frees the GIL in every call and loads the NCCL that torch uses.

What the library is asked follows its headers and sources (2.28, 2.32). Run on cards: 2.28.9 (``docs/performance.md``).
Abort after a member's death leaves one socket of the library's bootstrap open in each survivor, which it never closes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from .base import TransportError
from .cuda_driver import Cuda, driver

if TYPE_CHECKING:
    import torch

__all__ = ["INSTALL", "NcclCommunicator", "NcclRuntime"]

INSTALL: Final = "pip install nccl4py==0.6.* (it uses the NCCL of a CUDA build of torch)"
_SPINS: Final = 200  # looks without a pause: a queued operation is there within some tens of microseconds
_PAUSE_S: Final = 0.0005


@cache
def _library() -> Any:
    """``nccl.core``. ``TransportError`` says what is missing."""
    try:
        import torch  # noqa: F401 - loads its NCCL first, so that this process has one
        from nccl import core
    except ImportError as e:
        raise TransportError(f"nccl4py cannot be loaded ({e}): {INSTALL}") from e
    return core


class NcclCommunicator:
    """See ``collective_abc.Communicator``. ``check`` is called while the library is busy with a call, and may raise."""

    def __init__(self, made: Any, stream: int, check: Callable[[], None]) -> None:
        self._made, self._stream, self._check = made, stream, check
        self._lock = threading.Lock()
        self._aborted = False

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """See ``Communicator``."""
        with self._group():
            for tensor in tensors:
                self._made.broadcast(tensor, tensor, 0, stream=self._stream)
        self.settle()

    def exchange(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> None:
        """See ``Communicator``."""
        with self._group():
            for tensor, peer in sends:
                self._made.send(tensor, peer, stream=self._stream)
            for tensor, peer in receives:
                self._made.recv(tensor, peer, stream=self._stream)
        self.settle()

    def reduce(self, byte: torch.Tensor) -> None:
        """See ``Communicator``."""
        with self._group():
            self._made.reduce(byte, byte, _library().SUM, 0, stream=self._stream)
        self.settle()

    @contextmanager
    def _group(self) -> Iterator[None]:
        """Calls inside are begun together at the end."""
        core = _library()
        with self._lock:
            self._alive()
            try:
                core.group_start()
                try:
                    yield
                finally:
                    core.group_end()
            except Exception as e:
                raise TransportError(f"NCCL: {type(e).__name__}: {e}{self._said()}") from e

    def settle(self) -> None:
        """Return when the library is done with the last call (not: with what it queued)."""
        pause = threading.Event()
        for n in itertools.count():
            with self._lock:
                self._alive()
                state = int(self._made.get_async_error())
                if state != _in_progress():
                    if state:
                        raise TransportError(f"NCCL: {_name(state)}{self._said()}")
                    return
            if n >= _SPINS:
                self._check()
                pause.wait(_PAUSE_S)

    def problem(self) -> str:
        """See ``Communicator``."""
        with self._lock:
            if self._aborted:
                return ""
            state = int(self._made.get_async_error())
            return f"NCCL: {_name(state)}{self._said()}" if state not in (0, _in_progress()) else ""

    def split(self, member: bool, rank: int) -> NcclCommunicator | None:
        """One of the communicators that all ranks of this one make together; ``None`` if not a ``member`` of it."""
        with self._lock:
            self._alive()
            try:
                made = self._made.split(0 if member else None, rank)
            except Exception as e:
                raise TransportError(f"NCCL could not split a communicator: {e}{self._said()}") from e
        child = NcclCommunicator(made, self._stream, self._check)
        try:
            self.settle()
            if member:
                child.settle()
        except BaseException:
            if member:
                child.abort()
            raise
        return child if member else None

    def abort(self) -> None:
        """See ``Communicator``. Blocks until the library has stopped (its kernels leave at once)."""
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
        self._made.abort()  # nobody else calls it any more

    def _alive(self) -> None:
        if self._aborted:
            raise TransportError("the communicator was aborted")

    def _said(self) -> str:
        try:
            text = str(self._made.get_last_error()).strip()
        except Exception:
            text = ""
        return f" ({text[:300]})" if text else ""


def _in_progress() -> int:
    return int(_bindings().Result.InProgress)


def _name(state: int) -> str:
    try:
        return str(_bindings().Result(state).name)
    except ValueError:
        return f"error {state}"


@cache
def _bindings() -> Any:
    _library()
    from nccl.bindings import nccl

    return nccl


class NcclRuntime:
    """See ``collective_abc.Runtime``."""

    def version(self) -> int:
        """See ``Runtime``: 22809 = 2.28.9."""
        try:
            return int(_bindings().get_version())
        except Exception as e:
            raise TransportError(f"NCCL cannot be loaded: {type(e).__name__}: {e}: {INSTALL}") from e

    def device_uuid(self) -> str:
        """See ``Runtime``."""
        import torch

        return driver().uuid(torch.cuda.current_device())

    def index_of(self, uuid: str) -> int:
        """See ``Runtime``."""
        cuda = driver()
        seen = [cuda.uuid(i) for i in range(cuda.count())]
        if uuid not in seen:
            raise TransportError(f"GPU {uuid} is not visible to this process (CUDA_VISIBLE_DEVICES?); it sees {seen}")
        return seen.index(uuid)

    def mint(self) -> bytes:
        """See ``Runtime``. A thread of NCCL's waits in this process until everybody has connected by the id."""
        try:
            return bytes(_library().get_unique_id())
        except TransportError:
            raise
        except Exception as e:
            raise TransportError(
                f"NCCL gives no unique id ({e}): it needs a network interface, see NCCL_SOCKET_IFNAME"
            ) from e

    def cuda(self) -> Cuda:
        """See ``Runtime``."""
        return driver()

    def connect(
        self,
        unique_id: bytes,
        rank: int,
        senders: int,
        receivers: int,
        device: int,
        stream: int,
        check: Callable[[], None],
    ) -> Mapping[int, NcclCommunicator]:
        """See ``Runtime``. With several senders one communicator is made of all ranks, and one split off for each."""
        import torch

        core = _library()
        made: list[NcclCommunicator] = []
        try:
            with torch.cuda.device(device):
                torch.cuda.current_stream(device)  # the device's context is this thread's
                identity = core.UniqueId.from_bytes(unique_id)
                config = core.NCCLConfig(blocking=False)
                try:
                    raw = core.Communicator.init(senders + receivers, rank, identity, config)
                except Exception as e:
                    raise TransportError(f"NCCL could not begin to connect: {type(e).__name__}: {e}") from e
                whole = NcclCommunicator(raw, stream, check)
                made.append(whole)
                whole.settle()
                if senders == 1:
                    return {0: whole}
                found: dict[int, NcclCommunicator] = {}
                for n in range(senders):  # in one order everywhere
                    part = whole.split(rank in (n, *range(senders, senders + receivers)), rank)
                    if part is not None:
                        made.append(part)
                        found[n] = part
                found[-1] = whole  # so that it is aborted with the others
                return found
        except BaseException:
            for communicator in reversed(made):
                communicator.abort()
            raise
