"""A server on loopback, and scripted members for it: a replica and a trainer that follow the protocol without torch.

``Replica`` obeys the desired state; ``hooks`` make it misbehave at a stage. ``Trainer`` makes each call by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.model import Config
from weightplane.controlplane.server.app import CLIENT_OPTIONS, Running, ServerConfig, serve
from weightplane.controlplane.store.memory import MemoryStore
from weightplane.v1 import agent_pb2 as ag
from weightplane.v1 import agent_pb2_grpc as ag_grpc
from weightplane.v1 import common_pb2 as cm
from weightplane.v1 import fleet_pb2 as fl
from weightplane.v1 import fleet_pb2_grpc as fl_grpc
from weightplane.v1 import tensor_pb2 as tn
from weightplane.v1 import transport_pb2 as tp
from weightplane.v1 import update_pb2 as up
from weightplane.v1 import weight_transfer_pb2 as wt
from weightplane.v1 import weight_transfer_pb2_grpc as wt_grpc

FAST = Config(beat_s=0.1, ttl_s=1.2, routing_budget_s=3.0, quiesce_s=0.8)
MODEL = Manifest.of(
    [TensorMeta("a", "float32", (4, 4)), TensorMeta("b", "bfloat16", (8,)), TensorMeta("c", "int8", ())]
)


@contextlib.asynccontextmanager
async def server(config: ServerConfig | None = None) -> AsyncIterator[Running]:
    """A running server."""
    running = await serve(config or ServerConfig(MemoryStore(), core=FAST))
    try:
        yield running
    finally:
        await running.stop()


def dial(address: str, *options: tuple[str, int]) -> grpc.aio.Channel:
    """A connection of its own."""
    return grpc.aio.insecure_channel(
        address,
        options=[
            *CLIENT_OPTIONS,
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 200),
            *options,
        ],
    )


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """The reason in an error's ErrorInfo; fails unless the error is one of ours in full."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None, f"no details: {error}"
    info, failure = error_details_pb2.ErrorInfo(), cm.Failure()
    assert status.details[0].Unpack(info) and info.domain == "weightplane"
    assert status.details[1].Unpack(failure)
    assert cm.Reason.Name(failure.reason) == f"REASON_{info.reason}"
    assert failure.message
    return str(info.reason)


def update_of(error: grpc.aio.AioRpcError) -> up.UpdateInfo:
    """The update in an error's details."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    for detail in status.details:
        info = up.UpdateInfo()
        if detail.Unpack(info):
            return info
    raise AssertionError(f"no UpdateInfo in {status}")


async def refused(call: Awaitable[Any], reason: str, code: grpc.StatusCode | None = None) -> grpc.aio.AioRpcError:
    """Expect a refusal."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as e:
        assert reason_of(e) == reason, f"{reason_of(e)}: {e.details()}"
        assert code is None or e.code() is code
        return e
    raise AssertionError(f"expected {reason}, got {answer}")


async def until(condition: Callable[[], bool], what: str, within: float = 10.0) -> None:
    """Wait for a condition of the server's own state."""
    end = asyncio.get_running_loop().time() + within
    while not condition():
        assert asyncio.get_running_loop().time() < end, f"still waiting for {what}"
        await asyncio.sleep(0.005)


def offer(transport: str = "grpc") -> tp.Rendezvous:
    """An offer for a transport that needs nothing."""
    return tp.Rendezvous(transport=transport, grpc=tp.GrpcRendezvous(address="127.0.0.1:1"))


def replica_hello(workers: int = 1, **fields: Any) -> ag.ReplicaHello:
    """What a replica says it is."""
    default: dict[str, Any] = {
        "modes": [cm.MODE_STAGED, cm.MODE_IN_PLACE],
        "pause_modes": [cm.PAUSE_MODE_KEEP, cm.PAUSE_MODE_ABORT],
        "cache_policies": [cm.CACHE_POLICY_CLEAR],
        "evidence": cm.EVIDENCE_LIVE,
        "engine": "scripted",
        "sleep_levels": [1, 2],
    }
    return ag.ReplicaHello(
        workers=[ag.WorkerInfo(index=i, host_id="h", offers=[offer()]) for i in range(workers)], **{**default, **fields}
    )


