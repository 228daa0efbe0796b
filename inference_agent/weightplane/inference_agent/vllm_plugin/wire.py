"""What an agent and the workers of its engine say to each other over a unix socket: frames of JSON. No torch.

A frame is a 4-byte big-endian length and that many bytes of UTF-8 JSON, one object. The worker dials, says ``hello``
(with the token it was handed), is told ``welcome`` once the agent knows of it, and is asked; every question has an
``id`` and one answer. In between it tells its state (``{"tell": "state", …}``) and, while bytes land, how many
(``{"tell": "landed", …}``). Both ends are of one release: ``PROTOCOL`` differs where they are not, and the agent says
so.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.model import Channel, Held, Offer
from weightplane.controlplane.core.placement import Box
from weightplane.controlplane.core.plan import Bucket, Plan, Region, Segment

__all__ = [
    "MOST",
    "PROTOCOL",
    "Hello",
    "Link",
    "LinkLost",
    "State",
    "box",
    "channel_from",
    "channel_json",
    "manifest_from",
    "manifest_json",
    "plan_from",
    "plan_json",
    "same_user",
]

PROTOCOL = 3

MOST = 1 << 30  # bytes of one frame
_HEAD = 4


class LinkLost(ConnectionError):
    """The other end of the socket is gone."""


def same_user(sock: socket.socket) -> None:
    """``PermissionError`` unless this user, or root, is at the other end: a path alone says nothing of who listens."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid not in (os.getuid(), 0):
        raise PermissionError(f"a process of user {uid} is at the other end; this one runs as {os.getuid()}")


class Link:
    """One connection. ``send`` from any thread; ``receive`` from one; ``close`` from any, and wakes ``receive``."""

    def __init__(self, sock: socket.socket, most: int = MOST) -> None:
        self._sock, self.most = sock, most
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one frame. ``LinkLost`` if the other end is gone."""
        data = json.dumps(message, separators=(",", ":")).encode()
        with self._lock:
            try:
                self._sock.sendall(len(data).to_bytes(_HEAD, "big") + data)
            except OSError as e:
                raise LinkLost(f"the connection is gone: {e}") from e

    def receive(self) -> dict[str, Any]:
        """The next frame. ``LinkLost`` at its end, or if what comes is no frame of ours."""
        size = int.from_bytes(self._exactly(_HEAD), "big")
        if size > self.most:
            raise LinkLost(f"a frame of {size} bytes was announced, the most is {self.most}")
        try:
            message = json.loads(self._exactly(size))
        except ValueError as e:
            raise LinkLost(f"what came is not JSON: {e}") from e
        if not isinstance(message, dict):
            raise LinkLost(f"expected an object, found {type(message).__name__}")
        return message

    def _exactly(self, n: int) -> bytes:
        data = bytearray(n)
        view = memoryview(data)
        at = 0
        while at < n:
            try:
                got = self._sock.recv_into(view[at:])
            except OSError as e:
                raise LinkLost(f"the connection is gone: {e}") from e
            if not got:
                raise LinkLost("the other end closed the connection")
            at += got
        return bytes(data)

    def close(self) -> None:
        """End it. Idempotent."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was not connected any more
        self._sock.close()


