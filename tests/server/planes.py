"""A control plane as the real command on a store, with addresses of its own: it may stand by."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from tests.cli.fleet import ROOT
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc

__all__ = ["Plane"]


def free() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


class Plane:
    """The real command on a store, with addresses of its own."""

    def __init__(self, store: Path, name: str, listen: str = "") -> None:
        self.listen, self.probes = listen or free(), free()
        self.log = store.with_name(f"{name}.log")
        words = ["controlplane", "--listen", self.listen, "--probes", self.probes, "--store", f"sqlite:{store}"]
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "weightplane.cli", *words, "--exit-with", str(os.getpid())]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def ready(self, path: str = "/readyz") -> tuple[int, dict[str, Any]]:
        try:
            with urllib.request.urlopen(f"http://{self.probes}{path}", timeout=10) as said:
                return said.status, json.load(said)
        except urllib.error.HTTPError as e:
            return e.code, json.load(e)
        except OSError:
            return 0, {}

    def until(self, look: Callable[[], bool], seconds: float = 40) -> None:
        end = time.monotonic() + seconds
        while not look():
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)

    def leads(self) -> bool:
        return self.ready()[0] == 200

    def stands_by(self) -> bool:
        return "stands by" in self.log.read_text()

    def groups(self) -> list[str]:
        with grpc.insecure_channel(self.listen) as channel:
            asked = fleet_pb2_grpc.FleetServiceStub(channel).ListGroups(fleet_pb2.ListGroupsRequest(), timeout=5)
            return [g.group for g in asked.groups]
