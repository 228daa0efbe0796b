"""WatchUpdate and WatchGroup: the newest, at once, resumable."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from tests.server.scripted import Replica, Trainer, fleet, reason_of, refused, server, until
from weightplane.controlplane.server import feed, watch
from weightplane.v1 import agent_pb2 as ag
from weightplane.v1 import fleet_pb2 as fl
from weightplane.v1 import update_pb2 as up
from weightplane.v1 import weight_transfer_pb2 as wt


class Follower:
    """Collects a stream."""

    def __init__(self, call: Any) -> None:
        self.messages: list[Any] = []
        self.error: grpc.aio.AioRpcError | None = None
        self._call = call
        self.task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        try:
            async for message in self._call:
                self.messages.append(message)
        except grpc.aio.AioRpcError as e:
            self.error = e

    async def stop(self) -> None:
        self._call.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_watching_one_update_shows_its_way_and_ends_with_it() -> None:
    async with server() as running, fleet(running.address, 2) as (trainer, _):
        u = await trainer.start()
        watch = Follower(trainer.stub.WatchUpdate(wt.WatchUpdateRequest(group="g", update_id=u.update_id)))
        await until(lambda: bool(watch.messages), "a first picture")
        await trainer.weights(u)
        await trainer.rest(u)
        await asyncio.wait_for(watch.task, 3)
        phases = [m.update.phase for m in watch.messages]
        assert phases == sorted(phases) and phases[-1] == up.UPDATE_PHASE_COMMITTED
        last = watch.messages[-1]
        assert {(p.replica_id, p.stage) for p in last.progress} == {
            ("r0", ag.REPLICA_STAGE_APPLIED),
            ("r1", ag.REPLICA_STAGE_APPLIED),
        }
        assert all(p.bytes == p.bytes_planned == u.channels[0].nbytes for p in last.progress)
        assert last.update.source_free and [c.seq for c in last.calls] == [1]
        again = Follower(trainer.stub.WatchUpdate(wt.WatchUpdateRequest(group="g", update_id=u.update_id)))
        await asyncio.wait_for(again.task, 3)
        assert len(again.messages) == 1
        unknown = Follower(trainer.stub.WatchUpdate(wt.WatchUpdateRequest(group="g", update_id="u-no")))
        await unknown.task
        assert unknown.error is not None and reason_of(unknown.error) == "UNKNOWN_UPDATE"


async def test_watching_all_updates_tells_a_fenced_trainer_and_ends() -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, _):
        watch = Follower(trainer.stub.WatchUpdate(wt.WatchUpdateRequest(group="g", generation=1)))
        await trainer.publish()
        await trainer.publish()
        await Trainer(running.address, name="rival").init(takeover=True)
        await asyncio.wait_for(watch.task, 3)
        assert watch.messages[-1].fenced and not watch.messages[0].fenced
        assert 2 in {m.update.version for m in watch.messages}
        stale = Follower(trainer.stub.WatchUpdate(wt.WatchUpdateRequest(group="g", generation=1)))
        await stale.task
        assert stale.error is not None and reason_of(stale.error) == "TRAINER_FENCED"
        bad = Follower(trainer.stub.WatchUpdate(wt.WatchUpdateRequest(group="g", rank=1)))
        await bad.task
        assert bad.error is not None and reason_of(bad.error) == "INVALID_ARGUMENT"


async def test_a_group_is_followed_and_resumed_by_revision() -> None:
    async with server() as running, fleet(running.address, 2) as (trainer, replicas):
        first = Follower(trainer.fleet.WatchGroup(fl.WatchGroupRequest(group="g")))
        await until(lambda: bool(first.messages), "the full picture")
        full = first.messages[0]
        assert full.full and {r.replica_id for r in full.replicas} == {"r0", "r1"}
        await trainer.publish()
        await until(lambda: first.messages[-1].group.committed.version == 1, "the commit")
        changed = [m for m in first.messages[1:] if m.replicas]
        assert changed and not any(m.full for m in first.messages[1:])
        revisions = [m.revision for m in first.messages]
        assert revisions == sorted(set(revisions))
        known = first.messages[-1].revision
        await first.stop()
        await trainer.publish()
        request = fl.WatchGroupRequest(group="g", after_revision=known)
        second = Follower(trainer.fleet.WatchGroup(request))
        await until(lambda: bool(second.messages), "what was missed")
        await until(lambda: second.messages[-1].group.committed.version == 2, "the second commit")
        assert not any(m.full for m in second.messages) and second.messages[0].revision > known
        await second.stop()
        for after in (1, known + (1 << 40)):
            other = Follower(trainer.fleet.WatchGroup(fl.WatchGroupRequest(group="g", after_revision=after)))
            await until(lambda o=other: bool(o.messages), "a full picture")  # type: ignore[misc]
            assert other.messages[0].full
            await other.stop()
        quiet = len(second.messages)
        await asyncio.sleep(0.4)  # heartbeats are no changes
        assert len(second.messages) == quiet
        assert replicas[0].held.version == 2


async def test_many_changes_that_were_missed_are_told_as_one_and_all_watchers_are_given_the_same() -> None:
    async with server() as running, fleet(running.address, 2) as (trainer, _):
        first = Follower(trainer.fleet.WatchGroup(fl.WatchGroupRequest(group="g")))
        await until(lambda: bool(first.messages), "the full picture")
        known = first.messages[0].revision
        version = 0
        while len(first.messages) <= 9:  # on a busy machine a publish is few messages
            version += 1
            await trainer.publish()
            await until(lambda v=version: first.messages[-1].group.committed.version == v, "the commit")  # type: ignore[misc]
        await asyncio.sleep(0.5)
        made: list[Any] = []

        async def write(message: fl.WatchGroupResponse) -> None:
            made.append(message)

        group = running.coordinator.group("g")
        late = [asyncio.create_task(feed.follow(group, known, write)) for _ in range(3)]
        await until(lambda: len(made) == 3, "one message for each")
        assert made[0] is made[1] is made[2] and not made[0].full
        assert made[0].revision == first.messages[-1].revision and made[0].group.committed.version == version
        newest = {r.replica_id: r for m in first.messages for r in m.replicas}
        assert {r.replica_id: r for r in made[0].replicas} == newest
        for task in late:
            task.cancel()
        await first.stop()


async def test_what_watchers_of_an_update_are_told_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = []
    event = watch._event

    def counted(*said: Any) -> wt.WatchUpdateResponse:
        looks.append(said)
        return event(*said)

    monkeypatch.setattr(watch, "_event", counted)
    monkeypatch.setattr(watch, "SHARED_S", 60.0)
    async with server() as running, fleet(running.address, 1) as (trainer, _):
        await trainer.publish()
        quiet = len(looks)
        many = [Follower(trainer.stub.WatchUpdate(wt.WatchUpdateRequest(group="g"))) for _ in range(20)]
        await until(lambda: all(m.messages for m in many), "a first picture for each")
        assert len(looks) - quiet < 10  # a state or two, and one for the trainer's own stream
        await asyncio.gather(*(m.stop() for m in many))


async def test_a_forgotten_replica_is_told_as_removed() -> None:
    from tests.server.scripted import FAST
    from weightplane.controlplane.core.model import Config
    from weightplane.controlplane.server.app import ServerConfig
    from weightplane.controlplane.store.memory import MemoryStore

    config = Config(FAST.beat_s, 0.3, 0.6, lost_kept_s=0.3)
    async with server(ServerConfig(MemoryStore(), core=config)) as running:
        replica = await Replica(running.address).start()
        trainer = Trainer(running.address)
        watch = Follower(trainer.fleet.WatchGroup(fl.WatchGroupRequest(group="g")))
        await until(lambda: bool(watch.messages), "the full picture")
        await replica.kill()
        await until(lambda: any("r0" in m.removed for m in watch.messages), "its removal", 5)
        await watch.stop()
        await trainer.channel.close()


async def test_streams_end_when_the_server_stops() -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, replicas):
        watch = Follower(trainer.fleet.WatchGroup(fl.WatchGroupRequest(group="g")))
        await until(lambda: bool(watch.messages), "the full picture")
        await running.stop()
        await asyncio.wait_for(watch.task, 2)
        assert watch.error is not None and watch.error.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(watch.error) == "COORDINATOR_RESTARTED"
        await until(lambda: replicas[0].ended is not None, "the session's end")
        assert replicas[0].ended is not None and replicas[0].ended.code() is grpc.StatusCode.UNAVAILABLE


async def test_watchers_of_a_group_that_is_not_there() -> None:
    async with server() as running:
        trainer = Trainer(running.address)
        watch = Follower(trainer.fleet.WatchGroup(fl.WatchGroupRequest(group="no")))
        await watch.task
        assert watch.error is not None and reason_of(watch.error) == "UNKNOWN_GROUP"
        await refused(trainer.fleet.GetGroup(fl.GetGroupRequest(group="no"), timeout=5), "UNKNOWN_GROUP")
        await trainer.channel.close()
