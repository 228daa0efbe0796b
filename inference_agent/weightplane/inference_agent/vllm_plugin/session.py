"""The thread that answers the agent from inside a vLLM worker, and the failures it passes on. No torch.

It lives beside vLLM's own threads: while the engine core is stuck in a call of ours it still answers and aborts.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

from weightplane.transports.base import ChannelAborted, ChannelTimeout, PeerLost, TransportError

from ..engines.base import EngineError
from .wire import Hello, Link, LinkLost, State, same_user

if TYPE_CHECKING:
    from .worker import WorkerReplica

__all__ = ["WorkerSession", "error_from", "error_json"]

log = logging.getLogger("weightplane.vllm")

_CONNECT_S = 10.0
_LANDED_S = 0.2  # between two tellings of how much landed

_TRANSPORT: dict[str, type[TransportError]] = {
    c.__name__: c for c in (TransportError, ChannelAborted, ChannelTimeout, PeerLost)
}


def error_json(e: BaseException) -> dict[str, Any]:
    """An exception as the agent can raise it again."""
    if isinstance(e, TransportError):
        kind = type(e).__name__ if type(e).__name__ in _TRANSPORT else TransportError.__name__
        return {"kind": kind, "text": str(e), "peers": list(e.peers), "bucket": e.bucket}
    if isinstance(e, EngineError):
        return {"kind": "EngineError", "text": str(e), "tensors": list(e.tensors)}
    if isinstance(e, MemoryError):
        return {"kind": "MemoryError", "text": str(e)}
    if isinstance(e, OSError) and e.errno is not None:
        return {"kind": "OSError", "text": e.strerror or str(e), "errno": e.errno}
    return {"kind": "EngineError", "text": f"{type(e).__name__}: {e}", "tensors": []}


def error_from(j: dict[str, Any]) -> Exception:
    """Back."""
    kind, text = j["kind"], str(j["text"])
    if kind in _TRANSPORT:
        return _TRANSPORT[kind](text, peers=tuple(j["peers"]), bucket=int(j["bucket"]))
    if kind == "MemoryError":
        return MemoryError(text)
    if kind == "OSError":
        return OSError(int(j["errno"]), text)
    return EngineError(text, tuple(j.get("tensors", ())))


class WorkerSession:
    """One connection to one agent. ``start`` dials and says hello, or raises; ``stop`` ends it."""

    def __init__(self, worker: WorkerReplica, path: str, hello: Hello) -> None:
        self._worker, self._path, self._hello = worker, path, hello
        self._link: Link | None = None
        self._ended, self._met = threading.Event(), threading.Event()

    def start(self) -> WorkerSession:
        """Dial the agent's socket. ``RuntimeError`` says why that does not work."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(_CONNECT_S)
        try:
            sock.connect(self._path)
            same_user(sock)  # whoever reaches vLLM's HTTP port can name a path to us
        except OSError as e:
            sock.close()
            raise RuntimeError(
                f"weightplane: worker {self._hello.rank} cannot reach its agent's socket {self._path}: {e}; the agent "
                f"runs on this host as this user and shares that folder with vLLM (--engine-option socket_dir=…)"
            ) from e
        sock.settimeout(None)
        self._link = Link(sock)
        self._link.send({"tell": "hello", **self._hello.json()})
        self._worker.on_state = self._tell_state
        for name, run in (("session", self._run), ("landed", self._tell_landed)):
            threading.Thread(target=run, name=f"weightplane-{name}", daemon=True).start()
        self._met.wait(_CONNECT_S)  # whoever made us dial may count on it: the agent knows of us
        return self

    def stop(self) -> None:
        """End the connection; what is under way is dropped by the thread that notices. Idempotent."""
        self._ended.set()
        if self._link is not None:
            self._link.close()

    @property
    def path(self) -> str:
        """The agent's socket: another one, another agent."""
        return self._path

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end: an agent that was killed is noticed by the kernel's word, at once."""
        return self._ended.wait(seconds)

    @property
    def over(self) -> bool:
        """Whether the agent is gone, or was let go."""
        return self._ended.is_set()

    def _tell_state(self, state: State) -> None:
        self._send({"tell": "state", **state.json()})

    def _tell_landed(self) -> None:
        told = 0
        while not self._ended.wait(_LANDED_S):
            landed = self._worker.landed
            if landed != told:
                told = landed
                self._send({"tell": "landed", "landed": landed})

    def _send(self, message: dict[str, Any]) -> None:
        assert self._link is not None
        try:
            self._link.send(message)
        except LinkLost as e:
            log.info("weightplane: the agent is gone: %s", e)

    def _run(self) -> None:
        assert self._link is not None
        try:
            while True:
                message = self._link.receive()
                self._met.set()
                self._take(message)
        except LinkLost as e:
            self._met.set()
            if not self._ended.is_set():
                log.warning("weightplane: worker %d lost its agent (pid %d): %s", self._hello.rank, os.getpid(), e)
        self._ended.set()
        self._worker.abort("", "the agent is gone")
        self._worker.submit(self._worker.agent_gone)

    def _take(self, m: dict[str, Any]) -> None:
        if m["do"] == "welcome":
            return
        if m["do"] == "abort":  # here and now: the data thread may be what is to be freed
            self._worker.abort(m["update_id"], m["reason"])
            return
        if m["do"] == "drop":  # it comes behind what the data thread does by itself
            self._worker.leave(m["update_id"], m["reason"])

        def work() -> None:
            try:
                answer = {"id": m["id"], "ok": self._worker.do(m["do"], m)}
            except Exception as e:
                log.info("weightplane: %s failed: %s: %s", m["do"], type(e).__name__, e)
                answer = {"id": m["id"], "error": error_json(e)}
            self._send(answer)

        self._worker.submit(work)
