"""kill -9 of the coordinator in any phase: undecided aborts, decided completes, and a full update works after it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from tests.server.scripted import FAST, Replica, Trainer, _hold, fleet, reason_of, refused, server, until
from weightplane.controlplane.server import coordinator
from weightplane.controlplane.server.app import ServerConfig
from weightplane.controlplane.store.memory import Disk, Fault, MemoryStore
from weightplane.controlplane.store.sqlite import SqliteStore
from weightplane.v1 import common_pb2 as cm
from weightplane.v1 import update_pb2 as up
from weightplane.v1 import weight_transfer_pb2 as wt


class Process:
    """The server in a process of its own."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.child: asyncio.subprocess.Process | None = None

    async def start(self, failpoints: str = "") -> None:
        self.child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.server.serve_main", str(self.file), str(self.port)),
            env={**os.environ, "WEIGHTPLANE_FAILPOINTS": failpoints},
            stdout=asyncio.subprocess.PIPE,
        )
        assert self.child.stdout is not None
        line = await asyncio.wait_for(self.child.stdout.readline(), 30)
        assert line.startswith(b"serving"), line

    async def died(self) -> int:
        assert self.child is not None
        return await asyncio.wait_for(self.child.wait(), 20)

    async def kill(self) -> None:
        if self.child is not None and self.child.returncode is None:
            self.child.kill()
            await self.child.wait()


@contextlib.asynccontextmanager
async def members(process: Process) -> AsyncIterator[tuple[Trainer, list[Replica]]]:
    """Two replicas that dial again, and a trainer."""
    replicas = [Replica(process.address, f"r{i}") for i in range(2)]
    trainer = Trainer(process.address)
    try:
        for r in replicas:
            r.redial = True
            await r.start()
        await trainer.init()
        await trainer.put_manifest()
        yield trainer, replicas
    finally:
        for r in replicas:
            await r.kill()
        await trainer.channel.close()


async def attempt(trainer: Trainer, request: wt.StartUpdateRequest) -> None:
    """A whole update, as far as it comes."""
    u = await trainer.stub.StartUpdate(request, timeout=8)
    await trainer.weights(u)
    await trainer.rest(u)


async def ask(trainer: Trainer, request_id: str) -> up.UpdateInfo | None:
    """GetUpdate, until somebody answers; ``None`` if no update began."""
    request = wt.GetUpdateRequest(group="g", request_id=request_id)
    while True:
        try:
            return (await trainer.stub.GetUpdate(request, timeout=5)).update
        except grpc.aio.AioRpcError as e:
            if e.code() is grpc.StatusCode.UNAVAILABLE:
                await asyncio.sleep(0.05)
                continue
            assert reason_of(e) == "UNKNOWN_UPDATE"
            return None


#: Failpoint -> what became of the second update: "" (it never began), ABORTED, COMMITTED.
PHASES = {
    "server.start.received@2": "",
    "server.start.before_write@2": "",
    "server.start.after_write@2": "ABORTED",
    "server.update.received@2": "ABORTED",
    "server.update.armed@2": "ABORTED",
    "server.finish.received@2": "ABORTED",
    "server.decide.before_write@2": "ABORTED",
    "server.decide.after_write@2": "COMMITTED",
    "server.close.before_write@2": "COMMITTED",
}


@pytest.mark.chaos
@pytest.mark.parametrize("point", PHASES)
async def test_kill_dash_nine_in_each_phase(point: str, tmp_path: Path) -> None:
    process = Process(tmp_path / "state.db")
    name, _, nth = point.partition("@")
    try:
        await process.start(f"{name}=kill@{nth}")
        async with members(process) as (trainer, replicas):
            await attempt(trainer, trainer.start_request())
            request = trainer.start_request(trainer_step=2)
            with pytest.raises(grpc.aio.AioRpcError):
                await attempt(trainer, request)
                await asyncio.sleep(0.5)  # the close is written after the answer
                raise await _gone(trainer)
            assert await process.died() == -signal.SIGKILL
            assert [r.held.version for r in replicas] in ([1, 1], [2, 2], [1, 2], [2, 1])
            await process.start()
            await until(lambda: all(r.welcome.epoch == 2 for r in replicas), "reconnection")
            info = await ask(trainer, request.request_id)
            expected = PHASES[point]
            assert (up.UpdatePhase.Name(info.phase) if info is not None else "") == (
                f"UPDATE_PHASE_{expected}" if expected else ""
            )
            version = 2 if expected == "COMMITTED" else 1
            await until(lambda: all(r.held.version == version for r in replicas), f"version {version} everywhere")
            if expected == "ABORTED":
                assert info is not None and info.failure.reason == cm.REASON_COORDINATOR_RESTARTED
            # Nothing was restarted but the coordinator; the same trainer publishes on, at a version never used before.
            before = trainer.generation
            await trainer.init()
            assert trainer.generation == before
            await trainer.put_manifest()
            after = await trainer.publish(trainer_step=3)
            assert after.phase == up.UPDATE_PHASE_COMMITTED and after.version == (3 if expected else 2)
            assert all(r.held.version == after.version for r in replicas)
    finally:
        await process.kill()


