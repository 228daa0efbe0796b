"""A call of the contract that came over HTTP: servicers and guard serve it as they serve gRPC's, by the same rules."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.rpc import status_pb2

from weightplane.controlplane.core.reasons import Failure, Reason

from .calls import Guard, Undecodable
from .errors import Refused, status_of

__all__ = ["Ended", "HttpContext", "Lines", "Method", "body_of", "error_of", "methods", "refusal", "request_of"]

_DETAILS = "grpc-status-details-bin"
_DEPTH = 32  # of nested JSON
_TRAILER = Sequence[tuple[str, str | bytes]]

Serve = Callable[[Any, Any], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC: ``/package.Service/Name``. ``serve``: its servicer's method behind the guard."""

    path: str
    request: type[Message]
    serve: Serve
    streams: bool  # answers by a stream
    both: bool  # takes one, too


def methods(guard: Guard, services: Iterable[tuple[ServiceDescriptor, Any]]) -> dict[str, Method]:
    """By path, as the contract's descriptors say."""
    found: dict[str, Method] = {}
    for service, servicer in services:
        for m in service.methods:
            path = f"/{service.full_name}/{m.name}"
            request = message_factory.GetMessageClass(m.input_type)
            serve = guard.serving(path, getattr(servicer, m.name), unary=not m.server_streaming)
            found[path] = Method(path, request, serve, m.server_streaming, m.client_streaming)
    return found


class Ended(grpc.aio.AbortError):
    """The call ended with an error, which ``status`` says in full."""

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self.status = status


class HttpContext:
    """What servicers and guard use of ``grpc.aio.ServicerContext``. ``send`` takes the messages of a stream."""

    def __init__(
        self,
        peer: str,
        metadata: Iterable[tuple[str, str]],
        names: Sequence[bytes],
        uris: Sequence[bytes],
        timeout: float | None,
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """``names``, ``uris``: of the verified client certificate. ``timeout``: seconds; ``None``: no deadline."""
        self._peer, self._metadata = peer, tuple(metadata)
        self._shown = {"x509_common_name": names, "peer_uri": uris}
        self._end = None if timeout is None else time.monotonic() + timeout
        self.write = send

    def peer(self) -> str:
        """Whose connection it is."""
        return self._peer

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """The request's headers."""
        return self._metadata

    def auth_context(self) -> dict[str, Sequence[bytes]]:
        """What the client's certificate says."""
        return self._shown

    def time_remaining(self) -> float | None:
        """Seconds to the deadline."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    async def abort(self, code: Any, details: str = "", trailing_metadata: _TRAILER = ()) -> None:
        """End the call with an error."""
        number = code.value[0] if isinstance(code, grpc.StatusCode) else int(code)
        status = status_pb2.Status(code=number, message=details)
        for key, value in trailing_metadata:
            if key == _DETAILS and isinstance(value, bytes):
                status = status_pb2.Status.FromString(value)
        raise Ended(status)


class _NoJson(Undecodable):
    """A body that is no message of the method's, in words for somebody who wrote JSON."""

    def refusal(self, method: str) -> Refused:
        name = method.rpartition("/")[2]
        text = f"{name}: expected the JSON of a {name}Request (docs/protocol.md), found none of one: {self._error}"
        return Refused(Failure(Reason.INVALID_ARGUMENT, text))


def request_of(method: Method, body: bytes) -> Message | Undecodable:
    """The request that a body says; an empty body says an empty one."""
    message = method.request()
    try:
        if body and not body.lstrip().startswith(b"{"):
            raise ValueError("no JSON object")  # json_format would take a list for an empty message
        json_format.Parse(body or b"{}", message, max_recursion_depth=_DEPTH)
    except (json_format.ParseError, TypeError, ValueError, RecursionError) as e:  # TypeError: of an Any of a stranger's
        return _NoJson(e)
    return message


def body_of(message: Message) -> bytes:
    """A message as one line of JSON: the contract's own field names, 64-bit numbers as strings, all fields said. Raises
    ``Ended`` for one that holds an Any of a type that only others know."""
    try:
        said = json_format.MessageToDict(
            message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
    except (TypeError, ValueError) as e:
        text = f"the answer cannot be said in JSON: {str(e)[:200]}: ask for it by gRPC"
        raise Ended(refusal(Reason.NOT_IMPLEMENTED, text)) from None
    return json.dumps(said, ensure_ascii=False).encode()


class Lines:
    """The lines of all streams. One at a time, and the coordinator, whose event loop it is, has its turn between two: a
    change has a line for each of hundreds of callers. A message that many are sent is put into JSON once."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._newest: deque[tuple[Message, bytes]] = deque(maxlen=8)

    async def of(self, message: Message) -> bytes:
        """As ``body_of``."""
        async with self._turn:
            await asyncio.sleep(0)  # whoever waits for the turn stands in line; without this all would go at once
            line = next((line for known, line in self._newest if known is message), None)
            if line is None:
                line = body_of(message)
                self._newest.append((message, line))
            return line


def error_of(status: status_pb2.Status) -> dict[str, Any]:
    """What a caller is told of an error: its gRPC code, our reason, the message, the details."""
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    details = [json_format.MessageToDict(d, preserving_proto_field_name=True) for d in status.details]
    reason = next((d["reason"] for d in details if str(d.get("@type", "")).endswith("google.rpc.ErrorInfo")), "")
    return {"code": code.name, "reason": reason, "message": status.message, "details": details}


def refusal(reason: Reason, message: str) -> status_pb2.Status:
    """The status of a refusal of the gateway's own."""
    return status_of(Refused(Failure(reason, message)))


_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
