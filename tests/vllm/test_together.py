"""Workers that refuse a call together, without vLLM: threads, and an executor that reads replies as vLLM's does."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from weightplane.inference_agent.vllm_plugin.together import stand_in, together

_ME = threading.local()


class Group:
    """vLLM's group of some workers along one dimension, over threads."""

    def __init__(self, size: int) -> None:
        self.world_size, self.cpu_group = size, self
        self._barrier, self._votes = threading.Barrier(size, timeout=20), list[torch.Tensor]()

    def reduce_max(self, votes: torch.Tensor) -> None:
        if self._barrier.wait() == 0:
            self._votes.clear()
        self._barrier.wait()
        self._votes.append(votes.clone())
        self._barrier.wait()
        votes.copy_(torch.stack(self._votes).amax(0))
        self._barrier.wait()


class Worker:
    """Of an executor of ``pp`` x ``tp`` workers, ranks in vLLM's order."""

    def __init__(self, rank: int, tp: Group, pp: Group, backend: str = "mp") -> None:
        size = tp.world_size * pp.world_size
        self.parallel_config = SimpleNamespace(rank=rank, world_size=size, distributed_executor_backend=backend)
        self.rank, self.tp, self.pp = rank, tp, pp
        self.did: list[str] = []


class Executor:
    """Replies are queued by rank and have no number; they are read in order, up to the first failure."""

    def __init__(self, tp: int, pp: int, backend: str = "mp") -> None:
        along_tp, along_pp = [Group(tp) for _ in range(pp)], [Group(pp) for _ in range(tp)]
        self.workers = [Worker(r, along_tp[r // tp], along_pp[r % tp], backend) for r in range(tp * pp)]
        self._replies = [deque[Any]() for _ in self.workers]
        self._pool = ThreadPoolExecutor(tp * pp)

    def call(self, method: Callable[[Worker], Any]) -> list[Any]:
        def one(worker: Worker) -> None:
            _ME.worker = worker
            try:
                reply = method(worker)
            except Exception as e:
                reply = e
            self._replies[worker.rank].append(reply)

        list(self._pool.map(one, self.workers))
        found = []
        for replies in self._replies:
            if isinstance(reply := replies.popleft(), Exception):
                raise reply
            found.append(reply)
        return found

    @property
    def unread(self) -> int:
        return sum(map(len, self._replies))


@pytest.fixture(autouse=True)
def parallel_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """vLLM's own, of this thread's worker."""
    state = ModuleType("vllm.distributed.parallel_state")
    state.get_tp_group = lambda: _ME.worker.tp  # type: ignore[attr-defined]
    state.get_pp_group = lambda: _ME.worker.pp  # type: ignore[attr-defined]
    package = ModuleType("vllm.distributed")
    package.parallel_state = state  # type: ignore[attr-defined]
    for name, module in (("vllm", ModuleType("vllm")), ("vllm.distributed", package), (state.__name__, state)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda votes, _, group: group.reduce_max(votes))
    yield state


def refusing(*ranks: int) -> Callable[[Worker], Any]:
    def call(worker: Worker) -> Any:
        def check() -> None:
            if worker.rank in ranks:
                raise RuntimeError(f"{worker.rank} says no")

        def does() -> int:
            worker.did.append("it")
            return worker.rank

        return together(worker, check, does)

    return call


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_who_refuses_and_who_does_not_reply_as_one(tp: int, pp: int) -> None:
    """All, the first, or the last: none does it, one failure is read, and no reply is left for the next call."""
    executor = Executor(tp, pp)
    everybody = list(range(tp * pp))
    for ranks, text in (
        (everybody, f"{everybody[-1]} says no"),
        ([0], "refused, or failed: worker 0: RuntimeError: 0 says no$"),
        ([everybody[-1]], f"{everybody[-1]} says no"),
    ):
        with pytest.raises(RuntimeError, match=text):
            executor.call(refusing(*ranks))
        assert executor.unread == 0 and not any(w.did for w in executor.workers)
    assert executor.call(refusing()) == everybody
    assert all(w.did == ["it"] for w in executor.workers)


def test_the_executor_here_leaves_replies_unread_as_vllms_does() -> None:
    """What the test above would not see otherwise."""
    executor = Executor(2, 1)

    def alone(worker: Worker) -> None:
        raise RuntimeError(f"{worker.rank} says no")

    with pytest.raises(RuntimeError, match="0 says no"):
        executor.call(alone)
    assert executor.unread == 1


def test_without_an_executor_over_them_each_worker_says_it_itself(parallel_state: ModuleType) -> None:
    """An external launcher's processes are not waited for; nor are workers in a dimension that is not known here."""
    for executor in (Executor(2, 1, "external_launcher"), Executor(2, 2)):
        parallel_state.get_pp_group = lambda: Group(1)  # type: ignore[attr-defined]
        worker = executor.workers[0]
        _ME.worker = worker
        with pytest.raises(RuntimeError, match="0 says no"):
            refusing(0)(worker)
        assert refusing()(worker) == 0


def test_a_method_is_stood_in_for_once_and_one_that_is_not_there_not_at_all() -> None:
    class Vllms(Worker):
        def update(self, n: int) -> int:
            return n + 1

    for _ in range(2):
        stand_in(Vllms, "update", lambda w, call, n: (lambda: w.did.append(f"asked {n}"), call))
        stand_in(Vllms, "gone", lambda w, call: (call,))
    worker = Vllms(0, Group(1), Group(1))
    assert worker.update(n=1) == 2 and worker.did == ["asked 1"] and not hasattr(Vllms, "gone")


def test_arguments_that_a_method_does_not_take_are_refused_together_and_a_call_inside_another_does_not_vote() -> None:
    class Vllms(Worker):
        def outer(self) -> int:
            if self.rank:
                raise RuntimeError("before the call inside")
            return self.inner(1)

        def inner(self, n: int) -> int:
            return n + 1

    stand_in(Vllms, "outer", lambda w, call: (call,))
    stand_in(Vllms, "inner", lambda w, call, n: (call,))
    executor = Executor(2, 1)
    executor.workers = [Vllms(w.rank, w.tp, w.pp) for w in executor.workers]
    with pytest.raises(TypeError, match="unexpected keyword"):
        executor.call(lambda w: w.inner(m=1))  # type: ignore[attr-defined]
    assert executor.unread == 0
    with pytest.raises(RuntimeError, match="before the call inside"):
        executor.call(lambda w: w.outer())  # type: ignore[attr-defined]
    assert executor.unread == 0
    assert executor.call(lambda w: w.inner(1)) == [2, 2]  # type: ignore[attr-defined]
