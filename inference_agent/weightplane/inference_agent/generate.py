"""A minimal HTTP endpoint for an engine that runs in this process: generates, and says which version made each token.

``POST /generate`` ``{"prompts": [[int]], "max_new_tokens": n, "temperature": t, "seed": s}`` ->
``{"completions": [{"tokens", "logprobs", "spans", "finished"}], "incarnation"}``. ``GET /version``, ``/routable``,
``/digests`` (LIVE, read back from memory). It is for demos and tests: loopback, no authentication, no batching across
requests. Every forward pass runs inside ``engine.forward()``.

A request may say in the header ``Weightplane-Min-Version`` which version it needs at least: a replica that holds less
answers 503 before it generates, so that a proxy that sent it here by older knowledge sends it to another.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from weightplane.controlplane.addresses import is_loopback_host
from weightplane.controlplane.bounded_http import BoundedHandler, BoundedHttpServer
from weightplane.controlplane.core.model import NONE_HELD
from weightplane.transports.digest import hex_digest

from .engines.base import Engine, EngineClosed, Request, RequestAborted, VersionTag
from .spans import spans_of, to_dicts

__all__ = ["GenerateServer", "Generated", "Generator"]

log = logging.getLogger("weightplane.inference_agent")

_MOST_CONNECTIONS = 256
_MAX_BODY = 1 << 20
_DISCARD = 8 << 20  # bytes of a body that is too large which are read all the same
_MAX_PROMPTS = 1024
_MAX_TOKENS = 1 << 16
_PUBLISH_WAIT_S = 3.0
_GRACE_S = 5.0  # for requests in flight when it ends
_FLOOR = "Weightplane-Min-Version"
_TIMEOUT_S = 30.0  # on reading a request: a client that sends half of one holds no thread for ever

Gate = Callable[[], AbstractContextManager[Any]]


class Generated(Protocol):
    """One completion; ``tags``: what the gate yielded for each token (as ``weightplane.demo.sampling.Completion``)."""

    tokens: list[int]
    logprobs: list[float]
    tags: list[Any]
    finished: bool


class Generator(Protocol):
    """``weightplane.demo.sampling.generate`` with its model bound; enters ``gate`` once per forward pass."""

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        gate: Gate,
    ) -> Sequence[Generated]:
        """Generate for each prompt."""
        ...


class _Refused(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class GenerateServer:
    """Serves one engine. ``start`` binds and returns; ``stop`` ends it. Thread-safe.

    ``stop_with``: what the generator takes as "end now, return what you have" when its gate raises it.
    ``serve_unsynced``: generate also before the first update (the control of an experiment). ``/digests`` is there if
    the engine has ``live_digests``. Another host than loopback needs ``insecure``: nobody is asked who they are.
    """

    def __init__(
        self,
        engine: Engine,
        generator: Generator,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        stop_with: type[Exception] = RequestAborted,
        serve_unsynced: bool = False,
        insecure: bool = False,
    ) -> None:
        if not is_loopback_host(host):
            if not insecure:
                text = f"/generate has no authentication: {host} needs insecure=True (--insecure)"
                raise ValueError(f"{text}, or listen on 127.0.0.1")
            log.warning(
                "INSECURE, as asked for: /generate listens on %s, off loopback, and asks nobody who calls", host
            )
        self._engine, self._generator = engine, generator
        self._stop_with, self._unsynced = stop_with, serve_unsynced
        self._digests: Callable[[], dict[str, int]] | None = getattr(engine, "live_digests", None)
        owner = self

        class Handler(_Handler):
            server_owner = owner

        self._running, self._stopping, self._quiet = 0, False, threading.Condition()
        self._http = BoundedHttpServer((host, port), Handler, _MOST_CONNECTIONS)
        self._thread = threading.Thread(target=self._http.serve_forever, name="weightplane-generate", daemon=True)

    @property
    def address(self) -> str:
        """host:port as bound."""
        host, port = self._http.server_address[:2]
        return f"{host!s}:{port}"

    def start(self) -> GenerateServer:
        """Begin to serve."""
        self._thread.start()
        return self

    def stop(self, grace_s: float = _GRACE_S) -> bool:
        """Take no more requests; whether those in flight ended in time. Idempotent.

        A thread that is inside torch when the interpreter ends brings the process down with SIGABRT: whoever ends the
        process closes the engine after this, which ends their passes, and asks once more.
        """
        self._stopping = True
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(2)
        with self._quiet:
            return self._quiet.wait_for(lambda: not self._running, grace_s)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """One request, until its answer is written: ``stop`` waits for it."""
        with self._quiet:
            self._running += 1
        try:
            yield
        finally:
            with self._quiet:
                self._running -= 1
                self._quiet.notify_all()

    # --- what it answers

    def why_not(self, floor: int = 0) -> str:
        """Why it may not generate now, at ``floor`` or newer; empty if it may. A publish in progress does not count."""
        engine = self._engine
        mixed = engine.mixed()
        if mixed:
            return f"DIRTY: {mixed}"
        held = set(engine.held())
        if len(held) > 1:
            return f"its workers hold different versions: {sorted(h.version for h in held)}"
        if held == {NONE_HELD} and not self._unsynced:
            return "no update has reached this engine yet"
        if (version := max(h.version for h in held)) < floor:
            return f"it holds version {version}, below {floor}"
        return ""

    def _await_publish(self) -> None:
        """Live memory is being written by an update: wait a while for its end, which is no reason to refuse."""
        end = time.monotonic() + _PUBLISH_WAIT_S
        while self._engine.mixed() and "update" in self._engine.holders() and time.monotonic() < end:
            time.sleep(0.01)  # the engine contract has no event for this, and a publish is short

    def version(self) -> dict[str, Any]:
        """What the engine says it holds."""
        held = self._engine.held()
        with_tag: VersionTag | None = getattr(getattr(self._engine, "gate", None), "tag", None)
        return {
            "held": [{"version": h.version, "update_id": h.update_id} for h in held],
            "version": held[0].version if len(set(held)) == 1 else None,
            "trainer_step": with_tag.trainer_step if with_tag is not None else None,
            "incarnation": with_tag.incarnation if with_tag is not None else None,
            "dirty": self._engine.mixed(),
            "pause_holders": sorted(self._engine.holders()),
            "cache_epoch": getattr(self._engine, "cache_epoch", None),
        }

    def routable(self) -> tuple[bool, str]:
        """This engine's own view: the control plane's is the one that counts."""
        why = self.why_not()
        if not why:
            others = sorted(self._engine.holders() - {"update"})
            why = f"generation is paused by {', '.join(others)}" if others else ""
        return not why, why

    def digests(self) -> dict[str, str]:
        """LIVE digests by name, taken while no pass runs and nothing is written."""
        if self._digests is None:
            raise _Refused(404, f"{self._engine.name} cannot read its live tensors back")
        with self._engine.forward():
            return {name: hex_digest(d) for name, d in self._digests().items()}

    def generate(self, body: dict[str, Any], floor: int = 0) -> dict[str, Any]:
        """Answer one request, with weights of version ``floor`` or newer."""
        prompts, most, temperature, seed = _checked(body)
        if self._stopping:  # a connection that was kept
            raise _Refused(503, "this replica is leaving")
        self._await_publish()
        why = self.why_not(floor)
        if why:
            raise _Refused(503, why)
        with self._engine.request() as request:
            why = self.why_not(floor)  # waiting for the pause to end may have changed it
            if why:
                raise _Refused(503, why)
            made = self._generator(
                prompts,
                max_new_tokens=most,
                temperature=temperature,
                seed=seed,
                gate=lambda: self._pass(request),
            )
        return {
            "completions": [
                {
                    "tokens": c.tokens,
                    "logprobs": c.logprobs,
                    "spans": to_dicts(spans_of(t if isinstance(t, VersionTag) else None for t in c.tags)),
                    "finished": c.finished,
                }
                for c in made
            ],
            "aborted": request.aborted,
        }

    @contextmanager
    def _pass(self, request: Request) -> Any:
        """One forward pass; an aborted request ends in the generator's own way."""
        pass_ = self._engine.forward(request)
        try:
            tag = pass_.__enter__()
        except RequestAborted as e:
            raise self._stop_with(str(e)) from e
        try:
            yield tag
        finally:
            pass_.__exit__(None, None, None)


