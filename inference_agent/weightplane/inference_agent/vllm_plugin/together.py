"""That the workers of one vLLM refuse a call together, and one of them says so. Imports no torch until it is needed.

vLLM's executor reads its workers' replies in the order of their ranks and leaves at the first failure: what later ranks
replied stays unread, and is taken for the answer to the next call (vllm-project/vllm#49972; in every release that we
ran). So of a call that failed anywhere only the rank that is read last replies with a failure.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Step", "stand_in", "together"]

log = logging.getLogger("weightplane.vllm")

Step = Callable[[], Any]
_inside = threading.local()
_TEXT = 400  # bytes of what a worker raised that the others hear


def stand_in(worker_class: type, name: str, steps: Callable[..., Sequence[Step]]) -> None:
    """Stand in for a method of a class of vLLM workers, once; where it has none, nothing is done.

    ``steps``: told the worker, the call itself and its arguments, it says what is done instead, ``together``.
    """
    inner = getattr(worker_class, name, None)
    if not callable(inner) or getattr(inner, "weightplane", False):
        return

    @functools.wraps(inner)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(inner, self, *args, **kwargs)
        if getattr(_inside, "call", False):  # the one it is part of votes
            return call()
        _inside.call = True
        try:
            return together(self, *_planned(steps, self, call, *args, **kwargs))
        finally:
            _inside.call = False

    called.weightplane = True  # type: ignore[attr-defined]
    setattr(worker_class, name, called)


def _planned(
    steps: Callable[..., Sequence[Step]], vllm_worker: Any, call: Step, *args: Any, **kw: Any
) -> Sequence[Step]:
    try:
        inspect.signature(steps).bind(vllm_worker, call, *args, **kw)
    except TypeError:  # arguments that it does not take: the call says so itself
        return (call,)
    return steps(vllm_worker, call, *args, **kw)


def together(vllm_worker: Any, *steps: Step) -> Any:
    """Take each step once every worker of this executor has taken the one before; the result of the last.

    Called by all of them at once, on their main threads. Where one raises, none goes on: the last rank raises, the
    others log it and return None.
    """
    parallel = vllm_worker.parallel_config
    rank, size = int(parallel.rank), int(parallel.world_size)
    groups = _groups(parallel)
    result = None
    for step in steps:
        error: Exception | None = None
        try:
            result = step()
        except Exception as e:
            error = e
        try:
            failed = _failed(error, rank, size, groups)
            if not failed:
                continue
            if error is not None and (not groups or rank == size - 1):
                raise error
            if rank == size - 1:
                said = "; ".join(f"worker {n}: {text}" for n, text in failed.items())
                raise RuntimeError(f"weightplane: refused, or failed: {said}")
            if error is not None:
                log.error("weightplane: worker %d leaves it to worker %d to tell vLLM", rank, size - 1, exc_info=error)
            return None
        finally:
            error = None  # it holds this frame, and what the step held
    return result


def _groups(parallel: Any) -> list[Any]:
    """Groups over which each worker hears of all those that its executor calls, and of no other's; none if it is alone.

    vLLM's group of the world is not it: with data parallelism that holds the workers of several executors. What an
    external launcher starts has an executor of its own in each process, which hears what its one worker raises.
    """
    if int(parallel.world_size) == 1 or parallel.distributed_executor_backend == "external_launcher":
        return []
    from vllm.distributed import parallel_state

    known = [g for n in ("get_tp_group", "get_pp_group", "get_pcp_group") if (g := getattr(parallel_state, n, None))]
    found, reached = [], 1
    for group in (g() for g in known):
        reached *= int(group.world_size)
        if group.world_size > 1:
            found.append(group.cpu_group)
    # A release that splits a model in yet another way: each worker raises what it has, as without us.
    return found if reached == int(parallel.world_size) else []


def _failed(error: Exception | None, rank: int, size: int, groups: Sequence[Any]) -> dict[int, str]:
    """What failed, by rank, the same in each worker of ``groups``."""
    mine = "" if error is None else f"{type(error).__name__}: {error}"
    if not groups:
        return {rank: mine} if mine else {}
    import torch

    def everybodys(table: torch.Tensor) -> torch.Tensor:
        for group in groups:  # along one dimension after the other: then everybody has everybody's
            torch.distributed.all_reduce(table, torch.distributed.ReduceOp.MAX, group=group)
        return table

    votes = torch.zeros(size, dtype=torch.int32, device="cpu")
    votes[rank] = int(bool(mine))
    if not everybodys(votes).any():
        return {}
    texts = torch.zeros((size, _TEXT), dtype=torch.uint8, device="cpu")
    text = mine.encode(errors="replace")[:_TEXT]
    texts[rank, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    rows = everybodys(texts).tolist()
    return {n: bytes(rows[n]).rstrip(b"\0").decode(errors="replace") for n, vote in enumerate(votes.tolist()) if vote}
