"""The receiving side of ``grpc``: one data port per process, and the channels that it fills.

A stream that opens names its channel, update, epoch, generation, sender and receiver, and shows the channel's key; only
then is a byte of it read, and only a bucket that ``receive`` waits for is written. A stream whose bucket is not waited
for yet is not read either: HTTP/2 flow control holds its sender back, so memory stays bounded.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
import torch

from weightplane.controlplane import failpoints
from weightplane.controlplane.addresses import is_loopback
from weightplane.controlplane.core.plan import Bucket
from weightplane.controlplane.ports import PortRefused, check_free
from weightplane.v1.transport_pb2 import TransferOpen, TransferResponse

from .base import ArmToken, ChannelAborted, ChannelSpec, ChannelTimeout, PeerLost, ReceiveChannel, TransportError
from .grpc_wire import KEEPALIVE, KEY_METADATA, METHOD, SERVICE, Chunk, decode_or_say, reuse_freed_memory
from .span_cursor import SpanCursor

__all__ = ["DataPort", "GrpcReceiveChannel"]

log = logging.getLogger(__name__)

_STREAMS = 256  # streams served at once; one thread each while it lives
_THREADS = 8  # there from the start
_TOKEN_WAIT = 30.0  # a stream may open this long before its receiver is armed for it
_INSIDE = 2 << 20  # a failpoint is passed at least this often


class _Refused(Exception):
    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class GrpcReceiveChannel(ReceiveChannel):
    """One receiver of one channel; registered with the data port from birth to ``close``."""

    def __init__(self, port: DataPort, spec: ChannelSpec, member: str) -> None:
        self._port, self.spec, self.member = port, spec, member
        self._condition = threading.Condition()
        self._token: ArmToken | None = None
        self._deadline = 0.0
        self._reason: str | None = None
        self._closed = False
        self._waiting: tuple[Bucket, SpanCursor] | None = None
        self._landed_buckets: set[int] = set()
        self._lost: dict[str, str] = {}
        self._contexts: dict[str, grpc.ServicerContext] = {}
        self._landed = 0
        self._chunk: Chunk | None = None  # checked, and given to ``receive``
        port.register(self)

    @property
    def bytes_landed(self) -> int:
        """See ``ReceiveChannel``."""
        return self._landed

    def arm(self, token: ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        """See ``ReceiveChannel``. A new token ends the streams of the one before."""
        with self._condition:
            self._check(-1)
            for bucket in buckets:
                if self.member not in bucket.receivers or bucket.sender not in self.spec.senders:
                    raise TransportError(f"bucket {bucket.index} is not {self.member!r}'s on this channel")
            self._deadline = deadline
            if token == self._token:
                return
            self._token = token
            self._waiting, self._chunk, self._landed_buckets, self._lost = None, None, set(), {}
            self._end_streams()
            self._condition.notify_all()

    def receive(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        """See ``ReceiveChannel``. This thread copies; meanwhile the stream's thread takes the next chunk from gRPC."""
        failpoints.hit("grpc.receive.before")
        cursor = SpanCursor(spans)
        if cursor.nbytes != bucket.nbytes:
            raise TransportError(f"bucket {bucket.index} has {bucket.nbytes} bytes, its spans {cursor.nbytes}")
        with self._condition:
            self._check(bucket.index)
            if self._token is None:
                raise TransportError(f"bucket {bucket.index}: the channel was never armed")
            self._waiting = (bucket, cursor)
            self._condition.notify_all()
        try:
            while cursor.position < cursor.nbytes:
                chunk = self._next_chunk(bucket)
                cursor.write(chunk.address, chunk.nbytes)
                with self._condition:
                    self._landed += chunk.nbytes
                failpoints.hit("grpc.receive.inside")
                with self._condition:
                    self._check(bucket.index)
                    if self._chunk is not chunk:
                        raise ChannelAborted(f"channel {self.spec.channel_id}: armed anew", bucket=bucket.index)
                    if cursor.position == cursor.nbytes:
                        self._landed_buckets.add(bucket.index)
                    self._chunk = None
                    self._condition.notify_all()
        finally:
            with self._condition:
                self._waiting = self._chunk = None
                self._condition.notify_all()
        failpoints.hit("grpc.receive.after")

    def _next_chunk(self, bucket: Bucket) -> Chunk:
        """Wait for it; it stays where it is until it is copied, so that no other is given meanwhile."""
        with self._condition:
            while True:
                self._check(bucket.index)
                if self._chunk is not None:
                    return self._chunk
                lost = self._lost.get(bucket.sender)
                if lost:
                    raise PeerLost(f"{bucket.sender!r} {lost}", peers=(bucket.sender,), bucket=bucket.index)
                left = self._deadline - time.monotonic()
                if left <= 0:
                    text = f"{self.member!r} waited for {bucket.sender!r} in bucket {bucket.index} until the deadline"
                    raise ChannelTimeout(text, peers=(bucket.sender,), bucket=bucket.index)
                self._condition.wait(left)

    def abort(self, reason: str) -> None:
        """See ``ReceiveChannel``; the senders' streams end."""
        with self._condition:
            if self._reason is None:
                self._reason = reason
            self._end_streams()
            self._condition.notify_all()

    def close(self) -> None:
        """See ``ReceiveChannel``."""
        self._port.unregister(self)
        with self._condition:
            self._closed = True
            self._end_streams()
            self._condition.notify_all()

    def _check(self, bucket: int) -> None:
        if self._closed:
            raise TransportError(f"channel {self.spec.channel_id} is closed")
        if self._reason is not None:
            raise ChannelAborted(f"channel {self.spec.channel_id}: {self._reason}", bucket=bucket)

    def _end_streams(self) -> None:
        for context in self._contexts.values():
            context.cancel()
        self._contexts.clear()

    # --- the stream's thread ---

    def serve(
        self, opening: TransferOpen, chunks: Iterator[Chunk], context: grpc.ServicerContext
    ) -> Iterator[TransferResponse]:
        """Answer one opened stream. Raises ``_Refused`` before the first byte of a stale one."""
        token = ArmToken(opening.update_id, opening.epoch, opening.generation)
        self._admit(token, opening.sender, context)
        yield TransferResponse(bucket=-1, bytes_landed=self._landed)
        try:
            for chunk in chunks:
                _check_message(chunk)
                if chunk.open is not None:
                    raise _Refused(grpc.StatusCode.INVALID_ARGUMENT, "a stream is opened once")
                if self._take(token, opening.sender, chunk, context):
                    yield TransferResponse(bucket=chunk.bucket, bytes_landed=self._landed)
        finally:
            with self._condition:
                if self._contexts.get(opening.sender) is context:
                    del self._contexts[opening.sender]
                    if self._token == token:
                        self._lost.setdefault(opening.sender, "ended its stream, or died")
                    self._condition.notify_all()

    def _admit(self, token: ArmToken, sender: str, context: grpc.ServicerContext) -> None:
        until = time.monotonic() + _TOKEN_WAIT
        with self._condition:
            while self._token != token:
                armed = self._token
                stale = armed is not None and (token.epoch, token.generation) < (armed.epoch, armed.generation)
                left = until - time.monotonic()
                if stale or left <= 0 or self._closed or self._reason is not None or not context.is_active():
                    text = f"update {token.update_id} is not what {self.member!r} is armed for"
                    raise _Refused(grpc.StatusCode.FAILED_PRECONDITION, text)
                self._condition.wait(min(left, 0.2))
            if sender not in self.spec.senders:
                raise _Refused(grpc.StatusCode.PERMISSION_DENIED, f"{sender!r} is no sender of this channel")
            old = self._contexts.pop(sender, None)
            if old is not None:
                old.cancel()
            self._contexts[sender] = context
            self._lost.pop(sender, None)

    def _take(self, token: ArmToken, sender: str, chunk: Chunk, context: grpc.ServicerContext) -> bool:
        """Give one chunk to the ``receive`` that waits for it; whether its bucket is complete now."""
        with self._condition:
            while True:
                if self._token != token or self._contexts.get(sender) is not context:
                    raise _Refused(grpc.StatusCode.ABORTED, "the update is over here")
                if chunk.bucket in self._landed_buckets:
                    return chunk.nbytes == 0 or chunk.offset == 0  # a repeat: acknowledged once, moved never
                waiting = self._waiting
                if waiting is not None and waiting[0].index == chunk.bucket and self._chunk is None:
                    break
                self._condition.wait(1.0)
            bucket, cursor = waiting
            _verify(bucket, cursor.position, sender, chunk)
            self._chunk = chunk
            self._condition.notify_all()
            if chunk.offset + chunk.nbytes < bucket.nbytes:
                return False
            while self._chunk is chunk:
                self._condition.wait(1.0)
            if self._token != token or chunk.bucket not in self._landed_buckets:
                raise _Refused(grpc.StatusCode.ABORTED, "the update is over here")
            return True


