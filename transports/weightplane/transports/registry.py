"""Transports by name, from the entry-point group ``weightplane.transports``; each is imported only when it is used.

A plug-in that cannot be imported or probed is reported under its name with the error, and stands in nobody's way. Any
thread.
"""

from __future__ import annotations

import threading
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from .base import Probe, Transport, TransportError

__all__ = ["GROUP", "available", "get", "names", "shutdown"]

GROUP = "weightplane.transports"

_lock = threading.Lock()
_instances: dict[str, Transport] = {}


@cache
def _entries() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, entry)
    return dict(sorted(found.items()))


def names() -> tuple[str, ...]:
    """Registered names, sorted. Imports nothing."""
    return tuple(_entries())


def get(name: str) -> Transport:
    """This process's instance of a transport. ``TransportError`` names one that is unknown or broken, and says why."""
    with _lock:
        instance = _instances.get(name)
        if instance is None:
            entry = _entries().get(name)
            if entry is None:
                raise TransportError(f"no transport {name!r}; registered: {', '.join(names()) or 'none'}")
            try:
                instance = entry.load()()
            except Exception as e:
                raise TransportError(f"transport {name!r} ({entry.value}) is broken: {type(e).__name__}: {e}") from e
            if not isinstance(instance, Transport) or instance.name != name:
                raise TransportError(f"transport {name!r} ({entry.value}) is broken: not a Transport of that name")
            _instances[name] = instance
        return instance


def available() -> dict[str, Probe]:
    """Every registered transport and whether it works here, if not why. Never raises."""
    found: dict[str, Probe] = {}
    for name in names():
        try:
            found[name] = get(name).probe()
        except TransportError as e:
            found[name] = Probe(False, str(e))
        except Exception as e:
            found[name] = Probe(False, f"transport {name!r}: its probe failed: {type(e).__name__}: {e}")
    return found


def shutdown() -> None:
    """Shut every instance of this process down; the next ``get`` makes new ones."""
    with _lock:
        instances = list(_instances.values())
        _instances.clear()
    for instance in instances:
        instance.shutdown()
