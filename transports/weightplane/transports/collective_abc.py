"""What a collective transport needs of a library and a device; ``collective`` is the channel's logic above it.

``nccl_comm`` implements it on NCCL. Tests implement it on sockets, and run the same channels on host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from .cuda_driver import Cuda

__all__ = ["Communicator", "Runtime"]

#: A tensor (contiguous, 1-D, uint8, on the device) and the rank at its other end.
Addressed = tuple["torch.Tensor", int]


class Communicator(Protocol):
    """One sender (rank 0) and all receivers of a channel (ranks 1…, in the channel's order).

    Calls queue work on the stream that the communicator was connected with and return; every rank makes the same calls
    in the same order. The data thread, but ``abort``. ``TransportError``: the library refused.
    """

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Move each tensor from rank 0 to all others, as one group."""
        ...

    def exchange(self, sends: Sequence[Addressed], receives: Sequence[Addressed]) -> None:
        """Move tensors between pairs of ranks, as one group; those of a pair in order."""
        ...

    def reduce(self, byte: torch.Tensor) -> None:
        """Add one byte of every rank up at rank 0. Nobody's completes at rank 0 before all ranks came to it."""
        ...

    def problem(self) -> str:
        """What the library noticed meanwhile that makes the communicator unusable, or nothing. Cheap."""
        ...

    def abort(self) -> None:
        """End what is queued or runs, and free everything. Any thread; once it has begun, other calls raise."""
        ...


class Runtime(Protocol):
    """The library and the device of a process. Any thread."""

    def version(self) -> int:
        """The library's, as its own number. ``TransportError`` says why there is none."""
        ...

    def device_uuid(self) -> str:
        """UUID of the calling thread's current device."""
        ...

    def index_of(self, uuid: str) -> int:
        """This process's number of a device. ``TransportError``: it does not see it."""
        ...

    def mint(self) -> bytes:
        """A new unique id, for one communicator. This process must live until everybody has connected."""
        ...

    def cuda(self) -> Cuda:
        """The driver."""
        ...

    def connect(
        self,
        unique_id: bytes,
        rank: int,
        senders: int,
        receivers: int,
        device: int,
        stream: int,
        check: Callable[[], None],
    ) -> Mapping[int, Communicator]:
        """Connect all members of a channel; ranks: senders, then receivers. By sender: this rank's communicators.

        Blocks until everybody has come. ``check`` is called every few milliseconds, here and in later calls of the
        communicators, and may raise: then nothing is left behind.
        """
        ...
