"""Calls of the control plane from the command line: connecting, deadlines, and errors that say what to do next."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import grpc
import typer
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from weightplane.controlplane.dial import Dial, PlaintextRefused
from weightplane.controlplane.grpc_close import close_channels
from weightplane.controlplane.handshake import NO_GRPC, trouble
from weightplane.controlplane.names import CONFINED
from weightplane.v1.agent_pb2_grpc import AgentServiceStub
from weightplane.v1.common_pb2 import Failure as FailureMessage
from weightplane.v1.fleet_pb2_grpc import FleetServiceStub
from weightplane.v1.weight_transfer_pb2_grpc import WeightTransferServiceStub

from .exits import Exit
from .output import complain, emit_json, err

__all__ = [
    "LEADS",
    "START_ONE",
    "AddressOption",
    "Connection",
    "GroupOption",
    "JsonOption",
    "advice_on",
    "connect",
    "dial",
    "interrupted",
    "one_of",
    "open_channel",
    "request_id",
    "said_of",
    "words",
]

DEFAULT_ADDRESS = "127.0.0.1:7450"

AddressOption = Annotated[
    str, typer.Option("--address", "-a", envvar="WEIGHTPLANE_ADDRESS", help="host:port of the control plane.")
]
GroupOption = Annotated[str, typer.Option("--group", "-g", envvar="WEIGHTPLANE_GROUP", help="The group.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]

#: What to do where nobody answers.
START_ONE = "start one (weightplane controlplane), or name its address with --address or WEIGHTPLANE_ADDRESS"

#: What to do where one answers that does not lead.
LEADS = "name the control plane that leads with --address or WEIGHTPLANE_ADDRESS, or ask again once this one does"

#: What to do next, by reason; the server's message already says what happened. Of ``group``, the one asked for.
_ADVICE = {
    "UNKNOWN_GROUP": "weightplane status lists the groups; one is made by its first trainer or replica",
    "UNKNOWN_REPLICA": "weightplane status --group {group} lists the replicas",
    "UNKNOWN_UPDATE": "weightplane updates --group {group} lists the updates",
    "TRAINER_HELD": "wait for the other trainer's lease to end, or take over with --takeover",
    "NOT_ENOUGH_REPLICAS": "start replicas (weightplane inference-agent), and see weightplane status -g {group}",
    "UPDATE_IN_PROGRESS": "weightplane watch -g {group} follows it; weightplane abort -g {group} ends it",
    "NO_TRANSPORT": "weightplane doctor on both hosts says which transport works and why not",
    "UNAUTHENTICATED": "give a token (WEIGHTPLANE_TOKEN), or a certificate (WEIGHTPLANE_CA, _CERT and _KEY)",
    "PERMISSION_DENIED": "use a token or a certificate that has the role that is expected",
    "COORDINATOR_RESTARTED": LEADS,
    "UNKNOWN_OUTCOME": "weightplane updates -g {group} shows what became of it once a coordinator leads again",
}

#: For whom one of its other groups is refused, whatever its roles.
_CONFINED = (
    "this token or certificate is for other groups, whatever its roles: name one of these with --group, or use one "
    "that is for group {group} too"
)

_CODES = {
    grpc.StatusCode.UNAVAILABLE: Exit.UNREACHABLE,
    grpc.StatusCode.NOT_FOUND: Exit.NOT_FOUND,
    grpc.StatusCode.UNAUTHENTICATED: Exit.DENIED,
    grpc.StatusCode.PERMISSION_DENIED: Exit.DENIED,
    grpc.StatusCode.ABORTED: Exit.FAILED,
    grpc.StatusCode.DEADLINE_EXCEEDED: Exit.UNKNOWN_OUTCOME,
    grpc.StatusCode.CANCELLED: Exit.UNKNOWN_OUTCOME,
    grpc.StatusCode.UNKNOWN: Exit.UNKNOWN_OUTCOME,
    grpc.StatusCode.INTERNAL: Exit.UNEXPECTED,
}


def request_id() -> str:
    """A fresh request_id; a retry of the same logical call must reuse it."""
    return uuid.uuid4().hex


@dataclass(frozen=True)
class Connection:
    """Stubs over one channel. ``timeout`` is the deadline of unary calls, seconds."""

    address: str
    fleet: FleetServiceStub
    transfer: WeightTransferServiceStub
    agent: AgentServiceStub
    timeout: float = 10.0


def dial(address: str) -> Dial:
    """How to reach the control plane, as the environment says: WEIGHTPLANE_CA, _CERT, _KEY (PEM files), _TOKEN.

    WEIGHTPLANE_INSECURE=1 allows plaintext off loopback. Raises ``typer.BadParameter`` for what cannot be.
    """
    try:
        return Dial.from_environment(address)
    except PlaintextRefused:
        raise typer.BadParameter(
            f"--address {address} is not a loopback address: use TLS (WEIGHTPLANE_CA), or, where the network is "
            "trusted, set WEIGHTPLANE_INSECURE=1"
        ) from None
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None


@contextmanager
def open_channel(address: str) -> Iterator[grpc.Channel]:
    """A channel to the control plane; every call carries the token, if there is one."""
    how = dial(address)
    channel = how.channel()
    try:
        yield grpc.intercept_channel(channel, _BearerInterceptor(how.metadata[0])) if how.metadata else channel
    finally:
        close_channels([channel])


class _BearerInterceptor(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Adds the token to every call."""

    def __init__(self, entry: tuple[str, str]) -> None:
        self._entry = entry

    def _with(self, details: grpc.ClientCallDetails) -> grpc.ClientCallDetails:
        return details._replace(metadata=[*(details.metadata or ()), self._entry])  # type: ignore[attr-defined,no-any-return]

    def intercept_unary_unary(self, continuation, client_call_details, request):  # type: ignore[no-untyped-def]
        return continuation(self._with(client_call_details), request)

    def intercept_unary_stream(self, continuation, client_call_details, request):  # type: ignore[no-untyped-def]
        return continuation(self._with(client_call_details), request)