def digest_of(region: tn.PlanRegion) -> int:
    """A stand-in for a region's digest that both scripted sides agree on."""
    return 1000 + region.tensor


class PlanView:
    """A plan fetched in pages."""

    def __init__(self, pages: list[tn.PlanPage]) -> None:
        self.members = list(pages[0].members)
        self.sets = [list(s.members) for s in pages[0].receiver_sets]
        self.regions = [r for p in pages for r in p.regions]
        self.buckets = [b for p in pages for b in p.buckets]

    def sent_by(self, member: str) -> list[tn.PlanRegion]:
        """Regions that a member sends."""
        return [r for r in self.regions if self.members[r.sender] == member]

    def received_by(self, member: str) -> list[tn.PlanRegion]:
        """Regions that a member receives."""
        return [r for r in self.regions if member in [self.members[m] for m in self.sets[r.receiver_set]]]


async def fetch_plan(get: Callable[[int], Awaitable[tn.PlanPage]]) -> PlanView:
    """Every page of a plan."""
    pages = [await get(0)]
    for n in range(1, pages[0].pages):
        pages.append(await get(n))
    return PlanView(pages)


class Replica:
    """Joins, arms, votes, applies. ``hooks[stage]`` (an async function) runs before that stage is reported; it may
    raise ``Fail`` or never return. Stages: join, arm, prepare, apply, drain."""

    def __init__(
        self, address: str, rid: str = "r0", group: str = "g", incarnation: str = "", workers: int = 1
    ) -> None:
        self.rid, self.group, self.workers = rid, group, workers
        self.incarnation = incarnation or secrets.token_hex(4)
        self.hello = replica_hello(workers)
        self.hooks: dict[str, Callable[[ag.DesiredUpdate], Awaitable[None]]] = {}
        self.held = cm.HeldVersion()
        self.dirty = False
        self.report = ag.ReplicaReport()
        self.seen: list[ag.DesiredReplica] = []
        self.ended: grpc.aio.AioRpcError | None = None
        self.beats = True
        self.evidence = cm.EVIDENCE_LIVE
        self.with_vote = True  # its receipts; else they go by PutReceipt, before it
        self.corrupt: set[int] = set()
        self.liars = set(range(workers))  # workers whose digests of those tensors are wrong
        self.welcome = ag.Welcome()
        self._channel = dial(address)
        self.agent = ag_grpc.AgentServiceStub(self._channel)
        self._sequence = itertools.count(1)
        self._beat = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []
        self._working_task: list[asyncio.Task[None]] = []
        self._stage = ag.REPLICA_STAGE_UNSPECIFIED
        self._taking = ""
        self._version = 0
        self.redial = False
        self._newest: ag.DesiredReplica | None = None
        self._changed = asyncio.Event()
        self._outbox: asyncio.Queue[ag.SessionRequest] = asyncio.Queue()
        self.joined = asyncio.Event()

    async def start(self) -> Replica:
        """Say hello and begin; returns once the server has the first report."""
        self._tasks = [asyncio.create_task(self._session())]
        await asyncio.wait([asyncio.create_task(self.joined.wait()), self._tasks[0]], return_when="FIRST_COMPLETED")
        end = asyncio.get_running_loop().time() + 10
        while self.ended is None and not await self._known():
            assert asyncio.get_running_loop().time() < end, f"the server never took in a report of {self.rid}"
            await asyncio.sleep(0.005)  # another process's state: nothing to wait on
        return self

    async def _known(self) -> bool:
        """Whether the server has taken in a report of this life."""
        fleet = fl_grpc.FleetServiceStub(self._channel)
        answer = await fleet.ListReplicas(fl.ListReplicasRequest(group=self.group), timeout=5)
        mine = [r for r in answer.replicas if (r.replica_id, r.incarnation) == (self.rid, self.incarnation)]
        return bool(mine) and "has not reported" not in mine[0].may_not_join

    async def kill(self) -> None:
        """Vanish without a word."""
        for task in (*self._tasks, *self._working_task):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._working_task, return_exceptions=True)
        await self._channel.close()

    async def _session(self) -> None:
        while True:
            try:
                await self._connected()
            except grpc.aio.AioRpcError as e:
                self.ended = e
                if not self.redial or e.code() is not grpc.StatusCode.UNAVAILABLE:
                    self.joined.set()
                    return
                await asyncio.sleep(0.05)

    async def _connected(self) -> None:
        """One stream, from hello to its end, which is raised."""
        stream = self.agent.Session()
        hello = ag.Hello(
            group=self.group,
            agent_id=self.rid,
            incarnation=self.incarnation,
            kind=ag.SESSION_KIND_CONTROL,
            replica=self.hello,
        )
        try:
            await stream.write(ag.SessionRequest(hello=hello))
        except asyncio.InvalidStateError:  # it ended before we wrote: nobody listens there now
            raise await _error(stream) from None
        first = await stream.read()
        if not isinstance(first, ag.SessionResponse):
            raise await _error(stream)
        self.welcome = first.welcome
        self._outbox = asyncio.Queue()
        streaming = [asyncio.create_task(self._saying(stream)), asyncio.create_task(self._beating())]
        if not self._working_task:
            self._working_task.append(asyncio.create_task(self._working()))
        try:
            await self.send_report()
            self.joined.set()
            while isinstance(message := await stream.read(), ag.SessionResponse):
                self._newest = message.replica
                self.seen.append(message.replica)
                self._changed.set()
            raise await _error(stream)
        finally:
            for task in streaming:
                task.cancel()
            await asyncio.gather(*streaming, return_exceptions=True)

    async def send_report(self, **fields: Any) -> None:
        """Tell the coordinator how things are."""
        self.report = ag.ReplicaReport(
            sequence=next(self._sequence),
            held=[self.held] * self.workers,
            dirty=self.dirty,
            update_id=self._taking,
            stage=self._stage,
            **fields,
        )
        self.say(ag.SessionRequest(report=self.report))

    def say(self, message: ag.SessionRequest) -> None:
        """Queue a message: a write that is cancelled half-way would cancel the whole stream."""
        self._outbox.put_nowait(message)

    async def _saying(self, stream: Any) -> None:
        while True:
            await stream.write(await self._outbox.get())

    async def _beating(self) -> None:
        while True:
            await asyncio.sleep(self.welcome.heartbeat_ms / 1000)
            if self.beats:
                beat = ag.Heartbeat(sequence=next(self._beat), process=ag.PROCESS_STATE_RUNNING)
                self.say(ag.SessionRequest(heartbeat=beat))

    async def _working(self) -> None:
        work: asyncio.Task[None] | None = None
        while True:
            await self._changed.wait()
            self._changed.clear()
            d = self._newest
            if d is None:
                continue
            u = d.update if d.HasField("update") else None
            for told in d.resolutions:
                await self._resolve(told)
            if u is not None and u.decision == ag.DECISION_ABORT and self._taking == u.update_id:
                if work is not None:
                    work.cancel()
                    await asyncio.gather(work, return_exceptions=True)
                    work = None
                if self._stage < ag.REPLICA_STAGE_APPLIED:
                    await self._hook("drain", u)
                    self._stage = ag.REPLICA_STAGE_ABORTED
                    await self.send_report()
            elif (
                u is not None
                and (u.update_id != self._taking or self._stage < ag.REPLICA_STAGE_APPLIED)
                and (work is None or work.done())
            ):
                work = asyncio.create_task(self._advance(d))
                self._tasks.append(work)

    async def _resolve(self, told: ag.Resolution) -> None:
        """In doubt no more."""
        if told.update_id != self._taking or self._stage >= ag.REPLICA_STAGE_APPLIED:
            return
        if told.decision == ag.DECISION_COMMIT:
            self.held = cm.HeldVersion(version=self._version, update_id=self._taking)
            self._stage = ag.REPLICA_STAGE_APPLIED
        elif told.decision == ag.DECISION_ABORT:
            self._stage = ag.REPLICA_STAGE_ABORTED
        await self.send_report()

    async def _hook(self, stage: str, u: ag.DesiredUpdate) -> None:
        hook = self.hooks.get(stage)
        if hook is not None:
            await hook(u)

    async def _advance(self, d: ag.DesiredReplica) -> None:
        try:
            while self._newest is not None:
                before = (self._stage, self.report.armed_seq, self._taking)
                await self._step(self._newest.update, self._newest.epoch)
                if before == (self._stage, self.report.armed_seq, self._taking):
                    return
        except Fail as e:
            self._stage = ag.REPLICA_STAGE_FAILED
            self.dirty = self.dirty or e.dirty
            await self.send_report(failure=cm.Failure(reason=e.reason, message=str(e)))

    async def _step(self, u: ag.DesiredUpdate, epoch: int) -> None:
        if u.update_id != self._taking:
            if u.decision:
                return
            self._taking, self._stage = u.update_id, ag.REPLICA_STAGE_UNSPECIFIED
            self._version = u.version
            self.report = ag.ReplicaReport()
            for w in range(self.workers):
                member = f"{self.rid}/{w}"
                await self.agent.PutWorkerPlacement(
                    ag.PutWorkerPlacementRequest(
                        group=self.group,
                        replica_id=self.rid,
                        incarnation=self.incarnation,
                        manifest_id=u.manifest_id,
                        placement=tn.Placement(member=member, full=True),
                    ),
                    timeout=5,
                )
            await self._hook("join", u)
            self._stage = ag.REPLICA_STAGE_JOINED
            await self.send_report()
        elif u.decision == ag.DECISION_COMMIT:
            if self._stage < ag.REPLICA_STAGE_APPLIED:  # else it is said again
                await self._hook("apply", u)
            self.held = cm.HeldVersion(version=u.version, update_id=u.update_id)
            self.dirty = False
            self._stage = ag.REPLICA_STAGE_APPLIED
            await self.send_report()
        elif self._stage < ag.REPLICA_STAGE_PREPARED and u.calls and u.calls[-1].seq > self.report.armed_seq:
            await self._hook("arm", u)
            self._stage = max(self._stage, ag.REPLICA_STAGE_ARMED)
            await self.send_report(armed_seq=u.calls[-1].seq)
        elif u.all_called and ag.REPLICA_STAGE_ARMED <= self._stage < ag.REPLICA_STAGE_PREPARED:
            await self._prepare(u, epoch)

    async def _prepare(self, u: ag.DesiredUpdate, epoch: int) -> None:
        async def get(page: int, plan_id: str) -> tn.PlanPage:
            request = ag.AgentServiceGetPlanRequest(group=self.group, plan_id=plan_id, page=page)
            return (await self.agent.GetPlan(request, timeout=5)).page

        landed, receipts = 0, []
        for w, plan_id in sorted((w, c.plan_id) for c in u.channels for w in c.workers):
            plan = await fetch_plan(partial(get, plan_id=plan_id))
            regions = plan.received_by(f"{self.rid}/{w}")
            landed += sum(r.nbytes for r in regions)
            receipt = up.Receipt(
                update_id=u.update_id,
                member=f"{self.rid}/{w}",
                plan_id=plan_id,
                evidence=self.evidence,
                bytes_received=sum(r.nbytes for r in regions),
                elements_written=sum(r.nbytes // [4, 2, 1][r.tensor % 3] for r in regions),
                digests=[digest_of(r) + (r.tensor in self.corrupt and w in self.liars) for r in regions],
                total=len(regions),
            )
            if self.with_vote:
                receipts.append(receipt)
                continue
            await self.agent.PutReceipt(
                ag.PutReceiptRequest(
                    group=self.group,
                    replica_id=self.rid,
                    incarnation=self.incarnation,
                    epoch=epoch,
                    receipt=receipt,
                ),
                timeout=5,
            )
        await self._hook("prepare", u)
        self._stage = ag.REPLICA_STAGE_PREPARED
        armed_seq = u.calls[-1].seq if u.calls else 0
        await self.send_report(armed_seq=armed_seq, bytes_received=landed, receipts=receipts)


async def _error(stream: Any) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        await stream.code(),
        await stream.initial_metadata(),
        await stream.trailing_metadata(),
        await stream.details(),
        None,
    )


