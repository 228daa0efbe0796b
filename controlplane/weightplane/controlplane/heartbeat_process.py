"""The heartbeat helper itself: the program that ``HeartbeatHelper`` starts. Imports grpc and the stubs, nothing more.

One line of JSON on stdin says who it beats for; a second one means leave. The end of stdin without it means that the
parent is dying: what runs a GPU closes its pipes at once and is gone a second or more later, and others should know at
once. The helper exits 0 whatever happened: its parent reads the shared page.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import random
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from weightplane.v1 import agent_pb2, agent_pb2_grpc

from .dial import Dial
from .heartbeat import HelperStatus, Page

__all__ = ["Parent", "main", "reason_of"]

_LOOK_S = 0.2  # between two looks at the parent
_BACKOFF_S = (0.1, 1.0)
_EXITING = 0x4  # PF_EXITING of a process's flags in /proc: it runs no code of its own any more
_OUTBOX = 4  # beats that may wait for a stalled stream: older ones are worth nothing


class Parent:
    """The process we beat for, by pid and start time."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = -1
        with contextlib.suppress(OSError, AttributeError):  # not every kernel has it; then /proc has to do
            self._pidfd = os.pidfd_open(pid)
        self._born = self._stat()[1]

    def _stat(self) -> tuple[str, str, int]:
        """(state letter, start time, flags); empty when it is gone."""
        try:
            rest = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return "", "", 0
        return rest[0], rest[19], int(rest[6])

    def state(self) -> agent_pb2.ProcessState.ValueType:
        """RUNNING, STOPPED or DEAD."""
        if self._pidfd >= 0 and _readable([self._pidfd], 0):
            return agent_pb2.PROCESS_STATE_DEAD
        letter, born, _ = self._stat()
        if not letter or born != self._born or os.getppid() != self.pid:
            return agent_pb2.PROCESS_STATE_DEAD
        if letter == "Z" and self._pidfd < 0:
            return agent_pb2.PROCESS_STATE_DEAD
        return agent_pb2.PROCESS_STATE_STOPPED if letter in "tT" else agent_pb2.PROCESS_STATE_RUNNING

    def alive(self) -> bool:
        """Whether it runs code still. Not, as soon as it is on its way out, however long that takes."""
        return self.state() != agent_pb2.PROCESS_STATE_DEAD and not self._stat()[2] & _EXITING

    def wait(self, others: list[int], seconds: float) -> list[int]:
        """Sleep; wakes when the parent dies or one of ``others`` is readable (those are returned)."""
        fds = [*others, self._pidfd] if self._pidfd >= 0 else others
        return _readable(fds, seconds)


def _readable(fds: list[int], seconds: float) -> list[int]:
    """Those of some descriptors that are readable or ended, within that time. (``select`` takes none above 1023.)"""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(math.ceil(1000 * seconds))]


def reason_of(error: Any) -> str:
    """The ``Reason`` in an RPC's rich status; empty if it has none."""
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        return ""
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return str(info.reason)
    return ""


class _Stream:
    """One HEARTBEAT session, from hello to its end."""

    def __init__(self, stub: Any, hello: agent_pb2.Hello, metadata: Any) -> None:
        self._outbox: queue.Queue[agent_pb2.SessionRequest | None] = queue.Queue()
        self._outbox.put(agent_pb2.SessionRequest(hello=hello))
        self.interval = 0.0  # set once welcome
        self.ended = threading.Event()
        self.error: grpc.RpcError | None = None
        self._call = stub.Session(self._requests(), metadata=metadata)
        threading.Thread(target=self._read, name="heartbeat-read", daemon=True).start()

    def _requests(self) -> Iterator[agent_pb2.SessionRequest]:
        while (message := self._outbox.get()) is not None:
            yield message

    def _read(self) -> None:
        try:
            for response in self._call:
                if response.HasField("welcome"):
                    self.interval = max(0.05, response.welcome.heartbeat_ms / 1000)
        except grpc.RpcError as e:
            self.error = e
        finally:
            self.ended.set()
            self._outbox.put(None)

    def beat(self, sequence: int, progress: int, process: agent_pb2.ProcessState.ValueType) -> bool:
        """Send one; False if the stream is stalled."""
        if self._outbox.qsize() >= _OUTBOX:
            return False
        beat = agent_pb2.Heartbeat(sequence=sequence, progress=progress, process=process)
        self._outbox.put(agent_pb2.SessionRequest(heartbeat=beat))
        return True

    def leave(self, seconds: float) -> None:
        """Half-close, let what was written go out, and end."""
        self._outbox.put(None)
        self.ended.wait(seconds)
        self._call.cancel()


