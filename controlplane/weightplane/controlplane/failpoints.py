"""Failpoints: named places where a test may make the product fail. A no-op unless a hook is installed.

``WEIGHTPLANE_FAILPOINTS="name=action[@n];..."`` arms them as a process starts, each at the n-th hit (default 1); the
actions are those of ``perform``. Library use: ``set_hook``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable

__all__ = ["FailpointError", "hit", "known", "perform", "set_hook"]

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


#: Whether an action takes seconds after a colon.
_ACTIONS = {"kill": False, "stop": False, "raise": False, "full": False, "block": True, "hold-gil": True}


def known(action: str) -> bool:
    """Whether ``perform`` can do this."""
    verb, _, seconds = action.partition(":")
    if verb not in _ACTIONS or bool(seconds) is not _ACTIONS[verb]:
        return False
    return not seconds or seconds.replace(".", "", 1).isdigit()


def perform(action: str, name: str) -> None:
    """Do it to this process, here: ``kill`` (SIGKILL), ``stop`` (SIGSTOP), ``raise`` (FailpointError), ``full`` (no
    space left on device), ``block:S`` (this thread sleeps S seconds), ``hold-gil:S`` (so do all of Python's).
    """
    if not known(action):
        raise ValueError(f"failpoint {name}: {action!r} is none of {', '.join(_ACTIONS)}")
    verb, _, seconds = action.partition(":")
    if verb == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif verb == "stop":
        # To this thread: sent to the process, another one may be picked, and this one goes on until that one has run.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    elif verb == "block":
        time.sleep(float(seconds))
    elif verb == "hold-gil":
        ctypes.PyDLL(None).poll(None, ctypes.c_ulong(0), round(float(seconds) * 1000))  # PyDLL keeps the lock
    elif verb == "full":
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: failpoint {name}")
    else:
        raise FailpointError(f"failpoint {name}")


def _parse(spec: str) -> dict[str, tuple[str, int]]:
    armed: dict[str, tuple[str, int]] = {}
    for part in filter(None, (p.strip() for p in spec.split(";"))):
        name, sep, action = part.partition("=")
        verb, _, nth = action.partition("@")
        if not sep or not known(verb) or (nth and not nth.isdigit()):
            raise ValueError(f"WEIGHTPLANE_FAILPOINTS: {part!r} is not name={'|'.join(_ACTIONS)}[:seconds][@n]")
        armed[name] = (verb, int(nth or 1))
    return armed


def _from_environment() -> None:
    spec = os.environ.get("WEIGHTPLANE_FAILPOINTS", "")
    if not spec:
        return
    armed = _parse(spec)

    def hook(name: str, n: int) -> None:
        verb, nth = armed.get(name, ("", 0))
        if n == nth:
            perform(verb, name)

    set_hook(hook)


_from_environment()
