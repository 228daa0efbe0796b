"""``nccl``: GPUs that are each a member's own, on one host or many, by NCCL's collectives (``collective`` says how).

Rank 0 of the trainer (``rank/0``) mints unique ids, single use; the coordinator hands them to everybody, and a channel
takes the one at its ordinal. All members run one version of NCCL, which NCCL asks for itself. Two members on one GPU
are refused: that is what ``cuda_ipc`` is for. Engines that use NCCL themselves should take an update paused.

Environment: NCCL's own (``NCCL_SOCKET_IFNAME``, ``NCCL_IB_HCA``, ``NCCL_DEBUG``…); nothing of it is set here.

The channel's logic is tested over sockets and host memory (``tests/transports/test_nccl_logic.py``); what ran on cards
is in ``docs/performance.md``.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, Final, TypeVar

from .base import Capabilities, ChannelSpec, Probe, Transport, TransportError

if TYPE_CHECKING:
    from weightplane.v1.transport_pb2 import Rendezvous

    from .collective import CollectiveChannel
    from .collective_abc import Communicator, Runtime
    from .collective_connect import Connect
    from .collective_lanes import Lanes
    from .collective_layout import Tuning
    from .collective_receive import CollectiveReceiveChannel
    from .collective_send import CollectiveSendChannel

__all__ = ["NcclTransport"]

_C = TypeVar("_C", bound="CollectiveChannel")

_IDS: Final = 4  # channels of one kind that can be bound together; each id costs rank 0 a thread and a socket till used


class NcclTransport(Transport):
    """See the module text."""

    name: ClassVar[str] = "nccl"
    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cuda"}),
        one_to_many=True,
        one_sided=False,
        cross_host=True,
        buffered=False,
        collective=True,
    )

    def __init__(self, tuning: Tuning | None = None) -> None:
        """``tuning`` must be equal in all members."""
        self._tuning = tuning
        self._lock = threading.Lock()
        self._ids: list[bytes] = []
        self._used: set[tuple[bytes, str]] = set()
        self._opened: list[tuple[bytes, weakref.ref[CollectiveChannel]]] = []

    def runtime(self) -> Runtime:
        """The library and the devices."""
        from .nccl_comm import NcclRuntime

        return NcclRuntime()

    def probe(self) -> Probe:
        """Whether there may be a GPU, and ``nccl4py``; loads neither."""
        from .nccl_comm import INSTALL

        details = {"cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES", "all")}
        problem = ""
        if find_spec("nccl") is None or find_spec("nccl.core") is None:
            problem = f"nccl4py is not installed: {INSTALL}"
        else:
            try:
                details["nccl4py"] = version("nccl4py")
            except PackageNotFoundError:
                details["nccl4py"] = "unknown"
        import torch  # who asks has it loaded

        details["torch_cuda"] = torch.version.cuda or "none"
        if torch.version.cuda is None:
            problem = problem or "this torch was built without CUDA: install a CUDA build of torch"
        elif not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))):
            problem = problem or "no NVIDIA driver here (/dev/nvidiactl is missing)"
        elif os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "NoDevFiles"):
            problem = problem or "CUDA_VISIBLE_DEVICES hides every GPU from this process"
        return Probe(not problem, problem, details)

    def offer(self, member: str) -> Rendezvous:
        """The member's GPU (the calling thread's current one), its NCCL, and unique ids if others may need its own.

        Ids are offered until they are used, or a channel that has one is closed here: others may have used it. Who is
        not named as the coordinator names members (``rank/0``, ``replica/0``) may be the first sender of a channel, and
        mints ids too.
        """
        from weightplane.v1.transport_pb2 import NcclRendezvous, Rendezvous

        runtime = self.runtime()
        offered = NcclRendezvous(device_uuid=runtime.device_uuid(), version=runtime.version())
        if member == "rank/0" or "/" not in member:
            with self._lock:
                spent = {used for used, _ in self._used}
                spent.update(i for i, ref in self._opened if (channel := ref()) is None or channel.closed)
                self._opened = [(i, ref) for i, ref in self._opened if i not in spent]
                self._ids = [i for i in self._ids if i not in spent]
                while len(self._ids) < _IDS:
                    self._ids.append(runtime.mint())
                offered.unique_ids.extend(self._ids)
        return Rendezvous(transport=self.name, nccl=offered, collective=True)

    def open_sender(self, spec: ChannelSpec, member: str) -> CollectiveSendChannel:
        """See ``Transport``. NCCL is not asked before the first bucket moves. ``TransportError``: it could not work."""
        from .collective_send import CollectiveSendChannel

        lanes, connect, tuning = self._open(spec, member, spec.senders)
        return self._noted(CollectiveSendChannel(spec, member, lanes, connect, tuning))

    def open_receiver(self, spec: ChannelSpec, member: str) -> CollectiveReceiveChannel:
        """See ``open_sender``."""
        from .collective_receive import CollectiveReceiveChannel

        lanes, connect, tuning = self._open(spec, member, spec.receivers)
        return self._noted(CollectiveReceiveChannel(spec, member, lanes, connect, tuning))

    def _noted(self, channel: _C) -> _C:
        with self._lock:
            self._opened.append((_unique_id(channel.spec), weakref.ref(channel)))
        return channel

    def _open(self, spec: ChannelSpec, member: str, side: tuple[str, ...]) -> tuple[Lanes, Connect, Tuning]:
        from .collective_lanes import Lanes
        from .collective_layout import Tuning

        if member not in side:
            raise TransportError(f"{member!r} is not a member of channel {spec.channel_id} in that role")
        everybody = (*spec.senders, *spec.receivers)
        _check_members(spec, everybody, member)
        unique_id = _unique_id(spec)
        self._claim(unique_id, member, final=False)
        runtime = self.runtime()
        device = runtime.index_of(spec.offers[member].nccl.device_uuid)
        lanes = Lanes(runtime.cuda(), device)
        ranks = everybody.index(member), len(spec.senders), len(spec.receivers)

        def connect(check: Callable[[], None]) -> Mapping[int, Communicator]:
            self._claim(unique_id, member, final=True)
            return runtime.connect(unique_id, *ranks, device, lanes.wire, check)

        return lanes, connect, self._tuning or Tuning()

    def _claim(self, unique_id: bytes, member: str, *, final: bool) -> None:
        with self._lock:
            if (unique_id, member) in self._used:
                raise TransportError(
                    f"{member!r}: the channel's unique id was used before, and serves one communicator: bind anew, "
                    "with what rank 0 offers now"
                )
            if final:
                self._used.add((unique_id, member))


def _check_members(spec: ChannelSpec, everybody: tuple[str, ...], member: str) -> None:
    """Every member has offered a GPU of its own and the same NCCL. ``TransportError`` names those that did not.

    A receiver is told the senders' offers and its own alone: senders, who know all, and the coordinator look at others.
    """
    if len(set(everybody)) != len(everybody):
        raise TransportError(f"channel {spec.channel_id} names a member twice: {', '.join(everybody)}")
    needed = everybody if member in spec.senders else (*spec.senders, member)
    missing = [m for m in needed if m not in spec.offers or not spec.offers[m].nccl.device_uuid]
    if missing:
        raise TransportError(f"channel {spec.channel_id}: no offer of a GPU from {', '.join(missing)}", peers=missing)
    known = [m for m in everybody if m in spec.offers]
    by_uuid: dict[str, str] = {}
    for m in known:
        uuid = spec.offers[m].nccl.device_uuid
        other = by_uuid.setdefault(uuid, m)
        if other != m:
            raise TransportError(
                f"{other!r} and {m!r} use one GPU ({uuid}), which NCCL cannot have twice: use cuda_ipc for them",
                peers=(other, m),
            )
    versions = {m: spec.offers[m].nccl.version for m in known}
    if len(set(versions.values())) > 1:
        said = ", ".join(f"{m!r} {_dotted(v)}" for m, v in versions.items())
        raise TransportError(
            f"channel {spec.channel_id}: NCCL must be the same version everywhere, and is {said}: install the same "
            "torch (or nvidia-nccl) everywhere, or use ucx",
            peers=known,
        )


def _dotted(number: int) -> str:
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _unique_id(spec: ChannelSpec) -> bytes:
    first = spec.senders[0]
    ids = spec.offers[first].nccl.unique_ids
    if spec.ordinal >= len(ids):
        raise TransportError(
            f"channel {spec.channel_id}: {first!r} offered {len(ids)} unique id(s), and this is number {spec.ordinal} "
            "of the channels bound together: fewer kinds of replicas at once, or some by another transport",
            peers=(first,),
        )
    return bytes(ids[spec.ordinal])