#: Seconds before a call that came to nothing is made again: its connection broke, or its answer was lost.
_AGAIN_S = (0.1, 0.3)


class _AgainInterceptor(grpc.UnaryUnaryClientInterceptor):
    """Makes a call again that was UNAVAILABLE, within its deadline: a look, or a change that counts once by its
    ``request_id``."""

    def intercept_unary_unary(self, continuation, client_call_details, request):  # type: ignore[no-untyped-def]
        asked: Any = client_call_details
        end = time.monotonic() + (asked.timeout or 0.0)
        call = continuation(asked, request)
        for pause in _AGAIN_S:
            left = end - time.monotonic() - pause
            if call.code() is not grpc.StatusCode.UNAVAILABLE or left <= 0:
                break
            time.sleep(pause)
            call = continuation(asked._replace(timeout=left), request)
        return call


@contextmanager
def connect(
    address: str, timeout: float = 10.0, as_json: bool = False, group: str = "", changes: bool = False
) -> Iterator[Connection]:
    """Connect, and turn every gRPC error inside the block into a message, an advice and a documented exit code.

    ``group``: the one that the advice is about. ``changes``: the command asks for a change, not for a look.
    """
    try:
        with open_channel(address) as opened:
            channel = grpc.intercept_channel(opened, _AgainInterceptor())
            yield Connection(
                address,
                FleetServiceStub(channel),
                WeightTransferServiceStub(channel),
                AgentServiceStub(channel),
                timeout,
            )
    except grpc.RpcError as error:
        raise typer.Exit(_explain(error, address, as_json, group)) from None
    except KeyboardInterrupt:
        asked = "what was asked for may be carried out all the same; weightplane status shows the fleet as it is"
        interrupted(asked if changes else "nothing was changed", as_json)


def interrupted(text: str, as_json: bool) -> NoReturn:
    """End as Ctrl-C does. ``text``: what it means for the fleet."""
    if as_json:
        complain(text, "INTERRUPTED", Exit.INTERRUPTED, True, "")
    err.print(f"interrupted: {text}", markup=False, soft_wrap=True)
    raise typer.Exit(Exit.INTERRUPTED)


def one_of(option: str, value: str, words: tuple[str, ...]) -> None:
    """``typer.BadParameter`` for a value that an option does not know. An empty one stands for the default."""
    if value not in words:
        raise typer.BadParameter(f"{option}: expected one of {', '.join(w for w in words if w)}, found {value!r}")


def words(error: grpc.RpcError) -> str:
    """A failed call in a few words; what gRPC prints of itself is several lines of its own insides."""
    if not isinstance(error, grpc.Call):
        return type(error).__name__
    code, details = error.code(), str(error.details() or "")
    return f"{code.name}: {details}" if details else str(code.name)


def said_of(error: grpc.RpcError) -> tuple[str, FailureMessage | None]:
    """The control plane's own reason and failure; empty and none where the error is not its answer."""
    reason, failure = "", None
    status: Any = rpc_status.from_call(error) if isinstance(error, grpc.Call) else None
    for detail in status.details if status is not None else ():
        info, message = error_details_pb2.ErrorInfo(), FailureMessage()
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(message):
            failure = message
    return reason, failure


def advice_on(reason: str, text: str, group: str) -> str:
    """What to do next about a refusal, by its reason and its text; empty where that text says it all."""
    confined = reason == "PERMISSION_DENIED" and CONFINED in text
    return (_CONFINED if confined else _ADVICE.get(reason, "")).format(group=group or "GROUP")


def _explain(error: grpc.RpcError, address: str, as_json: bool, group: str) -> Exit:
    code = error.code()
    reason, failure = said_of(error)
    exit_code = _CODES.get(code, Exit.REFUSED)
    text = failure.message if failure is not None else str(error.details() or "")
    if code is grpc.StatusCode.UNAVAILABLE and not reason:
        found = trouble(dial(address))
        text = f"no control plane answers at {address}: {found or text}"
        tls = "docs/security.md tells how TLS is turned on, and what each refusal means"
        advice = {"": START_ONE, NO_GRPC: ""}.get(found, tls)
    else:
        advice = advice_on(reason, text, group)
    if as_json:
        error_data = {"code": code.name, "reason": reason, "message": text, "next": advice, "exit": int(exit_code)}
        emit_json({"error": error_data})
    else:
        err.print(f"[bold red]error[/] {code.name}{f' / {reason}' if reason else ''}: ", end="")
        err.print(text, markup=False, soft_wrap=True)
        if failure is not None and failure.tensors:
            named = ", ".join(failure.tensors)
            err.print(f"  tensors ({failure.tensor_count}): {named}", markup=False, soft_wrap=True)
        if advice:
            err.print(f"  next: {advice}", markup=False, soft_wrap=True)
    return exit_code
