"""The agent's end of the sessions that its engine's workers hold: a private unix socket, one connection per worker."""

from __future__ import annotations

import hmac
import itertools
import logging
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from weightplane.inference_agent.threads import detached
from weightplane.inference_agent.vllm_plugin.session import error_from
from weightplane.inference_agent.vllm_plugin.wire import MOST, Hello, Link, LinkLost, State, same_user
from weightplane.transports.base import ChannelAborted

from ..base import EngineError
from .leftovers import PREFIX, SOCKET, sweep

__all__ = ["Listener", "WorkerLink"]

log = logging.getLogger("weightplane.inference_agent")

_HELLO_S = 10.0
_FIRST = 64 << 10  # bytes of a hello: what one who has not shown the token may make us hold
_GREETED = 64  # at once; others wait in the socket's queue
_SEND_S = 10  # a worker that is stopped takes nothing more: then its connection counts as lost
_LOOK_S = 0.1


class WorkerLink:
    """The session with one worker. Thread-safe."""

    def __init__(self, link: Link, hello: Hello, on_lost: Callable[[WorkerLink], None]) -> None:
        self.hello = hello
        self.state: State = hello.state
        self.landed = 0
        self._link, self._on_lost = link, on_lost
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._open: dict[int, Future[Any]] = {}
        self.lost = ""
        threading.Thread(target=self._run, name=f"weightplane-worker-{hello.rank}", daemon=True).start()

    def call(self, do: str, timeout: float, cancelled: Callable[[], str] = lambda: "", **fields: Any) -> Any:
        """Ask the worker's data thread. Raises what it raised there; ``EngineError`` if it is gone or late.

        ``cancelled``: why the wait is to end early (``ChannelAborted``), empty while it is not.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self.lost:
                raise EngineError(f"vLLM's worker {self.hello.rank} is gone: {self.lost}")
            number = next(self._ids)
            self._open[number] = future
        end = time.monotonic() + timeout
        try:
            try:
                self._link.send({"id": number, "do": do, **fields})
            except LinkLost as e:
                raise EngineError(f"vLLM's worker {self.hello.rank} is gone: {e}") from e
            while True:
                try:
                    return future.result(min(_LOOK_S, max(0.0, end - time.monotonic())))
                except TimeoutError:
                    if future.done():  # it was answered just now
                        return future.result()
                    if why := cancelled():
                        raise ChannelAborted(why) from None
                    if time.monotonic() >= end:
                        raise EngineError(
                            f"vLLM's worker {self.hello.rank} did not answer {do!r} within {timeout:.1f} s"
                        ) from None
        finally:
            with self._lock:
                self._open.pop(number, None)

    def post(self, do: str, **fields: Any) -> None:
        """Say something that has no answer, from a thread of its own: this one must not block."""

        def send() -> None:
            try:
                self._link.send({"id": 0, "do": do, **fields})
            except LinkLost as e:
                log.debug("worker %d: %s was not said: %s", self.hello.rank, do, e)

        detached("weightplane-post", send)

    def close(self) -> None:
        """End the session. Idempotent."""
        self._link.close()

    def _run(self) -> None:
        try:
            while True:
                self._take(self._link.receive())
        except (LinkLost, KeyError, ValueError, TypeError) as e:
            why = str(e) or type(e).__name__
        self._link.close()
        with self._lock:
            self.lost = why
            waiting = list(self._open.values())
        for future in waiting:
            if not future.done():
                future.set_exception(EngineError(f"vLLM's worker {self.hello.rank} is gone: {why}"))
        self._on_lost(self)

    def _take(self, m: dict[str, Any]) -> None:
        told = m.get("tell")
        if told == "state":
            self.state = State.of(m)
        elif told == "landed":
            self.landed = int(m["landed"])
        elif "id" in m:
            with self._lock:
                future = self._open.get(m["id"])
            if future is not None:
                if "error" in m:
                    future.set_exception(error_from(m["error"]))
                else:
                    future.set_result(m["ok"])


class Listener:
    """Listens in a folder of its own, readable by this user only. ``on_hello``: a worker with a token that it knows."""

    def __init__(self, folder: str | None, on_hello: Callable[[str, Link, Hello], None]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
        self.path = str(self.folder / SOCKET)
        self._on_hello = on_hello
        self._tokens: set[str] = set()
        self._room = threading.BoundedSemaphore(_GREETED)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.bind(self.path)
        except OSError as e:
            self._sock.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            raise EngineError(f"the socket {self.path} cannot be made: {e} (choose a shorter socket_dir)") from e
        self._sock.listen(64)
        if folder is None:  # one that was named may be another machine's, too, whose agents we cannot see
            sweep(self.folder.parent, self.folder)
        threading.Thread(target=self._accept, name="weightplane-workers", daemon=True).start()

    def expect(self, tokens: set[str]) -> None:
        """Let in who knows one of these; no others."""
        self._tokens = set(tokens)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed before
        self._sock.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                return
            self._room.acquire()
            threading.Thread(target=self._greet, args=(sock,), name="weightplane-greet", daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        try:
            self._let_in(sock)
        finally:
            self._room.release()

    def _let_in(self, sock: socket.socket) -> None:
        try:
            same_user(sock)
            sock.settimeout(_HELLO_S)
            link = Link(sock, _FIRST)
            m = link.receive()
            token = str(m.pop("token", ""))
            if m.pop("tell", "") != "hello" or not any(hmac.compare_digest(token, t) for t in self._tokens):
                raise ValueError("it does not know the token of this attachment")
            hello = Hello.of({**m, "token": token})
            link.most = MOST
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
        except (OSError, ValueError, KeyError, TypeError) as e:
            log.error("a worker was not let in: %s", e)
            sock.close()
            return
        self._on_hello(token, link, hello)
        try:
            link.send({"do": "welcome"})
        except LinkLost as e:
            log.debug("worker %d left at once: %s", hello.rank, e)
