"""``cuda_ipc``: GPU memory of one host, shared between processes: the same GPU, or GPUs that are each other's peers.

The sender exports each allocation that holds its tensors once; receivers map it and copy straight into their own (see
``pull`` for who tells whom what, ``cuda_export`` for which streams are waited for). Each side holds its own memory;
the sender's is let go of when the last receiver has acknowledged. GPUs are matched by UUID, so the two sides may number
them differently, or hide the other's.

Refused, with the reason: memory of expandable segments and other pools, MIG slices among one another, GPUs without peer
access, WSL 2 (``cuda_facts``). Environment: ``WEIGHTPLANE_CUDA_IPC_EVENTS=0`` at a sender: it waits for its streams
itself instead of sharing events.

Needs the NVIDIA driver alone; Triton, which CUDA builds of torch bring, makes many small tensors fast. Run on one
and two H200 (``docs/performance.md``); its logic runs in CI with a card played by the host
(``tests/transports/host_card.py``). Never run: MIG, GPUs without peer access.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from .base import Capabilities, ChannelSpec, Probe, TransportError
from .pull_transport import PullTransport

if TYPE_CHECKING:
    from weightplane.v1.transport_pb2 import PullEndpoint, Rendezvous

    from .cuda_driver import Cuda
    from .cuda_facts import Facts
    from .pull import PullReceiveChannel, PullSendChannel

__all__ = ["CudaIpcTransport"]


class CudaIpcTransport(PullTransport):
    """See the module text. ``producer`` names the stream that writes a GPU's tensors, by the GPU's index, where it is
    not the current stream of the threads that arm and send."""

    name: ClassVar[str] = "cuda_ipc"
    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cuda"}), one_to_many=True, one_sided=True, cross_host=False, buffered=False
    )
    part_bytes: ClassVar[int] = 0  # of a launch; 0: as the case wants

    def __init__(self, producer: Callable[[int], int] | None = None) -> None:
        super().__init__()
        self._producer = producer

    def cuda(self) -> Cuda:
        """The driver. ``TransportError`` says why there is none."""
        from .cuda_driver import driver

        return driver()

    def facts(self, *, deep: bool) -> Facts:
        """What is known of this process's GPUs."""
        from .cuda_facts import gather

        return gather(deep=deep)

    def probe(self) -> Probe:
        """Whether CUDA memory can be shared here, as far as that shows without using a GPU."""
        from .cuda_facts import blocked, cannot_export

        facts = self.facts(deep=False)
        details = {
            "torch_cuda": facts.torch_cuda or "none",
            "cuda_visible_devices": "all" if facts.visible is None else facts.visible,
            **{f"allocator_{k}": v for k, v in facts.allocator.items()},
        }
        if why := cannot_export(facts):
            details["sending"] = why
        problem = blocked(facts) or self.address_problem()
        return Probe(not problem, problem, details)

    def offer(self, member: str) -> Rendezvous:
        """Where the member listens when it sends, and which GPUs it can read. ``TransportError``: it cannot send.

        A trainer's rank (``rank/…``) that cannot export its memory offers nothing: another transport is chosen.
        """
        from weightplane.v1.transport_pb2 import CudaIpcRendezvous, Rendezvous

        from .cuda_facts import blocked, cannot_export, reaches
        from .pull_wire import host_id, shm_directory

        facts = self.facts(deep=True)
        problem = blocked(facts) or (cannot_export(facts) if member.startswith("rank/") else "")
        if not problem and not any(d.index >= 0 for d in facts.devices):
            problem = "no GPU is visible to the driver: see CUDA_VISIBLE_DEVICES and nvidia-smi"
        if problem:
            raise TransportError(problem)
        seen = [d.uuid for d in facts.devices if d.index >= 0]
        offered = CudaIpcRendezvous(
            host_id=host_id(shm_directory()),
            device_uuid=seen[0] if len(seen) == 1 else "",
            endpoint=self.endpoint(),
        )
        return Rendezvous(transport=self.name, cuda_ipc=offered, same_host=True, reaches=reaches(facts))

    def endpoint_of(self, offer: Rendezvous) -> PullEndpoint:
        """See ``PullTransport``."""
        return offer.cuda_ipc.endpoint

    def open_sender(self, spec: ChannelSpec, member: str) -> PullSendChannel:
        """See ``Transport``. Memory is exported when it is first sent."""
        self.validate(spec, member, spec.senders)
        from .cuda_export import CudaIpcExporter

        return self.sender(spec, member, CudaIpcExporter(self.cuda(), self._producer))

    def open_receiver(self, spec: ChannelSpec, member: str) -> PullReceiveChannel:
        """See ``Transport``. ``TransportError``: a sender is on another host."""
        self.validate(spec, member, spec.receivers)
        from .cuda_import import CudaIpcImporter
        from .pull_wire import host_id, shm_directory

        here = host_id(shm_directory())
        for sender in spec.senders:
            there = spec.offers[sender].cuda_ipc.host_id if sender in spec.offers else ""
            if there and there != here:
                raise TransportError(
                    f"{sender!r} is at {there} and {member!r} at {here} (boot id / shared-memory mount / user): CUDA "
                    "IPC needs one host; containers share it with --ipc=host",
                    peers=(sender,),
                )
        return self.receiver(spec, member, CudaIpcImporter(self.cuda(), self.facts(deep=True), self.part_bytes))