class _Beater:
    def __init__(self, spec: dict[str, Any]) -> None:
        self._page = Page(spec["fd"])
        self._parent = Parent(spec["parent"])
        self._dial = Dial.from_dict(spec["dial"])
        self._hello = agent_pb2.Hello(
            group=spec["group"],
            agent_id=spec["agent_id"],
            incarnation=spec["incarnation"],
            kind=agent_pb2.SESSION_KIND_HEARTBEAT,
            software="weightplane heartbeat helper",
        )
        if spec["rank"] >= 0:
            self._hello.trainer.CopyFrom(agent_pb2.TrainerHello(generation=spec["generation"], rank=spec["rank"]))
        self._channel = self._dial.channel()
        self._stub = agent_pb2_grpc.AgentServiceStub(self._channel)
        self._sequence = 0
        self._stdin = [0]
        self._dead = False

    def run(self) -> None:
        """Until the parent dies, stdin ends, or a newer helper took over."""
        backoff = _BACKOFF_S[0]
        while True:
            stream = _Stream(self._stub, self._hello, self._dial.metadata)
            why = self._serve(stream)
            if why:
                self._last_word(stream, why)
                return
            reason, text = _describe(stream.error)
            if reason == "SESSION_SUPERSEDED":
                self._page.say(HelperStatus.SUPERSEDED, text)
                while not self._leave(1.0):
                    pass
                return
            self._page.say(HelperStatus.CONNECTING, f"{reason or 'disconnected'}: {text}")
            backoff = _BACKOFF_S[0] if stream.interval else min(_BACKOFF_S[1], backoff * 2)
            why = self._leave(backoff * random.uniform(0.5, 1.5))
            if why:
                self._last_word(None, why)
                return

    def _serve(self, stream: _Stream) -> str:
        """Beat on one stream until it ends ("") or it is time to leave (why)."""
        due = 0.0
        while not stream.ended.is_set():
            now = time.monotonic()
            if stream.interval and now >= due:
                if not due:
                    self._page.say(HelperStatus.LIVE)
                due = now + stream.interval
                self._beat(stream)
            # until welcome look often, so that the first beat follows at once
            why = self._leave(min(_LOOK_S, max(0.0, due - time.monotonic())) if due else 0.02)
            if why:
                return why
        return ""

    def _beat(self, stream: _Stream) -> None:
        self._sequence += 1
        state = agent_pb2.PROCESS_STATE_DEAD if self._dead else self._parent.state()
        if stream.beat(self._sequence, self._page.progress, state):
            self._page.beats += 1

    def _leave(self, seconds: float) -> str:
        """Sleep; "dead" when the parent died, "stop" when it asked us to leave, else empty."""
        readable = self._parent.wait(self._stdin, seconds)
        if self._parent.state() == agent_pb2.PROCESS_STATE_DEAD:
            return "dead"
        if 0 not in readable:
            return ""
        if os.read(0, 4096):
            return "stop"
        if not self._parent.alive():
            return "dead"
        self._stdin = []  # somebody closed its descriptors: it lives, and is watched by its pid alone
        return ""

    def _last_word(self, stream: _Stream | None, why: str) -> None:
        """Say DEAD, on a new stream if there is none; all of it within 0.8 s."""
        if why == "dead":
            self._dead = True
            if stream is None or stream.ended.is_set():
                stream = _Stream(self._stub, self._hello, self._dial.metadata)
            end = time.monotonic() + 0.4
            while not stream.interval and not stream.ended.is_set() and time.monotonic() < end:
                time.sleep(0.01)
            self._beat(stream)
        if stream is not None:
            stream.leave(0.4)
        self._page.say(HelperStatus.EXITED, why)


def _describe(error: Any) -> tuple[str, str]:
    return (reason_of(error), str(error.details())) if error is not None else ("", "the stream ended")


def _first_line() -> bytes:
    """Who it beats for; empty if it is to leave already. Not buffered: what comes later is waited for by ``select``."""
    read = b""
    while b"\n" not in read:
        more = os.read(0, 1 << 16)
        if not more:
            return b""
        read += more
    line, _, rest = read.partition(b"\n")
    return b"" if rest else line


def main() -> int:
    """The program."""
    line = _first_line()
    if line:
        _Beater(json.loads(line)).run()
        os._exit(0)  # at once: gRPC's own shutdown may take its time, and nothing here needs it
    return 0
