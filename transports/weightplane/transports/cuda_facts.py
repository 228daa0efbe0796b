"""Whether two members can use ``cuda_ipc``: pure judgements on recorded facts of GPUs, and how facts are gathered.

GPUs are told apart by UUID, never by index: ``CUDA_VISIBLE_DEVICES`` numbers them differently in each process. What a
process cannot see itself (the GPUs hidden from it, which may well hold the other side's memory) NVML tells.

Judged from recorded facts alone, and never run: MIG slices, GPUs without peer access, WSL 2.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final

from .base import TransportError

__all__ = ["Device", "Facts", "blocked", "cannot_export", "gather", "pair_problem", "reaches", "settings"]

#: The name that a MIG slice's driver gives it ends so: ``NVIDIA H100 80GB HBM3 MIG 1g.10gb``.
_MIG: Final = re.compile(r" MIG \d")
_TRUE: Final = ("true", "1", "yes", "on")


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, or MIG slice. ``index``: as this process numbers it, -1 if it is hidden from it."""

    uuid: str
    index: int = -1
    name: str = ""
    compute: tuple[int, int] = (0, 0)
    mig: bool = False
    ipc_events: bool = True


@dataclass(frozen=True, slots=True)
class Facts:
    """A process and the GPUs of its host, as far as it knows them.

    ``peers``: unordered pairs of UUIDs of which each can address the other's memory. ``complete``: whether ``devices``
    and ``peers`` say all of the host's GPUs, hidden ones too.
    ``allocator``: torch's settings (``settings``). ``kernel``: the operating system's release. ``control``: whether the
    driver's device files are there.
    """

    torch_cuda: str = ""
    devices: tuple[Device, ...] = ()
    peers: frozenset[frozenset[str]] = frozenset()
    complete: bool = False
    driver: int = 0
    allocator: Mapping[str, str] = field(default_factory=dict)
    visible: str | None = None
    kernel: str = ""
    control: bool = True

    def device(self, uuid: str) -> Device | None:
        """A known device."""
        return next((d for d in self.devices if d.uuid == uuid), None)


# --- judgements


def blocked(facts: Facts) -> str:
    """Why no member of this process can use CUDA IPC, with what to do; empty if nothing stands against it."""
    if not facts.torch_cuda:
        return "this torch was built without CUDA: install a CUDA build of torch"
    if "microsoft" in facts.kernel.lower():
        return "WSL 2 cannot share GPU memory between processes: use grpc"
    if not facts.control:
        return "no NVIDIA driver here (/dev/nvidiactl is missing): in a container, start it with the GPUs"
    if facts.visible is not None and facts.visible.strip() in ("", "-1", "NoDevFiles"):
        return f"CUDA_VISIBLE_DEVICES={facts.visible!r} hides every GPU from this process"
    return ""


def cannot_export(facts: Facts) -> str:
    """Why tensors of this process cannot be shared by CUDA IPC, with what to do; empty if nothing is known."""
    if facts.allocator.get("expandable_segments", "").lower() in _TRUE:
        return (
            "PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF) has expandable_segments:True, and CUDA IPC cannot share "
            "such memory: set expandable_segments:False for the trainer, or use nccl or ucx"
        )
    backend = facts.allocator.get("backend", "native")
    if backend.lower() != "native":
        return f"torch's allocator is {backend}, whose memory CUDA IPC cannot share: use backend:native, nccl or ucx"
    return ""


def reaches(facts: Facts) -> tuple[str, ...]:
    """UUIDs of the GPUs whose memory this process can address; empty if it cannot tell (then a try decides).

    Of a process that uses several GPUs: what any of them can.
    """
    if not facts.complete:
        return ()
    seen = {d.uuid for d in facts.devices if d.index >= 0}
    return tuple(sorted(seen.union(*(p for p in facts.peers if p & seen))))


def pair_problem(sender: Device, receiver: Device, here: Facts) -> str:
    """Why ``receiver`` (a GPU of the process that ``here`` is of) cannot read memory of ``sender``, with what to do.

    Empty if nothing stands against it. A device of which no more than the UUID is known may be anything.
    """
    if not sender.uuid or sender.uuid == receiver.uuid:
        return ""
    known = here.device(sender.uuid) or sender
    if known.mig or receiver.mig:
        return (
            f"MIG slices read no memory but their own (the sender is on {sender.uuid}, this member on "
            f"{receiver.uuid}): put both on one slice, or use ucx, shm or grpc"
        )
    pair = frozenset((sender.uuid, receiver.uuid))
    if pair in here.peers:
        return ""
    if here.complete or (known.index >= 0 and receiver.index >= 0):
        return (
            f"GPU {receiver.uuid} has no peer access to GPU {sender.uuid} (see nvidia-smi topo -p2p r): use nccl or ucx"
        )
    return ""


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """torch's allocator settings: ``key:value`` pairs; the newer variable's word counts."""
    found: dict[str, str] = {}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        for pair in re.sub(r"\[[^\]]*\]", "", environment.get(name, "")).split(","):
            key, colon, value = pair.partition(":")
            if colon:
                found[key.strip()] = value.strip()
    return found


# --- gathering


def gather(*, deep: bool) -> Facts:
    """The facts of this process and host. ``deep``: ask the driver and NVML (100 ms once, no context is made).

    Never raises: what cannot be learnt is left out.
    """
    found = _shallow()
    if not deep or blocked(found):
        return found
    devices, peers, driver = _visible()
    others, more, complete = _host()
    known = {d.uuid for d in devices}
    hidden = tuple(d for d in others if d.uuid not in known)
    # Of two visible GPUs the driver's word counts, else NVML's.
    peers |= {p for p in more if not p <= known}
    return replace(found, devices=(*devices, *hidden), peers=frozenset(peers), complete=complete, driver=driver)


def _shallow() -> Facts:
    import torch

    allocator = settings(os.environ)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        allocator["backend"] = str(torch.cuda.get_allocator_backend())
    return Facts(
        torch_cuda=torch.version.cuda or "",
        allocator=allocator,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        kernel=platform.uname().release,
        control=any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))),
    )


def _visible() -> tuple[tuple[Device, ...], set[frozenset[str]], int]:
    """The visible devices, which of them are peers, and the driver's version."""
    from .cuda_driver import driver

    try:
        cuda = driver()
        devices = tuple(
            Device(cuda.uuid(i), i, name := cuda.name(i), cuda.compute(i), bool(_MIG.search(name)), cuda.ipc_events(i))
            for i in range(cuda.count())
        )
        pairs = {(a, b) for a in devices for b in devices if a is not b and cuda.can_access(a.index, b.index)}
        return devices, {frozenset((a.uuid, b.uuid)) for a, b in pairs if (b, a) in pairs}, cuda.version
    except TransportError:
        return (), set(), 0


@cache
def _host() -> tuple[tuple[Device, ...], set[frozenset[str]], bool]:
    """All GPUs of the host, which are peers, and whether that is all there is to know."""
    from .nvml import NvmlError, gpus

    try:
        found = gpus()
    except NvmlError:
        return (), set(), False
    devices = tuple(Device(g.uuid, name=g.name, mig=g.mig) for g in found)
    # Of a GPU in MIG mode NVML names the card and its driver the slices: who sees those only is not told all.
    return devices, _pairs((g.uuid, g.peers) for g in found), not any(g.mig for g in found)


def _pairs(said: Iterable[tuple[str, frozenset[str]]]) -> set[frozenset[str]]:
    of = dict(said)
    return {frozenset((a, b)) for a, peers in of.items() for b in peers if a != b and a in of.get(b, ())}