class Fail(Exception):
    """A scripted failure."""

    def __init__(self, message: str = "scripted", reason: Any = cm.REASON_ENGINE, dirty: bool = False) -> None:
        super().__init__(message)
        self.reason, self.dirty = reason, dirty


class Trainer:
    """One rank of a trainer, call by call."""

    def __init__(self, address: str, group: str = "g", name: str = "job", rank: int = 0, world: int = 1) -> None:
        self.group, self.name, self.rank, self.world = group, name, rank, world
        self.incarnation = f"{name}-{secrets.token_hex(3)}"
        self.generation = 0
        self.timeout = 10.0
        self.channel = dial(address)
        self.stub = wt_grpc.WeightTransferServiceStub(self.channel)
        self.fleet = fl_grpc.FleetServiceStub(self.channel)
        self.manifest = MODEL

    def id(self) -> str:
        """A new request_id."""
        return secrets.token_hex(8)

    async def init(self, **fields: Any) -> wt.InitTransferResponse:
        """InitTransfer."""
        request = wt.InitTransferRequest(
            **{
                "request_id": self.id(),
                "group": self.group,
                "trainer_id": self.name,
                "incarnation": self.incarnation,
                "rank": self.rank,
                "world_size": self.world,
                "generation": self.generation,
                "offers": [offer()],
                "host_id": "h",
                **fields,
            }
        )
        answer = await self.stub.InitTransfer(request, timeout=self.timeout)
        self.generation = answer.generation
        return answer

    async def put_manifest(self, manifest: Manifest | None = None) -> None:
        """PutManifest and PutPlacement, in one page."""
        manifest = manifest or self.manifest
        await self.stub.PutManifest(
            wt.PutManifestRequest(
                request_id=self.id(),
                group=self.group,
                generation=self.generation,
                manifest_id=manifest.id,
                total=len(manifest),
                tensors=[
                    tn.TensorMeta(name=t.name, dtype=t.dtype, shape=t.shape, alias_of=t.alias_of) for t in manifest
                ],
            ),
            timeout=self.timeout,
        )
        await self.put_placement(manifest)

    async def put_placement(self, manifest: Manifest | None = None, **fields: Any) -> wt.PutPlacementResponse:
        """PutPlacement of everything."""
        request = wt.PutPlacementRequest(
            **{
                "request_id": self.id(),
                "group": self.group,
                "generation": self.generation,
                "manifest_id": (manifest or self.manifest).id,
                "rank": self.rank,
                "placement": tn.Placement(member=f"rank/{self.rank}", full=True),
                **fields,
            }
        )
        return await self.stub.PutPlacement(request, timeout=self.timeout)

    def start_request(self, **fields: Any) -> wt.StartUpdateRequest:
        """A StartUpdate."""
        return wt.StartUpdateRequest(
            **{
                "request_id": self.id(),
                "group": self.group,
                "generation": self.generation,
                "manifest_id": self.manifest.id,
                "trainer_step": 1,
                "update_timeout_ms": 8000,
                **fields,
            }
        )

    async def start(self, **fields: Any) -> wt.StartUpdateResponse:
        """StartUpdate."""
        return await self.stub.StartUpdate(self.start_request(**fields), timeout=self.timeout)

    async def weights(self, u: wt.StartUpdateResponse, seq: int = 1, **fields: Any) -> wt.UpdateWeightsResponse:
        """UpdateWeights."""
        request = wt.UpdateWeightsRequest(**{**self.of(u), "seq": seq, **fields})
        return await self.stub.UpdateWeights(request, timeout=self.timeout)

    def of(self, u: wt.StartUpdateResponse) -> dict[str, Any]:
        """The fields that name an update."""
        return {
            "request_id": self.id(),
            "group": self.group,
            "generation": self.generation,
            "update_id": u.update_id,
            "epoch": u.epoch,
            "rank": self.rank,
        }

    async def plan(self, plan_id: str) -> PlanView:
        """GetPlan, every page."""

        async def get(page: int) -> tn.PlanPage:
            request = wt.GetPlanRequest(group=self.group, plan_id=plan_id, page=page)
            return (await self.stub.GetPlan(request, timeout=self.timeout)).page

        return await fetch_plan(get)

    async def digests(self, u: wt.StartUpdateResponse) -> None:
        """PutDigests for every channel."""
        for c in u.channels:
            regions = (await self.plan(c.plan_id)).sent_by(f"rank/{self.rank}")
            request = wt.PutDigestsRequest(
                **self.of(u), plan_id=c.plan_id, digests=[digest_of(r) for r in regions], total=len(regions)
            )
            await self.stub.PutDigests(request, timeout=self.timeout)

    async def finish(self, u: wt.StartUpdateResponse, **fields: Any) -> up.UpdateInfo:
        """FinishUpdate."""
        request = wt.FinishUpdateRequest(**{**self.of(u), **fields})
        return (await self.stub.FinishUpdate(request, timeout=self.timeout)).update

    async def rest(self, u: wt.StartUpdateResponse) -> up.UpdateInfo:
        """PutDigests and FinishUpdate; an abort may reach either."""
        await self.digests(u)
        return await self.finish(u)

    async def publish(self, **fields: Any) -> up.UpdateInfo:
        """A whole update."""
        u = await self.start(**fields)
        await self.weights(u)
        return await self.rest(u)

    async def get(self, update_id: str) -> up.UpdateInfo:
        """GetUpdate."""
        request = wt.GetUpdateRequest(group=self.group, update_id=update_id)
        return (await self.stub.GetUpdate(request, timeout=self.timeout)).update


