"""Six hosts: a control plane, two trainer ranks, three replicas, by the real commands with their real options."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc

from tests.hosts.net import Network
from tests.process.coded import step_of
from tests.process.harness import GROUP, ROOT, eventually, http
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc

__all__ = ["HOSTS", "REPLICAS", "TRAINERS", "Hosts"]

REPLICAS = ("i0", "i1", "i2")
TRAINERS = ("t0", "t1")
HOSTS = ("cp", *TRAINERS, *REPLICAS)
_DATA, _GENERATE, _PLANE, _PROBES = 7460, 8000, 7450, 7451


class Hosts:
    """A context. Every host has a shared-memory directory of its own, as machines have."""

    def __init__(self, folder: Path, network: Network, transport: str, env: Mapping[str, str]) -> None:
        self.folder, self.network, self.transport = folder, network, transport
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", "WEIGHTPLANE_INSECURE": "1", **env}
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._said: dict[str, queue.SimpleQueue[str]] = {}
        self.plane = f"{network.address['cp']}:{_PLANE}"

    # --- processes

    def start(self, host: str, *words: str, **env: str) -> None:
        memory = self.folder / f"shm-{host}"
        memory.mkdir(exist_ok=True)
        with (self.folder / f"{host}.log").open("ab") as log:
            self.processes[host] = subprocess.Popen(
                [*self.network.on(host), sys.executable, "-m", *words],
                cwd=ROOT,
                env={**self._env, "WEIGHTPLANE_SHM_DIR": str(memory), **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._said[host] = lines
        threading.Thread(target=self._read, args=(self.processes[host], lines), daemon=True).start()

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                lines.put(line)

    def command(self, host: str, *words: str, **env: str) -> None:
        """One of weightplane's own; it is up once it has announced itself."""
        path = self.folder / f"{host}.json"
        path.unlink(missing_ok=True)
        self.start(host, "weightplane.cli", *words, "--announce", str(path), "--exit-with", str(os.getpid()), **env)
        eventually(lambda: path.exists() or self._dead(host), f"{host} is up: {self.log(host)}", 60)

    def _dead(self, host: str) -> bool:
        assert self.processes[host].poll() is None, self.log(host)
        return False

    def log(self, host: str) -> str:
        return (self.folder / f"{host}.log").read_text(errors="replace")[-20000:]

    def __enter__(self) -> Hosts:
        at = self.network.address
        beats = ("--beat", "0.2", "--ttl", "2")
        probes = ("--probes", f"{at['cp']}:{_PROBES}", "--insecure")
        store = ("--store", f"sqlite:{self.folder / 'store.db'}")
        self.command("cp", "controlplane", "--listen", self.plane, *probes, *store, *beats)
        self._channel = grpc.insecure_channel(self.plane)
        self.fleet = fleet_pb2_grpc.FleetServiceStub(self._channel)
        for host in REPLICAS:
            self.replica(host)
        for rank, host in enumerate(TRAINERS):
            words = ("tests.hosts.trainer", self.plane, str(rank), str(len(TRAINERS)), self.transport)
            where = {"WEIGHTPLANE_PULL_BIND": f"{at[host]}:{_DATA}", "UCX_NET_DEVICES": "eth0"}
            self.start(host, *words, **where)
        for host in TRAINERS:
            assert "ready" in self.heard(host, 60)
        return self

    def replica(self, host: str) -> None:
        at = self.network.address[host]
        words = ["inference-agent", "--address", self.plane, "--group", GROUP, "--replica-id", host, "--insecure"]
        words += ["--engine", "tests.process.coded:make", "--transport", self.transport]
        words += ["--advertise", f"{at}:{_DATA}", "--interface", "eth0", "--generate", f"{at}:{_GENERATE}"]
        self.command(host, *words)

    def __exit__(self, *exc: object) -> None:
        self._channel.close()
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                try:
                    pipe.close()
                except OSError:
                    pass

    # --- orders and questions

    def tell(self, host: str, **order: Any) -> None:
        pipe = self.processes[host].stdin
        assert pipe is not None
        pipe.write(json.dumps(order) + "\n")
        pipe.flush()

    def heard(self, host: str, seconds: float = 60.0) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._said[host].get(timeout=seconds))
        except queue.Empty:
            log = self.folder / f"{host}.log"
            before = log.stat().st_size
            self.processes[host].send_signal(signal.SIGUSR1)
            eventually(lambda: log.stat().st_size > before, f"{host} says where it stands", 10)
            raise AssertionError(f"{host} says nothing: {self.log(host)}") from None
        return found

    def publish(self, step: int, during: Callable[[], None] | None = None, **options: Any) -> list[dict[str, Any]]:
        """Each rank's answer, with the seconds that the whole took."""
        began = time.monotonic()
        for host in TRAINERS:
            self.tell(host, step=step, options=options)
        if during is not None:
            during()
        answers = [self.heard(host) for host in TRAINERS]
        return [{**a, "took": time.monotonic() - began} for a in answers]

    def wait(self, count: int) -> None:
        for host in TRAINERS:
            self.tell(host, count=count)
        for host in TRAINERS:
            answer = self.heard(host)
            assert answer["ok"], answer

    def info(self, host: str) -> fleet_pb2.ReplicaInfo | None:
        request = fleet_pb2.ListReplicasRequest(group=GROUP)
        found = self.fleet.ListReplicas(request, timeout=5).replicas
        return next((r for r in found if r.replica_id == host), None)

    def routable(self) -> list[str]:
        """As a router on another host is told."""
        _, said = http(f"{self.network.address['cp']}:{_PROBES}", f"/groups/{GROUP}/routable")
        return sorted(said.get("replicas", {}))

    def serves(self, host: str) -> int | None:
        """The step that a replica's tokens were made with, asked over the network."""
        body = {"prompts": [[1]], "max_new_tokens": 2, "temperature": 0.0, "seed": 0}
        status, said = http(f"{self.network.address[host]}:{_GENERATE}", "/generate", body)
        assert status == 200, said
        steps = {step_of(t) for c in said["completions"] for t in c["tokens"]}
        assert len(steps) == 1
        return steps.pop()