async def _gone(trainer: Trainer) -> grpc.aio.AioRpcError:
    """The error that a dead server answers with."""
    try:
        while True:
            await trainer.get("u-0")
    except grpc.aio.AioRpcError as e:
        return e


async def test_a_restarted_start_update_waits_for_the_roster_and_names_who_is_absent(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    async with (
        server(ServerConfig(SqliteStore(file), core=FAST)) as running,
        fleet(running.address, 2) as (trainer, _),
    ):
        await trainer.publish()
    async with server(ServerConfig(SqliteStore(file), core=FAST)) as running:
        replica = await Replica(running.address, "r0").start()
        trainer = Trainer(running.address, name="next")
        started = time.monotonic()
        await trainer.init(takeover=True)
        hold = asyncio.create_task(_hold(trainer))
        await trainer.put_manifest()
        u = await trainer.start()
        assert time.monotonic() - started > FAST.ttl_s
        assert [p.replica_id for p in u.participants] == ["r0"] and u.version == 2
        assert [(a.replica_id) for a in u.absent] == ["r1"]
        hold.cancel()
        await replica.kill()


async def test_the_request_id_of_a_start_survives_a_restart() -> None:
    disk = Disk()
    async with server(ServerConfig(MemoryStore(disk), core=FAST)) as running, fleet(running.address, 1) as (trainer, _):
        request = trainer.start_request()
        await attempt(trainer, request)
    async with server(ServerConfig(MemoryStore(disk), core=FAST)) as running:
        again = Trainer(running.address)
        info = await ask(again, request.request_id)
        assert info is not None and info.phase == up.UPDATE_PHASE_COMMITTED
        await again.channel.close()


@pytest.mark.parametrize("fault", [Fault.UNKNOWN_WRITTEN, Fault.UNKNOWN_LOST, Fault.FAIL])
async def test_a_decision_of_unknown_outcome_is_read_back(fault: Fault) -> None:
    store = MemoryStore()
    async with server(ServerConfig(store, core=FAST)) as running, fleet(running.address, 2) as (trainer, replicas):
        for r in replicas:
            r.redial = True
        request = trainer.start_request()
        u = await trainer.stub.StartUpdate(request, timeout=5)
        await trainer.weights(u)
        await trainer.digests(u)
        store.inject(fault, "decide")
        if fault is Fault.UNKNOWN_WRITTEN:
            assert (await trainer.finish(u)).phase == up.UPDATE_PHASE_COMMITTED
            return
        with pytest.raises(grpc.aio.AioRpcError):
            await trainer.finish(u)
        info = await ask(trainer, request.request_id)
        assert info is not None and info.phase == up.UPDATE_PHASE_ABORTED
        await until(lambda: all(r.welcome.epoch == running.coordinator.epoch for r in replicas), "reconnection")
        assert [r.held.version for r in replicas] == [0, 0]


async def test_a_rival_coordinator_fences_this_one_which_then_leads_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "weightplane.controlplane")
    monkeypatch.setattr(coordinator, "_WATCH_S", 60.0)  # a write finds out
    disk = Disk()
    async with (
        server(ServerConfig(MemoryStore(disk), core=FAST)) as running,
        fleet(running.address, 1) as (trainer, rs),
    ):
        rs[0].redial = True
        await trainer.publish()
        group = running.coordinator.group("g")
        await until(lambda: group.state.open is None and not group.state.writes, "the end of that update's writes")
        rival = MemoryStore(disk)
        rival.open()
        await refused(trainer.start(), "UNKNOWN_OUTCOME", grpc.StatusCode.UNKNOWN)
        await until(lambda: running.coordinator.epoch == 3, "a new epoch")
        await until(lambda: rs[0].welcome.epoch == 3, "the replica's return")
        assert [r.levelname for r in caplog.records if "stepping down" in r.getMessage()] == ["ERROR"]
        await trainer.init()
        await trainer.put_manifest()
        assert (await trainer.publish()).version >= 2


@pytest.mark.alone
async def test_a_store_that_hangs_in_the_decision_is_unknown_in_time() -> None:
    store = MemoryStore()
    async with server(ServerConfig(store, core=FAST)) as running, fleet(running.address, 1) as (trainer, _):
        request = trainer.start_request()
        u = await trainer.stub.StartUpdate(request, timeout=5)
        await trainer.weights(u)
        await trainer.digests(u)

        def slow(kind: str, when: str) -> None:
            if (kind, when) == ("decide", "after"):
                time.sleep(3)

        store.delay = slow
        started = time.monotonic()
        await refused(trainer.finish(u), "UNKNOWN_OUTCOME", grpc.StatusCode.UNKNOWN)
        assert time.monotonic() - started < FAST.store_timeout_s + 0.5
        info = await ask(trainer, request.request_id)  # it was written, as the next epoch finds
        assert info is not None and info.phase == up.UPDATE_PHASE_COMMITTED and info.epoch == 1
        assert running.coordinator.epoch == 2
