"""``grpc``: anywhere, any language; slow and universal. The sender is the client: one stream per receiver.

A chunk is copied once from the spans into a wire message, which all receivers' streams share. Each stream holds at most
two messages that are not sent yet: a slow receiver holds the sender back, and memory stays bounded.

Environment: ``WEIGHTPLANE_DATA_BIND`` (default ``127.0.0.1:0``) is where a receiver listens;
``WEIGHTPLANE_DATA_ADVERTISE`` (host:port) is what it tells senders, needed when it listens on a wildcard address. With
a certificate (``grpc_tls.py``) it speaks TLS.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import grpc
import torch

from weightplane.controlplane import failpoints
from weightplane.controlplane.addresses import is_loopback, is_loopback_host
from weightplane.controlplane.core.plan import Bucket
from weightplane.controlplane.grpc_close import close_channels
from weightplane.v1.transport_pb2 import GrpcRendezvous, Rendezvous, TransferOpen, TransferResponse

from .base import (
    ArmToken,
    Capabilities,
    ChannelAborted,
    ChannelSpec,
    ChannelTimeout,
    PeerLost,
    Probe,
    SendChannel,
    Transport,
    TransportError,
)
from .grpc_data_port import DataPort, GrpcReceiveChannel
from .grpc_tls import insecure_allowed, own, sender_credentials, server_credentials, why_not
from .grpc_wire import (
    CHUNK_BYTES,
    KEEPALIVE,
    KEY_METADATA,
    METHOD,
    SERVICE,
    encode_chunk,
    encode_open,
    reuse_freed_memory,
)
from .span_cursor import SpanCursor

__all__ = ["GrpcSendChannel", "GrpcTransport"]

_QUEUED = 2  # messages per stream that wait for the wire
_RETRY = 0.05  # seconds before an opening is tried again while the receiver has not opened the channel
_WILDCARDS = ("0.0.0.0", "[::]", "*", "")
_GIVE = "give it a certificate (WEIGHTPLANE_CA, _CERT, _KEY)"


class _Stream:
    """One receiver's stream for one token. Its two threads are gRPC's writer (``_requests``) and our reader."""

    def __init__(self, owner: GrpcSendChannel, member: str, opening: TransferOpen) -> None:
        self._owner, self.member = owner, member
        self._opening = encode_open(opening)
        self._queue: deque[bytes] = deque()
        self._changed = owner.changed
        self._ended = False
        self.opened = False
        self.failure = ""
        self.acknowledged: set[int] = set()
        self._call = self._dial()
        self._reader = threading.Thread(target=self._read, name=f"weightplane-acks-{member}", daemon=True)
        self._reader.start()

    def _dial(self) -> Any:
        metadata = ((KEY_METADATA, self._owner.spec.key),)
        return self._owner.method(self.member)(self._requests(), metadata=metadata)

    def _requests(self) -> Iterator[bytes]:
        yield self._opening
        while True:
            with self._changed:
                while not self._queue and not self._ended:
                    self._changed.wait()
                if self._ended:
                    return
                message = self._queue.popleft()
                self._changed.notify_all()
            yield message

    def _read(self) -> None:
        while True:
            try:
                for response in self._call:
                    with self._changed:
                        if response.bucket < 0:
                            self.opened = True
                        else:
                            self.acknowledged.add(response.bucket)
                        self._changed.notify_all()
                why = "ended its side"
            except grpc.RpcError as error:
                code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
                if code is grpc.StatusCode.NOT_FOUND and not self.opened and self._owner.wait_to_retry(self):
                    self._call = self._dial()
                    continue
                text = error.details() if isinstance(error, grpc.Call) else str(error)
                why = f"is unreachable or gone ({code.name}: {text})"
                if code is grpc.StatusCode.UNAVAILABLE and not self.opened:
                    why += self._owner.why_unreachable(self.member)
            with self._changed:
                if not self._ended:
                    self.failure = why
                self._changed.notify_all()
            return

    @property
    def full(self) -> bool:
        """Whether no further message is taken now."""
        return not self.opened or len(self._queue) >= _QUEUED

    @property
    def ended(self) -> bool:
        """Whether ``end`` was called."""
        return self._ended

    def put(self, message: bytes) -> None:
        """Queue a message; the caller holds the condition and saw that the stream is not full."""
        self._queue.append(message)
        self._changed.notify_all()

    def end(self) -> None:
        """Cancel and forget. Any thread; returns at once."""
        with self._changed:
            self._ended = True
            self._queue.clear()
            self._changed.notify_all()
        self._call.cancel()

    def join(self, timeout: float) -> None:
        """Wait for the reader, after ``end``."""
        self._reader.join(timeout)


class GrpcSendChannel(SendChannel):
    """The client side. Streams open at the first ``send`` after an arming, when the receivers are armed too."""

    def __init__(self, spec: ChannelSpec, member: str) -> None:
        self.spec, self._member = spec, member
        self.changed = threading.Condition()
        self._token: ArmToken | None = None
        self._deadline = 0.0
        self._reason: str | None = None
        self._closed = False
        self._dropped: set[str] = set()
        self._streams: dict[str, _Stream] = {}
        self._channels: dict[str, grpc.Channel] = {}
        self._sent: dict[int, tuple[str, ...]] = {}
        reuse_freed_memory()

    def arm(self, token: ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        """See ``SendChannel``."""
        self._check(-1)
        for bucket in buckets:
            if bucket.sender != self._member or not set(self.spec.receivers) >= set(bucket.receivers):
                raise TransportError(f"bucket {bucket.index} is not {self._member!r}'s on this channel")
        for receiver in {r for b in buckets for r in b.receivers} - set(self._channels):
            self._channels[receiver] = self._connect(receiver)
        self._deadline = deadline
        if token != self._token:
            self._token = token
            self._end_streams()
            self._sent = {}

    def send(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        """See ``SendChannel``. Returns when the bytes are in wire messages; the spans may be reused."""
        self._check(bucket.index)
        if self._token is None:
            raise TransportError(f"bucket {bucket.index}: the channel was never armed")
        failpoints.hit("grpc.send.before")
        cursor = SpanCursor(spans)
        if cursor.nbytes != bucket.nbytes:
            raise TransportError(f"bucket {bucket.index} has {bucket.nbytes} bytes, its spans {cursor.nbytes}")
        streams = [self._stream(r) for r in bucket.receivers if r not in self._dropped]
        offset = 0
        while offset < bucket.nbytes:
            n = min(CHUNK_BYTES, bucket.nbytes - offset)
            message = encode_chunk(bucket.index, offset, cursor, n)
            for stream in streams:
                self._wait(stream, bucket.index, lambda s=stream: not s.full)
                with self.changed:
                    stream.put(message)
            offset += n
            failpoints.hit("grpc.send.inside")
        self._sent[bucket.index] = bucket.receivers
        failpoints.hit("grpc.send.after")

    def flush(self) -> None:
        """See ``SendChannel``: waits for every receiver's acknowledgement of every bucket."""
        for index, receivers in list(self._sent.items()):
            for receiver in receivers:
                stream = self._streams.get(receiver)
                if stream is not None and receiver not in self._dropped:
                    self._wait(stream, index, lambda s=stream, i=index: i in s.acknowledged)
        self._sent = {}

    def drop(self, member: str) -> None:
        """See ``SendChannel``."""
        with self.changed:
            self._dropped.add(member)
            stream = self._streams.get(member)
            self.changed.notify_all()
        if stream is not None:
            stream.end()

    def abort(self, reason: str) -> None:
        """See ``SendChannel``; the receivers' streams end."""
        with self.changed:
            if self._reason is None:
                self._reason = reason
            streams = list(self._streams.values())
            self.changed.notify_all()
        for stream in streams:
            stream.end()

    def close(self) -> None:
        """See ``SendChannel``."""
        if self._closed:
            return
        self._closed = True
        self._end_streams()
        close_channels(self._channels.values())
        self._channels.clear()

    def method(self, receiver: str) -> grpc.StreamStreamMultiCallable[bytes, TransferResponse]:
        """The bound ``Transfer`` method of one receiver; messages are given as bytes."""
        path = f"/{SERVICE}/{METHOD}"
        return self._channels[receiver].stream_stream(path, None, TransferResponse.FromString)

    def wait_to_retry(self, stream: _Stream) -> bool:
        """Pause before an opening is tried again; False once that is pointless."""
        with self.changed:
            if stream.ended or self._reason is not None or time.monotonic() + _RETRY >= self._deadline:
                return False
            self.changed.wait(_RETRY)
            return not (stream.ended or self._reason is not None)

    def _stream(self, receiver: str) -> _Stream:
        stream = self._streams.get(receiver)
        if stream is None:
            assert self._token is not None
            opening = TransferOpen(
                channel_id=self.spec.channel_id,
                update_id=self._token.update_id,
                epoch=self._token.epoch,
                generation=self._token.generation,
                sender=self._member,
                receiver=receiver,
            )
            stream = _Stream(self, receiver, opening)
            with self.changed:
                self._streams[receiver] = stream
        return stream

    def _wait(self, stream: _Stream, bucket: int, done: object) -> None:
        assert callable(done)
        with self.changed:
            while not done():
                if stream.member in self._dropped:
                    return
                self._check(bucket)
                if stream.failure:
                    raise PeerLost(f"{stream.member!r} {stream.failure}", peers=(stream.member,), bucket=bucket)
                left = self._deadline - time.monotonic()
                if left <= 0:
                    text = f"{self._member!r} waited for {stream.member!r} in bucket {bucket} until the deadline"
                    raise ChannelTimeout(text, peers=(stream.member,), bucket=bucket)
                self.changed.wait(left)
            self._check(bucket)

    def _check(self, bucket: int) -> None:
        if self._closed:
            raise TransportError(f"channel {self.spec.channel_id} is closed")
        if self._reason is not None:
            raise ChannelAborted(f"channel {self.spec.channel_id}: {self._reason}", bucket=bucket)

    def _end_streams(self) -> None:
        with self.changed:
            streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.end()
        for stream in streams:
            stream.join(1.0)

    def _connect(self, receiver: str) -> grpc.Channel:
        offer = self.spec.offers[receiver].grpc
        if not offer.address:
            raise TransportError(f"{receiver!r} offers no data port", peers=(receiver,))
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", 4 << 20), *KEEPALIVE]
        if offer.ca_pem:
            return grpc.secure_channel(offer.address, sender_credentials(offer.ca_pem), options=options)
        if not is_loopback(offer.address) and not insecure_allowed():
            text = f"{receiver!r} at {offer.address} offers plaintext off loopback: {_GIVE} there"
            raise TransportError(text, peers=(receiver,))
        return grpc.insecure_channel(offer.address, options=options)

    def why_unreachable(self, receiver: str) -> str:
        """What is wrong with TLS towards a receiver, if that is it."""
        offer = self.spec.offers[receiver].grpc
        return why_not(offer.address, offer.ca_pem) if offer.ca_pem else ""