def _checked(body: dict[str, Any]) -> tuple[list[list[int]], int, float, int]:
    unknown = sorted(set(body) - {"prompts", "max_new_tokens", "temperature", "seed"})
    if unknown:
        raise _Refused(400, f"unknown field(s) {unknown}")
    prompts = body.get("prompts")
    if not isinstance(prompts, list) or not 1 <= len(prompts) <= _MAX_PROMPTS:
        raise _Refused(400, f"prompts: expected a list of 1 to {_MAX_PROMPTS} lists of token ids")
    for p in prompts:
        if not isinstance(p, list) or not p or not all(type(t) is int and t >= 0 for t in p):
            raise _Refused(400, "prompts: every prompt is a non-empty list of token ids (integers, 0 or more)")
    most = body.get("max_new_tokens")
    if type(most) is not int or not 1 <= most <= _MAX_TOKENS:
        raise _Refused(400, f"max_new_tokens: expected an integer from 1 to {_MAX_TOKENS}, found {most!r}")
    temperature, seed = body.get("temperature", 1.0), body.get("seed", 0)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        raise _Refused(400, f"temperature: expected a number, 0 or more, found {temperature!r}")
    if type(seed) is not int or not 0 <= seed < 1 << 63:
        raise _Refused(400, f"seed: expected an integer from 0 to 2**63 - 1, found {seed!r}")
    return prompts, most, float(temperature), seed


