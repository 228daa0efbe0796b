"""What each transport is held against, and how much of it must be reached. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from weightplane.transports.base import Capabilities

__all__ = ["DIGEST_SHARE", "FLOORS", "Floor", "bucket_bytes", "limit_of"]

_MIB = 1 << 20


@dataclass(frozen=True)
class Floor:
    """At least ``share`` of the limit, without digests, to one receiver. ``layout``: cpu, across or colocated."""

    transport: str
    layout: str
    models: tuple[str, ...]
    share: float


FLOORS = (
    Floor("shm", "cpu", ("1GiB",), 0.70),
    Floor("grpc", "cpu", ("1GiB",), 0.50),
    Floor("ucx", "cpu", ("256MiB", "1GiB"), 0.80),
    Floor("cuda_ipc", "across", ("dense",), 0.95),
    Floor("cuda_ipc", "across", ("moe",), 0.93),
    Floor("cuda_ipc", "colocated", ("dense", "moe"), 0.92),
    Floor("nccl", "across", ("dense",), 0.90),
    Floor("nccl", "across", ("moe",), 0.80),
    Floor("ucx", "across", ("dense", "moe"), 0.80),
)
#: Of the card's read bandwidth, for digests of its memory.
DIGEST_SHARE = 0.70


def limit_of(capabilities: Capabilities, layout: str) -> str:
    """The limit that bounds a transport: what the host or its cards do without it."""
    if layout == "colocated":
        return "same-GPU copy"
    if layout == "across":
        return "broadcast 1GiB" if capabilities.collective else "peer copy"
    # On the CPU a socket bounds what copies through the kernel's network for the sake of other hosts; whoever reads the
    # other side's memory is held against memcpy, even if it can cross hosts in another way.
    return "socket" if capabilities.cross_host and not capabilities.one_sided else "memcpy"


def bucket_bytes(capabilities: Capabilities, layout: str) -> int:
    """A bucket for measuring: 16 MiB (the product's default) through host memory that is copied piece by piece; larger
    where a bucket costs a message and the bytes move by themselves; a collective has the product's on cards."""
    if layout != "cpu":
        return 1024 * _MIB if layout == "colocated" or capabilities.collective else 512 * _MIB
    return 64 * _MIB if capabilities.one_sided else 16 * _MIB
