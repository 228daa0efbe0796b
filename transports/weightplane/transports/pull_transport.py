"""What transports that pull share as factories: the listener of the process, its endpoint, and checks of a spec.

Environment: receivers of this host come through a unix socket in the shared-memory directory (``WEIGHTPLANE_SHM_DIR``,
default ``/dev/shm``). ``WEIGHTPLANE_PULL_BIND`` (host:port) makes senders listen for other hosts too, if the transport
crosses hosts; ``WEIGHTPLANE_PULL_ADVERTISE`` (host:port) is what receivers dial, needed when the bind address is a
wildcard. Plaintext off loopback needs ``WEIGHTPLANE_INSECURE=1`` on both sides.
"""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .base import ChannelSpec, Transport, TransportError

if TYPE_CHECKING:
    from weightplane.v1.transport_pb2 import PullEndpoint, Rendezvous

    from .pull import PullReceiveChannel, PullSendChannel
    from .pull_abc import Exporter, Importer
    from .pull_control import Listener

__all__ = ["PullTransport", "addresses"]


def addresses() -> tuple[str, str]:
    """Where a sender listens for other hosts (empty: nowhere), and what it tells them."""
    return os.environ.get("WEIGHTPLANE_PULL_BIND", ""), os.environ.get("WEIGHTPLANE_PULL_ADVERTISE", "")


class PullTransport(Transport):
    """Base of ``ucx`` and ``cuda_ipc``: they add ``probe``, ``offer``, and where an offer holds its endpoint."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: Listener | None = None

    def endpoint(self) -> PullEndpoint:
        """This process's endpoint for an offer; it listens from the first call on. ``TransportError``: it cannot."""
        return self._listener().endpoint

    @abstractmethod
    def endpoint_of(self, offer: Rendezvous) -> PullEndpoint:
        """The endpoint in an offer of this transport."""

    def sender(self, spec: ChannelSpec, member: str, exporter: Exporter) -> PullSendChannel:
        """The sending side around ``exporter``."""
        from .pull import PullSendChannel

        return PullSendChannel(spec, member, self._listener(), exporter)

    def receiver(self, spec: ChannelSpec, member: str, importer: Importer) -> PullReceiveChannel:
        """The receiving side around ``importer``."""
        from .pull import PullReceiveChannel
        from .pull_wire import shm_directory

        endpoints = {m: self.endpoint_of(spec.offers[m]) for m in spec.senders if m in spec.offers}
        return PullReceiveChannel(spec, member, shm_directory(), endpoints, importer)

    def shutdown(self) -> None:
        """Stop listening; senders' channels lose their receivers."""
        with self._lock:
            made, self._made = self._made, None
        if made is not None:
            made.stop()

    @classmethod
    def address_problem(cls) -> str:
        """Why senders cannot listen as the environment says, or nothing. Cheap; for ``probe``."""
        from .pull_wire import problem_of, shm_directory

        bind, advertise = addresses()
        if not os.access(directory := shm_directory(), os.W_OK | os.X_OK):
            return f"no socket can be made in {directory}: set WEIGHTPLANE_SHM_DIR to a directory of one's own"
        return problem_of(bind, advertise) if bind and cls.capabilities.cross_host else ""

    @staticmethod
    def validate(spec: ChannelSpec, member: str, members: Sequence[str]) -> None:
        """``TransportError`` if ``member`` is not one of ``members`` or the key is none."""
        if member not in members:
            raise TransportError(f"{member!r} is not a member of channel {spec.channel_id} in that role")
        if len(spec.key) != 32:
            raise TransportError(f"channel {spec.channel_id}: the key has {len(spec.key)} bytes, expected 32")

    def _listener(self) -> Listener:
        from .pull_control import Listener
        from .pull_wire import shm_directory

        with self._lock:
            if self._made is None:
                far = addresses() if self.capabilities.cross_host else ("", "")
                self._made = Listener(shm_directory(), *far)
            return self._made
