"""What this process shares by CUDA IPC itself: the driver opens only other processes' handles.

A trainer and an engine in one process meet here; a handle that is found here needs no opening. Any thread.
"""

from __future__ import annotations

import threading

__all__ = ["event", "hide_event", "hide_memory", "memory", "show_event", "show_memory"]

_lock = threading.Lock()
_memory: dict[bytes, tuple[int, int, int]] = {}  # device, base, how often it was shown
_events: dict[bytes, int] = {}


def show_memory(handle: bytes, device: int, base: int) -> None:
    """A handle of ours names this allocation; once per ``hide_memory``."""
    with _lock:
        _memory[handle] = (device, base, _memory.get(handle, (0, 0, 0))[2] + 1)


def hide_memory(handle: bytes) -> None:
    """Undo one ``show_memory``."""
    with _lock:
        device, base, times = _memory.pop(handle)
        if times > 1:
            _memory[handle] = (device, base, times - 1)


def memory(handle: bytes) -> tuple[int, int] | None:
    """Device and address of an allocation of ours; ``None``: the handle is another process's."""
    with _lock:
        return _memory[handle][:2] if handle in _memory else None


def show_event(handle: bytes, made: int) -> None:
    """A handle of ours names this event."""
    with _lock:
        _events[handle] = made


def hide_event(handle: bytes) -> None:
    """It is about to be freed."""
    with _lock:
        _events.pop(handle, None)


def event(handle: bytes) -> int:
    """An event of ours; 0: the handle is another process's."""
    with _lock:
        return _events.get(handle, 0)
