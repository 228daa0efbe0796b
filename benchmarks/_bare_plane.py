"""What gRPC alone takes for the control plane's calls: ``python benchmarks/_bare_plane.py [CERT KEY CLIENT-CA]``.

Prints its address and serves ``control_plane_agents.py`` and the trainer of ``control_plane.py`` with the messages that
the control plane sends them, in the same order, and counts the answers. Nothing is checked, decided or written down:
no state machine, no store, no lease. What is left is asyncio, gRPC and protobuf in one Python process, the floor under
any control plane that is one.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from weightplane.controlplane.server.app import SERVER_OPTIONS, tune_collector
from weightplane.v1 import agent_pb2 as ag
from weightplane.v1 import agent_pb2_grpc as ag_grpc
from weightplane.v1 import common_pb2 as cm
from weightplane.v1 import update_pb2 as up
from weightplane.v1 import weight_transfer_pb2 as wt
from weightplane.v1 import weight_transfer_pb2_grpc as wt_grpc

_ID = "0123456789abcdef" * 2  # ids as long as the real ones


class Plane(ag_grpc.AgentServiceServicer, wt_grpc.WeightTransferServiceServicer):  # type: ignore[misc]
    """Both services; one group, one trainer of one rank."""

    def __init__(self) -> None:
        self.streams: dict[str, Any] = {}
        self.revision = self.version = 0
        self.update = ag.DesiredUpdate()
        self.due: set[str] = set()
        self.reached: Callable[[ag.ReplicaReport], bool] = lambda r: False
        self.all_there = asyncio.Event()

    # --- agents ---

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # by read, write
        """A welcome, then what comes is counted."""
        hello = (await context.read()).hello
        await context.write(ag.SessionResponse(welcome=ag.Welcome(cluster_id=_ID, epoch=1)))
        if hello.kind == ag.SESSION_KIND_HEARTBEAT:
            while await context.read() is not grpc.aio.EOF:
                pass
            return
        self.streams[hello.agent_id] = context
        while (message := await context.read()) is not grpc.aio.EOF:
            if self.reached(message.report):
                self.due.discard(hello.agent_id)
                if not self.due:
                    self.all_there.set()

    async def PutWorkerPlacement(self, request: Any, context: Any) -> Any:
        """Taken."""
        return ag.PutWorkerPlacementResponse()

    async def everyone(self, reached: Callable[[ag.ReplicaReport], bool]) -> None:
        """Tell every replica what the update is now, and wait until each says that it got there."""
        self.due, self.reached = set(self.streams), reached
        self.all_there.clear()
        self.revision += 1
        committed = cm.HeldVersion(version=self.version - 1, update_id=_ID)
        for context in self.streams.values():
            desired = ag.DesiredReplica(
                revision=self.revision,
                epoch=1,
                cluster_id=_ID,
                incarnation="life",
                committed=committed,
                update=self.update,
                committed_manifest_id=_ID,
            )
            await context.write(ag.SessionResponse(replica=desired))
        await self.all_there.wait()

    # --- the trainer ---

    async def InitTransfer(self, request: Any, context: Any) -> Any:
        """Granted."""
        return wt.InitTransferResponse(generation=1)

    async def PutManifest(self, request: Any, context: Any) -> Any:
        """Taken."""
        return wt.PutManifestResponse()

    async def PutPlacement(self, request: Any, context: Any) -> Any:
        """Taken."""
        return wt.PutPlacementResponse()

    async def WatchUpdate(self, request: Any, context: Any) -> None:  # type: ignore[override]
        """A lease on which nothing is said: the least that it could cost."""
        await asyncio.Event().wait()

    async def StartUpdate(self, request: Any, context: Any) -> Any:
        """Open an update; every replica joins."""
        self.version += 1
        self.update = ag.DesiredUpdate(
            update_id=f"{self.version:032}",
            version=self.version,
            lineage=_ID,
            generation=1,
            manifest_id=request.manifest_id,
            channels=[ag.WorkerChannel(channel_id=_ID, plan_id=_ID, workers=[0])],
            mode=cm.MODE_STAGED,
            remaining_ms=60_000,
        )
        await self.everyone(lambda r: r.stage >= ag.REPLICA_STAGE_JOINED)
        return wt.StartUpdateResponse(
            update_id=self.update.update_id,
            version=self.version,
            epoch=1,
            participants=[up.Participant(replica_id=r, incarnation="life", mode=cm.MODE_STAGED) for r in self.streams],
            channels=[wt.UpdateChannel(channel_id=_ID, plan_id=_ID)],
        )

    async def UpdateWeights(self, request: Any, context: Any) -> Any:
        """Every replica arms, then votes."""
        self.update.calls.append(ag.ArmedCall(seq=1))
        self.update.all_called = True
        await self.everyone(lambda r: r.stage >= ag.REPLICA_STAGE_PREPARED)
        return wt.UpdateWeightsResponse()

    async def PutDigests(self, request: Any, context: Any) -> Any:
        """Taken."""
        return wt.PutDigestsResponse()

    async def FinishUpdate(self, request: Any, context: Any) -> Any:
        """Every replica applies."""
        self.update.decision = ag.DECISION_COMMIT
        await self.everyone(lambda r: r.stage == ag.REPLICA_STAGE_APPLIED)
        outcomes = [up.ReplicaOutcome(replica_id=r) for r in self.streams]
        return wt.FinishUpdateResponse(update=up.UpdateInfo(update_id=self.update.update_id, outcomes=outcomes))

    async def AbortUpdate(self, request: Any, context: Any) -> Any:
        """Every replica drops it."""
        self.update.decision = ag.DECISION_ABORT
        await self.everyone(lambda r: r.stage == ag.REPLICA_STAGE_ABORTED)
        return wt.AbortUpdateResponse()


async def main(*tls: str) -> None:
    """Serve until killed."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    plane = Plane()  # type: ignore[abstract]  # the calls that the benchmark makes, and no other
    ag_grpc.add_AgentServiceServicer_to_server(plane, server)
    wt_grpc.add_WeightTransferServiceServicer_to_server(plane, server)
    if tls:
        cert, key, ca = (Path(f).read_bytes() for f in tls)  # noqa: ASYNC240 - before it serves
        credentials = grpc.ssl_server_credentials([(key, cert)], root_certificates=ca, require_client_auth=True)
        port = server.add_secure_port("127.0.0.1:0", credentials)
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    tune_collector()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
