"""What every RPC passes through: identity, deadline, errors. One interceptor, so that no method can forget it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from weightplane.controlplane.core.reasons import Failure, Reason

from . import health
from .authorisation import Scope
from .errors import Refused, status_of
from .pacing import Paces
from .security import Authoriser, Identity

__all__ = ["CALLER", "Guard", "Undecodable", "remaining_s"]

log = logging.getLogger(__name__)

#: Who makes the call being served.
CALLER: ContextVar[Identity] = ContextVar("weightplane_caller")

_Context = grpc.aio.ServicerContext[Any, Any]


def remaining_s(context: _Context) -> float | None:
    """Seconds left to the call's deadline; ``None`` without one."""
    left = context.time_remaining()
    return None if left is None or left > 10 * 365 * 86400 else float(left)


class Undecodable:
    """Stands in for a request whose bytes are no message of its type: gRPC itself would only say INTERNAL."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def refusal(self, method: str) -> Refused:
        """What its sender is told."""
        name = method.rpartition("/")[2]
        text = f"{name}: expected the bytes of a {name}Request, found none of one ({self._error}): generate your stubs "
        return Refused(Failure(Reason.INVALID_ARGUMENT, text + "from our .proto files"))


def _decoding(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decode(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError as e:
            return Undecodable(e)

    return decode


class Guard(grpc.aio.ServerInterceptor):
    """Wraps every handler: who calls, how often, for which group, with a deadline if unary; each failure as the one
    table of errors says."""

    def __init__(self, authoriser: Authoriser) -> None:
        self._authoriser = authoriser
        self._wrapped: dict[str, Any] = {}
        self._paces = Paces()
        self._streams: dict[asyncio.Task[Any], _Stream] = {}

    def serving(self, method: str, behaviour: Callable[[Any, _Context], Awaitable[Any]], unary: bool) -> Any:
        """``behaviour`` behind every check, for whoever serves calls by another way than gRPC: a coroutine of request
        and context."""
        return self._guarded(method, behaviour, unary)

    def withdraw(self) -> None:
        """Look at who may call now, and end the streams of those who may no longer. Called every second or so."""
        if not self._authoriser.refresh():
            return
        for task, stream in list(self._streams.items()):
            try:
                identity, _ = self._authoriser.admit(stream.method, stream.context)
                if identity.groups == stream.identity.groups and identity.roles == stream.identity.roles:
                    continue
                stream.refusal = Refused(Failure(Reason.UNAUTHENTICATED, "what this token may do was changed"))
            except Refused as e:
                stream.refusal = e
            task.cancel()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Give the wrapped handler of a method (made once)."""
        method = str(handler_call_details.method)
        if method in health.METHODS:
            return await continuation(handler_call_details)
        if self._authoriser.strange(handler_call_details.invocation_metadata or ()):
            return grpc.stream_stream_rpc_method_handler(self._refuse(method))
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            wrapped = self._wrapped[method] = self._wrap(method, handler)
        return wrapped

    def _wrap(self, method: str, handler: Any) -> Any:
        coders = {
            "request_deserializer": _decoding(handler.request_deserializer),
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._guarded(method, handler.unary_unary, unary=True), **coders)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(self._guarded(method, handler.unary_stream), **coders)
        return grpc.stream_stream_rpc_method_handler(self._guarded(method, handler.stream_stream), **coders)

    def _guarded(
        self,
        method: str,
        behaviour: Callable[[Any, _Context], Awaitable[Any]],
        unary: bool = False,
    ) -> Any:
        """``behaviour`` behind every check. Streams answer by ``context.write``, so that all kinds are coroutines."""
        name = method.rpartition("/")[2]

        async def serve(request: Any, context: _Context) -> Any:
            try:
                identity, row = self._authoriser.admit(method, context)
                CALLER.set(identity)
                await self._paces.turn(context.peer())
                if isinstance(request, Undecodable):
                    raise request.refusal(method)
                if row.scope is Scope.REQUEST:
                    identity.enter(request.group, name)
                if not unary:
                    return await self._stream(method, identity, request, context, behaviour)
                if remaining_s(context) is None:
                    message = f"{name}: expected a deadline, found none: set a timeout on the call"
                    raise Refused(Failure(Reason.DEADLINE_REQUIRED, message))
                return await behaviour(request, context)
            except BaseException as e:
                await _fail(method, context, e)

        return serve

    async def _stream(self, method: str, identity: Identity, request: Any, context: _Context, behaviour: Any) -> Any:
        """Serve a stream for as long as its caller may call."""
        task = asyncio.current_task()
        assert task is not None
        mine = self._streams[task] = _Stream(method, identity, context)
        try:
            return await behaviour(request, context)
        except asyncio.CancelledError:
            if mine.refusal is None:
                raise
            task.uncancel()
            raise mine.refusal from None
        finally:
            del self._streams[task]

    def _refuse(self, method: str) -> Any:
        """A handler for a stranger's call of any kind: it reads nothing."""

        async def serve(_: Any, context: _Context) -> None:
            try:
                self._authoriser.admit(method, context)
            except Refused as e:
                await _fail(method, context, e)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server's tokens changed just now: call again")

        return serve


@dataclass
class _Stream:
    """An open stream; ``refusal``: why it is ended."""

    method: str
    identity: Identity
    context: _Context
    refusal: Refused | None = None


async def _fail(method: str, context: _Context, error: BaseException) -> None:
    """End a call with what went wrong: refusals as they are, the unexpected as INTERNAL with a number to ask for."""
    if isinstance(error, (asyncio.CancelledError, grpc.aio.AbortError, KeyboardInterrupt, SystemExit)):
        raise error
    if isinstance(error, grpc.aio.InternalError):  # a message could not be sent: nobody is there to be told
        _gone(method, error)
    if not isinstance(error, Refused):
        number = secrets.token_hex(6)
        log.error("unexpected error %s in %s", number, method, exc_info=error, extra={"correlation_id": number})
        error = Refused(Failure(Reason.INTERNAL, f"unexpected error {number}: the server's log has the details"))
    status = rpc_status.to_status(status_of(error))
    try:
        await context.abort(status.code, status.details or "", status.trailing_metadata or ())
    except grpc.aio.InternalError:
        _gone(method, error)


def _gone(method: str, error: BaseException) -> NoReturn:
    """The caller's deadline passed, or it went away: what it would have been told is no error of ours."""
    log.debug("the caller of %s was gone before it heard: %s", method, error)
    raise asyncio.CancelledError from None  # what gRPC makes of a handler whose caller left while it ran
