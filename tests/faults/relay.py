"""A gRPC relay: it takes each call whole, and loses, doubles, delays or reorders messages, one call at a time.

Over TCP a frame cannot be lost from a stream that goes on, so a lost message is a call that ends UNAVAILABLE: before
the message was passed on, or after it was carried out, with its answer thrown away.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from tests.loop import Loop

__all__ = ["KINDS", "Relay", "Rule"]

KINDS = ("lost-before", "lost-after", "duplicated", "delayed", "reordered")
_SIZE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass
class Rule:
    """Strikes the n-th call of ``method``. ``reordered``: it goes on only after a later call has been carried out (or
    ``delay`` seconds)."""

    method: str
    kind: str
    nth: int = 1
    delay: float = 0.5
    seen: int = 0
    struck: bool = False


@dataclass
class Relay(grpc.GenericRpcHandler):
    loop: Loop
    target: str
    rules: list[Rule] = field(default_factory=list)

    def start(self) -> str:
        async def work() -> str:
            backoff = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)]
            self._channel = grpc.aio.insecure_channel(self.target, [*backoff, *_SIZE])
            self._server = grpc.aio.server(options=_SIZE)
            self._server.add_generic_rpc_handlers((self,))
            self._passed = asyncio.Event()
            port = self._server.add_insecure_port("127.0.0.1:0")
            await self._server.start()
            return f"127.0.0.1:{port}"

        return self.loop.run(work())

    def close(self) -> None:
        async def work() -> None:
            await self._server.stop(0)
            await self._channel.close()

        self.loop.run(work())

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = details.method

        async def handle(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> Any:
            async for answer in self._relay(method, requests, context):
                yield answer

        return grpc.stream_stream_rpc_method_handler(handle)

    def _rule(self, method: str) -> Rule | None:
        for rule in self.rules:
            if not rule.struck and method.endswith("/" + rule.method):
                rule.seen += 1
                if rule.seen == rule.nth:
                    rule.struck = True
                    return rule
        return None

    async def _relay(
        self, method: str, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        rule = self._rule(method)
        kind = rule.kind if rule is not None else ""
        if kind == "lost-before":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the relay lost the request")
        if rule is not None and kind == "delayed":
            await asyncio.sleep(rule.delay)
        if rule is not None and kind == "reordered":
            self._passed.clear()
            try:
                await asyncio.wait_for(self._passed.wait(), rule.delay)
            except TimeoutError:
                rule.seen = -1  # nothing came to go first
        if kind in ("lost-after", "duplicated"):
            messages = [r async for r in requests]
            requests = _again(messages)
            if kind == "duplicated":
                async for _ in self._call(method, _again(messages), context):
                    pass
        async for answer in self._call(method, requests, context):
            if kind == "lost-after":
                break
            yield answer
        if kind == "lost-after":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the relay lost the answer")
        if kind != "reordered":
            self._passed.set()

    async def _call(
        self, method: str, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        metadata = [(k, v) for k, v in context.invocation_metadata() or () if k not in ("user-agent", "te")]
        multi: Any = self._channel.stream_stream(method)
        call = multi(requests, timeout=context.time_remaining(), metadata=grpc.aio.Metadata(*metadata))
        try:
            async for answer in call:
                yield answer
        except grpc.aio.AioRpcError as e:
            trailing = tuple((k, v) for k, v in e.trailing_metadata() or ())
            await context.abort(e.code(), e.details() or "", trailing)
        finally:
            call.cancel()


async def _again(messages: list[bytes]) -> AsyncIterator[bytes]:
    """The messages of a call that is made more than once."""
    for message in messages:
        yield message
