"""``external``: for migration. The user's own code moves the bytes; versions, deadlines, digests and commit are ours.

On each side the user sets a mover, a callable ``mover(bucket, spans)`` that sends (or fills) the spans by whatever
means the two sides share, in plan order. The channel calls it on the data thread. An abort cannot interrupt the user's
code; it is noticed when the mover returns, so a mover should have a time-out of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from weightplane.controlplane.core.plan import Bucket
from weightplane.v1.transport_pb2 import ExternalRendezvous, Rendezvous

from .base import (
    ArmToken,
    Capabilities,
    ChannelAborted,
    ChannelSpec,
    ChannelTimeout,
    Probe,
    ReceiveChannel,
    SendChannel,
    Transport,
    TransportError,
)

__all__ = ["ExternalTransport", "Mover", "set_mover"]

Mover = Callable[[Bucket, Sequence[torch.Tensor]], None]

_lock = threading.Lock()
_movers: dict[str, Mover] = {}


def set_mover(member: str, mover: Mover | None) -> None:
    """Say how ``member`` of this process ("rank/0", "replica-a/0") moves a bucket; ``None`` removes it. Any thread."""
    with _lock:
        if mover is None:
            _movers.pop(member, None)
        else:
            _movers[member] = mover


class _Side:
    def __init__(self, spec: ChannelSpec, member: str) -> None:
        self._spec, self._member = spec, member
        self._deadline = 0.0
        self._reason: str | None = None
        self._moved = 0

    def _check(self, bucket: int) -> None:
        if self._reason is not None:
            raise ChannelAborted(f"channel {self._spec.channel_id}: {self._reason}", bucket=bucket)
        if time.monotonic() >= self._deadline:
            raise ChannelTimeout(f"{self._member!r}: the deadline passed in bucket {bucket}", bucket=bucket)

    def _arm(self, deadline: float) -> None:
        self._deadline = deadline
        self._check(-1)
        self._mover()

    def _mover(self) -> Mover:
        with _lock:
            mover = _movers.get(self._member)
        if mover is None:
            text = f"{self._member!r} has no mover: call weightplane.transports.external.set_mover before the update"
            raise TransportError(text)
        return mover

    def _move(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        self._check(bucket.index)
        mover = self._mover()
        self._moved += bucket.nbytes  # before: who can say how far a mover came that raises
        mover(bucket, spans)
        self._check(bucket.index)


class _Sender(_Side, SendChannel):
    def arm(self, token: ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        self._arm(deadline)

    def send(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        self._move(bucket, spans)

    def flush(self) -> None:
        self._check(-1)

    def abort(self, reason: str) -> None:
        self._reason = self._reason or reason

    def close(self) -> None:
        self._reason = self._reason or "closed"


class _Receiver(_Side, ReceiveChannel):
    def arm(self, token: ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        self._arm(deadline)

    def receive(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        self._move(bucket, spans)

    @property
    def bytes_landed(self) -> int:
        return self._moved

    def abort(self, reason: str) -> None:
        self._reason = self._reason or reason

    def close(self) -> None:
        self._reason = self._reason or "closed"


class ExternalTransport(Transport):
    """See the module text."""

    name: ClassVar[str] = "external"
    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cpu", "cuda"}),
        one_to_many=True,
        one_sided=False,
        cross_host=True,
        buffered=False,
        moves_bytes=False,
    )

    def probe(self) -> Probe:
        """Works wherever the user's own code does; chosen only when it is asked for."""
        return Probe(True, "", {"note": "moves nothing by itself; chosen only when it is asked for"})

    def offer(self, member: str) -> Rendezvous:
        """Nothing but the name."""
        return Rendezvous(transport=self.name, external=ExternalRendezvous(label=member))

    def open_sender(self, spec: ChannelSpec, member: str) -> SendChannel:
        """See ``Transport``."""
        return _Sender(spec, member)

    def open_receiver(self, spec: ChannelSpec, member: str) -> ReceiveChannel:
        """See ``Transport``."""
        return _Receiver(spec, member)
