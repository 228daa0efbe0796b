"""What ``nccl_comm`` makes of the library's answers. A stand-in gives them: where there is no GPU, NCCL cannot run."""

from __future__ import annotations

import enum
import threading
import time
from typing import Any

import pytest
import torch

from weightplane.transports import nccl_comm
from weightplane.transports.base import TransportError
from weightplane.transports.nccl import NcclTransport
from weightplane.transports.nccl_comm import NcclCommunicator


class Result(enum.IntEnum):
    Success = 0
    RemoteError = 6
    InProgress = 7


class Library:
    """``nccl.core`` and the communicator that it made: notes calls, and is busy for ``busy`` looks after each group."""

    SUM = 0
    Result = Result

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.busy, self.left, self.state = 0, 0, Result.Success
        self.refuses = False

    def group_start(self) -> None:
        self.calls.append("start")

    def group_end(self) -> None:
        self.calls.append("end")
        self.left = self.busy

    def get_async_error(self) -> int:
        if self.left:
            self.left -= 1
            return Result.InProgress
        return self.state

    def get_last_error(self) -> str:
        return "socket closed"

    def broadcast(self, source: Any, target: Any, root: int, *, stream: int) -> None:
        if self.refuses:
            raise ValueError("no")
        assert source is target
        self.calls.append(("broadcast", source.numel(), root, stream))

    def send(self, tensor: Any, peer: int, *, stream: int) -> None:
        self.calls.append(("send", tensor.numel(), peer, stream))

    def recv(self, tensor: Any, peer: int, *, stream: int) -> None:
        self.calls.append(("recv", tensor.numel(), peer, stream))

    def reduce(self, source: Any, target: Any, op: int, root: int, *, stream: int) -> None:
        self.calls.append(("reduce", source.numel(), op, root, stream))

    def abort(self) -> None:
        self.calls.append("abort")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(nccl_comm, "_library", lambda: made)
    monkeypatch.setattr(nccl_comm, "_bindings", lambda: made)
    return made


def test_calls_are_grouped_and_looked_at_until_they_are_queued(library: Library) -> None:
    checks: list[int] = []
    made = NcclCommunicator(library, 9, lambda: checks.append(1))
    a, b = torch.empty(5, dtype=torch.uint8), torch.empty(6, dtype=torch.uint8)
    library.busy = 3
    made.broadcast([a, b])
    made.exchange([(a, 1)], [(b, 2)])
    made.reduce(a[:1])
    assert library.calls == [
        *("start", ("broadcast", 5, 0, 9), ("broadcast", 6, 0, 9), "end"),
        *("start", ("send", 5, 1, 9), ("recv", 6, 2, 9), "end"),
        *("start", ("reduce", 1, 0, 0, 9), "end"),
    ]
    assert library.left == 0 and not checks, "nobody is asked within the first looks"
    library.busy = nccl_comm._SPINS + 3
    made.broadcast([a])
    assert 0 < len(checks) < 10


def test_a_busy_library_is_given_up_when_the_check_says_so(library: Library) -> None:
    def check() -> None:
        raise TimeoutError("the deadline")

    made = NcclCommunicator(library, 9, check)
    library.busy = 1 << 30
    with pytest.raises(TimeoutError, match="the deadline"):
        made.broadcast([torch.empty(1, dtype=torch.uint8)])


def test_errors_are_the_librarys_own_words(library: Library) -> None:
    made = NcclCommunicator(library, 9, lambda: None)
    assert made.problem() == ""
    library.state = Result.InProgress
    assert made.problem() == ""
    library.state = Result.RemoteError
    assert made.problem() == "NCCL: RemoteError (socket closed)"
    with pytest.raises(TransportError, match=r"NCCL: RemoteError \(socket closed\)"):
        made.broadcast([torch.empty(1, dtype=torch.uint8)])
    library.refuses = True
    with pytest.raises(TransportError, match=r"NCCL: ValueError: no \(socket closed\)"):
        made.broadcast([torch.empty(1, dtype=torch.uint8)])
    assert library.calls.count("start") == library.calls.count("end"), "a group never stays open"


@pytest.mark.alone
def test_an_abort_from_another_thread_ends_a_call_and_is_the_last_one(library: Library) -> None:
    made = NcclCommunicator(library, 9, lambda: None)
    library.busy = 1 << 30
    failed: list[BaseException] = []

    def call() -> None:
        try:
            made.broadcast([torch.empty(1, dtype=torch.uint8)])
        except TransportError as e:
            failed.append(e)

    thread = threading.Thread(target=call)
    thread.start()
    while "end" not in library.calls:
        threading.Event().wait(0.001)
    start = time.monotonic()
    made.abort()
    made.abort()
    thread.join(1)
    assert time.monotonic() - start < 0.5 and "aborted" in str(failed[0])
    assert library.calls.count("abort") == 1 and library.calls[-1] == "abort"
    with pytest.raises(TransportError, match="aborted"):
        made.reduce(torch.empty(1, dtype=torch.uint8))
    assert made.problem() == "" and library.calls[-1] == "abort"


@pytest.mark.alone
def test_probe_is_quick_and_says_what_to_install() -> None:
    start = time.monotonic()
    probe = NcclTransport().probe()
    assert time.monotonic() - start < 0.05
    if not probe.ok:
        assert any(s in probe.reason for s in ("pip install nccl4py", "CUDA build of torch", "/dev/nvidiactl", "hides"))
