"""gRPC's Python by itself, as a limit: one stream of ready-made messages to a process that counts and drops them.

No framing, no copy into a tensor, no token, no check: what a transport on gRPC can reach here at best.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from benchmarks._process import TIMEOUT_S
from weightplane.transports.grpc_wire import CHUNK_BYTES, reuse_freed_memory

__all__ = ["BareGrpc"]

_SERVICE, _METHOD = "weightplane.bench.Bare", "Take"
_OPTIONS = [("grpc.max_send_message_length", 2 * CHUNK_BYTES), ("grpc.max_receive_message_length", 2 * CHUNK_BYTES)]


class BareGrpc:
    """One side of it; messages are as large as the ``grpc`` transport's."""

    def __init__(self, nbytes: int) -> None:
        self._messages = max(1, nbytes // CHUNK_BYTES)
        self._server: grpc.Server | None = None
        self._channel: grpc.Channel | None = None
        self._ends: queue.Queue[float] = queue.Queue()

    def listen(self) -> int:
        """Receiver: serve; returns the port."""
        reuse_freed_memory()
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(self._take)
        self._server = grpc.server(ThreadPoolExecutor(2), options=_OPTIONS)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
        port = int(self._server.add_insecure_port("127.0.0.1:0"))
        self._server.start()
        return port

    def _take(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        count = sum(map(len, messages))
        self._ends.put(time.monotonic())
        return str(count).encode()

    def connect(self, port: int) -> None:
        """Sender."""
        reuse_freed_memory()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS)
        grpc.channel_ready_future(self._channel).result(TIMEOUT_S)

    def send(self) -> dict[str, float]:
        """Sender: everything, until the receiver has counted it."""
        assert self._channel is not None
        message, total = b"\x5a" * CHUNK_BYTES, self._messages * CHUNK_BYTES
        call: grpc.StreamUnaryMultiCallable[bytes, bytes] = self._channel.stream_unary(f"/{_SERVICE}/{_METHOD}")
        start = time.monotonic()
        counted = int(call((message for _ in range(self._messages)), timeout=TIMEOUT_S))
        assert counted == total, (counted, total)
        return {"start": start, "end": start, "bytes": total}

    def receive(self) -> dict[str, float]:
        """Receiver: until the last byte of a ``send`` is there."""
        start = time.monotonic()
        return {"start": start, "end": self._ends.get(timeout=TIMEOUT_S), "bytes": self._messages * CHUNK_BYTES}

    def close(self) -> None:
        """End."""
        if self._channel is not None:
            self._channel.close()
        if self._server is not None:
            self._server.stop(0).wait(5)
