"""Where a process listens for the bytes of others, what it says they should dial, and which interfaces it uses."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["AdvertiseOption", "DataOption", "InterfaceOption", "on_network"]

DataOption = Annotated[
    str, typer.Option("--data", help="host:port to listen on for weights' bytes; none = this host alone.")
]
AdvertiseOption = Annotated[
    str, typer.Option("--advertise", help="host:port that others dial for it; --data is then 0.0.0.0:PORT by default.")
]
InterfaceOption = Annotated[
    list[str] | None,
    typer.Option("--interface", help="eth0, or an RDMA device (mlx5_0:1): UCX and NCCL use these alone. Repeatable."),
]

_RDMA = Path("/sys/class/infiniband")


def on_network(kind: str, data: str, advertise: str, interfaces: Sequence[str]) -> None:
    """Put the options where the transports of this process, and of its children, look. ``kind``: DATA for a replica
    (its ``grpc`` port), PULL for a trainer (from whom ``ucx`` reads). An option goes before the environment.
    """
    if advertise and not data:
        data = f"0.0.0.0:{_port('--advertise', advertise, 1)}"
    if data:
        _port("--data", data, 0)
        os.environ[f"WEIGHTPLANE_{kind}_BIND"] = data
        os.environ.pop(f"WEIGHTPLANE_{kind}_ADVERTISE", None)
    if advertise:
        _port("--advertise", advertise, 1)
        os.environ[f"WEIGHTPLANE_{kind}_ADVERTISE"] = advertise
    if interfaces:
        _choose(interfaces)


def _port(option: str, address: str, least: int) -> int:
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and least <= int(port) <= 65535):
        raise typer.BadParameter(f"{option} {address!r}: expected host:port, the port from {least} to 65535")
    return int(port)


def _choose(names: Sequence[str]) -> None:
    """RDMA devices for InfiniBand and RoCE; network interfaces for TCP. NCCL takes each by a variable of its own."""
    here = {name for _, name in socket.if_nameindex()}
    devices = sorted(p.name for p in _RDMA.iterdir()) if _RDMA.is_dir() else []
    for name in names:
        if name not in here and name.partition(":")[0] not in devices:
            found = ", ".join([*sorted(here), *devices])
            raise typer.BadParameter(f"--interface {name!r}: this host has {found}")
    os.environ["UCX_NET_DEVICES"] = ",".join(names)
    plain = [n for n in names if n in here]
    if plain:
        os.environ["NCCL_SOCKET_IFNAME"] = "=" + ",".join(plain)  # =: these names, not what begins with them
    if len(plain) < len(names):
        os.environ["NCCL_IB_HCA"] = "=" + ",".join(n for n in names if n not in here)
