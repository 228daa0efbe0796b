"""Every field of every request is used or refused: a walk over the descriptors.

For each RPC there is one good request. Each of its fields, nested ones too, is changed alone, and the outcome (the
answer, the group's whole state, its artifacts, the log) must differ from the good one's, or be a refusal. The world is
made anew for each and is deterministic: no clock moves, what is random is counted. A field that nobody reads fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor
from google.protobuf.message import Message

from tests.server.scripted import (
    FAST,
    Replica,
    Trainer,
    dial,
    digest_of,
    offer,
    reason_of,
    replica_hello,
    server,
)
from tests.server.test_artifacts import metas
from tests.server.test_fleet import pausing
from weightplane.controlplane.core.events import Tick
from weightplane.controlplane.server import app, convert
from weightplane.controlplane.server.app import ServerConfig
from weightplane.controlplane.server.coordinator import Coordinator
from weightplane.controlplane.server.runtime import Group
from weightplane.controlplane.store.memory import MemoryStore
from weightplane.v1 import agent_pb2 as ag
from weightplane.v1 import common_pb2 as cm
from weightplane.v1 import fleet_pb2 as fl
from weightplane.v1 import tensor_pb2 as tn
from weightplane.v1 import update_pb2 as up
from weightplane.v1 import weight_transfer_pb2 as wt

Outcome = tuple[str, ...]


class World:
    """A server with one replica and one trainer, brought to a stage."""

    def __init__(self, running: app.Running) -> None:
        self.running = running
        self.replica = Replica(running.address, "r0", incarnation="life")
        self.replica.beats = False
        self.trainer = Trainer(running.address)
        self.trainer.incarnation = "job-life"
        self.u = wt.StartUpdateResponse()
        self.obeying: asyncio.Task[None] | None = None
        self.lines: list[str] = []

    async def reach(self, stage: str) -> None:
        """Stages: bare, joined, granted, bound, committed, twice, started, armed, digested, checked (digested, with an
        update committed before). One step at a time."""
        if stage == "bare":
            return
        self.running.coordinator.ensure("g").submit(Tick())  # the first one counts as a change: not in between
        await self.replica.start()
        self.obeying = pausing(self.replica)
        told = cm.Condition(type="Dtype", status=cm.CONDITION_STATUS_TRUE)
        self.replica.say(ag.SessionRequest(conditions=ag.EngineConditions(conditions=[told])))
        if stage == "joined":
            return
        await self.settled()
        await self.trainer.init()
        if stage == "granted":
            return
        await self.trainer.put_manifest()
        for _ in range({"committed": 1, "twice": 2, "checked": 1}.get(stage, 0)):
            await self._publish()
        if stage in ("bound", "committed", "twice"):
            return
        self.u = await self.trainer.start()
        if stage == "started":
            return
        await self.settled()
        await self.trainer.weights(self.u)
        await self.settled()
        if stage in ("digested", "checked"):
            await self.trainer.digests(self.u)

    async def _publish(self) -> None:
        u = await self.trainer.start()
        await self.settled()
        await self.trainer.weights(u)
        await self.settled()
        await self.trainer.digests(u)
        await self.settled()
        await self.trainer.finish(u)

    @property
    def group(self) -> Group | None:
        groups = {g.name: g for g in self.running.coordinator.groups()}
        return groups.get("g")

    async def settled(self) -> Outcome:
        """The world as it is once nothing moves."""
        while True:
            before = (self.group.state.revision if self.group is not None else 0, len(self.lines))
            await asyncio.sleep(0.015)
            if before == (self.group.state.revision if self.group is not None else 0, len(self.lines)):
                break
        out = [" ".join(g.name for g in self.running.coordinator.groups()), "\n".join(self.lines)]
        if self.group is not None:
            kept = self.group.artifacts
            digests = {k: v.pages for k, v in kept.update.digests.items()}
            uploads = {k: v.pages for k, v in kept._uploads._entries.items()}
            receipts = {k: (r, r.digests.pages) for k, r in kept.update.receipts.items()}
            out += [repr(self.group.state), repr(digests), repr(receipts), repr(uploads)]
            out += [repr(sorted(kept._layouts._entries)), repr(sorted(kept.manifests._entries))]
        return tuple(
            re.sub(r"0x[0-9a-f]{6,}|[0-9.e-]+ s unless|total_s: [0-9.e-]+|remaining_ms: \d+", "", o) for o in out
        )


@contextlib.asynccontextmanager
async def world(stage: str) -> AsyncIterator[World]:
    """A deterministic world at a stage."""
    with pytest.MonkeyPatch.context() as patch:
        numbers = itertools.count(1)
        patch.setattr(secrets, "token_hex", lambda n=16: f"{next(numbers):0{2 * n}x}")
        patch.setattr(secrets, "token_bytes", lambda n=32: next(numbers).to_bytes(n, "big"))
        patch.setattr(convert, "time", SimpleNamespace(time=lambda: 1.0))
        patch.setattr(app, "Coordinator", functools.partial(Coordinator, clock=lambda: 1000.0))
        async with server(ServerConfig(MemoryStore(), core=FAST)) as running:
            w = World(running)
            with logged(w.lines):
                try:
                    await w.reach(stage)
                    await w.settled()
                    yield w
                finally:
                    if w.obeying is not None:
                        w.obeying.cancel()
                    await w.replica.kill()
                    await w.trainer.channel.close()


@contextlib.contextmanager
def logged(lines: list[str]) -> Iterator[None]:
    """Collect what the server logs."""

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, logger = Collect(), logging.getLogger("weightplane.controlplane")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


# --- good requests --------------------------------------------------------------------------------------------------

Make = Callable[[World], Message]
G: dict[str, Any] = {"request_id": "q", "group": "g"}
R: dict[str, Any] = {**G, "replica_id": "r0"}


def _plan_id(w: World) -> str:
    return w.u.channels[0].plan_id


def _init(_: World) -> Message:
    sender: dict[str, Any] = {"trainer_id": "job", "incarnation": "job-life", "host_id": "h", "offers": [offer()]}
    return wt.InitTransferRequest(**G, **sender, refusals=[ag.TransportRefusal(transport="shm", reason="none here")])


def _placement(member: str) -> tn.Placement:
    box = [tn.Range(start=0, stop=2), tn.Range(start=1, stop=4)]
    return tn.Placement(member=member, pieces=[tn.Piece(tensor=0, box=box)])


def _named(w: World) -> dict[str, Any]:
    return {**G, "generation": 1, "update_id": w.u.update_id, "epoch": 1}


def _receipt(w: World) -> up.Receipt:
    whole: dict[str, Any] = {"bytes_received": 81, "elements_written": 25, "digests": [1, 2, 3], "total": 3}
    return up.Receipt(
        update_id=w.u.update_id, member="r0/0", plan_id=_plan_id(w), evidence=cm.EVIDENCE_RECEIVED, **whole
    )


def _parity(version: int) -> up.ParityResult:
    figures: dict[str, Any] = {"mean_abs": 0.1, "p99_abs": 0.2, "max_abs": 0.3, "kl": 0.4, "ess": 0.5}
    found = up.PARITY_VERDICT_AT_PARITY
    said: dict[str, Any] = {"version": version, "tokens": 9, "clip_fraction": 0.6, "reason": "x"}
    return up.ParityResult(replica_id="r0", verdict=found, **said, **figures)


GOOD: dict[str, tuple[str, Make]] = {
    "WeightTransferService.InitTransfer": ("joined", _init),
    "WeightTransferService.PutManifest": (
        "granted",
        lambda w: wt.PutManifestRequest(
            **G, generation=1, manifest_id=w.trainer.manifest.id, total=3, tensors=metas(w.trainer.manifest)[:1]
        ),
    ),
    "WeightTransferService.PutPlacement": (
        "bound",
        lambda w: wt.PutPlacementRequest(
            **G, generation=1, manifest_id=w.trainer.manifest.id, placement=_placement("rank/0"), total=1
        ),
    ),
    "WeightTransferService.StartUpdate": (
        "bound",
        lambda w: wt.StartUpdateRequest(**G, generation=1, manifest_id=w.trainer.manifest.id),
    ),
    "WeightTransferService.GetPlan": ("started", lambda w: wt.GetPlanRequest(group="g", plan_id=_plan_id(w))),
    "WeightTransferService.UpdateWeights": (
        "started",
        lambda w: wt.UpdateWeightsRequest(
            **_named(w), seq=1, buckets=[ag.BucketRange(channel_id=w.u.channels[0].channel_id, count=1)]
        ),
    ),
    "WeightTransferService.PutDigests": (
        "armed",
        lambda w: wt.PutDigestsRequest(
            **_named(w), plan_id=_plan_id(w), total=3, digests=[digest_of(tn.PlanRegion(tensor=i)) for i in range(3)]
        ),
    ),
    "WeightTransferService.FinishUpdate": (
        "checked",
        lambda w: wt.FinishUpdateRequest(**_named(w), parity=[_parity(w.u.version - 1)]),
    ),
    "WeightTransferService.AbortUpdate": (
        "armed",
        lambda w: wt.AbortUpdateRequest(**G, generation=1, update_id=w.u.update_id),
    ),
    "WeightTransferService.CloseTransfer": ("bound", lambda w: wt.CloseTransferRequest(**G, generation=1)),
    "WeightTransferService.GetUpdate": ("started", lambda w: wt.GetUpdateRequest(group="g", update_id=w.u.update_id)),
    "WeightTransferService.WatchUpdate": ("started", lambda w: wt.WatchUpdateRequest(group="g")),
    "FleetService.CreateGroup": ("bare", lambda _: fl.CreateGroupRequest(**G)),
    "FleetService.UpdateGroup": ("joined", lambda _: fl.UpdateGroupRequest(**G)),
    "FleetService.PauseGeneration": ("joined", lambda _: fl.PauseGenerationRequest(**G)),
    "FleetService.ResumeGeneration": ("joined", lambda _: fl.ResumeGenerationRequest(**G)),
    "FleetService.SleepReplica": ("joined", lambda _: fl.SleepReplicaRequest(**R)),
    "FleetService.WakeReplica": ("joined", lambda _: fl.WakeReplicaRequest(**R)),
    "FleetService.ListGroups": ("joined", lambda _: fl.ListGroupsRequest()),
    "FleetService.GetGroup": ("joined", lambda _: fl.GetGroupRequest(group="g")),
    "FleetService.ListReplicas": ("bound", lambda _: fl.ListReplicasRequest(group="g")),
    "FleetService.ListUpdates": ("committed", lambda _: fl.ListUpdatesRequest(group="g")),
    "FleetService.WatchGroup": ("joined", lambda _: fl.WatchGroupRequest(group="g")),
    "FleetService.DrainReplica": ("joined", lambda _: fl.DrainReplicaRequest(**R)),
    "FleetService.ActivateReplica": ("joined", lambda _: fl.ActivateReplicaRequest(**R)),
    "FleetService.PinReplica": ("committed", lambda _: fl.PinReplicaRequest(**R)),
    "FleetService.UnpinReplica": ("joined", lambda _: fl.UnpinReplicaRequest(**R)),
    "FleetService.CheckReplica": ("committed", lambda _: fl.CheckReplicaRequest(group="g", replica_id="r0")),
    "AgentService.GetManifest": (
        "bound",
        lambda w: ag.GetManifestRequest(group="g", manifest_id=w.trainer.manifest.id),
    ),
    "AgentService.GetPlan": ("started", lambda w: ag.AgentServiceGetPlanRequest(group="g", plan_id=_plan_id(w))),
    "AgentService.PutWorkerPlacement": (
        "bound",
        lambda w: ag.PutWorkerPlacementRequest(
            group="g",
            replica_id="r0",
            incarnation="life",
            manifest_id=w.trainer.manifest.id,
            placement=_placement("r0/0"),
            total=1,
        ),
    ),
    "AgentService.PutReceipt": (
        "started",
        lambda w: ag.PutReceiptRequest(group="g", replica_id="r0", incarnation="life", epoch=1, receipt=_receipt(w)),
    ),
}

#: Fields that matter in a situation of their own: the stage, and what is changed in the good request first.
SITUATIONS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "InitTransferRequest.takeover": ("bound", lambda m: m.MergeFrom(wt.InitTransferRequest(trainer_id="rival"))),
    "StartUpdateRequest.on_busy": ("started", lambda m: None),
    "UpdateWeightsRequest.buckets": ("started", lambda m: m.buckets[0].MergeFrom(ag.BucketRange(count=7))),
    "ListUpdatesRequest.page_size": ("twice", lambda m: None),
}
#: Values to try where one made up from the type says nothing, or where clearing the field means the same.
VALUES: dict[str, Any] = {
    "AbortUpdateRequest.update_id": "u-0",
    "BucketRange.count": 7,
    "CommitPolicy.all": False,
    "GroupPolicy.verify": cm.VERIFY_LEVEL_OFF,
    "Hello.kind": ag.SESSION_KIND_HEARTBEAT,
    "ListUpdatesRequest.page_size": 1,
    "ListUpdatesRequest.page_token": "1",
    "PauseGenerationRequest.holder": "trainer",
    "PauseGenerationRequest.mode": cm.PAUSE_MODE_ABORT,
    "ResumeGenerationRequest.holder": "trainer",
    "StartUpdateRequest.mode": cm.MODE_IN_PLACE,
    "StartUpdateRequest.pause_mode": cm.PAUSE_MODE_ABORT,
    "WatchGroupRequest.after_revision": lambda w: w.group.state.revision,
}


# --- the walk -------------------------------------------------------------------------------------------------------


def made_up(field: Any) -> Any:
    """A value of the field's type that is not its default; of enums the last."""
    f = descriptor.FieldDescriptor
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {"zone": "b"}
    simple: dict[int, Any] = {
        f.TYPE_STRING: "x",
        f.TYPE_BYTES: b"x",
        f.TYPE_BOOL: True,
        f.TYPE_DOUBLE: 1.5,
        f.TYPE_ENUM: field.enum_type.values[-1].number if field.enum_type is not None else 0,
    }
    value = simple.get(field.type, 7)
    return [value] if field.is_repeated else value