class GrpcTransport(Transport):
    """See the module text."""

    name: ClassVar[str] = "grpc"
    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cpu"}), one_to_many=True, one_sided=False, cross_host=True, buffered=True
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._port: DataPort | None = None

    def probe(self) -> Probe:
        """Always works; says where a receiver would listen, or why that address will not do."""
        bind, advertise = self._addresses()
        problem = self._problem(bind, advertise)
        return Probe(not problem, problem, {"bind": bind, "advertise": advertise or "the address bound"})

    def offer(self, member: str) -> Rendezvous:
        """A receiver's data port (opened now); nothing for a sender."""
        if member.startswith("rank/"):
            return Rendezvous(transport=self.name, grpc=GrpcRendezvous())
        port = self._data_port()
        offer = GrpcRendezvous(address=port.address, ca_pem=port.ca)
        return Rendezvous(transport=self.name, grpc=offer, same_host=is_loopback(port.address))

    def open_sender(self, spec: ChannelSpec, member: str) -> GrpcSendChannel:
        """See ``Transport``."""
        _validate(spec, member, spec.senders)
        return GrpcSendChannel(spec, member)

    def open_receiver(self, spec: ChannelSpec, member: str) -> GrpcReceiveChannel:
        """See ``Transport``."""
        _validate(spec, member, spec.receivers)
        return GrpcReceiveChannel(self._data_port(), spec, member)

    def shutdown(self) -> None:
        """Close the data port."""
        with self._lock:
            port, self._port = self._port, None
        if port is not None:
            port.stop()

    def _data_port(self) -> DataPort:
        with self._lock:
            if self._port is None:
                bind, advertise = self._addresses()
                problem = self._problem(bind, advertise)
                if problem:
                    raise TransportError(problem)
                self._port = DataPort(bind, advertise, server_credentials())
            return self._port

    @staticmethod
    def _addresses() -> tuple[str, str]:
        return os.environ.get("WEIGHTPLANE_DATA_BIND", "127.0.0.1:0"), os.environ.get("WEIGHTPLANE_DATA_ADVERTISE", "")

    @staticmethod
    def _problem(bind: str, advertise: str) -> str:
        host, sep, port = bind.rpartition(":")
        if not sep or not port.isdigit():
            return f"WEIGHTPLANE_DATA_BIND={bind!r}: expected host:port"
        if advertise.rpartition(":")[0] in _WILDCARDS and advertise:
            return f"WEIGHTPLANE_DATA_ADVERTISE={advertise!r}: a wildcard address reaches nobody; name a host"
        if host in _WILDCARDS and not advertise:
            return (
                f"the data port listens on the wildcard {bind!r}: say what senders dial with WEIGHTPLANE_DATA_ADVERTISE"
            )
        try:
            plain = own(port=True) is None
        except TransportError as e:
            return str(e)
        if plain and not is_loopback_host(host) and not insecure_allowed():
            return f"a plaintext data port on {bind!r}: keep it on loopback, {_GIVE}, or set WEIGHTPLANE_INSECURE=1"
        return ""


def _validate(spec: ChannelSpec, member: str, members: Sequence[str]) -> None:
    if member not in members:
        raise TransportError(f"{member!r} is not a member of channel {spec.channel_id} in that role")
    if len(spec.key) != 32:
        raise TransportError(f"channel {spec.channel_id}: the key has {len(spec.key)} bytes, expected 32")
