"""What a publisher's caller had queued on its devices when it called: it wrote the weights, so readers wait for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["NOTHING_QUEUED", "Produced"]


class Produced:
    """A point on the calling thread's current stream of each CUDA device among ``devices``, passed once what was queued
    there before has run. Work on other streams is the caller's to order before it publishes. Any thread.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._events: dict[torch.device, Any] = {}
        for device in devices:
            if device.type == "cuda":
                self._events[device] = torch.cuda.current_stream(device).record_event()

    def wait(self) -> None:
        """Block until it has run. Then memory is complete for everybody: streams, peers, network cards, the host."""
        for event in self._events.values():
            event.synchronize()

    def order(self) -> None:
        """Put it before whatever this thread queues from now on on its current streams of the same devices.

        A transport that records an event of its own in ``arm`` (``cuda_ipc``) thereby exports one that implies this.
        """
        for device, event in self._events.items():
            torch.cuda.current_stream(device).wait_event(event)


#: For sources whose memory is complete already.
NOTHING_QUEUED = Produced(())
