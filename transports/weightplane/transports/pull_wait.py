"""How long a receiver that pulls may wait: until an abort, until its channel is closed, until the call's deadline."""

from __future__ import annotations

import os
import select
import socket
import threading
import time

from .base import ChannelAborted, ChannelSpec, ChannelTimeout, TransportError

__all__ = ["PullWait"]


class PullWait:
    """Of one channel. The data thread asks; ``abort`` and ``close`` (any thread) wake it, whatever it waits for."""

    def __init__(self, spec: ChannelSpec, member: str) -> None:
        self._spec, self._member = spec, member
        self.lock = threading.Lock()  # for what an abort touches: the descriptor here, the senders' sockets
        self.deadline = 0.0
        self.bucket = -1  # that is worked on; -1: none
        self.closed = False
        self._reason: str | None = None
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def abort(self, reason: str) -> None:
        """Under the lock. The first reason stays."""
        if self._reason is None:
            self._reason = reason
        if not self.closed:
            os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Under the lock; once, and never asked to wait again."""
        self.closed = True
        os.close(self._wake_fd)

    def begin(self, bucket: int) -> None:
        """Work on this bucket from now on; raise if aborted or closed."""
        self.bucket = bucket
        if self.closed:
            raise TransportError(f"channel {self._spec.channel_id} is closed", bucket=bucket)
        if self._reason is not None:
            raise ChannelAborted(f"channel {self._spec.channel_id}: {self._reason}", bucket=bucket)

    def check(self, waiting_for: str) -> float:
        """Raise if aborted or too late; the seconds left."""
        self.begin(self.bucket)
        left = self.deadline - time.monotonic()
        if left <= 0:
            where = f" in bucket {self.bucket}" if self.bucket >= 0 else ""
            raise ChannelTimeout(
                f"{self._member!r} waited for {waiting_for!r}{where} until the deadline",
                peers=(waiting_for,),
                bucket=self.bucket,
            )
        return left

    def poll(self, waiting_for: str, sock: socket.socket | None, events: int, seconds: float) -> None:
        """Sleep until the socket is ready, an abort, or the time is over; raise if aborted or too late."""
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        if sock is not None:
            poll.register(sock, events)
        poll.poll(max(0.0, seconds) * 1000 + 1)
        self.check(waiting_for)