class _Handler(BoundedHandler):
    server_owner: GenerateServer
    timeout = _TIMEOUT_S
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        log.debug("generate: " + format, *args)

    def do_GET(self) -> None:
        owner = self.server_owner

        def routable() -> dict[str, Any]:
            ok, why = owner.routable()
            return {"routable": ok, "reason": why}

        routes: dict[str, Callable[[], dict[str, Any]]] = {
            "/version": owner.version,
            "/routable": routable,
            "/digests": owner.digests,
        }
        route = routes.get(self.path)
        self._answer(lambda: _found(route, self.path)())

    def do_POST(self) -> None:
        owner = self.server_owner

        with owner._counted():
            self._answer(lambda: owner.generate(self._body(), self._floor()))

    def _floor(self) -> int:
        said: str = self.headers.get(_FLOOR, "0")
        if not (said.isascii() and said.isdigit() and len(said) < 19):
            raise _Refused(400, f"{_FLOOR}: expected a version, found {said[:40]!r}")
        return int(said)

    def _body(self) -> dict[str, Any]:
        if self.path != "/generate":
            raise _Refused(404, f"no {self.path} here: POST /generate")
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            raise _Refused(411, "Content-Length is needed") from None
        with self.bounded.asking(self.connection):
            said = self._read(length)
        try:
            body = json.loads(said)
        except ValueError as e:
            raise _Refused(400, f"the body is not JSON: {e}") from None
        if not isinstance(body, dict):
            raise _Refused(400, "the body is not a JSON object")
        return body

    def _read(self, length: int) -> bytes:
        if not 0 <= length <= _MAX_BODY:
            left = min(length, _DISCARD)  # who still writes when we close hears of a broken pipe, not of its mistake
            while left > 0 and (piece := self.rfile.read(min(left, 1 << 16))):
                left -= len(piece)
            raise _Refused(413, f"the body may have {_MAX_BODY} bytes, this one has {length}")
        return self.rfile.read(length)

    def _answer(self, work: Callable[[], dict[str, Any]]) -> None:
        try:
            answer = work()
            code = 503 if answer.get("routable") is False else 200  # what asks for it looks at the status alone
        except _Refused as e:
            code, answer = e.code, {"error": e.reason}
        except EngineClosed as e:
            code, answer = 503, {"error": str(e)}
        except ValueError as e:  # the model's own limits, as max_len
            code, answer = 400, {"error": str(e)}
        except Exception as e:
            log.exception("generate: %s failed", self.path)
            code, answer = 500, {"error": f"{type(e).__name__}: see this server's log"}
        raw = json.dumps(answer).encode()
        if code != 200:
            self.close_connection = True  # an unread body may follow
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def _found(route: Callable[[], dict[str, Any]] | None, path: str) -> Callable[[], dict[str, Any]]:
    if route is None:
        raise _Refused(404, f"no {path} here: /version, /routable, /digests")
    return route
