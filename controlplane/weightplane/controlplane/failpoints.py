"""Failpoints: named places where a test may make the product fail. A no-op unless a hook is installed.

``WEIGHTPLANE_FAILPOINTS="name=action[@n];..."`` arms them as a process starts: ``kill`` (SIGKILL itself), ``stop``
(SIGSTOP itself), ``raise`` (FailpointError), each at the n-th hit (default 1). Library use: ``set_hook``.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable

__all__ = ["FailpointError", "hit", "set_hook"]

Hook = Callable[[str, int], None]

_lock = threading.Lock()
_hits: Counter[str] = Counter()
_hook: Hook | None = None


class FailpointError(RuntimeError):
    """Raised by an armed failpoint whose action is ``raise``."""


def set_hook(hook: Hook | None) -> None:
    """Install ``hook(name, nth_hit)`` for this process, or remove it. Thread-safe; resets the hit counts."""
    global _hook
    with _lock:
        _hook = hook
        _hits.clear()


def hit(name: str) -> None:
    """Mark that execution passed ``name``. Costs one attribute test when no hook is installed."""
    if _hook is None:
        return
    with _lock:
        hook = _hook
        _hits[name] += 1
        n = _hits[name]
    if hook is not None:
        hook(name, n)


def _parse(spec: str) -> dict[str, tuple[str, int]]:
    armed: dict[str, tuple[str, int]] = {}
    for part in filter(None, (p.strip() for p in spec.split(";"))):
        name, sep, action = part.partition("=")
        verb, _, nth = action.partition("@")
        if not sep or verb not in {"kill", "stop", "raise"} or (nth and not nth.isdigit()):
            raise ValueError(f"WEIGHTPLANE_FAILPOINTS: {part!r} is not name=kill|stop|raise[@n]")
        armed[name] = (verb, int(nth or 1))
    return armed


def _from_environment() -> None:
    spec = os.environ.get("WEIGHTPLANE_FAILPOINTS", "")
    if not spec:
        return
    armed = _parse(spec)

    def hook(name: str, n: int) -> None:
        verb, nth = armed.get(name, ("", 0))
        if n != nth:
            return
        if verb == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif verb == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            raise FailpointError(f"failpoint {name} (hit {n})")

    set_hook(hook)


_from_environment()
