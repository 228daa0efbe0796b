"""A fleet of real processes that the test may kill, restart and question. Nothing here reaches into a process."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc

from tests import warm
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc, update_pb2

ROOT = Path(__file__).resolve().parents[2]
BEAT_S, TTL_S = 0.2, 3.0  # a SIGKILL is told at once by the heartbeat's process; the TTL only forgives a busy machine
GROUP = "g"
T = TypeVar("T")

__all__ = ["BEAT_S", "TTL_S", "Child", "Fleet", "Trainer", "eventually", "http"]


def eventually(look: Callable[[], T], what: str, timeout: float = 30.0) -> T:
    """Poll until truthy; the value."""
    end = time.monotonic() + timeout
    while True:
        value = look()
        if value:
            return value
        assert time.monotonic() < end, f"not within {timeout} s: {what}"
        time.sleep(0.01)


def http(address: str, path: str, body: dict[str, Any] | None = None, timeout: float = 30.0) -> tuple[int, Any]:
    """(status, answer); raises ``OSError`` when nobody answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{address}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


class Child:
    """One process. It warms up at once and becomes something by ``become``."""

    def __init__(self, folder: Path, env: dict[str, str], prefix: tuple[str, ...] = ()) -> None:
        self.folder, self.name = folder, "spare"
        log = (folder / f"log-{time.monotonic_ns()}").open("wb")
        self._log = Path(log.name)
        with log:
            self.process = warm.Popen(
                [*prefix, sys.executable, "-m", "tests.process.launch", str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **env},
            )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b"{"):
                self._lines.put(line)
        self._lines.put(b"")

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def started(self) -> int:
        """Its start time, in the kernel's clock ticks since boot: with the pid it names one life."""
        return int(Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[19])

    @property
    def life(self) -> tuple[int, int]:
        return self.pid, self.started

    def tell(self, what: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.stdin.flush()

    def heard(self, timeout: float) -> dict[str, Any] | None:
        """Its next answer; None: it died instead."""
        line = self._lines.get(timeout=timeout)
        return json.loads(line) if line else None

    def become(self, name: str, argv: list[str]) -> None:
        self.name = name
        self.tell({"name": name, "argv": argv})

    def announced(self, timeout: float = 60.0) -> dict[str, Any]:
        path = self.folder / f"{self.name}.json"

        def look() -> bool:
            assert self.process.poll() is None, f"{self.name} ended: {self.log()}"
            return path.exists()

        eventually(look, f"{self.name} is ready", timeout)
        facts: dict[str, Any] = json.loads(path.read_text())
        path.unlink()
        return facts

    def log(self) -> str:
        return self._log.read_bytes()[-6000:].decode(errors="replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self, timeout: float = 20.0) -> int:
        """Let it end by itself, which what reads its standard input does when that ends."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(timeout)

    def died(self, timeout: float = 20.0) -> int:
        """Wait for its end; the wait status as ``Popen`` gives it: -9 for SIGKILL."""
        return self.process.wait(timeout)


class Trainer(Child):
    """What ``tests.process.trainer`` answers."""

    def publish(self, step: int, *, mutate: bool = False, **options: Any) -> dict[str, Any] | None:
        """The receipt, or what was raised; None: the trainer died."""
        self.begin(step, mutate=mutate, **options)
        return self.heard(60)

    def begin(self, step: int, *, mutate: bool = False, **options: Any) -> None:
        self.tell({"do": "publish", "step": step, "mutate": mutate, "options": options})

    def ask(self, **order: Any) -> dict[str, Any]:
        self.tell(order)
        said = self.heard(70)
        assert said is not None, f"the trainer died: {self.log()}"
        return said


class Fleet:
    """A context. ``spares``: processes kept warm, so that a restart takes no time of the test's."""

    def __init__(
        self,
        folder: Path,
        engine: str = "tests.process.coded:make",
        *,
        options: tuple[str, ...] = (),
        transport: str = "shm",
        bucket_bytes: int = 4096,
        env: dict[str, str] | None = None,
        spares: int = 2,
        beat_s: float = BEAT_S,
        ttl_s: float = TTL_S,
    ) -> None:
        self.beat_s, self.ttl_s = beat_s, ttl_s
        self.folder, self.engine, self.options = folder, engine, options
        self.transport, self.bucket_bytes = transport, bucket_bytes
        self._env, self._spares = env or {}, spares
        self.prefix: tuple[str, ...] = ()  # of each command: what it is run by
        self.store = folder / "store.db"
        self._warm: list[Child] = []
        self._all: list[Child] = []
        self.address = "127.0.0.1:0"
        self.children: dict[str, Child] = {}
        self.serving: dict[str, str] = {}
        self.trainers = 0
        self._channel: grpc.Channel | None = None

    # --- processes

    def _take(self, kind: type[Child] = Child) -> Any:
        while len(self._warm) < self._spares + 1:
            fresh = Trainer(self.folder, self._env, self.prefix)
            self._warm.append(fresh)
            self._all.append(fresh)
        return self._warm.pop(0)

    def start_plane(self) -> None:
        child = self._take()
        argv = ["controlplane", "--listen", self.address, "--store", f"sqlite:{self.store}"]
        argv += ["--beat", str(self.beat_s), "--ttl", str(self.ttl_s), "--log-level", "info"]
        child.become("plane", [*argv, *self._launched("plane")])
        self.children["plane"] = child
        self.address = child.announced()["address"]
        if self._channel is None:
            options = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)]
            self._channel = grpc.insecure_channel(self.address, options)
            self.fleet = fleet_pb2_grpc.FleetServiceStub(self._channel)

    def start_replica(self, name: str) -> None:
        self.begin_replica(name)
        self.await_replica(name)

    def begin_replica(
        self,
        name: str,
        *,
        engine: str = "",
        options: tuple[str, ...] = (),
        generate: bool = True,
        argv: tuple[str, ...] = (),
    ) -> None:
        child = self._take()
        words = ["inference-agent", "--address", self.link(name), "--group", GROUP, "--replica-id", name]
        words += ["--engine", engine or self.engine, "--transport", self.transport, *argv]
        for option in (*self.options, *options):
            words += ["--engine-option", option]
        if generate:
            words += ["--generate", "127.0.0.1:0"]
        child.become(name, [*words, *self._launched(name)])
        self.children[name] = child

    def await_replica(self, name: str) -> None:
        """Until the control plane knows this life and what it holds."""
        serving = self.children[name].announced()["generate"]
        if serving:
            self.serving[name] = serving

        def here() -> bool:
            info = self.replicas().get(name)
            if info is None or info.liveness != fleet_pb2.LIVENESS_LIVE:
                return False
            return not serving or info.serving_address == serving

        eventually(here, f"{name} is here")

    def link(self, name: str) -> str:
        """Where this member dials the control plane."""
        return self.address

    def start(self, name: str, argv: list[str]) -> Child:
        child: Child = self._take()
        child.become(name, argv)
        self.children[name] = child
        return child

    def start_trainer(self) -> Trainer:
        child: Trainer = self._take()
        self.trainers += 1
        argv = ["trainer", self.link("trainer"), f"trainer-{self.trainers}", self.transport, str(self.bucket_bytes)]
        child.become("trainer", argv)
        self.children["trainer"] = child
        return child

    @property
    def trainer(self) -> Trainer:
        child = self.children["trainer"]
        assert isinstance(child, Trainer)
        return child

    def _launched(self, name: str) -> list[str]:
        return ["--announce", str(self.folder / f"{name}.json"), "--exit-with", str(os.getpid())]

    def lives(self, *but: str) -> dict[str, tuple[int, int]]:
        return {n: c.life for n, c in self.children.items() if n not in but and c.process.poll() is None}

    # --- faults

    def arm(self, name: str, point: str, nth: int = 1, action: str = "kill") -> None:
        path = self.folder / f"{name}.arm"
        (self.folder / f"{name}.fired").unlink(missing_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"point": point, "nth": nth, "action": action}))
        part.replace(path)

    def fired(self, name: str) -> bool:
        return (self.folder / f"{name}.fired").exists()

    # --- questions

    def replicas(self) -> dict[str, fleet_pb2.ReplicaInfo]:
        """Empty when the group is not known, or nobody answers."""
        try:
            answer = self.fleet.ListReplicas(fleet_pb2.ListReplicasRequest(group=GROUP), timeout=5)
        except grpc.RpcError:
            return {}
        return {r.replica_id: r for r in answer.replicas}

    def check(self, name: str, min_version: int = 0) -> fleet_pb2.CheckReplicaResponse | None:
        """The three answers; None when nobody answers."""
        request = fleet_pb2.CheckReplicaRequest(group=GROUP, replica_id=name, min_version=min_version)
        try:
            answer: fleet_pb2.CheckReplicaResponse = self.fleet.CheckReplica(request, timeout=5)
        except grpc.RpcError:
            return None
        return answer

    def updates(self) -> list[update_pb2.UpdateInfo]:
        """Newest first."""
        try:
            answer = self.fleet.ListUpdates(fleet_pb2.ListUpdatesRequest(group=GROUP), timeout=5)
        except grpc.RpcError:
            return []
        return list(answer.updates)

    def holds(self, name: str) -> dict[str, Any]:
        """What a replica's engine itself says."""
        status, answer = http(self.serving[name], "/version")
        assert status == 200
        return dict(answer)

    def generate(self, name: str, tokens: int = 3) -> tuple[int, Any]:
        body = {"prompts": [[1]], "max_new_tokens": tokens, "temperature": 0.0, "seed": 0}
        return http(self.serving[name], "/generate", body)

    def digests(self, name: str) -> dict[str, str]:
        status, answer = http(self.serving[name], "/digests")
        assert status == 200, answer
        return dict(answer)

    def logs(self) -> str:
        return "\n".join(f"--- {c.name} ({c.pid})\n{c.log()}" for c in self._all if c.name != "spare")

    # --- lifetime

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._channel is not None:
            self._channel.close()
        for child in self._all:
            if child.process.poll() is None:
                child.process.kill()
        for child in self._all:
            child.process.wait()
            for pipe in (child.process.stdin, child.process.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except OSError:
                        pass
