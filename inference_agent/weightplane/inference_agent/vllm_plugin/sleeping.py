"""Whether a vLLM can sleep, and that its workers know it when somebody else puts it to sleep. Imports no torch.

vLLM says that it sleeps where it merely stands still. Its workers are asked only where memory is released: there we
listen, by standing in for their class's ``sleep``, ``wake_up`` and ``discard``, which are called all the same.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection
from typing import Any, Protocol

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
    """Who is told, on the worker's main thread. The first two before it is so, and may raise: then it is not so."""

    def falls_asleep(self, level: int) -> None:
        """All of the worker's memory is released."""

    def wakes_up(self, tags: Collection[str] | None) -> None:
        """``tags`` come back (None: all)."""

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
    if getattr(worker_class.sleep, "weightplane", False):  # type: ignore[attr-defined]
        return True

    def stand_in(name: str, before: Callable[..., None], after: Callable[..., None]) -> None:
        inner = getattr(worker_class, name)

        @functools.wraps(inner)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            told = witness(self)
            if told is not None:
                before(told, *args, **kwargs)
            result = inner(self, *args, **kwargs)
            if told is not None:
                after(told, *args, **kwargs)
            return result

        called.weightplane = True  # type: ignore[attr-defined]
        setattr(worker_class, name, called)

    def nothing(*_: Any, **__: Any) -> None:
        pass

    stand_in("sleep", lambda w, level=1: w.falls_asleep(level), nothing)
    stand_in("wake_up", lambda w, tags=None: w.wakes_up(tags), lambda w, tags=None: w.woke_up(tags))
    if callable(getattr(worker_class, "discard", None)):
        stand_in("discard", nothing, lambda w, tags: w.discards(tags))
    return True
