"""Scripted agents for ``control_plane.py``: many replicas in one process, each with TCP connections of its own.

``python benchmarks/control_plane_agents.py ADDRESS COUNT [CA CERT KEY]``. Each joins, arms, votes and applies as told,
and beats on a stream of its own once a line ``beat`` comes on standard input (``still`` ends that). No engine.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import grpc

from weightplane.controlplane.server.app import CLIENT_OPTIONS
from weightplane.v1 import agent_pb2 as ag
from weightplane.v1 import agent_pb2_grpc as ag_grpc
from weightplane.v1 import common_pb2 as cm
from weightplane.v1 import tensor_pb2 as tn
from weightplane.v1 import transport_pb2 as tp
from weightplane.v1 import update_pb2 as up

GROUP = "bench"


def dial(address: str, tls: list[str]) -> grpc.aio.Channel:
    """A connection of its own."""
    options = [*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    if not tls:
        return grpc.aio.insecure_channel(address, options=options)
    ca, cert, key = (Path(f).read_bytes() for f in tls)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options=options)


class Agent:
    """One replica of one worker that holds an empty model."""

    def __init__(self, number: int, address: str, tls: list[str]) -> None:
        self.rid = f"r{number:04}"
        self.channel, self.beats = dial(address, tls), dial(address, tls)
        self.stub = ag_grpc.AgentServiceStub(self.channel)
        self.sequence = itertools.count(1)
        self.report = ag.ReplicaReport(held=[cm.HeldVersion()])
        self.placed: set[str] = set()
        self.beating = asyncio.Event()

    def hello(self, **fields: Any) -> ag.SessionRequest:
        """Its first message."""
        return ag.SessionRequest(hello=ag.Hello(group=GROUP, agent_id=self.rid, incarnation="life", **fields))

    async def start(self, tasks: set[asyncio.Task[None]]) -> None:
        """Join, with both streams."""
        offer = tp.Rendezvous(transport="grpc", grpc=tp.GrpcRendezvous(address="127.0.0.1:1"))
        said = ag.ReplicaHello(
            workers=[ag.WorkerInfo(host_id="h", offers=[offer])],
            modes=[cm.MODE_STAGED],
            pause_modes=[cm.PAUSE_MODE_KEEP],
            cache_policies=[cm.CACHE_POLICY_CLEAR],
            evidence=cm.EVIDENCE_RECEIVED,
        )
        self.stream = self.stub.Session()
        await self.stream.write(self.hello(replica=said))
        assert isinstance(await self.stream.read(), ag.SessionResponse)
        await self.say()
        beats = ag_grpc.AgentServiceStub(self.beats).Session()
        await beats.write(self.hello(kind=ag.SESSION_KIND_HEARTBEAT))
        assert isinstance(await beats.read(), ag.SessionResponse)
        for work in (self.obey(), self.beat(beats)):
            tasks.add(asyncio.create_task(work))

    async def say(self) -> None:
        """Report."""
        self.report.sequence = next(self.sequence)
        await self.stream.write(ag.SessionRequest(report=self.report))

    async def beat(self, stream: Any) -> None:
        """Once a second, when told to."""
        for n in itertools.count(1):
            await self.beating.wait()
            await stream.write(ag.SessionRequest(heartbeat=ag.Heartbeat(sequence=n)))
            await asyncio.sleep(1)

    async def obey(self) -> None:
        """Do what the desired state says; the stages that need nothing go by at once."""
        while isinstance(message := await self.stream.read(), ag.SessionResponse):
            d = message.replica
            if not d.HasField("update"):
                continue
            u, r = d.update, self.report
            before = (r.update_id, r.stage, r.armed_seq)
            if u.update_id != r.update_id:
                if u.decision:
                    continue
                r.update_id, r.stage, r.armed_seq = u.update_id, ag.REPLICA_STAGE_JOINED, 0
                await self.place(u)
            if u.decision == ag.DECISION_ABORT and r.stage < ag.REPLICA_STAGE_APPLIED:
                r.stage = ag.REPLICA_STAGE_ABORTED
            elif u.decision == ag.DECISION_COMMIT and r.stage == ag.REPLICA_STAGE_PREPARED:
                r.held[0].CopyFrom(cm.HeldVersion(version=u.version, update_id=u.update_id))
                r.stage = ag.REPLICA_STAGE_APPLIED
            elif u.calls and r.stage < ag.REPLICA_STAGE_PREPARED and u.all_called:
                r.stage, r.armed_seq = ag.REPLICA_STAGE_ARMED, u.calls[-1].seq
                await self.say()
                r.stage = ag.REPLICA_STAGE_PREPARED
                r.receipts.append(self.receipt(u))
            if before != (r.update_id, r.stage, r.armed_seq):
                await self.say()
                del r.receipts[:]

    async def place(self, u: ag.DesiredUpdate) -> None:
        """Say what the worker holds, once per manifest."""
        if u.manifest_id not in self.placed:
            self.placed.add(u.manifest_id)
            placement = tn.Placement(member=f"{self.rid}/0", full=True)
            request = ag.PutWorkerPlacementRequest(
                group=GROUP, replica_id=self.rid, incarnation="life", manifest_id=u.manifest_id, placement=placement
            )
            await self.stub.PutWorkerPlacement(request, timeout=30)

    def receipt(self, u: ag.DesiredUpdate) -> up.Receipt:
        """What arrived: nothing, as planned. It goes with the vote, as an agent's does."""
        return up.Receipt(
            update_id=u.update_id,
            member=f"{self.rid}/0",
            plan_id=u.channels[0].plan_id,
            evidence=cm.EVIDENCE_RECEIVED,
        )


async def main(address: str, count: int, tls: list[str]) -> None:
    """Join all, then follow the words on standard input until it ends."""
    tasks: set[asyncio.Task[None]] = set()
    agents = [Agent(i, address, tls) for i in range(count)]
    began = time.monotonic()
    for first in range(0, count, 50):
        await asyncio.gather(*(a.start(tasks) for a in agents[first : first + 50]))
    gc.freeze()
    print(f"joined {count} in {time.monotonic() - began:.2f} s", flush=True)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).strip():
        for n, agent in enumerate(agents):
            if line == b"still":
                agent.beating.clear()
            else:
                loop.call_later(n / count, agent.beating.set)  # spread over the second, as those of a fleet are
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
