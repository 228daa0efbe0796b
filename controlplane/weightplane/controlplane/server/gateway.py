"""The contract over HTTP and JSON: ``POST /weightplane.v1.Service/Method``. For curl, dashboards, and languages without
gRPC; by the contract's descriptors, so that every method is there, and behind the guard that gRPC's calls pass.

A stream answers with a line of JSON for each message; one that ends with an error says so in a last line,
``{"error": ...}``. A call ends when its caller goes away. Needs ``weightplane[gateway]``.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.rpc import status_pb2
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from weightplane.controlplane.addresses import is_loopback_host
from weightplane.controlplane.core.reasons import Reason

from .calls import Guard
from .errors import Refused, status_of
from .gateway_call import Ended, HttpContext, Lines, Method, body_of, error_of, methods, refusal, request_of
from .security import Authoriser

__all__ = ["TIMEOUT_HEADER", "Gateway"]

log = logging.getLogger(__name__)

TIMEOUT_HEADER = "weightplane-timeout"  # seconds
_TIMEOUT_S, _LONGEST_S = 30.0, 86_400.0
_MOST_BYTES = 4 << 20  # of a body, as of a gRPC message
_DISCARD = 16 << 20  # who still writes when the port closes hears of a broken pipe, not of its mistake
_BODY_S = 10.0  # that a body may take
_GRACE_S = 1.0  # after its deadline a call that ends by it says why
_WHERE = "expected POST /weightplane.v1.Service/Method with a body of JSON, say /weightplane.v1.FleetService/ListGroups"
_STATUS = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ABORTED": 409,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}


class _Refusal(Exception):
    """Answered by the gateway itself. ``http``: a status of its own, where HTTP knows better than gRPC's codes."""

    def __init__(self, reason: Reason, message: str, http: int = 0) -> None:
        super().__init__(message)
        self.status, self.http = refusal(reason, message), http


