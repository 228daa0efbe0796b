"""``ucx`` whose buckets are all read by two agents, in small pieces: for the kit, whose tensors are small."""

from __future__ import annotations

import os

from weightplane.transports import ucx_beside, ucx_import
from weightplane.transports.base import ChannelSpec
from weightplane.transports.pull_receive import PullReceiveChannel
from weightplane.transports.ucx import UcxTransport

__all__ = ["UcxByTwo"]


class UcxByTwo(UcxTransport):
    """See the module text. Its processes do nothing else."""

    def open_receiver(self, spec: ChannelSpec, member: str) -> PullReceiveChannel:
        """See ``UcxTransport``."""
        ucx_beside.LEAST, ucx_import.PIECE = 1, 64 << 10  # type: ignore[misc]
        os.sched_getaffinity = lambda _: {0, 1}
        return super().open_receiver(spec, member)
