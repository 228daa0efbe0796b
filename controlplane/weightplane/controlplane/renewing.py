"""A channel that takes renewed certificates: calls begun after the files changed go over a new connection.

Calls under way stay on the one they are on. A file that cannot be used changes nothing, and is told of once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from .grpc_close import close_channels

__all__ = ["RenewingChannel"]

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_RETIRED = 3  # channels that are kept for calls under way; an older one is closed


class RenewingChannel(grpc.Channel):
    """``make`` reads ``files`` and makes a channel; it may raise ``OSError`` or ``ValueError``. Any thread."""

    def __init__(self, files: tuple[str, ...], make: Callable[[], grpc.Channel]) -> None:
        self._files, self._make = tuple(map(Path, files)), make
        self._lock = threading.Lock()
        self._seen = self._stamp()
        self._channel = make()
        self._retired: list[grpc.Channel] = []
        self._looked = time.monotonic()
        self._closed = False

    def current(self) -> grpc.Channel:
        """The channel to begin a call on."""
        with self._lock:
            if self._closed or time.monotonic() < self._looked + _LOOK_S:
                return self._channel
            self._looked = time.monotonic()
            seen = self._stamp()
            if seen == self._seen:
                return self._channel
            self._seen = seen
            try:
                made = self._make()
            except (OSError, ValueError) as e:
                log.error("certificates: %s; those read before stay in use", e)
                return self._channel
            log.info("certificates: %s is read anew", self._files[0])
            self._retired.append(self._channel)
            self._channel = made
            gone = self._retired[:-_RETIRED]
            del self._retired[:-_RETIRED]
        close_channels(gone)
        return made

    def _stamp(self) -> object:
        try:
            return [(s.st_mtime_ns, s.st_ino, s.st_size) for s in (f.stat() for f in self._files)]
        except OSError as e:
            return str(e)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """See ``grpc.Channel``."""
        return _Late(self, "unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See ``grpc.Channel``."""
        return _Late(self, "unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """See ``grpc.Channel``."""
        return _Late(self, "stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See ``grpc.Channel``."""
        return _Late(self, "stream_stream", args, kwargs)

    def subscribe(self, callback: Any, try_to_connect: bool | None = False) -> None:
        """See ``grpc.Channel``: of the channel that is current now."""
        self.current().subscribe(callback, bool(try_to_connect))

    def unsubscribe(self, callback: Any) -> None:
        """See ``grpc.Channel``."""
        self._channel.unsubscribe(callback)

    def close(self) -> None:
        """Close every one."""
        with self._lock:
            self._closed = True
            channels = [self._channel, *self._retired]
        close_channels(channels)

    def __enter__(self) -> RenewingChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Late:
    """A method that is bound when it is called."""

    def __init__(self, owner: RenewingChannel, kind: str, args: Any, kwargs: Any) -> None:
        self._owner, self._kind, self._args, self._kwargs = owner, kind, args, kwargs
        self._bound: tuple[grpc.Channel | None, Any] = None, None

    def _now(self) -> Any:
        channel = self._owner.current()
        bound = self._bound
        if bound[0] is not channel:
            bound = self._bound = channel, getattr(channel, self._kind)(*self._args, **self._kwargs)
        return bound[1]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._now()(*args, **kwargs)

    def with_call(self, *args: Any, **kwargs: Any) -> Any:
        return self._now().with_call(*args, **kwargs)

    def future(self, *args: Any, **kwargs: Any) -> Any:
        return self._now().future(*args, **kwargs)
