"""Transports with one planted defect each: the kit must fail them (``test_conformance.py``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from weightplane.controlplane.core.plan import Bucket
from weightplane.transports import shm
from weightplane.transports.base import ArmToken, ChannelSpec


class _Defective(shm.ShmTransport):
    sender: type[shm.ShmSendChannel] = shm.ShmSendChannel
    receiver: type[shm.ShmReceiveChannel] = shm.ShmReceiveChannel

    def open_sender(self, spec: ChannelSpec, member: str) -> shm.ShmSendChannel:
        return self.sender(spec, member, Path("/dev/shm"), shm.SLOTS, shm.SLOT_BYTES)

    def open_receiver(self, spec: ChannelSpec, member: str) -> shm.ShmReceiveChannel:
        return self.receiver(spec, member, Path("/dev/shm"))


class _ZerosReceiver(shm.ShmReceiveChannel):
    def receive(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        super().receive(bucket, spans)
        for span in spans:
            span.zero_()


class Zeros(_Defective):
    """Delivers zeros."""

    receiver = _ZerosReceiver


class _NothingReceiver(shm.ShmReceiveChannel):
    def receive(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        super().receive(bucket, [torch.empty_like(s) for s in spans])


class Nothing(_Defective):
    """Reports success and moves nothing."""

    receiver = _NothingReceiver


class _ShortReceiver(shm.ShmReceiveChannel):
    def receive(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        last = spans[-1][-1:].clone()
        super().receive(bucket, spans)
        spans[-1][-1:] = last


class LastByteLost(_Defective):
    """Loses the last byte of each bucket."""

    receiver = _ShortReceiver


class _UnfencedReceiver(shm.ShmReceiveChannel):
    def arm(self, token: ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        done = dict(self._done)
        super().arm(token, buckets, deadline)
        for sender, segment in self._segments.items():
            self._done[sender] = done.get(sender, 0)
            segment.publish_read(self._rank, self._done[sender])

    def receive(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        segment = self._segments[bucket.sender]
        read = segment.read_header
        segment.read_header = lambda slot: (*read(slot)[:4], self._fence)  # type: ignore[method-assign]
        try:
            super().receive(bucket, spans)
        finally:
            segment.read_header = read  # type: ignore[method-assign]


class Unfenced(_Defective):
    """Delivers whatever update's bytes are next."""

    receiver = _UnfencedReceiver


class _DeafSender(shm.ShmSendChannel):
    def abort(self, reason: str) -> None:
        pass


class _DeafReceiver(shm.ShmReceiveChannel):
    def abort(self, reason: str) -> None:
        pass


class Deaf(_Defective):
    """Does not hear an abort."""

    sender, receiver = _DeafSender, _DeafReceiver


class _BlindReceiver(shm.ShmReceiveChannel):
    def arm(self, token: ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        super().arm(token, buckets, deadline + 1000)


class Blind(_Defective):
    """Does not look at the deadline."""

    receiver = _BlindReceiver


class _LeakySender(shm.ShmSendChannel):
    def arm(self, token: ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        super().arm(token, buckets, deadline)
        os.dup(0)


class Leaky(_Defective):
    """Leaks a descriptor at each arm."""

    sender = _LeakySender


class _SpoilingSender(shm.ShmSendChannel):
    def send(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        super().send(bucket, spans)
        spans[0][:1] ^= 1


class Spoiling(_Defective):
    """Writes to its source."""

    sender = _SpoilingSender


class _BusyReceiver(shm.ShmReceiveChannel):
    def arm(self, token: ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        super().arm(token, buckets, deadline)
        for segment in self._segments.values():
            segment.wait_bell = lambda seen: None  # type: ignore[method-assign]


class Busy(_Defective):
    """Waits by spinning."""

    receiver = _BusyReceiver
