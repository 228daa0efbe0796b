"""HTTP answers for load balancers and orchestrators: alive, ready, routable; of this server, a group, a replica.

``GET /livez | /readyz | /groups/G/livez | /groups/G/readyz | /groups/G/routable?min_version=N`` and the three under
``/groups/G/replicas/R/``. 200: yes; 503: no; the JSON body says why. A group is alive, ready or routable when a replica
of it is, and the body names each. A publish changes none of the three. ``GET /metrics``: see ``metrics``.

The first two paths are open to everybody who reaches the port; the others want what gRPC wants of a viewer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import threading
from concurrent.futures import TimeoutError as LoopTimeout
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from weightplane.controlplane.bounded_http import BoundedHandler, BoundedHttpServer
from weightplane.controlplane.core.members import routable
from weightplane.controlplane.core.model import Replica
from weightplane.controlplane.core.reasons import Reason

from .coordinator import Coordinator
from .errors import Refused
from .fields import refuse
from .metrics import CONTENT_TYPE, exposition
from .runtime import Group
from .security import Authoriser, Tls
from .tls import Contexts, names_in

__all__ = ["OPEN", "Answer", "Probes", "answer"]

log = logging.getLogger(__name__)

OPEN = frozenset({"/livez", "/readyz"})
_PATIENCE_S = 2.0  # an event loop that takes longer for a look at its own state is not alive
_IDLE_S = 10.0  # that a connection may be silent, or take for a request
_MOST = 64  # connections at a time
_QUESTIONS = ("livez", "readyz", "routable")
_PATHS = (
    "expected /livez, /readyz, /metrics, or one of livez, readyz, routable under /groups/G/ or /groups/G/replicas/R/"
)

#: Status and body: of JSON, or the text of ``/metrics``.
Answer = tuple[int, dict[str, Any] | str]


def _parsed(target: str) -> SplitResult | None:
    """The one reading of a request target, of its absolute form too; None if it is none."""
    try:
        return urlsplit(target)
    except ValueError:
        return None


def answer(coordinator: Coordinator, target: str) -> Answer:
    """Status and body for a request target. On the coordinator's event loop."""
    url = _parsed(target)
    if url is None:
        return 400, {"ok": False, "reason": _PATHS}
    parts = [unquote(p) for p in url.path.split("/")[1:]]
    query = parse_qs(url.query, keep_blank_values=True)
    if parts == ["livez"]:
        return 200, {"ok": True}
    try:
        groups = {g.name: g for g in coordinator.groups()}
    except Refused as e:
        return 503, {"ok": False, "reason": e.failure.message}
    if parts == ["readyz"]:
        return 200, {"ok": True, "epoch": coordinator.epoch, "groups": len(groups)}
    if len(parts) not in (3, 5) or parts[0] != "groups" or parts[-1] not in _QUESTIONS:
        return 404, {"ok": False, "reason": f"no {url.path!r} here: {_PATHS}"}
    extra = set(query) - ({"min_version"} if parts[-1] == "routable" else set())
    floor = query.get("min_version", ["0"])[-1]
    if extra or not (floor.isascii() and floor.isdigit() and len(floor) < 19):
        return 400, {"ok": False, "reason": f"expected min_version=N, and of routable alone, found {url.query!r}"}
    group = groups.get(parts[1])
    if group is None:
        return 404, {"ok": False, "reason": f"no group {parts[1]!r} here"}
    which = _QUESTIONS.index(parts[-1])
    if len(parts) == 3:
        return _of_group(group, which, int(floor))
    replica = group.state.replicas.get(parts[3])
    if parts[2] != "replicas" or replica is None:
        return 404, {"ok": False, "reason": f"group {parts[1]!r} has no replica {parts[3]!r}"}
    ok, why = _of_replica(group, replica, which, int(floor))
    return (200 if ok else 503), {"ok": ok, "reason": why, "version": replica.held.version}


def _of_replica(group: Group, replica: Replica, which: int, floor: int) -> tuple[bool, str]:
    *yes, why = routable(group.state, replica, floor)
    return bool(yes[which]), "" if yes[which] else str(why)


