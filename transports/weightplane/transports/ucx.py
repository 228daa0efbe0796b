"""``ucx``: RDMA (InfiniBand, RoCE, EFA), TCP and shared memory, for host and GPU memory, through UCX as NIXL brings it.

The sender registers its memory once; receivers read it with one-sided READs straight into their own tensors (see
``pull`` for who tells whom what). Where both are on one host UCX copies from process to process (CMA) or GPU to GPU.

Environment: ``WEIGHTPLANE_PULL_BIND`` and ``WEIGHTPLANE_PULL_ADVERTISE`` (see ``pull_transport``) open a sender to
other hosts; without them UCX uses no network but loopback. ``WEIGHTPLANE_UCX_REQUIRE_RDMA=1`` makes a receiver refuse a
sender that UCX reaches by less than RDMA. ``UCX_NET_DEVICES`` (``mlx5_0:1,mlx5_1:1`` or ``eth0``) chooses the NICs,
``UCX_TLS`` the transports; these, and all else that UCX reads, are the user's: what is set is left alone.

Run on CPU memory over shared memory (CMA) and TCP, and on GPU memory of one host. InfiniBand, RoCE and EFA: written
for, not run yet.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, ClassVar

from .base import Capabilities, ChannelSpec, Probe, TransportError
from .pull_transport import PullTransport, addresses

if TYPE_CHECKING:
    from weightplane.v1.transport_pb2 import PullEndpoint, Rendezvous

    from .pull import PullReceiveChannel, PullSendChannel

__all__ = ["UcxTransport"]


def _require_rdma() -> bool:
    return os.environ.get("WEIGHTPLANE_UCX_REQUIRE_RDMA", "") == "1"


class UcxTransport(PullTransport):
    """See the module text."""

    name: ClassVar[str] = "ucx"
    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cpu", "cuda"}), one_to_many=True, one_sided=True, cross_host=True, buffered=False
    )

    def probe(self) -> Probe:
        """Whether NIXL is installed and senders can listen; loads nothing."""
        from .ucx_agent import package, rdma_devices, settings

        name, devices, bind = package(), rdma_devices(), addresses()[0]
        details = {
            "package": name,
            "rdma_devices": ", ".join(devices) or "none",
            "pull_bind": bind or "this host only",
            "require_rdma": "yes" if _require_rdma() else "no",
        }
        for key, value in settings(_is_local(bind)).items():
            details[key.lower()] = value
        if not name:
            return Probe(False, "NIXL is not installed: pip install --no-deps nixl-cu12==1.5.1, and numpy", details)
        try:
            details["version"] = version(name.replace("_", "-"))
        except PackageNotFoundError:
            pass
        problem = self.address_problem()
        if not problem and _require_rdma():
            if not devices:
                problem = "WEIGHTPLANE_UCX_REQUIRE_RDMA=1, but this host shows no RDMA device (/sys/class/infiniband)"
            elif "UCX_NET_DEVICES" not in os.environ and _is_local(bind):
                problem = "WEIGHTPLANE_UCX_REQUIRE_RDMA=1, but without WEIGHTPLANE_PULL_BIND only loopback is used"
        return Probe(not problem, problem, details)

    def offer(self, member: str) -> Rendezvous:
        """Where the member listens when it sends; loads no NIXL."""
        from weightplane.v1.transport_pb2 import Rendezvous, UcxRendezvous

        return Rendezvous(transport=self.name, ucx=UcxRendezvous(endpoint=self.endpoint()))

    def endpoint_of(self, offer: Rendezvous) -> PullEndpoint:
        """See ``PullTransport``."""
        return offer.ucx.endpoint

    def open_sender(self, spec: ChannelSpec, member: str) -> PullSendChannel:
        """Makes a NIXL agent (20 ms; the first of a process half a second)."""
        self.validate(spec, member, spec.senders)
        from .ucx_agent import Agent
        from .ucx_export import UcxExporter

        return self.sender(spec, member, UcxExporter(Agent(member, _is_local(addresses()[0]))))

    def open_receiver(self, spec: ChannelSpec, member: str) -> PullReceiveChannel:
        """Makes a NIXL agent; senders are connected to by the first ``arm``."""
        self.validate(spec, member, spec.receivers)
        from weightplane.controlplane.addresses import is_loopback

        from .pull_wire import host_id, shm_directory
        from .ucx_agent import Agent
        from .ucx_import import UcxImporter

        here = host_id(shm_directory())
        senders = [spec.offers[m].ucx.endpoint for m in spec.senders if m in spec.offers]
        local = all(e.host_id == here or is_loopback(e.address) for e in senders)
        if _require_rdma() and local and "UCX_NET_DEVICES" not in os.environ:
            text = "WEIGHTPLANE_UCX_REQUIRE_RDMA=1, but all senders are on this host, where UCX uses no RDMA device"
            raise TransportError(f"channel {spec.channel_id}: {text}", peers=spec.senders)
        return self.receiver(spec, member, UcxImporter(Agent(member, local), _require_rdma()))


def _is_local(bind: str) -> bool:
    from weightplane.controlplane.addresses import is_loopback

    return not bind or is_loopback(bind)
