"""Whether a vLLM can sleep, and that its workers know it when somebody else puts it to sleep. Imports no torch.

vLLM says that it sleeps where it merely stands still. Its workers are asked only where memory is released: there we
listen, by standing in for their class's ``sleep``, ``wake_up`` and ``discard``, which are called all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from .together import Step, stand_in

__all__ = ["Witness", "listen", "sleep_refusal"]

log = logging.getLogger("weightplane.vllm")


def sleep_refusal(vllm_config: Any, device: str) -> str:
    """Why this vLLM cannot sleep; empty if it can.

    On CPU it can in name: vLLM obeys every order and keeps its memory, which the agent says.
    """
    if device == "cpu" or getattr(vllm_config.model_config, "enable_sleep_mode", False):
        return ""
    return "vLLM was started without --enable-sleep-mode: its memory is not in a pool that it can release"


class Witness(Protocol):
    """Who is told, on the worker's main thread. ``may_sleep`` and ``wakes_up`` may raise, and do nothing else: then it
    is not so, in no worker of this vLLM."""

    def may_sleep(self, level: int) -> None:
        """All of the worker's memory would be released."""

    def falls_asleep(self, level: int) -> None:
        """It is about to be."""

    def wakes_up(self, tags: Collection[str] | None) -> None:
        """``tags`` would come back (None: all)."""

    def woke_up(self, tags: Collection[str] | None) -> None:
        """They are back."""

    def discards(self, tags: Collection[str]) -> None:
        """``tags`` are released and not kept."""


def listen(worker_class: type, witness: Callable[[Any], Witness | None]) -> bool:
    """Stand in for a class of vLLM workers, once. ``witness``: whom a worker's orders are told to, if anybody.

    False where the class has no ``sleep`` and ``wake_up``: then nothing is seen.
    """
    if not all(callable(getattr(worker_class, n, None)) for n in ("sleep", "wake_up")):
        log.warning("weightplane: %s has no sleep: what others order is not seen", worker_class.__qualname__)
        return False

    def sleep(vllm_worker: Any, call: Step, level: int = 1) -> Sequence[Step]:
        w = witness(vllm_worker)

        def done() -> Any:
            assert w is not None
            w.falls_asleep(level)
            return call()

        return (call,) if w is None else (lambda: w.may_sleep(level), done)

    def wake_up(vllm_worker: Any, call: Step, tags: Collection[str] | None = None) -> Sequence[Step]:
        w = witness(vllm_worker)
        return (call,) if w is None else (lambda: w.wakes_up(tags), lambda: _then(call, w.woke_up, tags))

    def discard(vllm_worker: Any, call: Step, tags: Collection[str]) -> Sequence[Step]:
        w = witness(vllm_worker)
        return (call,) if w is None else (lambda: _then(call, w.discards, tags),)

    for name, steps in (("sleep", sleep), ("wake_up", wake_up), ("discard", discard)):
        stand_in(worker_class, name, steps)
    return True


def _then(call: Step, told: Callable[[Any], None], tags: Collection[str] | None) -> Any:
    result = call()
    told(tags)
    return result
