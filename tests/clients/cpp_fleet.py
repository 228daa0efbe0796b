"""A control plane and replicas as processes, and the C++ trainer that publishes to them."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import torch

from tests.cli.fleet import Launched
from tests.clients.files import save
from tests.clients.needs import PROGRAM
from tests.process.harness import eventually
from weightplane.trainer_agent.sources_safetensors import SafetensorsSource
from weightplane.transports.digest import digest_tensor, hex_digest
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc, update_pb2

__all__ = ["Fleet", "digests_of", "weights"]


class Fleet:
    """A control plane, and replicas whose live digests can be asked for."""

    def __init__(
        self,
        launched: Launched,
        *plane: str,
        env: Mapping[str, str] | None = None,
        plane_env: Mapping[str, str] | None = None,
    ) -> None:
        """``plane``: more options of the control plane; ``env``: of every agent, ``plane_env`` of the control plane."""
        self.program = PROGRAM
        self.launched, self.env = launched, dict(env or {})
        words = ["--listen", "127.0.0.1:0", "--store", "memory:", "--beat", "0.2", "--ttl", "3", *plane]
        started = launched.start("plane", "controlplane", *words, env=dict(plane_env or {}))
        self.address = str(started["address"])
        self.serving: dict[str, str] = {}

    def replica(
        self, name: str, path: Path, *, staged: bool = True, device: str = "cpu", only: str = "", **env: str
    ) -> None:
        """``only``: the one transport that it offers."""
        options = {"path": str(path), "staged": staged, "device": device}
        flags = [f"--engine-option={k}={json.dumps(v)}" for k, v in options.items()]
        words = ["--address", self.address, "-g", "g", "--replica-id", name, "--generate", "127.0.0.1:0"]
        words += ["--transport", only] if only else []
        engine = ["--engine", "tests.cli.blank_engine:make", *flags]
        started = self.launched.start(name, "inference-agent", *words, *engine, env={**self.env, **env})
        self.serving[name] = started["generate"]
        request = fleet_pb2.ListReplicasRequest(group="g")
        with self.asked() as fleet:

            def here() -> bool:
                if not fleet.ListGroups(fleet_pb2.ListGroupsRequest(), timeout=10).groups:
                    return False
                return name in {r.replica_id for r in fleet.ListReplicas(request, timeout=10).replicas}

            eventually(here, f"{name} is here")

    @contextmanager
    def asked(self) -> Iterator[fleet_pb2_grpc.FleetServiceStub]:
        with self.viewer() as channel:
            yield fleet_pb2_grpc.FleetServiceStub(channel)

    def viewer(self) -> grpc.Channel:
        """A connection of somebody who may look."""
        return grpc.insecure_channel(self.address)

    def get(self, name: str, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://{self.serving[name]}{path}", timeout=30) as answer:
            return dict(json.load(answer))

    def newest(self) -> update_pb2.UpdateInfo | None:
        with self.asked() as fleet:
            if not fleet.ListGroups(fleet_pb2.ListGroupsRequest(), timeout=10).groups:
                return None
            updates = fleet.ListUpdates(fleet_pb2.ListUpdatesRequest(group="g"), timeout=10).updates
            return updates[0] if updates else None

    def sends(self, version: int) -> bool:
        """Whether bytes of this version move: some are in place."""
        newest = self.newest()
        return newest is not None and newest.version == version and newest.phase == update_pb2.UPDATE_PHASE_TRANSFERRING

    def command(self, *args: str) -> list[str]:
        return [str(self.program), "--address", self.address, "--group", "g", *args]

    def publish(self, *args: str, code: int = 0, env: Mapping[str, str] | None = None) -> dict[str, Any]:
        merged = {**os.environ, **(env or {})}
        try:
            done = subprocess.run(
                self.command(*args), env=merged, capture_output=True, text=True, timeout=90, check=False
            )
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end: {self.newest()}\n{self.launched.log('plane')[-4000:]}") from None
        assert done.returncode == code, f"{args}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        said: dict[str, Any] = json.loads(done.stdout)
        assert said["committed"] == (code == 0) and bool(done.stderr) == (code != 0), done.stderr
        return said


def digests_of(path: Path) -> dict[str, str]:
    source = SafetensorsSource(path)
    return {m.name: hex_digest(digest_tensor(source.tensor(i)[0])) for i, m in enumerate(source.manifest())}


def weights(path: Path, value: float, names: str = "w", size: int = 1 << 21) -> Path:
    """8 MiB a tensor, and small ones of odd shapes."""
    tensors = {f"{names}{i}": torch.full((size,), value + i) for i in range(4)}
    odd = {"scalar": torch.tensor(value), "empty": torch.zeros(0, 3), "thin": torch.full((3, 5, 7), value).bfloat16()}
    return save(path, {**tensors, **odd})