class Gateway:
    """``app`` is the ASGI application. Calls run on the event loop that serves it, which is the coordinator's."""

    def __init__(
        self,
        guard: Guard,
        authoriser: Authoriser,
        services: Iterable[tuple[ServiceDescriptor, Any]],
        loopback_only: bool,
    ) -> None:
        """``loopback_only``: nobody is asked who they are, so a page that a browser on this host shows must not get
        here under a name of its own (DNS rebinding)."""
        self._authoriser, self._loopback_only = authoriser, loopback_only
        self._methods = methods(guard, services)
        self._said = Lines()
        self.app = Starlette(
            routes=[Route("/{service}/{method}", self._call, methods=["POST"])],
            exception_handlers={HTTPException: _elsewhere, _Refusal: _refused},
        )
        self.app.router.redirect_slashes = False  # a redirect says nothing in JSON, and curl drops the body

    async def _call(self, request: Request) -> Response:
        method = self._methods.get(request.url.path)
        if method is None:
            raise _Refusal(Reason.NOT_IMPLEMENTED, f"no method {request.url.path[:200]!r} here: {_WHERE}", 404)
        if method.both:
            name = method.path.rpartition("/")[2]
            raise _Refusal(Reason.NOT_IMPLEMENTED, f"{name} is a stream in both directions: dial gRPC for it")
        self._check(request)
        timeout = _timeout(request, None if method.streams else _TIMEOUT_S)
        messages: asyncio.Queue[bytes | status_pb2.Status | None] = asyncio.Queue(1)

        async def send(message: Message) -> None:  # back once its turn was had: who follows paces itself by that
            await messages.put(await self._said.of(message))

        context = _context(request, timeout, send)
        try:
            self._authoriser.admit(method.path, context)  # type: ignore[arg-type]  # before a byte of the body is read
        except Refused as e:
            return _error(status_of(e))
        asked = request_of(method, await _body(request))
        if method.streams:
            request.scope["state"]["lines"] = True  # as the listener asks that looks whether its caller is there
            return await _stream(method, asked, context, messages, timeout)
        return await _unary(method, asked, context, request, timeout or _TIMEOUT_S)

    def _check(self, request: Request) -> None:
        """What a browser would send for a page of somebody else's is refused."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            found = kind[:100] or "none"
            raise _Refusal(Reason.INVALID_ARGUMENT, f"content-type: expected application/json, found {found}", 415)
        host = request.url.hostname or ""
        if self._loopback_only and not is_loopback_host(host):
            text = f"host: expected localhost or a loopback address, found {host[:200]!r}: tokens would say who you are"
            raise _Refusal(Reason.PERMISSION_DENIED, text)


def _context(request: Request, timeout: float | None, send: Callable[[Message], Awaitable[None]]) -> HttpContext:
    client = request.client
    names, uris = request.scope["state"].get("certificate", ((), ()))
    peer = f"http:{client.host}:{client.port}" if client is not None else "http:"
    return HttpContext(peer, request.headers.items(), names, uris, timeout, send)


def _timeout(request: Request, default: float | None) -> float | None:
    said = request.headers.get(TIMEOUT_HEADER)
    if said is None:
        return default
    try:
        seconds = float(said)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= _LONGEST_S:
        text = f"{TIMEOUT_HEADER}: expected seconds, above 0 and at most {_LONGEST_S:g}, found {said[:50]!r}"
        raise _Refusal(Reason.INVALID_ARGUMENT, text)
    return seconds


async def _body(request: Request) -> bytes:
    found, size = bytearray(), 0
    try:
        async with asyncio.timeout(_BODY_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= _MOST_BYTES:
                    found += chunk
                elif size > _DISCARD:
                    break
        if size > _MOST_BYTES:
            raise _Refusal(Reason.LIMIT, f"body: expected at most {_MOST_BYTES} bytes, found more", 413)
    except TimeoutError:
        raise _Refusal(Reason.DEADLINE, f"body: expected the whole of it within {_BODY_S:g} s", 408) from None
    except ClientDisconnect:
        raise _Refusal(Reason.ABORTED_BY_CALLER, "the caller went away", 499) from None
    return bytes(found)


async def _unary(method: Method, asked: Any, context: HttpContext, request: Request, timeout: float) -> Response:
    serving = asyncio.ensure_future(method.serve(asked, context))
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({serving, gone}, timeout=timeout + _GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            return Response(body_of(serving.result()), media_type="application/json")
        if gone.done():
            raise _Refusal(Reason.ABORTED_BY_CALLER, "the caller went away", 499)
        name = method.path.rpartition("/")[2]
        text = f"{name}: no answer within {timeout:g} s ({TIMEOUT_HEADER}); what became of it is unknown: ask GetUpdate"
        raise _Refusal(Reason.DEADLINE, text)
    except Ended as e:
        return _error(e.status)
    finally:
        for task in (serving, gone):
            task.cancel()
        await asyncio.gather(serving, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    """Until the caller goes away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(
    method: Method,
    asked: Any,
    context: HttpContext,
    messages: asyncio.Queue[bytes | status_pb2.Status | None],
    timeout: float | None,
) -> Response:
    """An error that comes before any message is the whole answer."""

    async def serve() -> None:
        end: status_pb2.Status | None = None
        try:
            async with asyncio.timeout(timeout):
                await method.serve(asked, context)
        except Ended as e:
            end = e.status
        except TimeoutError:
            end = refusal(Reason.DEADLINE, f"the stream was asked to last {timeout:g} s ({TIMEOUT_HEADER})")
        except Exception:  # the guard lets none through; whoever waits for a message must not wait for ever
            log.exception("%s failed", method.path)
            end = refusal(Reason.INTERNAL, "unexpected error: the server's log has the details")
        await messages.put(end)

    serving = asyncio.ensure_future(serve())

    async def over() -> None:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    try:
        first = await messages.get()
    except BaseException:
        await over()
        raise
    if isinstance(first, status_pb2.Status):
        await over()
        return _error(first)

    async def lines() -> AsyncIterator[bytes]:
        line = first
        try:
            while line is not None:
                if isinstance(line, status_pb2.Status):
                    yield json.dumps({"error": error_of(line)}).encode() + b"\n"
                    return
                yield line + b"\n"
                line = await messages.get()
        finally:
            await over()

    return StreamingResponse(lines(), media_type="application/x-ndjson", headers={"cache-control": "no-store"})


def _error(status: status_pb2.Status, http: int = 0) -> Response:
    said = error_of(status)
    headers = {"www-authenticate": "Bearer"} if said["code"] == "UNAUTHENTICATED" else None
    number = http or _STATUS.get(said["code"], 500)
    return Response(json.dumps(said).encode(), number, headers, "application/json")


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, _Refusal)
    return _error(error.status, error.http)


async def _elsewhere(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = Reason.NOT_IMPLEMENTED if error.status_code in (404, 405) else Reason.INVALID_ARGUMENT
    found = f"{request.method} {request.url.path}"[:200]
    return _error(refusal(reason, f"{_WHERE}, found {found}"), error.status_code)