def _check_message(chunk: Chunk) -> None:
    """``_Refused`` for bytes that are no message of the contract's."""
    if chunk.error:
        text = f"expected the bytes of a TransferRequest, found none of one ({chunk.error}): generate your stubs "
        raise _Refused(grpc.StatusCode.INVALID_ARGUMENT, text + "from our .proto files")


def _verify(bucket: Bucket, position: int, sender: str, chunk: Chunk) -> None:
    """``_Refused`` if it is not the chunk that comes next."""
    if bucket.sender != sender:
        text = f"bucket {bucket.index} is {bucket.sender!r}'s, not {sender!r}'s"
        raise _Refused(grpc.StatusCode.INVALID_ARGUMENT, text)
    if chunk.offset + chunk.nbytes > bucket.nbytes:
        text = f"bucket {bucket.index} has {bucket.nbytes} bytes; the chunk ends at {chunk.offset + chunk.nbytes}"
        raise _Refused(grpc.StatusCode.OUT_OF_RANGE, text)
    if chunk.offset != position:
        text = f"bucket {bucket.index}: expected byte {position}, found {chunk.offset}"
        raise _Refused(grpc.StatusCode.OUT_OF_RANGE, text)


def _meet(barrier: threading.Barrier) -> None:
    with contextlib.suppress(threading.BrokenBarrierError):  # every thread is at work: then there are enough of them
        barrier.wait(1.0)