# --- what is said ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """What a worker holds. ``mixed``: why its memory may hold a mix, else empty.

    As an agent noted it: who paused vLLM, and what of its memory is released.
    """

    version: int = 0
    update_id: str = ""
    mixed: str = ""
    paused_by: tuple[str, ...] = ()
    asleep: tuple[str, ...] = ()

    @property
    def held(self) -> Held:
        """As the core says it."""
        return Held(self.version, self.update_id)

    def json(self) -> dict[str, Any]:
        """As it travels."""
        return asdict(self)

    @classmethod
    def of(cls, m: Mapping[str, Any]) -> State:
        """Back."""
        return cls(int(m["version"]), str(m["update_id"]), str(m["mixed"]), tuple(m["paused_by"]), tuple(m["asleep"]))


@dataclass(frozen=True)
class Hello:
    """A worker's first word. ``rank`` of ``world`` in its engine; ``life`` is fresh per process.

    ``device``: "cpu" or "cuda", with the GPU's ``uuid``. ``staging_refusal``, ``sleep_refusal``: why it cannot stage
    or sleep; empty if it can. ``draft``: how it speculates, if with a model of its own.
    """

    protocol: int
    token: str
    rank: int
    world: int
    life: str
    pid: int
    device: str
    uuid: str
    vllm: str
    model: str
    staging_refusal: str
    sleep_refusal: str
    state: State
    draft: str = ""

    def json(self) -> dict[str, Any]:
        """As it travels."""
        return asdict(self)

    @classmethod
    def of(cls, m: Mapping[str, Any]) -> Hello:
        """Back. ``ValueError`` if it is of another release."""
        if m.get("protocol") != PROTOCOL:
            raise ValueError(
                f"the worker's weightplane speaks protocol {m.get('protocol')}, this agent {PROTOCOL}: install the "
                f"same release of weightplane beside vLLM and beside the agent"
            )
        return cls(**{**m, "state": State.of(m["state"])})


def box(ranges: Any) -> Box:
    """A box from JSON."""
    return tuple((int(a), int(b)) for a, b in ranges)


def manifest_json(m: Manifest) -> dict[str, Any]:
    """A manifest as JSON."""
    return {"id": m.id, "tensors": [[t.name, t.dtype, list(t.shape), t.alias_of] for t in m]}


def manifest_from(j: Mapping[str, Any]) -> Manifest:
    """Back. ``ValueError`` if its content is not what its id says."""
    made = Manifest.of(TensorMeta(n, d, tuple(s), a) for n, d, s, a in j["tensors"])
    if made.id != j["id"]:
        raise ValueError(f"manifest {j['id']} arrived as {made.id}")
    return made


def plan_json(p: Plan) -> dict[str, Any]:
    """A plan as JSON."""
    return {
        "id": p.id,
        "manifest_id": p.manifest_id,
        "bucket_bytes": p.bucket_bytes,
        "regions": [[r.tensor, r.piece_box, r.box, r.sender, list(r.receivers), r.nbytes] for r in p.regions],
        "buckets": [
            [b.sender, list(b.receivers), [[s.region, s.offset, s.nbytes] for s in b.segments]] for b in p.buckets
        ],
    }


def plan_from(j: Mapping[str, Any]) -> Plan:
    """Back. ``ValueError`` if its content is not what its id says."""
    regions = [Region(t, box(pb), box(b), s, tuple(r), n) for t, pb, b, s, r, n in j["regions"]]
    buckets: list[Bucket] = []
    for sender, receivers, segments in j["buckets"]:
        parts = tuple(Segment(*s) for s in segments)
        buckets.append(Bucket(len(buckets), sender, tuple(receivers), parts, sum(s.nbytes for s in parts)))
    made = Plan.of(j["manifest_id"], j["bucket_bytes"], regions, buckets)
    if made.id != j["id"]:
        raise ValueError(f"plan {j['id']} arrived as {made.id}")
    return made


def channel_json(c: Channel) -> dict[str, Any]:
    """A channel as JSON. Its key is a secret: the socket is private to the user."""
    return {
        "channel_id": c.channel_id,
        "transport": c.transport,
        "key": base64.b64encode(c.key).decode(),
        "senders": list(c.senders),
        "receivers": list(c.receivers),
        "bucket_bytes": c.bucket_bytes,
        "ordinal": c.ordinal,
        "offers": {m: [o.transport, base64.b64encode(o.data).decode()] for m, o in c.offers.items()},
    }


def channel_from(j: Mapping[str, Any]) -> Channel:
    """Back."""
    return Channel(
        channel_id=j["channel_id"],
        transport=j["transport"],
        key=base64.b64decode(j["key"]),
        senders=tuple(j["senders"]),
        receivers=tuple(j["receivers"]),
        replicas=(),
        modes=(),
        bucket_bytes=j["bucket_bytes"],
        offers={m: Offer(t, base64.b64decode(d)) for m, (t, d) in j["offers"].items()},
        ordinal=j["ordinal"],
    )
