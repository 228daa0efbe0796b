"""Aborts that may not hang: an abort is bounded by contract, and this is what holds if one is not."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from .base import ReceiveChannel, SendChannel

__all__ = ["abort_all"]

log = logging.getLogger(__name__)


def abort_all(channels: Iterable[SendChannel | ReceiveChannel], reason: str, seconds: float = 1.0) -> bool:
    """Abort them all at once, each on a thread of its own; whether every call came back in time. Raises nothing."""
    called: list[tuple[SendChannel | ReceiveChannel, threading.Thread]] = []
    for channel in channels:
        thread = threading.Thread(target=_abort, args=(channel, reason), name="weightplane-abort", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be made any more
            _abort(channel, reason)
        else:
            called.append((channel, thread))
    end = time.monotonic() + seconds
    for _, thread in called:
        thread.join(max(0.0, end - time.monotonic()))
    stuck = [channel for channel, thread in called if thread.is_alive()]
    for channel in stuck:
        log.error("%s: its abort did not return within %.1f s and is left behind", type(channel).__name__, seconds)
    return not stuck


def _abort(channel: SendChannel | ReceiveChannel, reason: str) -> None:
    try:
        channel.abort(reason)
    except Exception:
        log.exception("%s: its abort failed", type(channel).__name__)