@contextlib.asynccontextmanager
async def fleet(
    address: str, replicas: int = 3, world: int = 1, **fields: Any
) -> AsyncIterator[tuple[Trainer, list[Replica]]]:
    """A trainer that holds the group, its manifest sent, and replicas bound to it."""
    agents = [await Replica(address, f"r{i}").start() for i in range(replicas)]
    trainer = Trainer(address, world=world)
    hold: asyncio.Task[None] | None = None
    try:
        await trainer.init(**fields)
        await trainer.put_manifest()
        held = asyncio.Event()
        hold = asyncio.create_task(_hold(trainer, held))
        await asyncio.wait_for(held.wait(), 10)  # the lease is the stream's from here on
        yield trainer, agents
    finally:
        if hold is not None:
            hold.cancel()
            await asyncio.gather(hold, return_exceptions=True)
        for agent in agents:
            await agent.kill()
        await trainer.channel.close()


async def _hold(trainer: Trainer, held: asyncio.Event | None = None) -> None:
    """The lease of a trainer without a Session; ``held`` once the control plane counts it."""
    request = wt.WatchUpdateRequest(group=trainer.group, generation=trainer.generation, rank=trainer.rank)
    async for _ in trainer.stub.WatchUpdate(request):
        if held is not None:
            held.set()