Path = tuple[str | int, ...]


def walk(message: Message, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every field of a message, and those of the messages in it (of a repeated one, the first)."""
    for field in list[Any](message.DESCRIPTOR.fields):
        here: Path = (*path, field.name)
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if field.message_type is None or is_map:
            yield here, field
        elif field.is_repeated:
            entries = getattr(message, field.name)
            if entries:
                yield here, field
                yield from walk(entries[0], (*here, 0))
        elif not opaque(field.message_type):
            yield from walk(getattr(message, field.name), here)


def opaque(kind: Any) -> bool:
    """A rendezvous is passed on as it is, whatever it holds."""
    return bool(kind.full_name.startswith("google.protobuf.") or kind.name.endswith("Rendezvous"))


def changed(w: World, message: Message, path: Path, field: Any) -> Message:
    """A copy with that field changed: cleared if it was set, else set."""
    copy = type(message)()
    copy.CopyFrom(message)
    at: Any = copy
    for step in path[:-1]:
        at = at[step] if isinstance(step, int) else getattr(at, step)
    key = f"{field.containing_type.name}.{field.name}"
    was_set = bool(getattr(at, field.name)) and key not in VALUES
    at.ClearField(field.name)
    if not was_set:
        value = VALUES.get(key, made_up(field))
        value = value(w) if callable(value) else value
        if isinstance(value, dict):
            getattr(at, field.name).update(value)
        elif isinstance(value, list):
            getattr(at, field.name).extend(value)
        else:
            setattr(at, field.name, value)
    return copy


async def outcome(w: World, method: Any, request: Message) -> tuple[bool, Outcome]:
    """Whether the call was refused, and everything that can be seen after it."""
    service = {
        "WeightTransferService": w.trainer.stub,
        "FleetService": w.trainer.fleet,
        "AgentService": w.replica.agent,
    }
    call = getattr(service[method.containing_service.name], method.name)
    try:
        if method.server_streaming:
            stream = call(request)
            answer = await asyncio.wait_for(stream.read(), 0.3)
            text = await w.settled()
            stream.cancel()
            return False, (str(answer), *text)
        answer = await call(request, timeout=0.5)
    except TimeoutError:
        return False, ("nothing", *(await w.settled()))
    except grpc.aio.AioRpcError as e:
        if e.code() is grpc.StatusCode.DEADLINE_EXCEEDED:  # it waits for somebody, and no clock moves here
            return False, ("nothing", *(await w.settled()))
        return True, (f"{reason_of(e)}: {e.details()}", *(await w.settled()))
    text = await w.settled()
    return False, (re.sub(r"total_s: [0-9.e-]+|remaining_ms: \d+", "", str(answer)), *text)


async def run(stage: str, method: Any, make: Callable[[World], Message]) -> tuple[bool, Outcome]:
    """A fresh world, one call."""
    async with world(stage) as w:
        return await outcome(w, method, make(w))


async def steady(once: Callable[[], Awaitable[tuple[bool, Outcome]]]) -> tuple[bool, Outcome]:
    """The outcome that two runs in a row agree on: a busy machine may be slower than ``settled`` waits."""
    last = await once()
    for _ in range(5):
        again = await once()
        if again == last:
            return again
        last = again
    raise AssertionError("the world is not deterministic")


METHODS = {
    f"{service.name}.{method.name}": method
    for file in (wt, fl, ag)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if not method.client_streaming
}


def test_every_unary_method_has_a_good_request() -> None:
    assert set(GOOD) == set(METHODS)


@pytest.mark.parametrize("name", sorted(GOOD))
async def test_every_field_is_used_or_refused(name: str) -> None:
    method, (stage, make) = METHODS[name], GOOD[name]
    refused, good = await steady(lambda: run(stage, method, make))
    assert not refused, good[0]
    async with world(stage) as w:
        fields = list(walk(make(w)))
    unread: list[str] = []
    for path, field in fields:
        key = f"{field.containing_type.name}.{field.name}"
        where, prepare = SITUATIONS.get(key, (stage, None))

        def situation(w: World, prepare: Any = prepare) -> Message:
            request = make(w)
            if prepare is not None:
                prepare(request)
            return request

        def mutated(w: World, path: Path = path, field: Any = field, situation: Any = situation) -> Message:
            return changed(w, situation(w), path, field)

        expected = good if key not in SITUATIONS else (await run(where, method, situation))[1]
        for _ in range(2):  # once more before we complain: see ``steady``
            refused, got = await run(where, method, mutated)
            if refused or got != expected:
                break
        else:
            unread.append(".".join(map(str, path)))
    assert not unread, f"{name}: these fields change nothing and are not refused: {unread}"


# --- sessions -------------------------------------------------------------------------------------------------------


def _session(w: World) -> list[ag.SessionRequest]:
    """Everything a replica says on its stream, in an update that it takes part in."""
    hello = ag.Hello(
        group="g",
        agent_id="r0",
        incarnation="life",
        kind=ag.SESSION_KIND_CONTROL,
        replica=replica_hello(serving_address="h:1", labels={"a": "b"}),
        software="scripted 1",
    )
    hello.replica.workers[0].device_uuid = "GPU-1"
    hello.replica.workers[0].refusals.append(ag.TransportRefusal(transport="shm", reason="none here"))
    failure = cm.Failure(
        reason=cm.REASON_ENGINE, message="broke", member="r0/0", phase="PREPARING", tensors=["a"], tensor_count=1
    )
    report = ag.ReplicaReport(
        sequence=1000,
        held=[cm.HeldVersion(version=5, update_id="u-5")],
        dirty=True,
        dirty_reason=failure,
        update_id=w.u.update_id,
        stage=ag.REPLICA_STAGE_FAILED,
        armed_seq=1,
        bytes_received=9,
        failure=failure,
        timings=up.ReplicaTimings(wire_s=0.1, verify_s=0.2, pause_s=0.3, apply_s=0.4),
        pause_holders=["operator"],
        updates_since_start=3,
        running_requests=2,
    )
    beat = ag.Heartbeat(sequence=1, progress=5)
    odd: dict[str, Any] = {"reason": "NotAsDeclared", "message": "it is raw", "setting": "--logprobs-mode"}
    condition = cm.Condition(type="LogprobsMode", status=cm.CONDITION_STATUS_FALSE, **odd)
    return [
        ag.SessionRequest(hello=hello),
        ag.SessionRequest(conditions=ag.EngineConditions(conditions=[condition])),
        ag.SessionRequest(report=report),
        ag.SessionRequest(heartbeat=beat),
        ag.SessionRequest(goodbye=ag.Goodbye(reason="scaling in")),
    ]


def _dirty_session(_: World) -> list[ag.SessionRequest]:
    """A replica outside of any update, which says that it is dirty and wants to leave."""
    hello = ag.Hello(group="g", agent_id="r0", incarnation="life", replica=replica_hello())
    why = cm.Failure(
        reason=cm.REASON_ENGINE, message="mixed", member="r0/0", phase="COMMITTED", tensors=["a"], tensor_count=1
    )
    report = ag.ReplicaReport(sequence=1000, dirty=True, dirty_reason=why, leaving=True)
    return [ag.SessionRequest(hello=hello), ag.SessionRequest(report=report)]


def _rank_session(_: World) -> list[ag.SessionRequest]:
    hello = ag.Hello(
        group="g", agent_id="rank/0", incarnation="job-life", trainer=ag.TrainerHello(generation=1), software="s"
    )
    copy = ag.RetainedCopy(held=cm.HeldVersion(version=5, update_id="u-5"), manifest_id="m-5")
    said = ag.TrainerReport(retained=copy)
    beat = ag.Heartbeat(sequence=1, process=ag.PROCESS_STATE_STOPPED)
    return [ag.SessionRequest(hello=hello), ag.SessionRequest(trainer=said), ag.SessionRequest(heartbeat=beat)]


async def talk(stage: str, script: Callable[[World], list[ag.SessionRequest]]) -> tuple[bool, Outcome]:
    """A fresh world, one stream; each message is taken in before the next."""
    from weightplane.v1 import agent_pb2_grpc

    async with world(stage) as w:
        said: list[str] = []
        refused = False
        async with dial(w.running.address) as channel:
            stream = agent_pb2_grpc.AgentServiceStub(channel).Session()

            async def listen() -> None:
                while isinstance(message := await stream.read(), ag.SessionResponse):
                    said.append(re.sub(r"remaining_ms: \d+|total_s: [0-9.e-]+", "", str(message)))

            listening = asyncio.create_task(listen())
            try:
                for message in script(w):
                    await stream.write(message)
                    await w.settled()
            except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
                pass  # it ended while we wrote: how, the reader says
            text = await w.settled()
            if listening.done() and isinstance(listening.exception(), grpc.aio.AioRpcError):
                refused = True
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
        return refused, ("\n".join(said), *text)


SCRIPTS = {_session: "started", _dirty_session: "bound", _rank_session: "bound"}


async def test_every_field_of_a_session_is_used_or_refused() -> None:
    matters: dict[str, bool] = {}
    for script, stage in SCRIPTS.items():
        refused, good = await steady(functools.partial(talk, stage, script))
        assert not refused, good[0]
        async with world(stage) as w:
            messages = script(w)
        for n, message in enumerate(messages):
            kind = str(message.WhichOneof("message"))
            for path, field in walk(getattr(message, kind)):
                said = ".".join(map(str, (kind, *path)))
                role = path[0] in ("trainer", "replica") and not getattr(message, kind).HasField(str(path[0]))
                if role or matters.get(said):
                    continue  # the other role, or shown already

                def mutated(
                    w: World, script: Any = script, n: int = n, kind: str = kind, path: Path = path, field: Any = field
                ) -> list[ag.SessionRequest]:
                    messages: list[ag.SessionRequest] = script(w)
                    inner = getattr(messages[n], kind)
                    inner.CopyFrom(changed(w, inner, path, field))
                    return messages

                for _ in range(2):
                    refused, got = await talk(stage, mutated)
                    matters[said] = refused or got != good
                    if matters[said]:
                        break
    unread = sorted(said for said, shown in matters.items() if not shown)
    assert not unread, f"these fields change nothing and are not refused: {unread}"
    said_kinds = {said.partition(".")[0] for said in matters}
    assert said_kinds == {field.name for field in ag.SessionRequest.DESCRIPTOR.fields}