class DataPort:
    """Hosts ``TensorService`` for every receiving channel of this process. Any thread."""

    def __init__(self, bind: str, advertise: str, tls: tuple[grpc.ServerCredentials, bytes] | None = None) -> None:
        """``tls``: credentials, and the authority that senders are to trust. Without, plaintext."""
        self._channels: dict[tuple[str, str], GrpcReceiveChannel] = {}
        self._lock = threading.Lock()
        reuse_freed_memory()
        self._pool = pool = ThreadPoolExecutor(_STREAMS, thread_name_prefix="weightplane-data-port")
        options = [("grpc.max_receive_message_length", 4 << 20), ("grpc.so_reuseport", 0), *KEEPALIVE]
        self._server = grpc.server(pool, options=options, maximum_concurrent_rpcs=_STREAMS)
        handler = grpc.stream_stream_rpc_method_handler(
            self._transfer, request_deserializer=decode_or_say, response_serializer=TransferResponse.SerializeToString
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        host = bind.rsplit(":", 1)[0]
        try:
            check_free(bind)
        except PortRefused as error:
            raise TransportError(f"the data port: {error}") from None
        self.ca = tls[1] if tls is not None else b""
        if tls is None:
            if not is_loopback(bind):
                log.warning("INSECURE, as asked for: the data port on %s speaks plaintext off loopback", bind)
            port = self._server.add_insecure_port(bind)
        else:
            port = self._server.add_secure_port(bind, tls[0])
        if port == 0:
            raise TransportError(f"the data port cannot listen on {bind}: address in use, or not this host's")
        self.address = advertise or f"{host}:{port}"
        self._server.start()
        self._have_threads(_THREADS)

    def register(self, channel: GrpcReceiveChannel) -> None:
        """Make a channel known; streams may open it from now on."""
        with self._lock:
            self._channels[channel.spec.channel_id, channel.member] = channel
        self._have_threads(2 * len(channel.spec.senders))

    def _have_threads(self, n: int) -> None:
        """A stream may open while those before it are still ending: have the threads for all now, so that their number
        does not hang on which is faster."""
        meet = threading.Barrier(n)
        for _ in range(n):
            self._pool.submit(_meet, meet)

    def unregister(self, channel: GrpcReceiveChannel) -> None:
        """Forget a channel."""
        with self._lock:
            if self._channels.get((channel.spec.channel_id, channel.member)) is channel:
                del self._channels[channel.spec.channel_id, channel.member]

    def stop(self) -> None:
        """End every stream and stop listening; bounded."""
        self._server.stop(grace=0).wait(5)

    def _transfer(self, requests: Iterator[Chunk], context: grpc.ServicerContext) -> Iterator[TransferResponse]:
        try:
            first = next(requests, None)
            if first is not None:
                _check_message(first)
            if first is None or first.open is None:
                raise _Refused(grpc.StatusCode.INVALID_ARGUMENT, "the first message must open the stream")
            opening = first.open
            with self._lock:
                channel = self._channels.get((opening.channel_id, opening.receiver))
            if channel is None:
                raise _Refused(grpc.StatusCode.NOT_FOUND, "no such channel is open here")
            shown = dict(context.invocation_metadata()).get(KEY_METADATA, b"")
            key = shown if isinstance(shown, bytes) else shown.encode()
            if not hmac.compare_digest(key, channel.spec.key):
                raise _Refused(grpc.StatusCode.PERMISSION_DENIED, "the channel's key was not shown")
            yield from channel.serve(opening, requests, context)
        except _Refused as refusal:
            context.abort(refusal.code, str(refusal))
