"""Closing gRPC channels without waiting for them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

import grpc

__all__ = ["CLOSE_S", "close_channels"]

log = logging.getLogger(__name__)

#: Seconds that a caller waits for channels to be closed; nearly all are within a millisecond.
CLOSE_S = 0.25

_kept: list[grpc.Channel] = []  # whose closing no thread could be had for; their collection would wait too


def close_channels(channels: Iterable[grpc.Channel]) -> None:
    """Close them; back within ``CLOSE_S`` seconds for all together. Any thread. Their open calls end as cancelled.

    ``grpc.Channel.close`` waits until each of its calls has come to its end, and that can be long, or never: the
    message that a cancelled call was writing ends with the write, which towards a host that is cut off is when the
    connection is given up; a call that an interrupt caught before gRPC had a thread for its answer has none at all.
    So it is done in a thread of its own, which goes on by itself where the caller stops waiting.
    """
    threads = [t for t in map(_begin, channels) if t is not None]
    end = time.monotonic() + CLOSE_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    left = sum(t.is_alive() for t in threads)
    if left:
        log.debug("%d gRPC channel(s) still close: something was being written to a host that does not answer", left)


def _begin(channel: grpc.Channel) -> threading.Thread | None:
    thread = threading.Thread(target=channel.close, name="weightplane-close", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        log.warning("a gRPC channel stays open: %s", error)
        _kept.append(channel)
        return None
    return thread
