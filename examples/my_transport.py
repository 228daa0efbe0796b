"""A transport of your own in one sitting: TCP, one connection per receiver. ``docs/transports.md`` explains it."""

import os
import socket
import threading
import time
from collections.abc import Sequence

import torch

from weightplane.controlplane import failpoints
from weightplane.controlplane.core.plan import Bucket
from weightplane.transports.base import (
    ArmToken,
    Capabilities,
    ChannelAborted,
    ChannelSpec,
    ChannelTimeout,
    PeerLost,
    Probe,
    ReceiveChannel,
    SendChannel,
    Transport,
)
from weightplane.v1.transport_pb2 import GrpcRendezvous, Rendezvous


class _Side:
    """What both sides need: a deadline, a reason once aborted, and socket calls that heed both."""

    def __init__(self) -> None:
        self.deadline, self.reason, self.landed = 0.0, "", 0
        self.sockets: dict[str, socket.socket] = {}

    def abort(self, reason: str) -> None:
        self.reason = self.reason or reason

    def close(self) -> None:
        for s in self.sockets.values():
            s.close()

    def move(self, peer: str, bucket: Bucket, spans: Sequence[torch.Tensor], receive: bool) -> None:
        s = self.sockets[peer]
        for span in spans:
            view = memoryview(span.numpy())  # type: ignore[arg-type]
            while view:
                if self.reason:
                    raise ChannelAborted(self.reason, bucket=bucket.index)
                if time.monotonic() > self.deadline:
                    raise ChannelTimeout(f"waited for {peer}", peers=(peer,), bucket=bucket.index)
                try:
                    n = s.recv_into(view[: 1 << 20]) if receive else s.send(view[: 1 << 20])
                except TimeoutError:
                    continue
                except OSError as error:
                    raise PeerLost(f"{peer}: {error}", peers=(peer,), bucket=bucket.index) from error
                if n == 0:
                    raise PeerLost(f"{peer} closed", peers=(peer,), bucket=bucket.index)
                view = view[n:]
                self.landed += n
                failpoints.hit(f"tcp.{'receive' if receive else 'send'}.inside")


def _hello(spec: ChannelSpec, token: ArmToken | None) -> bytes:
    """Secret and fence in one: a stranger or a stale update cannot say it."""
    assert token is not None, "never armed"
    words = (spec.key.hex(), token.update_id, token.epoch, token.generation)
    return " ".join(map(str, words)).encode().ljust(512)


class _Sender(_Side, SendChannel):
    def __init__(self, spec: ChannelSpec, member: str) -> None:
        super().__init__()
        self.spec = spec
        self.token: ArmToken | None = None

    def arm(self, token: ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        self.deadline = deadline
        if token != self.token:
            self.token = token
            self.close()
            self.sockets = {}

    def send(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        for peer in bucket.receivers:
            if peer not in self.sockets:
                host, _, port = self.spec.offers[peer].grpc.address.rpartition(":")
                s = self.sockets[peer] = socket.create_connection((host, int(port)), timeout=5)
                s.sendall(_hello(self.spec, self.token))
                s.settimeout(0.1)
            self.move(peer, bucket, spans, receive=False)

    def flush(self) -> None:
        for peer, s in self.sockets.items():
            s.settimeout(max(0.1, self.deadline - time.monotonic()))
            s.shutdown(socket.SHUT_WR)
            if s.recv(1) != b"!":
                raise PeerLost(f"{peer} did not confirm", peers=(peer,))


class _Receiver(_Side, ReceiveChannel):
    def __init__(self, spec: ChannelSpec, listener: socket.socket) -> None:
        super().__init__()
        self.spec, self.listener = spec, listener
        self.token: ArmToken | None = None
        self.left = 0

    @property
    def bytes_landed(self) -> int:
        return self.landed

    def arm(self, token: ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        self.token, self.deadline, self.left = token, deadline, len(buckets)
        self.close()
        self.sockets = {}

    def receive(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        while bucket.sender not in self.sockets:
            if self.reason or time.monotonic() > self.deadline:
                raise ChannelAborted(self.reason or "deadline", bucket=bucket.index)
            try:
                s, _ = self.listener.accept()
            except TimeoutError:
                continue
            s.settimeout(5)
            if s.recv(512, socket.MSG_WAITALL) == _hello(self.spec, self.token):
                s.settimeout(0.1)
                self.sockets[bucket.sender] = s
        self.move(bucket.sender, bucket, spans, receive=True)
        self.left -= 1
        if not self.left:
            self.sockets[bucket.sender].sendall(b"!")


class TcpTransport(Transport):
    """Loopback only, one sender and one receiver per channel: an example, not a product."""

    name = "tcp"
    capabilities = Capabilities(frozenset({"cpu"}), one_to_many=False, one_sided=False, cross_host=False, buffered=True)

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.listener: socket.socket | None = None

    def probe(self) -> Probe:
        return Probe(True, "", {"pid": str(os.getpid())})

    def offer(self, member: str) -> Rendezvous:
        if member.startswith("rank/"):
            return Rendezvous(transport=self.name)
        with self.lock:
            if self.listener is None:
                self.listener = socket.create_server(("127.0.0.1", 0))
                self.listener.settimeout(0.1)
            host, port = self.listener.getsockname()
        return Rendezvous(transport=self.name, grpc=GrpcRendezvous(address=f"{host}:{port}"))

    def open_sender(self, spec: ChannelSpec, member: str) -> SendChannel:
        return _Sender(spec, member)

    def open_receiver(self, spec: ChannelSpec, member: str) -> ReceiveChannel:
        self.offer(member)
        assert self.listener is not None
        return _Receiver(spec, self.listener)