def _of_group(group: Group, which: int, floor: int) -> Answer:
    found = {rid: _of_replica(group, r, which, floor) for rid, r in sorted(group.state.replicas.items())}
    good = {rid: group.state.replicas[rid] for rid, (ok, _) in found.items() if ok}
    return (200 if good else 503), {
        "ok": bool(good),
        "version": group.state.committed.version,
        "replicas": {rid: {"version": r.held.version, "address": r.serving_address} for rid, r in good.items()},
        "others": {rid: why for rid, (ok, why) in found.items() if not ok},
    }


class Probes:
    """Serves ``answer`` over HTTP from threads of its own until ``close``; every question is put to the event loop.

    Raises ``OSError`` if the port is taken.
    """

    def __init__(self, coordinator: Coordinator, address: str, authoriser: Authoriser, tls: Tls | None) -> None:
        self._coordinator, self._authoriser = coordinator, authoriser
        self._loop = asyncio.get_running_loop()
        host, _, port = address.rpartition(":")
        self._server = _Server((host.strip("[]"), int(port)), self._handler(), tls)
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="weightplane-probes", daemon=True)
        self._thread.start()
        log.info("probes on %s", self.address)

    def close(self) -> None:
        """Stop; idempotent. From any thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def _ask(self, target: str, headers: list[tuple[str, str]], names: list[bytes], uris: list[bytes]) -> Answer:
        async def on_loop() -> Answer:
            url = _parsed(target)  # as ``answer`` reads it: what is asked for is what was allowed
            path = url.path if url is not None else ""
            if path not in OPEN:
                caller = self._authoriser.identity(headers, names, uris)
                if not caller.roles:
                    refuse(Reason.PERMISSION_DENIED, "probes: expected any role, found none")
                parts = path.split("/")
                if path == "/metrics":
                    groups = (g for g in self._coordinator.groups() if caller.may_see(g.name))
                    return 200, exposition(g.state for g in groups)
                caller.enter(unquote(parts[2]) if len(parts) > 2 else "", "probes")
            return answer(self._coordinator, target)

        asked = asyncio.run_coroutine_threadsafe(on_loop(), self._loop)
        try:
            return asked.result(_PATIENCE_S)
        except LoopTimeout:
            asked.cancel()
            return 503, {"ok": False, "reason": f"the server's event loop did not answer within {_PATIENCE_S:g} s"}
        except Refused as e:
            status = {Reason.UNAUTHENTICATED: 401, Reason.COORDINATOR_RESTARTED: 503}.get(e.failure.reason, 403)
            return status, {"ok": False, "reason": e.failure.message}
        except Exception:
            log.exception("a probe of %r failed", target[:200])
            return 500, {"ok": False, "reason": "an internal error, see the server's log"}

    def _handler(self) -> type[BoundedHandler]:
        ask = self._ask

        class Handler(BoundedHandler):
            protocol_version = "HTTP/1.1"
            server_version, sys_version = "weightplane", ""
            timeout = _IDLE_S

            def do_GET(self) -> None:
                certificate = self.request.getpeercert() if isinstance(self.request, ssl.SSLSocket) else None
                headers = [(k.lower(), v) for k, v in self.headers.items()]
                status, body = ask(self.path, headers, *names_in(certificate))
                text = isinstance(body, str)
                said = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(status)
                self.send_header("Content-Type", CONTENT_TYPE if text else "application/json")
                self.send_header("Content-Length", str(len(said)))
                self.send_header("Cache-Control", "no-store")
                if status == 401:
                    self.send_header("WWW-Authenticate", "Bearer")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(said)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                log.debug("%s %s", self.address_string(), format % args)

        return Handler


class _Server(BoundedHttpServer):
    request_queue_size = _MOST

    def __init__(self, address: tuple[str, int], handler: type[BoundedHandler], tls: Tls | None) -> None:
        self._tls = Contexts(tls, "probes") if tls is not None else None
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler, _MOST)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the connection's thread: a client that is slow to shake hands holds up nobody else."""
        request.settimeout(_IDLE_S)
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        tls = self._tls.newest()
        with tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False) as wrapped:
            with self.asking(wrapped):
                self.asked(request)  # it has handed its descriptor over
                wrapped.do_handshake()
            super().finish_request(wrapped, client_address)
