"""The control plane under a thousand agents: the start barrier, an empty publish, heartbeats; plaintext and mTLS.

Server, agents and trainer are three processes on this machine, through core and SQLite store; each agent has two TCP
connections of its own (session, heartbeats). **Start barrier**: StartUpdate's call to its return, every replica having
joined. **Empty publish**: StartUpdate's call to FinishUpdate's return, no tensors, every replica READY. **Heartbeats**:
CPU of the server's process while each agent beats once a second. Each stands beside the design's bound for 2 cores and
beside gRPC alone in the same run (``_bare_plane.py``: the same messages between the same processes, nothing decided).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from benchmarks._common import SAMPLES, WARM_UPS, Report, Result, Rounds, parser
from benchmarks.control_plane_agents import GROUP, dial
from weightplane.controlplane.core.manifest import Manifest
from weightplane.v1 import tensor_pb2 as tn
from weightplane.v1 import transport_pb2 as tp
from weightplane.v1 import weight_transfer_pb2 as wt
from weightplane.v1 import weight_transfer_pb2_grpc as wt_grpc

HERE = Path(__file__).resolve().parent
SERVER = str(HERE / "_server.py")
BARRIER_S, PUBLISH_S, BEATS_CORES = 0.30, 0.015, 0.30
FEW = 8  # agents, of the empty publish


@contextmanager
def process(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A child that is gone at the end."""
    child = subprocess.Popen([sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def line(child: subprocess.Popen[str]) -> str:
    """What a child says next."""
    assert child.stdout is not None
    said = child.stdout.readline().strip()
    if not said:
        raise RuntimeError(f"a process of the benchmark ended: {child.wait()}")
    return said


def tell(child: subprocess.Popen[str], word: str) -> None:
    """Say a word to a child."""
    assert child.stdin is not None
    child.stdin.write(f"{word}\n")
    child.stdin.flush()


class Trainer:
    """One rank, by hand."""

    def __init__(self, address: str, tls: list[str]) -> None:
        self.channel = dial(address, tls)
        self.stub = wt_grpc.WeightTransferServiceStub(self.channel)
        self.manifest = Manifest.of([])
        self.generation = 0
        self.numbers = iter(range(1 << 30))

    def named(self) -> dict[str, Any]:
        """The fields that every call has."""
        return {"request_id": f"q{next(self.numbers)}", "group": GROUP, "generation": self.generation}

    async def init(self) -> None:
        """Hold the group; send the empty manifest."""
        offer = tp.Rendezvous(transport="grpc", grpc=tp.GrpcRendezvous())
        named = self.named()
        request = wt.InitTransferRequest(**named, trainer_id="bench", incarnation="i", offers=[offer], host_id="h")
        self.generation = (await self.stub.InitTransfer(request, timeout=60)).generation
        manifest = {**self.named(), "manifest_id": self.manifest.id}
        await self.stub.PutManifest(wt.PutManifestRequest(**manifest), timeout=60)
        placement = tn.Placement(member="rank/0", full=True)
        await self.stub.PutPlacement(
            wt.PutPlacementRequest(**{**manifest, "request_id": "place"}, placement=placement), timeout=60
        )

    async def hold(self) -> None:
        """The lease of a trainer without a session: it follows every update."""
        async for _ in self.stub.WatchUpdate(wt.WatchUpdateRequest(group=GROUP, generation=self.generation)):
            pass

    async def start(self) -> wt.StartUpdateResponse:
        """The start barrier."""
        request = wt.StartUpdateRequest(**self.named(), manifest_id=self.manifest.id)
        started: wt.StartUpdateResponse = await self.stub.StartUpdate(request, timeout=60)
        return started

    async def abort(self) -> None:
        """Undo a start; what it still tells the agents is over before the next one."""
        await self.stub.AbortUpdate(wt.AbortUpdateRequest(**self.named(), reason="again"), timeout=60)
        await asyncio.sleep(0.5)

    async def publish(self) -> float:
        """A whole update of nothing; the seconds that it took."""
        began = time.perf_counter()
        u = await self.start()
        of: dict[str, Any] = {"update_id": u.update_id, "epoch": u.epoch}
        await self.stub.UpdateWeights(wt.UpdateWeightsRequest(**self.named(), **of, seq=1), timeout=60)
        for c in u.channels:
            await self.stub.PutDigests(wt.PutDigestsRequest(**self.named(), **of, plan_id=c.plan_id), timeout=60)
        done = await self.stub.FinishUpdate(wt.FinishUpdateRequest(**self.named(), **of), timeout=60)
        assert len(done.update.outcomes) == len(u.participants)
        return time.perf_counter() - began


def cpu_s(pid: int) -> float:
    """CPU seconds that a process used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Samples:
    """Seconds of start barriers and of empty publishes; cores that the server keeps busy for heartbeats."""

    barrier: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    publish: list[float] = field(default_factory=list)


async def measure(
    found: Samples, server: list[str], tls: list[str], agents: int, samples: int, patience: float
) -> None:
    """A server of its own, with as many agents: barriers and heartbeats, or publishes if there are only a few."""
    with process(*server) as plane:
        address = line(plane)
        with process(str(HERE / "control_plane_agents.py"), address, str(agents), *tls) as fleet:
            line(fleet)
            trainer = Trainer(address, tls)
            await trainer.init()
            holding = asyncio.create_task(trainer.hold())
            rounds = Rounds(samples, WARM_UPS, [plane.pid, fleet.pid], patience)
            if agents > FEW:
                await barriers(found, trainer, rounds, agents)
                await heartbeats(found, fleet, plane.pid, samples)
            else:
                for counts in rounds:  # ten a round: one is shorter than a tick of the clock that sees the load
                    took = [await trainer.publish() for _ in range(10)]
                    found.publish.extend(took if counts and not rounds.spoilt() else [])
            holding.cancel()
            await trainer.channel.close()


async def barriers(found: Samples, trainer: Trainer, rounds: Rounds, agents: int) -> None:
    """StartUpdate, aborted each time."""
    for counts in rounds:
        began = time.perf_counter()
        started = await trainer.start()
        took = time.perf_counter() - began
        assert len(started.participants) == agents
        found.barrier.extend([took] if counts and not rounds.spoilt() else [])
        await trainer.abort()


async def heartbeats(found: Samples, fleet: subprocess.Popen[str], pid: int, samples: int) -> None:
    """The server's CPU while every agent beats."""
    seconds = 1.0 if samples < SAMPLES else 2.0
    tell(fleet, "beat")
    await asyncio.sleep(2)
    for _ in range(samples):
        before, began = cpu_s(pid), time.perf_counter()
        await asyncio.sleep(seconds)
        found.busy.append((cpu_s(pid) - before) / (time.perf_counter() - began))


async def compare(report: Report, folder: Path, kind: str, agents: int, samples: int, patience: float) -> None:
    """All cases, plaintext or mTLS: first gRPC alone, then the control plane."""
    server_tls, client_tls = certificates(folder) if kind == "mTLS" else ([], [])
    bare, ours = Samples(), Samples()
    for n in (agents, FEW):
        await measure(bare, [str(HERE / "_bare_plane.py"), *server_tls], client_tls, n, samples, patience)
        store = str(folder / f"{kind}-{n}.db")
        await measure(ours, [SERVER, store, *server_tls], client_tls, n, samples, patience)
    for case, unit, of_bare, of_ours, bound in (
        (f"start barrier, {agents} agents, {kind}", "s", bare.barrier, ours.barrier, BARRIER_S),
        (f"heartbeats of {agents} agents, {kind}", "cores", bare.busy, ours.busy, BEATS_CORES),
        (f"empty publish to {FEW} replicas, {kind}", "s", bare.publish, ours.publish, PUBLISH_S),
    ):
        alone = report.add(Result.of(f"{case}, gRPC alone", unit, of_bare))
        report.add(Result.of(case, unit, of_ours, bound, less_is_better=True, limit_name="the design's bound"))
        beside = f"{case}, beside gRPC alone"
        report.add(Result.of(beside, unit, of_ours, alone.value, less_is_better=True, limit_name="gRPC alone"))


def certificates(folder: Path) -> tuple[list[str], list[str]]:
    """(server's, client's) PEM files, made for this run by the openssl command."""
    from tests.server.certificates import authority, certificate

    ca = authority(folder)
    cert, key = certificate(folder, "server", "weightplane")
    client_cert, client_key = certificate(folder, "client", "trainer+inference+operator/bench")
    return [str(cert), str(key), str(ca)], [str(ca), str(client_cert), str(client_key)]


def main() -> None:
    """Run every case."""
    options = parser(__doc__ or "")
    options.add_argument("--agents", type=int, default=1000, help="how many agents (default 1000)")
    asked = options.parse_args()
    samples = 3 if asked.quick else SAMPLES
    report = Report("control_plane", asked.json)
    with tempfile.TemporaryDirectory(prefix="weightplane-bench-") as folder:
        for kind in ("plaintext", "mTLS"):
            asyncio.run(compare(report, Path(folder), kind, asked.agents, samples, asked.patience))
    report.write()


if __name__ == "__main__":
    try:
        main()
    except grpc.aio.AioRpcError as error:
        sys.exit(f"{error.code().name}: {error.details()}")
